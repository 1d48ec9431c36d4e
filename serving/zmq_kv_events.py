"""ZmqPublisher: the KV events as vLLM publishes them, over ZeroMQ with msgpack, with replay.

PUB frames: topic, sequence number (8 bytes, big-endian), payload [ts, [events], dp_rank]. Replay: a
client sends ["", first number] to the ROUTER and gets ["", topic, number, payload] for each batch
that is kept, then the number -1 with an empty payload. Runs in a thread of its own; never makes the
engine wait. Started by server.py.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import Any

import msgspec
import zmq

from jaxinfer.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from jaxinfer.errors import ConfigError
from serving.kv_events import ENCODINGS, KvBatch, KvEventHub, KvEventsConfig, check_endpoint

log = logging.getLogger(__name__)

END = b"\xff" * 8  # -1: the replay is over
MEDIUM = "GPU"  # vLLM's name for the memory of the device
MAX_INCOMING = 4096  # bytes; a replay request has 8, a subscription the length of its topic


def encode(batch: KvBatch, encoding: str, dp_rank: int = 0) -> bytes:
    """The payload of a batch; encoding: "map" or "array"."""
    convert = _as_map if encoding == "map" else _as_array
    events = [convert(event) for event in batch.events]
    return msgspec.msgpack.encode([batch.ts, events, dp_rank])


def _as_map(event: Event) -> dict[str, Any]:
    match event:
        case BlockStored():
            out = {
                "type": "BlockStored",
                "block_hashes": event.hashes,
                "parent_block_hash": event.parent,
                "token_ids": event.tokens,
                "block_size": event.block_size,
                "lora_id": None,
                "medium": MEDIUM,
                "lora_name": None,
            }
            return out | ({"cache_salt": event.cache_salt} if event.cache_salt else {})
        case BlockRemoved():
            return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": MEDIUM}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def _as_array(event: Event) -> list[Any]:
    """Fields in the order of vLLM's structs; the salt is an extra key of a prompt's first block."""
    match event:
        case BlockStored():
            out = [event.hashes, event.parent, event.tokens, event.block_size, None, MEDIUM]
            if event.cache_salt and event.parent is None:
                others = [None] * (len(event.hashes) - 1)
                out += [None, [[event.cache_salt], *others]]  # lora_name, extra_keys
            return ["BlockStored", *out]
        case BlockRemoved():
            return ["BlockRemoved", event.hashes, MEDIUM]
        case AllBlocksCleared():
            return ["AllBlocksCleared"]


class ZmqPublisher:
    """Publishes a hub's batches until it is closed.

    Args:
        endpoint, replay_endpoint: "tcp://HOST:PORT" (PORT 0: a free one) or "ipc://PATH"; what was bound
            stands in the attributes of these names. dp_rank: stamped on each batch.
        hwm: batches that wait for a slow subscriber before it loses some.
    Raises ConfigError if an endpoint can't be bound.
    """

    def __init__(
        self,
        hub: KvEventHub,
        endpoint: str = "tcp://127.0.0.1:5557",
        replay_endpoint: str | None = None,
        topic: str = "",
        encoding: str = "map",
        dp_rank: int = 0,
        hwm: int = 100_000,
    ) -> None:
        if encoding not in ENCODINGS:
            raise ConfigError(f"encoding={encoding!r} must be one of {', '.join(ENCODINGS)}")
        self._hub, self._topic = hub, topic.encode()
        self._encoding, self._dp_rank = encoding, dp_rank
        self._context = zmq.Context()
        try:
            self._pub = self._bind(zmq.PUB, "endpoint", endpoint, hwm)
            self._router = None
            if replay_endpoint is not None:  # a whole history may wait for one client, no more
                self._router = self._bind(
                    zmq.ROUTER, "replay_endpoint", replay_endpoint, hub.buffer_steps + 1
                )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = _bound(self._pub)
        self.replay_endpoint = None if self._router is None else _bound(self._router)
        self._seq = hub.range()[0]
        self._closing = False
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="jaxinfer-kv-events", daemon=True)
        self._thread.start()
        hub.add_waker(self._wake)
        self._wake()

    @classmethod
    def from_config(cls, hub: KvEventHub, config: KvEventsConfig) -> ZmqPublisher:
        return cls(
            hub,
            config.endpoint,
            config.replay_endpoint,
            topic=config.topic,
            encoding=config.encoding,
            hwm=config.hwm,
        )

    def _bind(self, kind: int, name: str, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        if check_endpoint(name, endpoint):
            log.warning("%s=%s: any machine can read the cached tokens there", name, endpoint)
        bound = self._context.socket(kind)
        bound.sndhwm = hwm
        bound.setsockopt(zmq.MAXMSGSIZE, MAX_INCOMING)
        bound.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events_config: {name}={endpoint!r} can't be bound ({error}); choose another"
            ) from None
        return bound

    def close(self) -> None:
        """Publish what the hub holds, then stop."""
        if self._closing:
            return
        self._closing = True
        self._hub.remove_waker(self._wake)
        self._wake()
        self._thread.join()
        self._bell.close()
        self._rope.close()

    def _wake(self) -> None:
        """Any thread: have the publisher look for new batches."""
        with contextlib.suppress(OSError):  # it has been rung often enough, or is closed
            self._rope.send(b"\0")

    # --- publisher thread --------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        try:
            closing = False
            while not closing:
                ready = dict(poller.poll())
                closing = self._closing  # read before what is published last
                if self._bell.fileno() in ready:
                    self._bell.recv(4096)
                    self._publish()
                if self._router is not None and self._router in ready:
                    self._replay(self._router)
        except Exception:
            log.exception("the KV event publisher failed; it publishes no more")
        finally:
            self._context.destroy(linger=200)  # ms for what is on its way

    def _publish(self) -> None:
        for batch in self._hub.kept(self._seq):
            if batch.seq > self._seq:
                log.warning(
                    "KV event batches %d to %d were not published", self._seq, batch.seq - 1
                )
            self._pub.send_multipart(self._frames(batch))
            self._seq = batch.seq + 1

    def _frames(self, batch: KvBatch) -> list[bytes]:
        payload = encode(batch, self._encoding, self._dp_rank)
        return [self._topic, batch.seq.to_bytes(8, "big"), payload]

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        """Answer one request; a malformed one gets no answer."""
        client, *request = router.recv_multipart()
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            log.warning("a malformed request for KV events was ignored")
            return
        start = int.from_bytes(request[1], "big")
        for batch in self._hub.kept(start):
            router.send_multipart([client, b"", *self._frames(batch)])
        router.send_multipart([client, b"", self._topic, END, b""])


def _bound(bound: zmq.Socket[bytes]) -> str:
    return bound.getsockopt_string(zmq.LAST_ENDPOINT)
