"""Prefill chunks of one step: cut into query blocks and laid out as the arrays of a StepPlan.

Never chooses what to prefill. Called by the scheduler and the admission.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxinfer.cache import PrefixTree
from jaxinfer.scheduler.budget import Budget
from jaxinfer.scheduler.pages import Pages
from jaxinfer.scheduler.rows import RowStore
from jaxinfer.scheduler.sequence import Sequence

# First position, tokens, and the slot that each STATE kind keeps at its end (0: none).
Block = tuple[int, int, tuple[int, ...]]


class Chunk(NamedTuple):
    """The part of a prompt that a step takes, cut into query blocks; its pages and slots are held."""

    sequence: Sequence
    length: int
    blocks: list[Block]


def claim_chunk(
    sequence: Sequence, budget: Budget, pages: Pages, whole: bool = False
) -> Chunk | None:
    """Hold the pages and slots of a prompt's next chunk, as far as budget and pages go; None if there are none.

    whole: None, too, if that is not all of the prompt.
    """
    start, held = sequence.scheduled, sequence.held
    wanted = budget.chunk(len(sequence.tokens) - start)
    end = min(start + wanted, pages.reach(held))
    if end <= start:
        return None
    cuts = pages.checkpoints.inside(sequence, start, end)
    # Cuts make more blocks than the tokens alone: the budget may hold the first ones only.
    spans = cut_blocks(start, end, cuts, budget.block, pages.aligned)[: budget.blocks]
    end = sum(spans[-1])
    if whole and not sequence.covers(end - start):
        return None
    if not pages.tree.open_states(held) or not pages.extend(held, end):
        return None
    budget.spend(end - start, len(spans))
    kept = pages.keep_states(held, [cut for cut in cuts if cut <= end])
    working = tuple(held.pages[kind][0] for kind in pages.tree.state_kinds)
    nowhere = (0,) * len(working)
    blocks = [(begin, size, kept.get(begin + size, nowhere)) for begin, size in spans]
    if end not in kept:
        blocks[-1] = (*blocks[-1][:2], working)
    return Chunk(sequence, end - start, blocks)


def cut_blocks(
    start: int, end: int, cuts: list[int], block: int, aligned: bool
) -> list[tuple[int, int]]:
    """(first position, tokens) of the query blocks of [start, end): cut at `cuts`, and every `block` tokens
    from the last cut or, if `aligned`, at the multiples of `block`."""
    spans: list[tuple[int, int]] = []
    edges = iter([*cuts, end])
    edge = next(edges)
    while start < end:
        if start == edge:
            edge = next(edges)
            continue
        stop = min(edge, start + block - (start % block if aligned else 0))
        spans.append((start, stop - start))
        start = stop
    return spans


class PrefillArrays:
    """Collects chunks once all pages of the step are held; then gives the arrays of the StepPlan."""

    def __init__(self, rows: RowStore, tree: PrefixTree, block: int) -> None:
        self._rows = rows
        self._tree = tree
        self._block = block
        self._records: list[np.ndarray] = []
        self._blocks: list[tuple[int, ...]] = []
        self._tokens: list[int] = []
        self._targets: list[int] = []
        self.scored: list[tuple[Sequence, int, int, int]] = []

    def add(self, chunk: Chunk) -> None:
        """A chunk that starts at the first token of its sequence that is not scheduled yet."""
        sequence, length = chunk.sequence, chunk.length
        start, end = sequence.scheduled, sequence.scheduled + length
        row, first_block = len(self._records), len(self._blocks)
        self._blocks += [(row, begin, size, *slots) for begin, size, slots in chunk.blocks]
        blocks = len(chunk.blocks)
        self._records.append(self._rows.take_prefill(sequence, self._tree, length, blocks))
        known = sequence.tokens
        self._tokens += known[start:end]
        self._targets += known[start + 1 : end + 1]
        if end == len(known):
            self._targets.append(0)
        if sequence.request.params.prompt_logprobs is not None:
            for i, (begin, size, _) in enumerate(chunk.blocks):
                self._score(sequence, begin, begin + size, (first_block + i) * self._block)

    def _score(self, sequence: Sequence, start: int, end: int, index: int) -> None:
        """Score the block [start, end) of a prompt, whose first token is prefill token `index`."""
        # After a preemption the prompt is computed again but scored only where it was not before.
        first = max(start, sequence.scored)
        last = min(end, sequence.prompt_length - 1)
        if last > first:
            self.scored.append((sequence, first, index + first - start, last - first))
            sequence.scored = last

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def records(self) -> np.ndarray:
        return np.array(self._records, np.int32).reshape(-1, self._rows.layout.width)

    def blocks(self) -> np.ndarray:
        columns = 3 + len(self._tree.state_kinds)
        return np.array(self._blocks, np.int32).reshape(-1, columns)

    def tokens(self) -> np.ndarray:
        return np.array(self._tokens, np.int32)

    def targets(self) -> np.ndarray:
        return np.array(self._targets, np.int32)
