"""SubscribeKvEvents: a hub's KV events as the gRPC stream that gateways read.

A subscriber without a cursor gets the history if it is whole, else a snapshot; a cursor that can't be
served ends with OUT_OF_RANGE, one that falls behind with DATA_LOSS: both mean "start from 0". Each batch
carries the load, and so do batches without events while the cache rests. Called by the gRPC servicer.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2 as pb

from jaxinfer.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from serving.kv_events import KvBatch, KvEventHub, ResyncNeeded

TICK = 0.1  # seconds between looks at the load while no events come
HEARTBEAT = 1.0  # seconds after which an unchanged load is sent again
IDLE_HEARTBEAT = 5.0  # the same, once two in a row told nothing new
CHUNK_TOKENS = 1 << 16  # tokens of one snapshot message: well below gRPC's default limit of 4 MiB

# What every batch tells of the load; the rest goes out with the first record and the heartbeats.
CORE = frozenset({
    "running_requests", "waiting_requests", "waiting_uncached_tokens", "token_usage",
    "active_token_usage", "gen_throughput", "max_running_requests", "age_ms",
    "engine_silence_ms", "engine_reports_steps", "prefill_pending_tokens",
})  # fmt: skip

Load = Callable[[], pb.EngineLoad | None]


async def subscribe_kv_events(
    hub: KvEventHub,
    request: pb.SubscribeKvEventsRequest,
    context: grpc.aio.ServicerContext[Any, Any],
    load: Load | None = None,
    dp_rank: int = 0,
) -> AsyncGenerator[pb.KvEventBatch]:
    """Stream batches until the client leaves or the hub is closed.

    load: the engine's load now (None: not known yet), called in the event loop ten times a second and
        for each batch, so it must be cheap. `sample` and `load_only` are set here.
    """
    await context.send_initial_metadata(())
    stream = _Stream(dp_rank, load)
    try:
        start, opening = _opening(hub, request, stream)
        subscription = hub.subscribe(start)
    except ResyncNeeded as error:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, f"{error}; resubscribe from 0")
    async with subscription:
        for chunk in opening:
            yield chunk
        while True:
            try:
                batches = await subscription.take(None if load is None else TICK)
            except ResyncNeeded as error:
                await context.abort(grpc.StatusCode.DATA_LOSS, f"{error}; resubscribe from 0")
            for batch in batches:
                yield stream.batch(batch)
            if not batches and hub.closed:
                return
            heartbeat = None if batches else stream.heartbeat()
            if heartbeat is not None:
                yield heartbeat


def _opening(
    hub: KvEventHub, request: pb.SubscribeKvEventsRequest, stream: _Stream
) -> tuple[int, Iterable[pb.KvEventBatch]]:
    """The batch to go on with, and the messages that come before it."""
    start = request.start_sequence_number
    if start == 0 and hub.range()[0] > 0:
        seq, stored = hub.snapshot()
        return seq + 1, stream.snapshot(seq, stored)
    if start or request.load_records_before_first_batch:
        stream.seq = max(0, start - 1)
    return start, ()


class _Stream:
    """The messages of one subscriber: numbers its events and its load records."""

    def __init__(self, dp_rank: int, load: Load | None) -> None:
        self.load = load
        self.seq: int | None = None  # of the last batch; heartbeats repeat it
        self._dp_rank = dp_rank
        self._event_id = self._sample = self._unchanged = 0
        self._record: pb.EngineLoad | None = None  # the last one sent
        self._sent = time.monotonic()

    def batch(self, batch: KvBatch) -> pb.KvEventBatch:
        out = pb.KvEventBatch(sequence_number=batch.seq, timestamp=batch.ts, dp_rank=self._dp_rank)
        for event in batch.events:
            self._event_id += 1
            out.events.append(self._event(event, self._event_id))
        return self._stamp(out)

    def snapshot(self, seq: int, stored: list[BlockStored]) -> Iterator[pb.KvEventBatch]:
        """Chunks whose numbers end at `seq`, after which the state was taken."""
        blocks = sum(len(event.hashes) for event in stored)
        pages = -(-blocks // (seq + 1))  # there are seq + 1 numbers to give at most
        pages = max(pages, CHUNK_TOKENS // max((e.block_size for e in stored), default=1), 1)
        chunks: list[list[Event]] = [[AllBlocksCleared()]]
        room = pages
        for event in stored:
            for part in _split(event, room, pages):
                if not room:
                    chunks.append([])
                    room = pages
                chunks[-1].append(part)
                room -= len(part.hashes)
        for index, events in enumerate(chunks):
            out = pb.KvEventBatch(
                sequence_number=seq - len(chunks) + 1 + index,
                timestamp=time.time(),
                events=[self._event(event, 0) for event in events],
                dp_rank=self._dp_rank,
                snapshot=pb.KvSnapshotChunk(index=index, count=len(chunks), blocks=blocks),
            )
            yield self._stamp(out)

    def heartbeat(self) -> pb.KvEventBatch | None:
        """The load alone, if it changed or has not been told for long; never before the first batch."""
        record = self.load() if self.load is not None and self.seq is not None else None
        if record is None:
            return None
        changed = self._record is None or _differs(self._record, record)
        wait = HEARTBEAT if self._unchanged < 2 else IDLE_HEARTBEAT
        if not changed and time.monotonic() - self._sent < wait:
            return None
        self._unchanged = 0 if changed else self._unchanged + 1
        out = pb.KvEventBatch(
            sequence_number=self.seq, timestamp=time.time(), dp_rank=self._dp_rank
        )
        self._fill(out.load, record, load_only=True)
        return out

    def _stamp(self, out: pb.KvEventBatch) -> pb.KvEventBatch:
        """Add the load to a batch that goes out."""
        self.seq, self._unchanged = out.sequence_number, 0
        record = None if self.load is None else self.load()
        if record is not None:
            self._fill(out.load, record, load_only=False)
        return out

    def _fill(self, out: pb.EngineLoad, record: pb.EngineLoad, load_only: bool) -> None:
        out.CopyFrom(record)
        if self._sample and not load_only:
            for field, _ in record.ListFields():
                if field.name not in CORE:
                    out.ClearField(field.name)  # pyright: ignore[reportArgumentType]
        self._sample += 1
        out.sample, out.load_only = self._sample, load_only
        self._record, self._sent = out, time.monotonic()

    def _event(self, event: Event, event_id: int) -> pb.KvCacheEvent:
        match event:
            case BlockStored():
                stored = pb.KvBlocksStored(
                    parent_block_hash=event.parent,
                    cache_salt=event.cache_salt,
                    tier=pb.KV_CACHE_TIER_DEVICE,
                    locality=pb.KV_CACHE_LOCALITY_LOCAL,
                    blocks=[
                        pb.KvBlock(block_hash=h, token_ids=tokens, block_size=event.block_size)
                        for h, tokens in zip(event.hashes, event.pages, strict=True)
                    ],
                )
                return pb.KvCacheEvent(event_id=event_id, stored=stored)
            case BlockRemoved():
                removed = pb.KvBlocksRemoved(
                    block_hashes=event.hashes,
                    tier=pb.KV_CACHE_TIER_DEVICE,
                    locality=pb.KV_CACHE_LOCALITY_LOCAL,
                )
                return pb.KvCacheEvent(event_id=event_id, removed=removed)
            case AllBlocksCleared():
                return pb.KvCacheEvent(event_id=event_id, cleared=pb.KvCacheCleared())


def _split(event: BlockStored, first: int, size: int) -> Iterator[BlockStored]:
    """Parts of at most `first` blocks (0: `size`), then `size` blocks each; each the parent of the next."""
    start, end = 0, first or size
    while start < len(event.hashes):
        parent = event.hashes[start - 1] if start else event.parent
        yield BlockStored(event.hashes[start:end], parent, event.pages[start:end], event.namespace)
        start, end = end, end + size


def _differs(old: pb.EngineLoad, new: pb.EngineLoad) -> bool:
    """Whether a router should hear of it before the next heartbeat."""
    counts = (
        "running_requests", "waiting_requests", "waiting_uncached_tokens", "max_running_requests",
    )  # fmt: skip
    if any(getattr(old, name) != getattr(new, name) for name in counts):
        return True
    if abs(old.token_usage - new.token_usage) > 0.005:
        return True
    return abs(old.gen_throughput - new.gen_throughput) > 0.05 * max(old.gen_throughput, 1000.0)
