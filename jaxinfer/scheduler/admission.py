"""Admission: which waiting sequences start in a step.

In the order of the policy, as long as rows, budget, pages and state slots last. A sequence is let in when its
whole prompt fits beside what the running ones will need next. Never preempts. Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxinfer.config import EngineConfig
from jaxinfer.scheduler.budget import Budget
from jaxinfer.scheduler.pages import Pages
from jaxinfer.scheduler.prefill import Chunk, claim_chunk
from jaxinfer.scheduler.queue import Groups, WaitingQueue
from jaxinfer.scheduler.rows import RowStore
from jaxinfer.scheduler.running import Running
from jaxinfer.scheduler.sequence import Sequence, Status


class Admission:
    """The waiting queue and the way out of it. queries, hits: see SchedulerStats."""

    def __init__(
        self,
        config: EngineConfig,
        pages: Pages,
        rows: RowStore,
        running: Running,
        clock: Callable[[], float],
    ) -> None:
        self._max_partial = config.max_partial_prefills
        self._pages = pages
        self._rows = rows
        self._running = running
        self._clock = clock
        self.waiting = WaitingQueue(config.policy, lambda s: pages.lookup(s).length)
        self.groups = Groups()
        self.queries = self.hits = 0
        # Who did not fit last, and the spare pages then: no new walk of the tree before there are more.
        self._refused: tuple[Sequence, list[int]] | None = None

    def admit(self, budget: Budget, chunks: list[Chunk]) -> list[Sequence]:
        """Start waiting sequences in order until one does not fit; their chunks go to `chunks`."""
        lengths = {chunk.sequence: chunk.length for chunk in chunks}
        partial = 0
        # What the running ones may take next: a page each, but no slot: they have theirs.
        reserve = [self._running.num_decoding] * len(self._pages.layout.tables)
        for kind in self._pages.layout.states:
            reserve[kind] = 0
        for sequence in self._running.prefilling():
            partial += not sequence.covers(lengths.get(sequence, 0))
            self._reserve(reserve, sequence)
        fresh: list[Sequence] = []
        for sequence in self.waiting.ordered():
            # A preempted sequence goes first, but not before its last token has arrived.
            if not self._rows.free or not budget.chunk(1) or sequence.inflight:
                break
            if self._pages.may_read(sequence) and self.groups.must_wait(sequence):
                continue
            chunk = self._start(sequence, budget, reserve, partial < self._max_partial)
            if chunk is None:
                break
            partial += not sequence.covers(chunk.length)
            self._reserve(reserve, sequence)
            chunks.append(chunk)
            fresh.append(sequence)
        return fresh

    def _reserve(self, reserve: list[int], sequence: Sequence) -> None:
        missing = self._pages.missing(sequence.held, len(sequence.tokens) + 1)
        for kind, pages in enumerate(missing):
            reserve[kind] += pages

    def _spare(self, reserve: list[int]) -> list[int]:
        """Pages of each kind that a new sequence may count on."""
        return [have - kept for have, kept in zip(self._pages.available(), reserve, strict=True)]

    def _still_refused(self, sequence: Sequence, spare: list[int]) -> bool:
        if self._refused is None or self._refused[0] is not sequence:
            return False
        return all(now <= then for now, then in zip(spare, self._refused[1], strict=True))

    def _start(
        self, sequence: Sequence, budget: Budget, reserve: list[int], may_be_cut: bool
    ) -> Chunk | None:
        """Admit one sequence; its first chunk, or None (and no change) if it must wait."""
        pages = self._pages
        alone, spare = not len(self._running), self._spare(reserve)
        if not alone and self._still_refused(sequence, spare):
            return None
        match = pages.lookup(sequence)
        sequence.held = pages.tree.lock(match)  # first: what it hits is no longer evictable
        sequence.scheduled = match.length
        sequence.branch = match.known if match.known > match.length else 0
        need = pages.missing(sequence.held, len(sequence.tokens) + 1)
        fits = alone or all(n <= m for n, m in zip(need, self._spare(reserve), strict=True))
        self._refused = None if fits else (sequence, spare)
        chunk = claim_chunk(sequence, budget, pages, whole=not may_be_cut) if fits else None
        if chunk is None:
            pages.tree.release(sequence.held)
            sequence.scheduled = 0
            return None
        self.waiting.remove(sequence)
        self._rows.open(sequence)
        self._running.move(sequence, Status.PREFILL)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = match.length
            sequence.metrics.first_scheduled_time = self._clock()
            if pages.may_read(sequence):
                self.queries += len(sequence.tokens)
                self.hits += match.length
                pages.tree.count(match)
        return chunk
