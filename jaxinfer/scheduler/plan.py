"""What the scheduler hands to the engine each round, and what it gets back: complete plain values.

A plan is a snapshot: once made, later changes of the scheduler do not touch it. Imports no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from jaxinfer.layout import LoadOp, StepShape

if TYPE_CHECKING:
    from jaxinfer.scheduler.sequence import Sequence


@dataclass(slots=True)
class StepPlan:
    """One step of the model.

    Attributes:
        shape: the rung; decode rows <= shape.rows, prefill blocks <= shape.blocks.
        decode: i32[n, width] records of the decode rows (their input token is last_token[slot] on the device).
        prefill: i32[m, width] records of the prefill rows; row i is row `shape.rows + i` of the step.
        blocks: i32[b, 3 + n]: (index into `prefill`, start position, tokens in the block, slot that each of
            the n STATE kinds keeps at its end or 0), rows in order.
        tokens: i32[sum of block lengths] fed by the blocks, one after the other, without padding.
        targets: i32[same]: the token that follows each of `tokens` in its sequence (0 where there is none yet).
        sampled: (row of the step, sequence) for each row that yields an output token.
        chunks: (sequence, position after the chunk) for each prefill chunk of the step.
        load: sampling state that the step fills before it samples.
        scored: (sequence, first position, first prefill token index, count) for chunks whose prompt
            log-probabilities are wanted: fed positions [first, first + count) score the prompt tokens at
            [first + 1, first + 1 + count). The token index counts positions of the padded prefill region
            (block * shape.block + offset).
    """

    shape: StepShape
    decode: np.ndarray
    prefill: np.ndarray
    blocks: np.ndarray
    tokens: np.ndarray
    targets: np.ndarray
    sampled: list[tuple[int, Sequence]]
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    load: LoadPlan | None = None
    scored: list[tuple[Sequence, int, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class LoadPlan:
    """Sampling state of slots to fill (penalty counts, masks, biases).

    It travels in the StepPlan that first samples from the slots; what does not fit there comes before
    it as a step of its own, without a model run.

    Attributes:
        resets: (slot, bias fill value) of slots whose state is cleared first; at most LOAD_RESETS.
        entries: (slot, token, LoadOp, value), at most LOAD_ENTRIES, applied after the resets.
    """

    resets: list[tuple[int, float]]
    entries: list[tuple[int, int, LoadOp, float]]


LOAD_RESETS = 32
LOAD_ENTRIES = 1024


@dataclass(slots=True)
class StepOutput:
    """What a step yielded, on the host.

    Attributes:
        tokens: i32[sample_rows] sampled ids; -1 where the row's logits had no finite maximum (NaN).
        logprobs: f32[sample_rows] of the sampled tokens; ranks: i32[sample_rows].
        top_ids, top_logprobs: [sample_rows, 20].
        scores: for plans with `scored`: (logprobs f32[n], ranks i32[n], top_ids i32[n, 20],
            top_logprobs f32[n, 20]) over the padded prefill region; entry t scores the token that
            follows prefill token t.
    """

    tokens: np.ndarray
    logprobs: np.ndarray | None = None
    ranks: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    scores: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None


Score = tuple[
    float, int, np.ndarray, np.ndarray
]  # log-probability, rank, top ids, top log-probabilities
