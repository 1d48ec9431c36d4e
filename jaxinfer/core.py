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
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.errors import CapacityError
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import get_family
from jaxinfer.scheduler.plan import LoadPlan, StepPlan
from jaxinfer.scheduler.scheduler import Scheduler, Update
from jaxinfer.scheduler.sequence import Sequence
from jaxinfer.sizing import PoolSizes, size_pools
from jaxinfer.step.compile import Executables, enable_compile_cache
from jaxinfer.step.forward import StepModel, unpack_result
from jaxinfer.step.pack import pack_load, pack_step
from jaxinfer.step.state import DeviceState, create_state
from jaxinfer.types import Request

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """What the core did; a step is one dispatch, one copy in and (unless it only loads) one copy out."""

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


@dataclass(slots=True)
class _InFlight:
    plan: StepPlan
    result: jax.Array


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
        family = get_family(model)
        specs = family.cache_specs(model, dtype)
        self.sizes = sizes or size_pools(config, model, specs)
        self.config, self.model, self.params, self.dtype = config, model, params, dtype
        self.max_model_len = self.sizes.max_model_len
        self.scheduler = Scheduler(config, specs, self.sizes.pages, self.max_model_len)
        self.step_model = StepModel(model, family, specs, self.scheduler.layout, config.page_size)
        self.state = self._new_state()
        self.executables = Executables(
            self.step_model, config.ladder(), params, self.state, config.strict_compile
        )
        self.counters = Counters()
        self._inflight: deque[_InFlight] = deque()

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        self.executables.warm_up(progress)

    def submit(self, request: Request) -> Sequence:
        """Queue a request. Raises CapacityError if it can never fit."""
        return self.scheduler.add(request)

    def abort(self, request_id: str) -> list[Update]:
        return self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        return bool(self._inflight) or self.scheduler.has_work()

    def step(self) -> list[Update]:
        """One round: dispatch the next step, then commit the oldest one that may be awaited."""
        start = time.perf_counter()
        plan = self.scheduler.plan()
        updates = self.scheduler.take_updates()
        while isinstance(plan, LoadPlan):
            self._dispatch_load(plan)
            plan = self.scheduler.plan()
            updates += self.scheduler.take_updates()
        try:
            if plan is not None:
                self._dispatch(plan)
            self.counters.host_seconds += time.perf_counter() - start
            depth = 1 if self.config.overlap and plan is not None else 0
            while len(self._inflight) > depth:
                updates += self._collect()
        except (jax.errors.JaxRuntimeError, CapacityError) as error:
            updates += self._recover(plan, error)
        return updates

    def _dispatch(self, plan: StepPlan) -> None:
        run = self.executables.step(plan.shape)
        buffer = pack_step(plan, self.scheduler.layout)
        state, (result, scored) = run(self.params, self.state, buffer)
        self.state = state
        result = scored if plan.scored else result
        result.copy_to_host_async()
        self._inflight.append(_InFlight(plan, result))
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
        updates = self.scheduler.commit(flight.plan, unpack_result(host, flight.plan.shape))
        self.counters.copies_out += 1
        self.counters.tokens_sampled += len(flight.plan.sampled)
        self.counters.host_seconds += time.perf_counter() - start
        return updates

    def _recover(self, plan: StepPlan | None, error: Exception) -> list[Update]:
        """A step raised: its sequences end with an error, everyone else is recomputed on a fresh state."""
        log.error("a step failed and its requests end with an error: %s", error)
        self.counters.failed_steps += 1
        plans = [flight.plan for flight in self._inflight]
        if plan is not None and plan not in plans:
            plans.append(plan)
        self._inflight.clear()
        updates = self.scheduler.fail(plans)
        self.state = self._new_state()
        return updates

    def _new_state(self) -> DeviceState:
        model = self.step_model
        state = create_state(
            model.specs, self.sizes.pages, model.page_size, self.config.rows, self.model.vocab_size
        )
        return jax.block_until_ready(state)

    def stats(self) -> dict[str, Any]:
        """Counters of the core, its executables and its scheduler, as plain numbers."""
        out: dict[str, Any] = {f.name: getattr(self.counters, f.name) for f in fields(Counters)}
        out["compiles"] = self.executables.compiles
        out["compile_seconds"] = self.executables.compile_seconds
        return out | self.scheduler.stats()

    def check(self) -> None:
        """Raise AssertionError if pools, tree and sequences disagree (tests call it when idle)."""
        self.scheduler.check()
