"""The lightest clients there can be: raw sockets whose bytes are only timed, and read when all is over.

So a measurement holds the server's work and the kernel's, not a client library's. HTTP: a connection a stream.
gRPC: one HTTP/2 connection with all streams, as a gateway has. Called by serve_latency.py.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import time
from typing import Any

Arrivals = dict[str, list[tuple[int, float]]]  # stream -> (tokens so far, time.monotonic)
Tokens = dict[str, list[int]]
WINDOW = 1 << 30
DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4


class Timed:
    """Bytes of one socket with the time of each read."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.data = bytearray()
        self.marks: list[tuple[int, float]] = []  # (bytes so far, time)
        self._mark = 0

    def read(self) -> bool:
        """Take what is there; False at the end."""
        piece = self.sock.recv(1 << 16)
        now = time.monotonic()
        self.data += piece
        self.marks.append((len(self.data), now))
        return bool(piece)

    def when(self, position: int) -> float:
        """When the byte before `position` came; positions must not go back."""
        while self.marks[self._mark][0] < position:
            self._mark += 1
        return self.marks[self._mark][1]


def over_http(port: int, bodies: dict[str, dict[str, Any]]) -> tuple[Arrivals, Tokens]:
    """Stream /v1/completions for each body; they must ask for return_token_ids."""
    connections: dict[str, Timed] = {}
    with selectors.DefaultSelector() as ready:
        for name, body in bodies.items():
            sock = socket.create_connection(("127.0.0.1", port))
            connections[name] = Timed(sock)
            ready.register(sock, selectors.EVENT_READ, connections[name])
            raw = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
            sock.sendall(
                head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + raw
            )
        while ready.get_map():
            for key, _ in ready.select():
                if not key.data.read():
                    ready.unregister(key.fileobj)
                    key.data.sock.close()
    return _collect({name: _events(timed) for name, timed in connections.items()})


def _events(timed: Timed) -> list[tuple[list[int], float]]:
    """(new token ids, time) of each event of a stream."""
    found, start = [], 0
    while (end := timed.data.find(b"\n\n", start)) >= 0:
        event = bytes(timed.data[start:end])
        at = event.find(b"data: {")
        if at >= 0:
            for choice in json.loads(event[at + 6 :])["choices"]:
                found.append((choice.get("token_ids") or [], timed.when(end + 2)))
        start = end + 2
    return found


def over_grpc(
    port: int, path: str, messages: dict[str, bytes], reply: Any
) -> tuple[Arrivals, Tokens]:
    """Call a server-streaming RPC once for each message. `reply`: the message class of the answers."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    timed, streams = Timed(sock), {2 * i + 1: name for i, name in enumerate(messages)}
    out = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(
        SETTINGS, 0, 0, struct.pack(">HI", 4, WINDOW)
    )
    out += _frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW))
    for stream, name in streams.items():
        body = b"\0" + struct.pack(">I", len(messages[name])) + messages[name]
        out += _frame(HEADERS, END_HEADERS, stream, _headers(path))
        out += _frame(DATA, END_STREAM, stream, body)
    sock.sendall(out)
    position, open_streams = 0, set(streams)
    payloads: dict[int, bytearray] = {stream: bytearray() for stream in streams}
    ends: dict[int, list[tuple[int, int]]] = {stream: [] for stream in streams}
    while open_streams and timed.read():
        while (frame := _parse(timed.data, position)) is not None:
            kind, flags, stream, payload, position = frame
            if kind in (SETTINGS, PING) and not flags & ACK:
                sock.sendall(_frame(kind, ACK, 0, payload if kind == PING else b""))
            elif kind == DATA:
                payloads[stream] += payload
                ends[stream].append((len(payloads[stream]), position))
            if kind in (RST, GOAWAY):
                raise SystemExit("the gRPC server cut a stream off")
            if kind in (DATA, HEADERS) and flags & END_STREAM:
                open_streams.discard(stream)
    sock.close()
    order = sorted((position, stream, size) for stream in ends for size, position in ends[stream])
    times = {(stream, size): timed.when(position) for position, stream, size in order}
    found = {
        streams[s]: _messages(payloads[s], [(n, times[s, n]) for n, _ in ends[s]], reply)
        for s in streams
    }
    return _collect(found)


def _messages(
    payload: bytearray, marks: list[tuple[int, float]], reply: Any
) -> list[tuple[list[int], float]]:
    found, start, mark = [], 0, 0
    while start < len(payload):
        end = start + 5 + struct.unpack_from(">I", payload, start + 1)[0]
        while marks[mark][0] < end:
            mark += 1
        answer = reply.FromString(bytes(payload[start + 5 : end]))
        if answer.HasField("chunk"):
            found.append((list(answer.chunk.token_ids), marks[mark][1]))
        start = end
    return found


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _parse(data: bytearray, at: int) -> tuple[int, int, int, bytes, int] | None:
    """(kind, flags, stream, payload, position behind it) of the frame at `at`, if it is all there."""
    if len(data) < at + 9:
        return None
    size = int.from_bytes(data[at : at + 3], "big")
    kind, flags, stream = struct.unpack_from(">BBI", data, at + 3)
    end = at + 9 + size
    return None if len(data) < end else (kind, flags, stream, bytes(data[at + 9 : end]), end)


def _headers(path: str) -> bytes:
    """HPACK, all fields literal and never indexed (RFC 7541, 6.2.2)."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost",
              "te": "trailers", "content-type": "application/grpc"}  # fmt: skip
    return b"".join(
        b"\0" + bytes([len(k)]) + k.encode() + bytes([len(v)]) + v.encode()
        for k, v in fields.items()
    )


def _collect(found: dict[str, list[tuple[list[int], float]]]) -> tuple[Arrivals, Tokens]:
    arrivals: Arrivals = {}
    tokens: Tokens = {}
    for name, items in found.items():
        got, seen = tokens.setdefault(name, []), arrivals.setdefault(name, [])
        for ids, when in items:
            got += ids
            seen.append((len(got), when))
    return arrivals, tokens
