"""Engine: the asyncio face of the core. One thread owns the core and its state; coroutines talk to it.

Two hops: a thread-safe inbox into the loop, and one call per step and event loop back out of it.
Text is made on the consumer's side. Servers and asyncio programs use this; scripts use LLM.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import Any

from jaxinfer.cache.events import Event
from jaxinfer.config import engine_config
from jaxinfer.errors import InvalidRequest, JaxinferError, Unavailable, check_range
from jaxinfer.inputs import default_sampling_params
from jaxinfer.loading import LoadedModel, load
from jaxinfer.outputs import RequestState
from jaxinfer.progress import Progress, console_progress
from jaxinfer.scheduler.inspection import MAX_NODES, CacheView
from jaxinfer.scheduler.sequence import Sequence, Update
from jaxinfer.scheduler.stats import PoolLoad, pool_load
from jaxinfer.types import FinishReason, Request, RequestOutput, SamplingParams

log = logging.getLogger(__name__)
ANSWER_SECONDS = 0.5  # in which the engine thread answers a drain whose time is up


class _Stream:
    """Updates of one client request, on their way to its event loop."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.loop = loop
        self._pending: list[Update] = []
        self._refusal: JaxinferError | None = None
        self._ready = asyncio.Event()

    def put(self, update: Update) -> None:
        self._pending.append(update)
        self._ready.set()

    def refuse(self, error: JaxinferError) -> None:
        """The engine could not take the request."""
        self._refusal = error
        self._ready.set()

    async def take(self) -> list[Update]:
        await self._ready.wait()
        self._ready.clear()
        if self._refusal is not None:
            raise self._refusal
        taken, self._pending = self._pending, []
        return taken


class Engine:
    """Serves one model to coroutines.

    Args:
        model: a model reference or a LoadedModel. options: any EngineConfig field, or vLLM's name for it.
    """

    def __init__(
        self, model: str | LoadedModel, *, progress: bool | Progress = True, **options: Any
    ) -> None:
        config = engine_config(**options)
        shown = progress if isinstance(progress, Progress) else console_progress(progress)
        with shown as bars:
            if not isinstance(model, LoadedModel):
                model = load(model, dtype=config.dtype, progress=bars.update)
            self.model = model
            self.core = model.core(config)
            if config.warmup == "eager":
                self.core.warm_up(lambda i, n: bars.update("compiling", i, n))
        self.inputs = model.inputs(self.core)
        self._ids = itertools.count()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # What runs, by Request id; changed by the engine thread only.
        self._streams: dict[str, tuple[_Stream, Sequence]] = {}
        self._active: dict[str, tuple[RequestState, _Stream]] = {}  # by client request id
        self._draining = False
        self._closed = False
        self._busy = False  # in a round, since _round (time.monotonic)
        self._round = 0.0
        self._thread = threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True)
        self._thread.start()

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with what the checkpoint's generation_config recommends."""
        return default_sampling_params(self.model.generation_config)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        use_prefix_cache: bool = True,
        deltas: bool = False,
    ) -> AsyncGenerator[RequestOutput]:
        """Stream a request: each item holds everything so far, the last one is `finished`.

        With `deltas` an item holds what came since the last one (RequestState.delta); a slow reader gets
        fewer, longer items. No `sampling_params`: the checkpoint's own. Leaving the iteration early aborts
        the request; so does `timeout` (seconds). Raises InvalidRequest, CapacityError or Unavailable
        before anything is queued.
        """
        if self._draining or self._closed:
            raise Unavailable("the engine is draining and takes no new requests")
        name = self._name(request_id)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        options = {"priority": priority, "timeout": timeout, "cache_salt": cache_salt}
        state = self._state(name, prompt, params, use_prefix_cache=use_prefix_cache, **options)
        stream = _Stream(name, asyncio.get_running_loop())
        entry = (state, stream)
        if self._active.setdefault(name, entry) is not entry:  # another event loop was faster
            raise _in_use(name)
        self._inbox.put(lambda: self._submit(state.requests, stream))
        try:
            if self._closed:  # by another thread, after the check above: nobody may read the inbox
                raise Unavailable("the engine is closed and takes no new requests")
            while not state.finished:
                for update in await stream.take():
                    stopped = state.apply(update)
                    if stopped is not None:
                        self._end(stopped, stream, FinishReason.STOP)
                yield state.delta() if deltas else state.output()
        finally:
            self._active.pop(name, None)
            for rid in state.unfinished_ids():
                self._end(rid, stream, FinishReason.ABORT)

    def _state(
        self, name: str, prompt: Any, params: SamplingParams, **options: Any
    ) -> RequestState:
        """A checked request that has not begun."""
        checked = self.inputs.prompt(prompt)
        requests = self.inputs.requests(name, checked, params, **options)
        for request in requests:
            self.core.scheduler.check_fits(request)
        return RequestState(name, checked, requests, self.model.tokenizer)

    async def abort(self, request_id: str) -> bool:
        """End a client request; its stream yields finish_reason "abort". False if it isn't running."""
        if request_id not in self._active:
            return False
        state, stream = self._active[request_id]
        for rid in state.unfinished_ids():
            self._end(rid, stream, FinishReason.ABORT)
        return True

    def set_kv_listener(self, listener: Callable[[list[Event]], None] | None) -> None:
        """Have the engine thread call `listener`, see EngineCore.set_kv_listener; returns at once."""
        self._inbox.put(lambda: self.core.set_kv_listener(listener))

    async def clear_prefix_cache(self) -> None:
        """Forget every cached prefix; running requests keep their pages."""
        await self._ask(lambda: self.core.scheduler.clear_prefix_cache())

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs: it ends on close, or if not even a reset worked."""
        return self._thread.is_alive()

    async def inspect(self, limit: int = 1000) -> CacheView:
        """The cache between two rounds: kinds, hits, states in use, and at most `limit` nodes of the tree.

        From any event loop. Raises Unavailable once the engine is closed.
        """
        check_range("limit", limit, 1, MAX_NODES)
        view = await self._ask(lambda: self.core.scheduler.inspect(limit))
        if view is None:
            raise Unavailable("the engine is closed; its cache is gone")
        return view

    @property
    def cache_unit(self) -> int:
        """The shortest prefix in tokens that another prompt can reuse; 0 if none can."""
        return self.core.config.reusable_unit(self._recurrent)

    @property
    def heeds_breakpoints(self) -> bool:
        """Whether a prompt's breakpoints change anything: there are recurrent states, and they are kept."""
        return self._recurrent and self.cache_unit > 0

    @property
    def _recurrent(self) -> bool:
        return bool(self.core.scheduler.layout.states)

    def pool_load(self) -> PoolLoad:
        """How full the cache is; safe to call from any thread."""
        return pool_load(self.core.scheduler.stats().kinds, self.core.config.page_size)

    def silence(self) -> float:
        """Seconds since the engine thread last began a round; 0.0 while it has nothing to do."""
        return time.monotonic() - self._round if self._busy else 0.0

    def stats(self) -> dict[str, Any]:
        """Counters and gauges; safe to call from any thread."""
        return self.core.stats() | {
            "active_requests": len(self._active),
            "draining": self._draining,
        }

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests and wait for the running ones; True if all ended in time.

        After `timeout` seconds what still runs is aborted, also if the engine thread stands still.
        """
        self._draining = True
        end = None if timeout is None else time.monotonic() + timeout
        while await self._is_busy(end and max(end - time.monotonic(), ANSWER_SECONDS)):
            if end is not None and time.monotonic() >= end:
                for name in list(self._active):
                    await self.abort(name)
                await self._is_busy(ANSWER_SECONDS)
                return False
            await asyncio.sleep(0.01)
        return True

    async def _is_busy(self, patience: float | None = None) -> bool:
        """Whether requests run, once the engine thread has done all that it was told so far.

        A thread that has not answered after `patience` seconds is busy.
        """
        try:
            return bool(await asyncio.wait_for(self._ask(lambda: bool(self._streams)), patience))
        except TimeoutError:
            return True

    async def _ask[T](self, question: Callable[[], T]) -> T | None:
        """What the engine thread answers, between two rounds; None once it is closed."""
        if self._closed:
            return None
        answer: Future[T] = Future()

        def tell() -> None:
            if answer.set_running_or_notify_cancel():  # False: who asked has been cancelled
                try:
                    answer.set_result(question())
                except BaseException as error:
                    answer.set_exception(error)
                    raise

        self._inbox.put(tell)
        if self._closed:  # since the check above: nobody may read the inbox
            return None
        return await asyncio.wrap_future(answer)

    def _end(self, request_id: str, stream: _Stream, reason: FinishReason) -> None:
        """Have the engine thread end a request of `stream`; another stream's of that name goes on."""

        def end() -> None:
            if self._streams.get(request_id, (None,))[0] is stream:
                self._deliver(self.core.finish(request_id, reason))

        self._inbox.put(end)

    def _name(self, wanted: str | None) -> str:
        if wanted is None:
            return next(n for i in self._ids if (n := f"request-{i}") not in self._active)
        if not isinstance(wanted, str) or not wanted:
            raise InvalidRequest(f"request_id={wanted!r:.60} must be a string that is not empty")
        if wanted in self._active:
            raise _in_use(wanted)
        return wanted

    def close(self) -> None:
        """Stop the engine thread. Whatever still runs is aborted."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
            self._thread.join()

    # --- engine thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        going = True
        try:
            while going:
                try:
                    going = self._take_inbox()
                    if going and self.core.has_work():
                        self._round, self._busy = time.monotonic(), True
                        self._deliver(self.core.step())
                        self._busy = False
                except Exception:
                    log.exception("the engine loop failed; its requests end with an error")
                    self._reset()
        finally:  # closed, or not even the reset worked
            self._closed = True
            self._inbox.put(None)
            self._take_inbox()
            for request_id in list(self._streams):
                self._deliver(self.core.abort(request_id))

    def _reset(self) -> None:
        """End every stream, also those of which the failed round lost the outcome."""
        self._busy = False
        sequences = [sequence for _, sequence in self._streams.values()]
        self._deliver([Update(s, None, None, FinishReason.ERROR) for s in sequences])
        self.core.reset()

    def _take_inbox(self) -> bool:
        """Do what coroutines asked for; waits for them when there is no work. False: close."""
        block = not self.core.has_work()
        while True:
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            block = False

    def _submit(self, requests: list[Request], stream: _Stream) -> None:
        for request in requests:
            try:
                sequence = self.core.submit(request)
            except JaxinferError as error:  # an id like "a/0" may be in use as a part of "a"
                self._call(stream, stream.refuse, error)
                return  # the client's side aborts the parts that were taken
            self._streams[request.request_id] = (stream, sequence)

    def _deliver(self, updates: list[Update]) -> None:
        batches: dict[_Stream, list[Update]] = {}
        for update in updates:
            request_id = update.sequence.request.request_id
            stream, _ = self._streams.get(request_id, (None, None))
            if stream is None:
                continue
            batches.setdefault(stream, []).append(update)
            if update.finish_reason is not None:
                del self._streams[request_id]
        loops: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, list[Update]]]] = {}
        for stream, batch in batches.items():
            loops.setdefault(stream.loop, []).append((stream, batch))
        for streams in loops.values():
            self._call(streams[0][0], _put_all, streams)

    def _call(self, stream: _Stream, function: Callable[..., None], *args: Any) -> None:
        """Run a function in a stream's event loop; if that is closed, its requests end."""
        try:
            stream.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not stream.loop.is_closed():
                raise
            self._forget(stream.loop)

    def _forget(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nobody can read the streams of a closed event loop any more."""
        orphans = {rid: stream for rid, (stream, _) in self._streams.items() if stream.loop is loop}
        for request_id, stream in orphans.items():
            del self._streams[request_id]
            self.core.abort(request_id)
            self._active.pop(stream.name, None)


def _in_use(name: str) -> InvalidRequest:
    return InvalidRequest(f"request_id={name!r} is already running; choose another")


def _put_all(batch: list[tuple[_Stream, list[Update]]]) -> None:
    for stream, updates in batch:
        for update in updates:
            stream.put(update)
