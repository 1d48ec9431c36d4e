"""Scheduler: which tokens of which sequences the next step feeds, and what its outcome means.

Iteration-level batching: every round decode rows go first, then prompts under way, then the queue.
A row takes pages only from its juniors, so the senior one always proceeds. plan() may run one step
ahead of commit(). Never touches arrays on a device, never reads text. Called by the engine thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from jaxinfer.cache import CacheSpec, Held
from jaxinfer.cache.events import Listener
from jaxinfer.config import EngineConfig
from jaxinfer.errors import InvalidRequest
from jaxinfer.layout import RecordLayout, RowField
from jaxinfer.scheduler.admission import Admission
from jaxinfer.scheduler.budget import Budget, Ladder
from jaxinfer.scheduler.inspection import CacheView, inspect_cache
from jaxinfer.scheduler.loads import load_plans, needs_load
from jaxinfer.scheduler.pages import Pages
from jaxinfer.scheduler.plan import LoadPlan, StepOutput, StepPlan
from jaxinfer.scheduler.prefill import Chunk, PrefillArrays, claim_chunk
from jaxinfer.scheduler.rows import RowStore
from jaxinfer.scheduler.running import Running
from jaxinfer.scheduler.sequence import Sequence, Status, Update
from jaxinfer.scheduler.stats import SchedulerStats, kind_stats
from jaxinfer.types import FinishReason, Request, RequestMetrics


class Scheduler:
    """See the methods; a round is expire(), plan(), run the plan, commit() or fail().

    Args:
        config: budgets and policy. specs: the model's cache kinds. num_pages: pages (STATE kinds: slots) of
            each kind's pool, number 0 included. max_model_len: longest prompt + output. clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: EngineConfig,
        specs: Seq[CacheSpec],
        num_pages: Seq[int],
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._clock = clock
        self._pages = Pages(config, specs, num_pages, max_model_len)
        self._ladder = Ladder(config)
        self._rows = RowStore(config.rows, self._pages.layout)
        self._running = Running()
        self._admission = Admission(config, self._pages, self._rows, self._running, clock)
        self._waiting = self._admission.waiting
        self._groups = self._admission.groups
        self._sequences: dict[str, Sequence] = {}
        self._deadlines: dict[str, float] = {}
        self._next_deadline = float("inf")
        self._ready: deque[StepPlan | LoadPlan] = deque()
        self._arrivals = self._preemptions = self._steps = 0

    @property
    def layout(self) -> RecordLayout:
        return self._pages.layout

    # -- requests ------------------------------------------------------------------------------

    def add(self, request: Request) -> Sequence:
        """Queue a request. CapacityError if it can never fit, InvalidRequest if its id is in use."""
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request_id={request.request_id!r} is in use; give another one")
        if not request.prompt_token_ids:
            raise InvalidRequest("prompt_token_ids is empty; give at least one token")
        limit = self._pages.output_limit(request)
        self._arrivals += 1
        held = Held(len(self._pages.tree.specs))
        metrics = RequestMetrics(arrival_time=request.arrival)
        tokens = list(request.prompt_token_ids)
        sequence = Sequence(request, self._arrivals, limit, tokens, held, metrics=metrics)
        self._sequences[request.request_id] = sequence
        self._waiting.push(sequence)
        self._groups.add(sequence)
        if request.deadline is not None:
            self._deadlines[request.request_id] = request.deadline
            self._next_deadline = min(self._next_deadline, request.deadline)
        return sequence

    def check_fits(self, request: Request) -> None:
        """Raise CapacityError if the request can never be served. Safe to call from any thread."""
        self._pages.output_limit(request)

    def finish(self, request_id: str, reason: FinishReason = FinishReason.STOP) -> Sequence | None:
        """End a request now (a stop string was found); None if it has ended already."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, reason)
        return sequence

    def abort(self, request_id: str) -> Sequence | None:
        """End a request that nobody wants any more; None if it has ended already."""
        return self.finish(request_id, FinishReason.ABORT)

    def expire(self, now: float | None = None) -> list[Update]:
        """End every request whose deadline has passed, with ABORT."""
        now = self._clock() if now is None else now
        if now < self._next_deadline:
            return []
        late = [key for key, deadline in self._deadlines.items() if deadline <= now]
        ended = [self.abort(key) for key in late]
        self._next_deadline = min(self._deadlines.values(), default=float("inf"))
        return [Update(s, None, None, FinishReason.ABORT) for s in ended if s is not None]

    def sequences(self) -> list[Sequence]:
        """All that have not ended, in the order of their arrival."""
        return list(self._sequences.values())

    def has_work(self) -> bool:
        return bool(self._sequences or self._ready)

    # -- planning ------------------------------------------------------------------------------

    def plan(self) -> StepPlan | LoadPlan | None:
        """The next step to run, or None if there is nothing to run before the next commit."""
        if not self._ready:
            self._plan_step()
        return self._ready.popleft() if self._ready else None

    def _plan_step(self) -> None:
        self._steps += 1
        stalled, turned = self._claim_decode()
        decoding = self._running.num_decoding - len(stalled)
        budget = self._ladder.budget(decoding, serial=bool(self.layout.states))
        before = self._preemptions
        chunks = self._claim_prefills(budget)
        fresh: list[Sequence] = []
        calm = not stalled and self._preemptions == before
        if calm and len(self._waiting) and self._rows.free:
            fresh = self._admission.admit(budget, chunks)
            for sequence in fresh:
                sequence.started = self._steps
        members, decode = self._build_decode(stalled)
        arrays = PrefillArrays(self._rows, self._pages.tree, self._ladder.block)
        for chunk in chunks:
            arrays.add(chunk)
        if not members and not chunks:
            if stalled and len(stalled) == self._running.num_decoding and not self._steps % 2:
                self._plan_step()  # the prompt that they made way for can't go on
            return
        shape = self._ladder.smallest(len(members), arrays.num_blocks)
        sampled = list(enumerate(members))
        plan = StepPlan(
            shape,
            decode,
            arrays.records(),
            arrays.blocks(),
            arrays.tokens(),
            arrays.targets(),
            sampled,
            scored=arrays.scored,
        )
        for sequence in turned:  # nothing more is allocated for this step
            if sequence.slot:  # else preempted for another row
                self._pages.tree.settle_source(sequence.held)
        for index, chunk in enumerate(chunks):
            if self._advance(chunk):
                sampled.append((shape.rows + index, chunk.sequence))
            plan.chunks.append((chunk.sequence, chunk.sequence.scheduled))
        # Slots are filled before the step that first samples from them.
        loads = load_plans(s for s in fresh if needs_load(s))
        plan.load = loads.pop() if loads else None
        self._ready.extend(loads)
        self._ready.append(plan)

    def _claim_decode(self) -> tuple[set[Sequence], list[Sequence]]:
        """Pages for the rows that begin a page: who must sit out this step, and whose state it keeps."""
        members, slots = self._running.decoding()
        crowded = 2 * len(members) > self.config.max_num_batched_tokens
        if self._running.starving(self._steps, self.config.prefill_deadline) and crowded:
            return set(members), []
        starts = self._rows.records[slots, RowField.START]
        stalled: set[Sequence] = set()
        turned: list[Sequence] = []
        for index in np.flatnonzero(starts % self._pages.size == 0):
            sequence = members[index]
            if sequence.status is not Status.DECODE:  # preempted for a row before
                continue
            start = int(starts[index])
            if self._claim(sequence, start + 1):
                if self._pages.turn_state(sequence, start):
                    turned.append(sequence)
                self._rows.add_page(sequence, self._pages.tree)
            else:
                stalled.add(sequence)
        return stalled, turned

    def _claim(self, sequence: Sequence, tokens: int) -> bool:
        """Hold pages for `tokens` tokens, if need be at the cost of juniors."""
        while not self._pages.extend(sequence.held, tokens):
            victim = self._running.last()
            if victim is sequence:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the front of the queue; what it has computed stays in the tree as long as it may."""
        self._leave(sequence, Status.WAITING)
        sequence.scheduled = 0
        sequence.preempted = True
        self._preemptions += 1
        self._waiting.push(sequence)

    def _leave(self, sequence: Sequence, status: Status) -> None:
        self._running.move(sequence, status)
        self._rows.close(sequence)
        self._pages.tree.release(sequence.held)

    def _claim_prefills(self, budget: Budget) -> list[Chunk]:
        """Chunks of the prompts under way, seniors first."""
        chunks: list[Chunk] = []
        for sequence in self._running.prefilling():
            if sequence.status is Status.PREFILL:
                chunk = claim_chunk(sequence, budget, self._pages)
                if chunk is None and budget.chunk(1):
                    self._claim(sequence, sequence.scheduled + 1)
                    chunk = claim_chunk(sequence, budget, self._pages)
                if chunk is not None:
                    chunks.append(chunk)
        return chunks

    def _build_decode(self, stalled: set[Sequence]) -> tuple[list[Sequence], np.ndarray]:
        members, slots = self._running.decoding()
        if stalled:
            keep = [i for i, s in enumerate(members) if s not in stalled]
            members, slots = [members[i] for i in keep], slots[keep]
        if not members:
            return [], np.zeros((0, self.layout.width), np.int32)
        longest = int(self._rows.records[slots, RowField.START].max()) // self._pages.size + 1
        decode = self._rows.take_decode(slots, [min(longest, n) for n in self.layout.tables])
        for sequence in members:
            sequence.inflight += 1
        for index in np.flatnonzero(self._rows.left[slots] == 0):
            self._running.move(members[index], Status.DRAIN)
        return members, decode

    def _advance(self, chunk: Chunk) -> bool:
        """Account for a planned chunk; True if its last token samples."""
        sequence, tree = chunk.sequence, self._pages.tree
        sequence.scheduled += chunk.length
        pending = sequence.held.pending
        if pending and pending[-1][0] == sequence.scheduled:
            tree.read_from_pending(sequence.held)
        else:
            tree.settle_source(sequence.held)
        sequence.inflight += 1
        if sequence.scheduled < len(sequence.tokens):
            return False
        samples = sequence.limit > 0
        self._rows.left[sequence.slot] -= samples
        if self._rows.left[sequence.slot] > 0:
            self._running.move(sequence, Status.DECODE)
            self._rows.start_decoding(sequence, self._pages.tree)
        else:
            self._running.move(sequence, Status.DRAIN)
        return samples

    # -- outcomes ------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Update]:
        """Take in the outcome of a step; plans are committed in the order in which they were made."""
        updates: list[Update] = []
        for sequence, end in plan.chunks:
            sequence.inflight -= 1
            if sequence.slot:
                self._commit_chunk(sequence, end, updates)
        now = self._clock()
        size, decode_rows = self._pages.size, plan.shape.rows
        tokens = output.tokens.tolist()
        for row, sequence in plan.sampled:
            if row < decode_rows:
                sequence.inflight -= 1
            if sequence.finish_reason is not None:  # ended meanwhile: a surplus row
                continue
            token = tokens[row]
            if token < 0:
                self._end(sequence, FinishReason.ERROR)
                updates.append(Update(sequence, None, row, FinishReason.ERROR))
                continue
            known = sequence.tokens
            computed = len(known)  # the step fed all but the new token
            known.append(token)
            if row >= decode_rows and sequence.metrics.first_token_time is None:
                sequence.metrics.first_token_time = now
            if computed % size == 0 and sequence.slot:
                self._settle(sequence, computed)
            reason = None
            if token in sequence.request.stop_ids and computed >= sequence.stop_from:
                reason = FinishReason.STOP
            elif computed >= sequence.stop_at:
                reason = FinishReason.LENGTH
            if reason is not None:
                if sequence.held.pending and sequence.slot:
                    self._settle(sequence, computed)
                self._end(sequence, reason)
            updates.append(Update(sequence, token, row, reason))
        return updates

    def _commit_chunk(self, sequence: Sequence, end: int, updates: list[Update]) -> None:
        self._settle(sequence, end)
        if end < sequence.prompt_length:
            return
        self._groups.mark_done(sequence)
        if sequence.limit == 0:
            self._end(sequence, FinishReason.LENGTH)
            updates.append(Update(sequence, None, None, FinishReason.LENGTH))

    def _settle(self, sequence: Sequence, computed: int) -> None:
        changed = self._pages.settle(sequence, computed)
        if changed and sequence.status is Status.DECODE:
            record = self._rows.records[sequence.slot]
            start = int(record[RowField.START])
            self._rows.write_table(record, self._pages.tree, sequence.held, start)

    def fail(self, plan: StepPlan | LoadPlan) -> list[Update]:
        """A plan raised: end all of its sequences with ERROR; nothing it computed is kept."""
        if isinstance(plan, LoadPlan):
            slots = {slot for slot, _ in plan.resets} | {entry[0] for entry in plan.entries}
            involved = [s for s in self._running if s.slot in slots]
        else:
            decode = [s for row, s in plan.sampled if row < plan.shape.rows]
            involved = decode + [s for s, _ in plan.chunks]
            for sequence in involved:
                sequence.inflight -= 1
        lost = [s for s in involved if s.finish_reason is None]
        for sequence in lost:
            self._end(sequence, FinishReason.ERROR)
        return [Update(s, None, None, FinishReason.ERROR) for s in lost]

    def restart(self) -> None:
        """The device lost its state: forget all plans and pages; what still lives is computed again."""
        for plan in self._ready:
            for sequence, first, _, _ in getattr(plan, "scored", ()):
                sequence.scored = first
        self._ready.clear()
        for sequence in list(self._running):
            self._preempt(sequence)
        for sequence in self._sequences.values():
            sequence.inflight = 0
        self._pages.tree.clear()

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.slot:
            self._leave(sequence, Status.FINISHED)
        else:
            self._waiting.remove(sequence)
            sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.metrics.finished_time = self._clock()
        self._groups.remove(sequence)
        self._deadlines.pop(sequence.request.request_id, None)
        del self._sequences[sequence.request.request_id]

    # -- the cache, gauges and checks ----------------------------------------------------------

    def clear_prefix_cache(self) -> None:
        """Forget every cached prefix; running sequences keep their pages."""
        self._pages.tree.clear()

    def set_kv_listener(self, listener: Listener | None) -> None:
        """Tell which pages can be reused: what is stored now, then every change."""
        self._pages.tree.set_listener(listener)

    def inspect(self, limit: int) -> CacheView:
        """The cache as it stands, with at most `limit` nodes of the prefix tree."""
        return inspect_cache(self.config, self._pages.tree, self._running, self.stats(), limit)

    def stats(self) -> SchedulerStats:
        kinds, admission = kind_stats(self._pages.tree), self._admission
        sizes = (len(self._running), len(self._waiting))
        return SchedulerStats(*sizes, kinds, self._preemptions, admission.queries, admission.hits)

    def check(self) -> None:
        """Assert that nothing leaks: pages, slots, maps. For tests and idle moments."""
        running = list(self._running)
        self._pages.tree.check(s.held for s in running)
        assert len(running) + len(self._waiting) == len(self._sequences)
        slots = [s.slot for s in running]
        assert 0 not in slots and len(set(slots)) == len(slots)
        assert len(slots) + self._rows.free == self.config.rows, "a row slot leaked"
        for sequence in self._sequences.values():
            assert sequence.running or sequence in self._waiting
        assert self._deadlines.keys() <= self._sequences.keys()
        if not self._sequences:
            assert not self._groups and not self._deadlines
            assert all(kind.protected == 0 for kind in self.stats().kinds)
