"""Sequence: the progress of one request, and Update: what a round told about it.

Holds host values only; device code never sees it. Changed by the scheduler alone; the engine reads
`request`, `tokens`, `output`, `metrics`, `cached_tokens` and `finish_reason`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from jaxinfer.cache import Held
from jaxinfer.scheduler.plan import Score
from jaxinfer.types import FinishReason, Request, RequestMetrics


class Status(Enum):
    WAITING = auto()  # in the queue: new, or preempted
    PREFILL = auto()  # running, some known tokens are not scheduled yet
    DECODE = auto()  # running, the next token is fed from the device
    DRAIN = auto()  # running, nothing more to schedule; its last steps are in flight
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One request under way.

    Attributes:
        order: number of its arrival; with the priority it ranks running sequences.
        tokens: prompt, then the output tokens that commits have brought.
        limit: output tokens that it may reach (max_tokens, model length, size of the pool).
        slot: its row slot while running, else 0: where its record, sampling state and last token stand. The
            slots of its recurrent states are others, see `held`.
        scheduled: tokens whose entries have been planned (kept up during prefill only; see RowStore).
        inflight: planned steps with a row of this sequence that are not committed yet.
        preempted: it has lost its pages at least once and goes to the front of the queue.
        cached_tokens: prompt tokens that the prefix cache spared at first admission.
        stop_from, stop_at: see __post_init__.
        scored: positions up to which prompt log-probabilities have been planned.
        branch: where another sequence's tokens part from these ones, if its pages reach further than any
            checkpoint did at admission; else 0.
        started: number of the step that it was admitted in.
    """

    request: Request
    order: int
    limit: int
    tokens: list[int]
    held: Held
    status: Status = Status.WAITING
    slot: int = 0
    scheduled: int = 0
    inflight: int = 0
    preempted: bool = False
    cached_tokens: int | None = None
    scored: int = 0
    branch: int = 0
    started: int = 0
    stop_from: int = field(init=False)
    stop_at: int = field(init=False)
    finish_reason: FinishReason | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def __post_init__(self) -> None:
        # Known tokens from which the next one may stop the sequence, and at which it ends it.
        self.stop_from = self.prompt_length + self.request.params.min_tokens - 1
        self.stop_at = self.prompt_length + self.limit - 1

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_length(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def running(self) -> bool:
        return self.slot != 0

    @property
    def rank(self) -> tuple[int, int]:
        """Running sequences of the least rank get pages first and are preempted last."""
        return (self.request.priority, self.order)

    def covers(self, length: int) -> bool:
        """Whether a chunk of `length` tokens would complete what is known of the sequence."""
        return self.scheduled + length == len(self.tokens)

    @property
    def reads_cache(self) -> bool:
        """Prompt log-probabilities need every prompt position computed."""
        return self.request.use_prefix_cache and self.request.params.prompt_logprobs is None


class Update(NamedTuple):
    """One sequence's part of a round.

    Attributes:
        token: the new output token, already in `sequence.tokens`; None if there is none.
        row: row of the step that sampled it (index into StepOutput), or None.
        finish_reason: set when the sequence ended with this update.
        score, prompt_scores: log-probabilities of the token and of prompt positions, for sequences that asked
            (filled by the engine core).
    """

    sequence: Sequence
    token: int | None
    row: int | None
    finish_reason: FinishReason | None
    score: Score | None = None
    prompt_scores: list[Score] | None = None
