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
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

from jaxinfer.config import engine_config
from jaxinfer.errors import CapacityError, InvalidRequest
from jaxinfer.loading import LoadedModel, load
from jaxinfer.outputs import RequestState
from jaxinfer.progress import console_progress
from jaxinfer.scheduler.sequence import Update
from jaxinfer.types import Request, RequestOutput, SamplingParams

log = logging.getLogger(__name__)


class _Stream:
    """Updates of one client request, on their way to its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.pending: list[Update] = []
        self.ready = asyncio.Event()

    def put(self, update: Update) -> None:
        self.pending.append(update)
        self.ready.set()

    async def take(self) -> list[Update]:
        await self.ready.wait()
        self.ready.clear()
        taken, self.pending = self.pending, []
        return taken


class Engine:
    """Serves one model to coroutines.

    Args:
        model: a model reference or a LoadedModel. options: any EngineConfig field, or vLLM's name for it.
    """

    def __init__(self, model: str | LoadedModel, *, progress: bool = True, **options: Any) -> None:
        config = engine_config(**options)
        with console_progress(progress) as bars:
            if not isinstance(model, LoadedModel):
                model = load(model, dtype=config.dtype, progress=bars.update)
            self.model = model
            self.core = model.core(config)
            if config.warmup == "eager":
                self.core.warm_up(lambda i, n: bars.update("compiling", i, n))
        self.inputs = model.inputs(self.core)
        self._ids = itertools.count()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # by Request id; touched by the engine thread only
        self._active: dict[str, RequestState] = {}  # by client request id
        self._draining = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True)
        self._thread.start()

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
    ) -> AsyncIterator[RequestOutput]:
        """Stream a request: each item holds everything so far, the last one is `finished`.

        Leaving the iteration early aborts the request. Raises InvalidRequest or CapacityError before
        anything is queued. `timeout` (seconds) ends the request with finish_reason "abort".
        """
        if self._draining or self._closed:
            raise CapacityError("the engine is draining and takes no new requests")
        name = request_id or f"request-{next(self._ids)}"
        if name in self._active:
            raise InvalidRequest(f"request_id={name!r} is already running; choose another")
        checked = self.inputs.prompt(prompt)
        requests = self.inputs.requests(
            name,
            checked,
            sampling_params or SamplingParams(),
            priority=priority,
            timeout=timeout,
            cache_salt=cache_salt,
            use_prefix_cache=use_prefix_cache,
        )
        for request in requests:
            self.core.scheduler.check_fits(request)
        state = RequestState(name, checked, requests, self.model.tokenizer)
        stream = _Stream(asyncio.get_running_loop())
        self._active[name] = state
        self._inbox.put(lambda: self._submit(requests, stream))
        try:
            while not state.finished:
                for update in await stream.take():
                    stopped = state.apply(update)
                    if stopped is not None:
                        self._inbox.put(lambda rid=stopped: self._finish(rid))
                yield state.output()
        finally:
            self._active.pop(name, None)
            for rid in state.unfinished_ids():
                self._inbox.put(lambda rid=rid: self._abort(rid))

    async def abort(self, request_id: str) -> bool:
        """End a client request; its stream yields finish_reason "abort". False if it isn't running."""
        state = self._active.get(request_id)
        if state is None:
            return False
        for rid in state.unfinished_ids():
            self._inbox.put(lambda rid=rid: self._abort(rid))
        return True

    def stats(self) -> dict[str, Any]:
        """Counters and gauges; safe to call from any thread."""
        return self.core.stats() | {"active_requests": len(self._active), "draining": self._draining}

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests and wait for the running ones; True if all ended in time.

        After `timeout` seconds what still runs is aborted.
        """
        self._draining = True
        end = None if timeout is None else time.monotonic() + timeout
        while self._active and (end is None or time.monotonic() < end):
            await asyncio.sleep(0.01)
        complete = not self._active
        for name in list(self._active):
            await self.abort(name)
        while self._active:
            await asyncio.sleep(0.01)
        return complete

    def close(self) -> None:
        """Stop the engine thread. Whatever still runs is aborted."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
            self._thread.join()

    # --- engine thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while self._take_inbox():
            try:
                if self.core.has_work():
                    self._deliver(self.core.step())
            except Exception:
                log.exception("the engine loop failed; its requests end with an error")
                self._deliver(self.core.reset("the engine loop failed"))
        for request_id in list(self._streams):
            self._abort(request_id)

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
            self._streams[request.request_id] = stream
            self.core.submit(request)

    def _finish(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self.core.finish(request_id)

    def _abort(self, request_id: str) -> None:
        self._deliver(self.core.abort(request_id))

    def _deliver(self, updates: list[Update]) -> None:
        batches: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Update]]] = defaultdict(list)
        for update in updates:
            request_id = update.sequence.request.request_id
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            batches[stream.loop].append((stream, update))
            if update.finish_reason is not None:
                del self._streams[request_id]
        for loop, batch in batches.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put_all, batch)


def _put_all(batch: list[tuple[_Stream, Update]]) -> None:
    for stream, update in batch:
        stream.put(update)


