"""Prefill chunks of one step: cut into query blocks and laid out as the arrays of a StepPlan.

Never chooses what to prefill. Called by the scheduler and the admission.
"""

from __future__ import annotations

import numpy as np

from jaxinfer.cache import PrefixTree
from jaxinfer.scheduler.budget import Budget
from jaxinfer.scheduler.pages import Pages
from jaxinfer.scheduler.rows import RowStore
from jaxinfer.scheduler.sequence import Sequence

Chunk = tuple[Sequence, int]  # a sequence and the tokens of its prompt that a step takes


def claim_chunk(sequence: Sequence, budget: Budget, pages: Pages) -> int:
    """Hold the pages of a prompt's next chunk, as far as budget and pages go; its length."""
    start = sequence.scheduled
    wanted = budget.chunk(len(sequence.tokens) - start)
    length = min(wanted, pages.reach(sequence.held) - start)
    if length <= 0:
        return 0
    pages.extend(sequence.held, start + length)
    budget.spend(length)
    return length


class PrefillArrays:
    """Collects chunks once all pages of the step are held; then gives the arrays of the StepPlan."""

    def __init__(self, rows: RowStore, tree: PrefixTree, block: int) -> None:
        self._rows = rows
        self._tree = tree
        self._block = block
        self._records: list[np.ndarray] = []
        self._blocks: list[tuple[int, int, int]] = []
        self._tokens: list[int] = []
        self._targets: list[int] = []
        self.scored: list[tuple[Sequence, int, int, int]] = []

    def add(self, sequence: Sequence, length: int) -> None:
        """The chunk [scheduled, scheduled + length) of a sequence's tokens."""
        start, end, block = sequence.scheduled, sequence.scheduled + length, self._block
        row, first_block = len(self._records), len(self._blocks)
        for begin in range(start, end, block):
            self._blocks.append((row, begin, min(block, end - begin)))
        blocks = len(self._blocks) - first_block
        self._records.append(self._rows.take_prefill(sequence, self._tree, length, blocks))
        known = sequence.tokens
        self._tokens += known[start:end]
        self._targets += known[start + 1 : end + 1]
        if end == len(known):
            self._targets.append(0)
        self._score(sequence, start, end, first_block * block)

    def _score(self, sequence: Sequence, start: int, end: int, index: int) -> None:
        if sequence.request.params.prompt_logprobs is None:
            return
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
        return np.array(self._blocks, np.int32).reshape(-1, 3)

    def tokens(self) -> np.ndarray:
        return np.array(self._tokens, np.int32)

    def targets(self) -> np.ndarray:
        return np.array(self._targets, np.int32)
