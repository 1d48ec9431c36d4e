"""KV events on their way out: the hub's history and mirror, ZeroMQ as vLLM's clients read it, the config."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings

from jaxinfer import Engine, load
from jaxinfer.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from jaxinfer.errors import ConfigError
from jaxinfer.loading import LoadedModel
from jaxinfer.types import SamplingParams
from serving import kv_events
from serving.kv_events import KvBatch, KvEventHub, KvEventsConfig, ResyncNeeded, check_endpoint
from serving.zmq_kv_events import ZmqPublisher
from tests.cache.test_tree import make
from tests.cache.traffic import Index, Traffic, operations, stored_in
from tests.engine.conftest import SMALL

LOCAL = "tcp://127.0.0.1:0"
STORED = BlockStored((11, -12), None, ((1, 2, 3, 4), (5, 6, 7, 8)), ("",))
SALTED = BlockStored((13, 14), None, ((1, 2, 3, 4), (5, 6, 7, 8)), ("salt",))
CHILD = BlockStored((15,), 14, ((9, 9, 9, 9),), ("salt",))
REMOVED = BlockRemoved((-12,))
CLEARED = AllBlocksCleared()


def stored(number: int) -> BlockStored:
    return BlockStored((number,), None, ((number,) * 4,))


# --- the hub ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(operations=operations)
def test_a_snapshot_equals_what_the_events_add_up_to(operations: list[tuple]) -> None:
    tree, hub, events = make((0, 4), pages=20), KvEventHub(), list[Event]()
    tree.set_listener(events.append)
    traffic = Traffic(tree)
    for operation in operations:
        traffic.do(operation)
        if events:
            hub.put(events)
            events.clear()
    seq, snapshot = hub.snapshot()
    index = Index()
    for event in snapshot:  # asserts that parents come before children
        index.apply(event)
    assert index.stored() == stored_in(tree)
    assert seq == hub.range()[1] - 1
    replayed = Index()
    for batch in hub.since(0):
        for event in batch.events:
            replayed.apply(event)
    assert replayed.blocks == index.blocks


def test_history_is_numbered_from_0_and_bounded() -> None:
    hub = KvEventHub(buffer_steps=3)
    assert hub.since(0) == [] and hub.snapshot() == (-1, [])
    before = time.time()
    for number in range(1, 6):
        hub.put([stored(number)])
    assert hub.range() == (2, 5)
    assert [b.seq for b in hub.since(3)] == [3, 4] and hub.since(5) == []
    assert all(before <= b.ts <= time.time() for b in hub.since(2))
    assert [b.seq for b in hub.kept(0)] == [2, 3, 4] and hub.kept(9) == []
    for lost in (1, 6):
        with pytest.raises(ResyncNeeded, match=f"batch {lost} is not kept: .* 2 to 4"):
            hub.since(lost)
    assert len(hub.snapshot()[1]) == 5  # what the history forgot is stored all the same


def test_history_is_bounded_in_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "HISTORY_TOKENS", 20)
    hub = KvEventHub()
    for events in ([stored(1)], [REMOVED], [SALTED, CHILD], [stored(2)], [stored(3)]):
        hub.put(events)
    assert hub.range() == (1, 5)  # of 0 + 12 + 4 + 4 tokens
    hub.put([BlockStored((7,), None, ((1,) * 50,))])
    assert hub.range() == (5, 6)  # the last one always


async def test_a_subscription_replays_and_follows_and_ends() -> None:
    hub = KvEventHub()
    hub.put([CLEARED])
    seen: list[KvBatch] = []

    async def read() -> None:
        async with hub.subscribe(0) as subscription:
            async for batch in subscription:
                seen.append(batch)

    reader = asyncio.create_task(read())
    thread = threading.Thread(target=lambda: [hub.put([stored(n)]) for n in range(1, 200)])
    thread.start()
    await asyncio.to_thread(thread.join)
    hub.close()
    await asyncio.wait_for(reader, 10)
    assert [b.seq for b in seen] == list(range(200))
    assert seen[-1].events == (stored(199),)


async def test_a_slow_subscriber_is_told_to_start_over_and_holds_nobody_up() -> None:
    hub = KvEventHub(buffer_steps=4)
    async with hub.subscribe(0) as slow, hub.subscribe(0) as quick:
        for number in range(1, 10):
            hub.put([stored(number)])
            assert [b.seq for b in await quick.take(1)] == [number - 1]
        with pytest.raises(ResyncNeeded):
            await slow.take()
        assert await quick.take(0.01) == []


def test_a_subscriber_whose_event_loop_is_gone_is_forgotten() -> None:
    hub = KvEventHub()

    async def leave() -> Any:
        return hub.subscribe(0)

    subscription = asyncio.run(leave())
    for number in (1, 2):
        hub.put([stored(number)])
    assert hub._wakers == [] and subscription is not None


# --- ZeroMQ -------------------------------------------------------------------------------------


class Stored(msgspec.Struct, tag="BlockStored"):  # as vLLM's clients declare them
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None
    cache_salt: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class StoredArray(msgspec.Struct, tag="BlockStored", array_like=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None


class RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[int]
    medium: str | None


class ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[StoredArray | RemovedArray | ClearedArray]
    data_parallel_rank: int | None = None


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def connect(context: zmq.Context, kind: int, endpoint: str | None) -> zmq.Socket[bytes]:
    assert endpoint is not None
    made = context.socket(kind)
    made.rcvtimeo = 10_000
    if kind == zmq.SUB:
        made.subscribe(b"")
    made.connect(endpoint)
    return made


def replay(dealer: zmq.Socket[bytes], start: int) -> list[list[bytes]]:
    dealer.send_multipart([b"", start.to_bytes(8, "big")])
    answers: list[list[bytes]] = []
    while True:
        empty, topic, seq, payload = dealer.recv_multipart()
        assert empty == b"" and topic == b"kv"
        if seq == b"\xff" * 8:
            assert payload == b""
            return answers
        answers.append([topic, seq, payload])


@pytest.mark.parametrize(("encoding", "kind"), [("map", MapBatch), ("array", ArrayBatch)])
def test_a_vllm_client_reads_live_and_replayed_batches(
    context: zmq.Context, encoding: str, kind: type[MapBatch | ArrayBatch]
) -> None:
    hub = KvEventHub()
    hub.put([CLEARED])
    publisher = ZmqPublisher(hub, LOCAL, LOCAL, topic="kv", encoding=encoding, dp_rank=3)
    sub = connect(context, zmq.SUB, publisher.endpoint)
    dealer = connect(context, zmq.DEALER, publisher.replay_endpoint)
    live = [sub_until(hub, sub)]  # joined; what came before is to be replayed
    hub.put([STORED, SALTED, CHILD])
    hub.put([REMOVED])
    live += [sub.recv_multipart(), sub.recv_multipart()]
    answers = replay(dealer, 0)
    publisher.close()
    assert answers[-3:] == live and answers[0][1] == bytes(8)
    assert [f[0] for f in live] == [b"kv"] * 3
    numbers = [int.from_bytes(f[1], "big") for f in live]
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    batches = [msgspec.msgpack.decode(f[2], type=kind) for f in live]
    assert all(b.data_parallel_rank == 3 and abs(b.ts - time.time()) < 60 for b in batches)
    (first, salted, child), (gone,) = batches[1].events, batches[2].events
    assert isinstance(first, Stored | StoredArray) and isinstance(gone, Removed | RemovedArray)
    assert isinstance(salted, Stored | StoredArray) and isinstance(child, Stored | StoredArray)
    assert (first.block_hashes, first.parent_block_hash) == ([11, -12], None)
    assert (first.token_ids, first.block_size) == ([1, 2, 3, 4, 5, 6, 7, 8], 4)
    assert (first.medium, first.lora_id, first.extra_keys) == ("GPU", None, None)
    assert (child.parent_block_hash, gone.block_hashes) == (14, [-12])
    if isinstance(salted, Stored) and isinstance(child, Stored) and isinstance(first, Stored):
        assert [e.cache_salt for e in (first, salted, child)] == [None, "salt", "salt"]
    else:
        assert salted.extra_keys == [("salt",), None] and child.extra_keys is None


def sub_until(hub: KvEventHub, sub: zmq.Socket[bytes]) -> list[bytes]:
    """Put batches until the subscriber has joined; the last of what it got."""
    while not sub.poll(50):
        hub.put([CLEARED])
    frames = sub.recv_multipart()
    while sub.poll(100):
        frames = sub.recv_multipart()
    return frames


def test_a_replay_starts_where_it_is_asked_to(context: zmq.Context) -> None:
    hub = KvEventHub(buffer_steps=2000)
    for number in range(1, 2501):
        hub.put([stored(number)])
    publisher = ZmqPublisher(hub, LOCAL, LOCAL, topic="kv")
    dealer = connect(context, zmq.DEALER, publisher.replay_endpoint)
    for malformed in ([b"x"], [b"", b"12"], [b"no", bytes(8)], [b"", bytes(8), b"more"]):
        dealer.send_multipart(malformed)  # gets no answer
    for start, first in ((0, 500), (600, 600), (2499, 2499), (2500, 2500), (2**63, 2500)):
        answers = replay(dealer, start)
        assert [int.from_bytes(a[1], "big") for a in answers] == list(range(first, 2500))
    event = msgspec.msgpack.decode(replay(dealer, 2499)[0][2], type=MapBatch).events[0]
    assert isinstance(event, Stored) and event.block_hashes == [2500]
    publisher.close()
    publisher.close()
    hub.put([CLEARED])  # nobody is rung any more


def test_an_endpoint_in_use_is_refused_by_name() -> None:
    hub = KvEventHub()
    publisher = ZmqPublisher(hub, LOCAL)
    assert publisher.endpoint.startswith("tcp://127.0.0.1:") and publisher.replay_endpoint is None
    with pytest.raises(ConfigError, match=f"replay_endpoint='{publisher.endpoint}' can't be bound"):
        ZmqPublisher(hub, LOCAL, publisher.endpoint)
    publisher.close()


# --- the config ---------------------------------------------------------------------------------


def test_the_config_takes_vllms_names_and_stays_on_this_machine() -> None:
    given = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "t", "buffer_steps": 7}
    config = KvEventsConfig.from_dict(given)
    assert (config.topic, config.buffer_steps, config.encoding) == ("t", 7, "map")
    assert config.endpoint == "tcp://127.0.0.1:5557" and config.replay_endpoint is None
    assert not KvEventsConfig.from_dict({}).enable_kv_cache_events


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"enpoint": "tcp://127.0.0.1:1"}, "no key 'enpoint'; did you mean 'endpoint'"),
        ({"max_queue_size": 1}, "no key 'max_queue_size'"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events='yes' must be true or false"),
        ({"publisher": "nats"}, "publisher='nats' must be 'null' or 'zmq'"),
        ({"encoding": "json"}, "encoding='json' must be 'map' or 'array'"),
        ({"buffer_steps": 0}, "buffer_steps=0 must be"),
        ({"hwm": True}, "hwm=True must be"),
        ({"topic": 3}, "topic=3 must be a string"),
        ({"endpoint": "127.0.0.1:5557"}, "endpoint='127.0.0.1:5557' must be 'tcp"),
        ({"endpoint": "tcp://127.0.0.1:70000"}, "endpoint='tcp://127.0.0.1:70000'"),
        ({"replay_endpoint": 5558}, "replay_endpoint=5558 must be"),
        ([1], "must be a JSON object"),
    ],
)
def test_the_config_refuses_by_name(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KvEventsConfig.from_dict(source)


def test_an_open_endpoint_is_told_from_a_local_one() -> None:
    for endpoint in ("tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:1", "ipc://kv.sock"):
        assert not check_endpoint("endpoint", endpoint)
    for endpoint in ("tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://eth0:5557", "tcp://[::]:*"):
        assert check_endpoint("endpoint", endpoint)


# --- a real engine ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny: Any) -> LoadedModel:
    return load(str(tiny))


@pytest.fixture
def engine(model: LoadedModel) -> Iterator[Engine]:
    made = Engine(model, **SMALL)
    yield made
    made.close()


async def ask(engine: Engine, prompt: list[int], **options: Any) -> tuple[list[int], int]:
    """All tokens whose keys and values were computed, and how many of them were cached."""
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    outs = [o async for o in engine.generate({"prompt_token_ids": prompt}, params, **options)]
    out = outs[-1]
    return [*prompt, *out.outputs[0].token_ids[:-1]], out.num_cached_tokens


async def test_a_real_engine_tells_what_it_can_reuse(engine: Engine) -> None:
    hub, size = KvEventHub(), engine.core.config.page_size
    engine.set_kv_listener(hub.put)
    shared = [7 + i for i in range(3 * size)]
    known: set[tuple] = set()
    for salt, tail in ((None, [5, 6]), (None, [9] * size), ("tenant", [5, 6])):
        tokens, cached = await ask(engine, shared + tail, cache_salt=salt)
        hits = [len(p) for s, p in known if (s, p) == (salt or "", tuple(tokens[: len(p)]))]
        assert cached == max(hits, default=0)
        full = range(size, len(tokens) + 1, size)
        known |= {(salt or "", tuple(tokens[:end])) for end in full}
    await engine.clear_prefix_cache()  # behind all rounds, so every event has come
    *rounds, last = hub.since(0)
    assert last.events == (CLEARED,) and hub.snapshot()[1] == []
    index = Index()
    for batch in rounds:
        for event in batch.events:
            index.apply(event)
    assert {(space[0], tokens) for space, tokens in index.stored()} == known
    assert len(rounds) <= 1 + engine.stats()["steps"]


async def test_evictions_and_a_failed_round_are_told(engine: Engine) -> None:
    hub, index = KvEventHub(), Index()
    engine.set_kv_listener(hub.put)
    for number in range(12):  # 12 x 6 pages do not fit into 48
        await ask(engine, [number] * 80)
    engine.core.scheduler.plan = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    async for out in engine.generate({"prompt_token_ids": [3]}, SamplingParams(max_tokens=2)):
        assert out.outputs[0].finish_reason == "error"
    await ask(engine, [2] * 40)
    events = [event for batch in hub.since(0) for event in batch.events]
    assert any(isinstance(event, BlockRemoved) for event in events)
    assert events.count(CLEARED) == 2  # at the start, and after the failure
    for event in events:
        index.apply(event)
    assert index.stored() == stored_in(engine.core.scheduler._pages.tree)
