"""SubscribeKvEvents over a real channel: history, snapshot, cursors, load records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as rpc

from jaxinfer.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from serving import grpc_kv_events
from serving.grpc_kv_events import subscribe_kv_events
from serving.kv_events import KvEventHub
from tests.cache.traffic import Index

CLEARED = AllBlocksCleared()


def chain(first: int, count: int, parent: int | None = None, salt: str = "") -> BlockStored:
    hashes = tuple(range(first, first + count))
    return BlockStored(hashes, parent, tuple((abs(h), 1, 2, 2**31) for h in hashes), (salt,))


class Servicer(rpc.VllmEngineServicer):
    def __init__(self, hub: KvEventHub, load: Callable[[], pb.EngineLoad | None] | None) -> None:
        self.hub, self.load = hub, load
        self.open = 0

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[pb.KvEventBatch]:
        self.open += 1
        try:
            async for batch in subscribe_kv_events(self.hub, request, context, self.load):
                yield batch
        finally:
            self.open -= 1


@asynccontextmanager
async def served(
    hub: KvEventHub, load: Callable[[], pb.EngineLoad | None] | None = None
) -> AsyncIterator[tuple[Any, Servicer]]:
    server, servicer = grpc.aio.server(), Servicer(hub, load)
    rpc.add_VllmEngineServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield rpc.VllmEngineStub(channel), servicer
    finally:
        await server.stop(0)


async def read(call: Any, count: int) -> list[pb.KvEventBatch]:
    return [await asyncio.wait_for(call.read(), 10) for _ in range(count)]


def subscribe(stub: Any, start: int = 0, **options: bool) -> Any:
    return stub.SubscribeKvEvents(
        pb.SubscribeKvEventsRequest(start_sequence_number=start, **options)
    )


def decoded(event: pb.KvCacheEvent) -> Event:
    match event.WhichOneof("data"):
        case "stored":
            stored = event.stored
            assert {b.block_size for b in stored.blocks} == {4}
            assert stored.tier == pb.KV_CACHE_TIER_DEVICE
            return BlockStored(
                tuple(b.block_hash for b in stored.blocks),
                stored.parent_block_hash if stored.HasField("parent_block_hash") else None,
                tuple(tuple(b.token_ids) for b in stored.blocks),
                (stored.cache_salt,),
            )
        case "removed":
            return BlockRemoved(tuple(event.removed.block_hashes))
        case "cleared":
            return CLEARED
        case other:
            raise AssertionError(other)


async def test_metadata_comes_at_once_then_history_then_what_happens() -> None:
    hub = KvEventHub()
    async with served(hub) as (stub, servicer):
        call = subscribe(stub)
        await asyncio.wait_for(call.initial_metadata(), 5)
        rounds = [[CLEARED], [chain(1, 3), chain(-9, 2, 3, "salt")], [BlockRemoved((-8, -9))]]
        for events in rounds:
            hub.put(events)
        batches = await read(call, 3)
        assert [b.sequence_number for b in batches] == [0, 1, 2]
        assert [[decoded(e) for e in b.events] for b in batches] == rounds
        assert [e.event_id for b in batches for e in b.events] == [1, 2, 3, 4]
        assert all(b.HasField("dp_rank") and not b.HasField("load") for b in batches)
        late = subscribe(stub, 2)
        assert (await read(late, 1))[0].sequence_number == 2
        late.cancel()
        hub.close()
        assert await asyncio.wait_for(call.code(), 5) is grpc.StatusCode.OK
        while servicer.open:
            await asyncio.sleep(0.01)
        assert hub._wakers == []


async def test_a_late_subscriber_gets_a_snapshot_and_goes_on_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_kv_events, "CHUNK_TOKENS", 12)  # three blocks
    hub = KvEventHub(buffer_steps=3)
    hub.put([CLEARED])
    hub.put([chain(1, 5)])
    hub.put([chain(20, 2, 5, "salt"), chain(40, 4)])
    for number in range(4):
        hub.put([BlockRemoved((43 - number,))])
    async with served(hub) as (stub, _):
        call = subscribe(stub)
        chunks = await read(call, 3)
        hub.put([chain(60, 1)])
        (live,) = await read(call, 1)
    assert [b.sequence_number for b in [*chunks, live]] == [4, 5, 6, 7]
    assert [(b.snapshot.index, b.snapshot.count, b.snapshot.blocks) for b in chunks] == [
        (0, 3, 7), (1, 3, 7), (2, 3, 7),
    ]  # fmt: skip
    assert not live.HasField("snapshot") and chunks[0].events[0].HasField("cleared")
    assert {e.event_id for b in chunks for e in b.events} == {0}
    index = Index()
    for event in (decoded(e) for b in chunks for e in b.events):
        index.apply(event)
    assert list(index.blocks) == [1, 2, 3, 4, 5, 20, 21]


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), max_size=8),
    seq=st.integers(0, 9),
    tokens=st.integers(1, 40),
)
def test_snapshots_fit_below_their_number(lengths: list[int], seq: int, tokens: int) -> None:
    stored = [chain(100 * i + 1, n) for i, n in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpc_kv_events, "CHUNK_TOKENS", tokens)
        chunks = list(grpc_kv_events._Stream(0, None).snapshot(seq, stored))
    assert chunks[-1].sequence_number == seq and len(chunks) <= seq + 1
    index = Index()
    for event in (decoded(e) for b in chunks for e in b.events):
        index.apply(event)
    expected = Index()
    for event in stored:
        expected.apply(event)
    assert index.blocks == expected.blocks


async def test_a_cursor_that_cannot_be_served_is_out_of_range() -> None:
    hub = KvEventHub(buffer_steps=2)
    for number in range(1, 6):
        hub.put([chain(number, 1)])
    async with served(hub) as (stub, _):
        for start in (2, 6):
            call = subscribe(stub, start)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call.read()
            assert failed.value.code() is grpc.StatusCode.OUT_OF_RANGE
            assert "resubscribe from 0" in str(failed.value.details())
        call = subscribe(stub, 5)  # the next one to come
        await call.initial_metadata()
        hub.put([CLEARED])
        assert (await read(call, 1))[0].sequence_number == 5


async def test_a_subscriber_that_falls_behind_ends_with_data_loss() -> None:
    hub = KvEventHub(buffer_steps=2)
    hub.put([CLEARED])
    async with served(hub) as (stub, servicer):
        call = subscribe(stub)
        await read(call, 1)
        for number in range(1, 9):  # in one go: the event loop cannot read between
            hub.put([chain(number, 1)])
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
        assert failed.value.code() is grpc.StatusCode.DATA_LOSS
        while servicer.open:
            await asyncio.sleep(0.01)
        assert hub._wakers == []


async def test_every_batch_tells_the_load_and_so_does_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_kv_events, "TICK", 0.01)
    monkeypatch.setattr(grpc_kv_events, "HEARTBEAT", 0.05)
    hub = KvEventHub()
    hub.put([CLEARED])
    load = pb.EngineLoad(waiting_uncached_tokens=0, token_usage=0.25, cache_hit_rate=0.5)
    async with served(hub, lambda: load) as (stub, _):
        call = subscribe(stub)
        first, quiet = await read(call, 2)
        load.running_requests = 3
        changed = (await read(call, 1))[0]
        while not changed.load.running_requests:
            changed = (await read(call, 1))[0]
        hub.put([chain(1, 1)])
        last, batch = changed, (await read(call, 1))[0]
        while batch.load.load_only:
            last, batch = batch, (await read(call, 1))[0]
    assert first.load.cache_hit_rate == 0.5 and not first.load.load_only
    assert quiet.load.load_only and not quiet.events and quiet.sequence_number == 0
    assert changed.load.load_only and changed.sequence_number == 0
    assert batch.sequence_number == 1 and batch.load.running_requests == 3
    assert batch.load.HasField("waiting_uncached_tokens") and batch.load.token_usage == 0.25
    assert not batch.load.HasField("cache_hit_rate")  # telemetry rides the heartbeats
    assert (first.load.sample, quiet.load.sample) == (1, 2)
    assert batch.load.sample == last.load.sample + 1


async def test_the_load_is_told_before_the_first_batch_only_if_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_kv_events, "TICK", 0.01)
    hub = KvEventHub()
    async with served(hub, pb.EngineLoad) as (stub, _):
        asked = subscribe(stub, load_records_before_first_batch=True)
        plain = subscribe(stub)
        await plain.initial_metadata()
        (early,) = await read(asked, 1)
        assert early.load.load_only and early.sequence_number == 0 and not early.events
        await asyncio.sleep(0.1)
        hub.put([CLEARED])
        (first,) = await read(plain, 1)
        assert first.events and not first.load.load_only and first.load.sample == 1
