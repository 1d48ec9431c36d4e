"""EngineCore: the one owner of the device state. Plans, packs, dispatches and commits steps.

Single-threaded and free of text: it takes Requests and yields Updates of tokens. `LLM` drives it
in the calling thread, `Engine` in a thread of its own. With overlap one step stays in flight
ahead of the host; without, each step is fetched before the next is planned. Both give the same tokens.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import jax
import numpy as np

from jaxinfer.cache.events import Event, EventBuffer
from jaxinfer.config import EngineConfig
from jaxinfer.errors import CapacityError
from jaxinfer.layout import RowFlag
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import get_family
from jaxinfer.scheduler import LoadPlan, Scheduler, Sequence, StepOutput, StepPlan, Update
from jaxinfer.scheduler.plan import Score
from jaxinfer.sizing import PoolSizes, size_pools
from jaxinfer.step.compile import Executables, enable_compile_cache
from jaxinfer.step.forward import StepModel, unpack_result
from jaxinfer.step.pack import pack_load, pack_step
from jaxinfer.step.state import DeviceState, create_state
from jaxinfer.types import FinishReason, Request

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """What the core did; a step is one dispatch, one copy in and one copy out.

    load_steps (long penalty or bias lists of new requests, more than a step carries) copy nothing out.
    """

    steps: int = 0
    load_steps: int = 0
    dispatches: int = 0
    copies_in: int = 0
    copies_out: int = 0
    tokens_fed: int = 0
    token_slots: int = 0
    tokens_sampled: int = 0
    failed_steps: int = 0
    host_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """One committed step: tokens fed, tokens its shape has room for, tokens drawn, seconds it took.

    The seconds count from its dispatch, or from the end of the step before it if that came later.
    """

    tokens: int
    token_slots: int
    sampled: int
    seconds: float


@dataclass(slots=True)
class _InFlight:
    plan: StepPlan
    result: jax.Array
    flags: int  # OR of the rows' RowFlags
    dispatched: float  # time.perf_counter()


class EngineCore:
    """Runs requests on one model. Not thread-safe: one thread calls every method."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        params: Any,
        dtype: str,
        sizes: PoolSizes | None = None,
    ) -> None:
        enable_compile_cache(config.compile_cache)
        model = replace(model, replay=config.replay)
        family = get_family(model)
        self._specs = specs = family.cache_specs(model, dtype)
        self.sizes = sizes or size_pools(config, model, specs)
        self.config, self.model, self.params, self.dtype = config, model, params, dtype
        self.max_model_len = self.sizes.max_model_len
        self._kv_events = EventBuffer()
        self.scheduler = self._new_scheduler()
        self.step_model = StepModel(model, family, specs, self.scheduler.layout, config.page_size)
        self.state = self._new_state()
        self.executables = Executables(
            self.step_model, config.ladder(), params, self.state, config.strict_compile
        )
        self.counters = Counters()
        self.on_step: Callable[[StepReport], None] | None = None
        self._inflight: deque[_InFlight] = deque()
        self._collected = 0.0  # when the last step's result had come
        self._scores: dict[str, list[Score]] = {}  # prompt positions scored so far, by request id

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        self.executables.warm_up(progress)

    def submit(self, request: Request) -> Sequence:
        """Queue a request. Raises CapacityError if it can never fit."""
        return self.scheduler.add(request)

    def finish(self, request_id: str, reason: FinishReason = FinishReason.STOP) -> list[Update]:
        """End a request from outside: a stop string was found, or nobody wants it any more."""
        sequence = self.scheduler.finish(request_id, reason)
        self._scores.pop(request_id, None)
        return [] if sequence is None else [Update(sequence, None, None, reason)]

    def abort(self, request_id: str) -> list[Update]:
        """End a request that nobody wants any more."""
        return self.finish(request_id, FinishReason.ABORT)

    def has_work(self) -> bool:
        return bool(self._inflight) or self.scheduler.has_work()

    def step(self) -> list[Update]:
        """One round: dispatch the next step, then commit the oldest one that may be awaited."""
        start, compiled = time.perf_counter(), self.executables.compile_seconds
        updates = self._expire()
        plan = self.scheduler.plan()
        try:
            while isinstance(plan, LoadPlan):
                self._dispatch_load(plan)
                plan = self.scheduler.plan()
            if plan is not None:
                self._dispatch(plan)
            compiling = self.executables.compile_seconds - compiled
            self.counters.host_seconds += time.perf_counter() - start - compiling
            depth = 1 if self.config.overlap and plan is not None else 0
            while len(self._inflight) > depth:
                updates += self._collect()
        except (jax.errors.JaxRuntimeError, CapacityError) as error:
            updates += self._recover(plan, error)
        self._kv_events.flush()
        return updates

    def _expire(self) -> list[Update]:
        """End what is past its deadline; its scores must not go to a later request of that id."""
        updates = self.scheduler.expire()
        for update in updates:
            self._scores.pop(update.sequence.request.request_id, None)
        return updates

    def _dispatch(self, plan: StepPlan) -> None:
        run = self.executables.step(plan.shape)
        buffer = pack_step(plan, self.scheduler.layout)
        state, (result, scored) = run(self.params, self.state, buffer)
        self.state = state
        result = scored if plan.scored else result
        result.copy_to_host_async()
        self._inflight.append(_InFlight(plan, result, int(buffer[0]), time.perf_counter()))
        counters = self.counters
        counters.steps += 1
        counters.dispatches += 1
        counters.copies_in += 1
        counters.tokens_fed += len(plan.decode) + len(plan.tokens)
        counters.token_slots += plan.shape.tokens

    def _dispatch_load(self, plan: LoadPlan) -> None:
        self.state = self.executables.load()(self.state, pack_load(plan))
        self.counters.load_steps += 1
        self.counters.dispatches += 1
        self.counters.copies_in += 1

    def _collect(self) -> list[Update]:
        """Wait for the oldest step and commit it."""
        flight = self._inflight[0]
        host = np.asarray(flight.result)
        self._inflight.popleft()
        start = time.perf_counter()
        if self.on_step is not None:
            self.on_step(_report(flight, start - max(flight.dispatched, self._collected)))
        self._collected = start
        output = unpack_result(host, flight.plan.shape)
        updates = self._keep_scores(flight.plan, output)
        updates += self.scheduler.commit(flight.plan, output)
        if self._scores or (flight.flags & RowFlag.LOGPROBS):
            updates = [self._with_scores(update, output) for update in updates]
        self.counters.copies_out += 1
        self.counters.tokens_sampled += len(flight.plan.sampled)
        self.counters.host_seconds += time.perf_counter() - start
        return updates

    def _keep_scores(self, plan: StepPlan, output: StepOutput) -> list[Update]:
        """Log-probabilities of prompt positions, kept until their request's next update.

        A NaN ends its request with ERROR: with max_tokens=0 nothing is sampled that would show it.
        -inf is a probability of 0, and fine.
        """
        updates: list[Update] = []
        for sequence, _, first, count in plan.scored:
            if sequence.finish_reason is not None or output.scores is None:
                continue
            logprobs, ranks, ids, top = (a[first : first + count] for a in output.scores)
            if np.isnan(logprobs).any() or np.isnan(top).any():
                updates += self.finish(sequence.request.request_id, FinishReason.ERROR)
                continue
            kept = self._scores.setdefault(sequence.request.request_id, [])
            rows = zip(logprobs, ranks, ids, top, strict=True)
            kept.extend((float(p), int(rank), i, t) for p, rank, i, t in rows)
        return updates

    def _with_scores(self, update: Update, output: StepOutput) -> Update:
        sequence = update.sequence
        scores = self._scores.pop(sequence.request.request_id, None)
        if update.token is None or sequence.request.params.logprobs is None:
            return update._replace(prompt_scores=scores)
        row = update.row
        assert row is not None and output.logprobs is not None and output.ranks is not None
        assert output.top_ids is not None and output.top_logprobs is not None
        score = (
            float(output.logprobs[row]),
            int(output.ranks[row]),
            output.top_ids[row],
            output.top_logprobs[row],
        )
        return update._replace(score=score, prompt_scores=scores)

    def _recover(self, plan: StepPlan | LoadPlan | None, error: Exception) -> list[Update]:
        """A step raised: its sequences end with an error, the others are computed again."""
        log.error("a step failed; its requests end with an error: %s", error)
        self.counters.failed_steps += 1
        plans: list[StepPlan | LoadPlan] = [flight.plan for flight in self._inflight]
        if plan is not None and all(plan is not other for other in plans):
            plans.append(plan)
        self._inflight.clear()
        updates = [update for failed in plans for update in self.scheduler.fail(failed)]
        for update in updates:
            self._scores.pop(update.sequence.request.request_id, None)
        self.scheduler.restart()
        self._renew_state()
        return updates

    def reset(self) -> list[Update]:
        """Start afresh after an error that `step` does not handle: every request ends with ERROR.

        Trusts nothing that the failed round may have left half done: scheduler, cache and device
        state are new. Counters of the core go on, those of the scheduler begin again.
        """
        lost = self.scheduler.sequences()
        for sequence in lost:
            sequence.finish_reason = FinishReason.ERROR
        self._inflight.clear()
        self._scores.clear()
        self.scheduler = self._new_scheduler()
        self._renew_state()
        return [Update(sequence, None, None, FinishReason.ERROR) for sequence in lost]

    def _new_scheduler(self) -> Scheduler:
        scheduler = Scheduler(self.config, self._specs, self.sizes.pages, self.max_model_len)
        if self._kv_events.listener is not None:
            scheduler.set_kv_listener(self._kv_events.add)  # begins with AllBlocksCleared
        return scheduler

    def set_kv_listener(self, listener: Callable[[list[Event]], None] | None) -> None:
        """Call `listener` once a round with what changed in the prefix cache; first with what is in it.

        It runs on the thread of this core and must neither wait nor raise.
        """
        self._kv_events.listener = listener
        self.scheduler.set_kv_listener(None if listener is None else self._kv_events.add)
        self._kv_events.flush()

    def _renew_state(self) -> None:
        """Replace the state; the old one goes first, memory may not hold both."""
        for array in jax.tree.leaves(self.state):
            if not array.is_deleted():
                array.delete()
        self.state = self._new_state()

    def _new_state(self) -> DeviceState:
        model = self.step_model
        state = create_state(
            model.specs,
            self.sizes.pages,
            model.page_size,
            self.config.rows,
            self.model.vocab_size,
            self.model.num_layers,
        )
        return jax.block_until_ready(state)

    def stats(self) -> dict[str, Any]:
        """Counters of the core, its executables and its scheduler, as plain numbers."""
        out: dict[str, Any] = {f.name: getattr(self.counters, f.name) for f in fields(Counters)}
        out["compiles"] = self.executables.compiles
        out["compile_seconds"] = self.executables.compile_seconds
        return out | asdict(self.scheduler.stats())

    def check(self) -> None:
        """Raise AssertionError if pools, tree and sequences disagree (tests call it when idle)."""
        self.scheduler.check()


def _report(flight: _InFlight, seconds: float) -> StepReport:
    plan = flight.plan
    fed = len(plan.decode) + len(plan.tokens)
    return StepReport(fed, plan.shape.tokens, len(plan.sampled), seconds)
