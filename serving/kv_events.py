"""KvEventHub: the engine's KV events numbered, kept for replay, mirrored, and handed to subscribers.

The engine thread calls `put` and never waits: readers have a cursor into one ring of batches, and a
reader that falls out of it has to start over. The mirror (what is stored now) answers late
subscribers without the engine. Read by grpc_kv_events.py and zmq_kv_events.py; built by server.py.
"""

from __future__ import annotations

import asyncio
import difflib
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, NamedTuple

from jaxinfer.cache.events import BlockRemoved, BlockStored, Event, Namespace
from jaxinfer.errors import ConfigError

ENCODINGS = ("map", "array")
PUBLISHERS = ("null", "zmq")
HISTORY_TOKENS = 1 << 22  # tokens of the batches that are kept: some 150 MB
ENDPOINT = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[\w.*-]+):(?P<port>\d{1,5}|\*)|ipc://.+")
LOOPBACK = re.compile(r"127(\.\d{1,3}){3}|localhost|\[::1\]")


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """What --kv-events-config says; the names are vLLM's, but `encoding`.

    Attributes:
        enable_kv_cache_events: whether the engine tells them at all (gRPC SubscribeKvEvents, ZMQ).
        publisher: "zmq", or "null" for gRPC alone.
        endpoint: address of the PUB socket; only this machine can connect unless it names another.
        replay_endpoint: address of the ROUTER socket that repeats batches; None: no replay.
        buffer_steps: batches that are kept for replay and for subscribers that are behind (fewer if
            they have more than HISTORY_TOKENS tokens).
        hwm: batches that wait for a slow ZMQ subscriber before it loses some.
        topic: first frame of each message ("" for Dynamo; "kv@<ip>:<port>@<model>" for llm-d).
        encoding: "map" (events as maps with `type`) or "array" (tag first, as vLLM once did).
    """

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""
    encoding: str = "map"

    def __post_init__(self) -> None:
        if not isinstance(self.enable_kv_cache_events, bool):
            raise _bad("enable_kv_cache_events", self.enable_kv_cache_events, "true or false")
        for name, allowed in (("publisher", PUBLISHERS), ("encoding", ENCODINGS)):
            if getattr(self, name) not in allowed:
                raise _bad(name, getattr(self, name), " or ".join(map(repr, allowed)))
        for name in ("buffer_steps", "hwm"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**30:
                raise _bad(name, value, "an integer in [1, 2**30]")
        if not isinstance(self.topic, str):
            raise _bad("topic", self.topic, "a string")
        check_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            check_endpoint("replay_endpoint", self.replay_endpoint)

    @classmethod
    def from_dict(cls, source: Mapping[str, Any]) -> KvEventsConfig:
        """From the JSON object. Raises ConfigError that names the key."""
        if not isinstance(source, Mapping):
            raise ConfigError(f"kv_events_config={source!r:.60} must be a JSON object")
        names = [f.name for f in fields(cls)]
        for key in source:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
                raise ConfigError(f"kv_events_config has no key {key!r:.60}; {hint}")
        return cls(**source)


def _bad(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"kv_events_config: {name}={value!r:.80} must be {wanted}")


def check_endpoint(name: str, endpoint: object) -> bool:
    """Whether other machines could connect. Raises ConfigError unless ZeroMQ can bind it."""
    match = ENDPOINT.fullmatch(endpoint) if isinstance(endpoint, str) else None
    if match is None or int((match["port"] or "0").replace("*", "0")) > 65535:
        raise _bad(name, endpoint, "'tcp://HOST:PORT' or 'ipc://PATH'")
    host = match["host"]
    return host is not None and not LOOPBACK.fullmatch(host)


class KvBatch(NamedTuple):
    """The events of one engine round. seq counts from 0; ts: time.time()."""

    seq: int
    ts: float
    events: tuple[Event, ...]


class ResyncNeeded(Exception):
    """The history does not hold what comes next for this reader; it must start from a snapshot."""


class _Block(NamedTuple):
    parent: int | None
    tokens: tuple[int, ...]
    namespace: Namespace


class KvEventHub:
    """Numbered batches and what is stored now. Every method may be called from any thread."""

    def __init__(self, buffer_steps: int = 10_000) -> None:
        self.buffer_steps = buffer_steps
        self.closed = False
        self._lock = threading.Lock()
        self._ring: deque[KvBatch] = deque()
        self._tokens = 0  # of all batches in the ring
        self._next = 0
        self._blocks: dict[int, _Block] = {}  # parents stand before their children
        self._wakers: list[Callable[[], None]] = []

    def put(self, events: Sequence[Event]) -> None:
        """Take in what one engine round told. Never waits for a subscriber."""
        with self._lock:
            batch = KvBatch(self._next, time.time(), tuple(events))
            self._ring.append(batch)
            self._tokens += _tokens(batch)
            self._next += 1
            while len(self._ring) > 1 and (
                len(self._ring) > self.buffer_steps or self._tokens > HISTORY_TOKENS
            ):
                self._tokens -= _tokens(self._ring.popleft())
            for event in events:
                self._apply(event)
            wakers = list(self._wakers)
        for wake in wakers:
            wake()

    def _apply(self, event: Event) -> None:
        if isinstance(event, BlockStored):
            parent = event.parent
            for block, tokens in zip(event.hashes, event.pages, strict=True):
                self._blocks[block] = _Block(parent, tokens, event.namespace)
                parent = block
        elif isinstance(event, BlockRemoved):
            for block in event.hashes:
                self._blocks.pop(block, None)
        else:
            self._blocks.clear()

    def range(self) -> tuple[int, int]:
        """Sequence numbers of the oldest batch that is kept and of the next one to come."""
        with self._lock:
            return self._next - len(self._ring), self._next

    def since(self, seq: int) -> list[KvBatch]:
        """All batches from `seq` on. Raises ResyncNeeded if some are gone or `seq` is to come later."""
        with self._lock:
            count = self._next - seq
            if not 0 <= count <= len(self._ring):
                first = self._next - len(self._ring)
                raise ResyncNeeded(
                    f"batch {seq} is not kept: the history holds {first} to {self._next - 1}"
                )
            return self._newest(count)

    def kept(self, seq: int) -> list[KvBatch]:
        """What is kept of the batches from `seq` on."""
        with self._lock:
            return self._newest(max(0, self._next - seq))

    def _newest(self, count: int) -> list[KvBatch]:
        return list(islice(reversed(self._ring), count))[::-1]

    def snapshot(self) -> tuple[int, list[BlockStored]]:
        """What is stored after which batch (-1: before any); parents come before their children."""
        with self._lock:
            seq, blocks = self._next - 1, list(self._blocks.items())
        return seq, _chains(blocks)

    def add_waker(self, wake: Callable[[], None]) -> None:
        """Call `wake` after each batch, on the thread that brings it; it must not wait."""
        with self._lock:
            self._wakers.append(wake)

    def remove_waker(self, wake: Callable[[], None]) -> None:
        with self._lock:
            if wake in self._wakers:
                self._wakers.remove(wake)

    def subscribe(self, start: int) -> Subscription:
        """Batches from `start` on, for a coroutine. Raises ResyncNeeded as `since` does."""
        self.since(start)
        return Subscription(self, start)

    def close(self) -> None:
        """No more batches come: subscriptions end when they have read what there is."""
        with self._lock:
            self.closed = True
            wakers = list(self._wakers)
        for wake in wakers:
            wake()


def _tokens(batch: KvBatch) -> int:
    return sum(len(e.hashes) * e.block_size for e in batch.events if isinstance(e, BlockStored))


def _chains(blocks: list[tuple[int, _Block]]) -> list[BlockStored]:
    """One BlockStored for each run of blocks that follow one another."""
    runs: list[list[tuple[int, _Block]]] = []
    for block in blocks:
        last = runs[-1][-1] if runs else None
        if last is not None and block[1].parent == last[0]:
            runs[-1].append(block)
        else:
            runs.append([block])
    return [
        BlockStored(
            tuple(name for name, _ in run),
            run[0][1].parent,
            tuple(block.tokens for _, block in run),
            run[0][1].namespace,
        )
        for run in runs
    ]


class Subscription:
    """One coroutine's cursor into a hub. Close it, or iterate it to its end in `async with`."""

    def __init__(self, hub: KvEventHub, start: int) -> None:
        self._hub = hub
        self._seq = start
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._told = False  # a call that sets `_news` is on its way
        hub.add_waker(self._wake)

    def _wake(self) -> None:
        if not self._told:
            self._told = True
            try:
                self._loop.call_soon_threadsafe(self._news.set)
            except RuntimeError:  # its event loop is closed: nobody reads any more
                self._hub.remove_waker(self._wake)

    async def take(self, timeout: float | None = None) -> list[KvBatch]:
        """What has come since the last call; [] if nothing does within `timeout` seconds, or ever.

        Raises ResyncNeeded when the reader is more than the hub's buffer_steps behind.
        """
        self._news.clear()
        self._told = False
        batches = self._hub.since(self._seq)
        if not batches and not self._hub.closed:
            try:
                await asyncio.wait_for(self._news.wait(), timeout)
            except TimeoutError:
                return []
            batches = self._hub.since(self._seq)
        self._seq += len(batches)
        return batches

    async def __aiter__(self) -> AsyncIterator[KvBatch]:
        while True:
            batches = await self.take()
            for batch in batches:
                yield batch
            if not batches and self._hub.closed:
                return

    def close(self) -> None:
        self._hub.remove_waker(self._wake)

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
