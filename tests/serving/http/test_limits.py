"""Bounds on what a client may send: size, depth, count, type, heads; and that large texts delay nobody.

R-SRV-01 and R-SRV-03; chunked bodies as well as measured ones.
"""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine import Engine
from jaxinfer.errors import InvalidRequest
from serving.config import Limits, ServerConfig
from serving.http import body as bodies
from serving.http import protocol
from serving.http.body import check_shape, parse_json
from tests.serving.http.wire import events, refusal
from tests.serving.live import LiveServer

JSON = {"content-type": "application/json"}
PACKED = {"content-encoding": "gzip"}
KINDS = ["prompt", "messages", "metadata", "nobody_knows"]


@pytest.fixture(scope="module")
def small(tiny_engine: Engine) -> Iterator[LiveServer]:
    """A server with small limits."""
    limits = Limits(body_bytes=50_000, queued_requests=2, idle_seconds=1.0)
    live = LiveServer(ServerConfig(model="tiny", port=0, limits=limits), tiny_engine)
    yield live
    live.close()


def address(server: LiveServer) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return host, int(port)


def talk(server: LiveServer, *parts: bytes, wait: float = 5.0) -> bytes:
    """Send raw bytes, return what comes back until the server closes or falls silent."""
    with socket.create_connection(address(server), timeout=wait) as connection:
        answer = b""
        try:
            for part in parts:
                connection.sendall(part)
            while data := connection.recv(65536):
                answer += data
                if b"\r\n\r\n" in answer and b"content-length: 0" in answer:
                    break
        except (TimeoutError, ConnectionError):
            pass
        return answer


@pytest.mark.parametrize("depth", [3_000, 20_000, 1_000_000])
@pytest.mark.parametrize("field", KINDS)
@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
def test_deep_bodies(field: str, depth: int, begin: str, end: str, http: httpx.Client):
    inside = begin * depth + "1" + end * depth
    text = f'{{"prompt": "a", "messages": [], "{field}": {inside}}}'
    for path in ("/v1/completions", "/v1/chat/completions"):
        start = time.monotonic()
        error = refusal(http.post(path, content=text.encode(), headers=JSON))
        assert "nested too deeply" in error["message"] and "64" in error["message"]
        assert time.monotonic() - start < 5
    unclosed = text[: text.index(inside) + depth // 2]
    refusal(http.post("/v1/completions", content=unclosed.encode(), headers=JSON))
    assert http.get("/health").status_code == 200


def test_what_is_in_strings_is_not_nesting(http: httpx.Client):
    text = ('["\\' + "{[" * 50) * 2
    answer = http.post("/v1/completions", json={"prompt": text, "max_tokens": 0, "echo": True})
    assert answer.json()["choices"][0]["text"] == text


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\[]{},', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\[,'), inner, max_size=3)
    ),
    max_leaves=30,
)


def depth_of(value: Any) -> int:
    if isinstance(value, (list, dict)):
        inside = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth_of, inside), default=0)
    return 0


@settings(max_examples=200, deadline=None)
@given(JSON_VALUES, st.integers(1, 6), st.integers(1, 9))
def test_the_scan_knows_the_depth(value: Any, most: int, piece: int):
    raw = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_PIECE", piece)
        try:
            check_shape(raw, most)
            passed = True
        except InvalidRequest:
            passed = False
    assert passed == (depth_of(value) <= most)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40) | st.text('ab"\\[]{},', max_size=40).map(str.encode))
def test_any_bytes_are_a_value_or_a_refusal(raw: bytes):
    with suppress(InvalidRequest):
        json.dumps(parse_json(raw, 8), allow_nan=False)


def test_many_values_are_refused_before_they_are_made(http: httpx.Client):
    for text in (b"[" + b"1," * 1_100_000 + b"1]", b"[" + b"[]," * 300_000 + b"[]]"):
        content = b'{"prompt": "a", "x": ' + text + b"}"
        error = refusal(http.post("/v1/completions", content=content, headers=JSON))
        assert "too much" in error["message"]


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "{", "nope", "[]", "5", "null", '"a"', '{"prompt": "a",}', "{'prompt': 'a'}",
        '{"prompt": "a", "temperature": NaN}', '{"prompt": "a", "temperature": Infinity}',
        '{"prompt": "a", "temperature": -Infinity}', '{"prompt": "a", "seed": 1' + "0" * 5000 + "}",
        '{"prompt": "a", "temperature": 1e999}', '{"prompt": "a"} x', '{"prompt": "\t"}',
        "\ufeff{}",
    ],
    ids=lambda text: f"{text:.30}",
)  # fmt: skip
def test_bodies_that_are_no_json_object(text: str, http: httpx.Client):
    error = refusal(http.post("/v1/completions", content=text.encode(), headers=JSON))
    assert "sys." not in error["message"] and " at at " not in error["message"]


@pytest.mark.parametrize(
    "raw", [b"\xff", '{"prompt": "a"}'.encode("utf-16"), b'{"prompt": "\xe9"}']
)
def test_bodies_that_are_no_utf8(raw: bytes, http: httpx.Client):
    refusal(http.post("/v1/completions", content=raw, headers=JSON))


def test_content_types(http: httpx.Client):
    body = json.dumps({"prompt": "a", "max_tokens": 1})
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json"):
        answer = http.post("/v1/completions", content=body, headers={"content-type": kind})
        assert answer.status_code == 200
    for kind in ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded"):
        answer = http.post("/v1/completions", content=body, headers={"content-type": kind})
        assert refusal(answer)["param"] == "content-type"
    untyped = http.post("/v1/completions", content=body)  # as a page of another site can send it
    assert "content-type" not in untyped.request.headers
    assert refusal(untyped)["param"] == "content-type"
    packed = http.post(
        "/v1/completions", content=gzip.compress(body.encode()), headers=JSON | PACKED
    )
    assert refusal(packed)["param"] == "content-encoding"


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
@pytest.mark.parametrize("cut", [1 << 20, 40, 1], ids=["whole", "pieces", "bytes"])
def test_an_offered_upgrade_is_ignored(server: LiveServer, chunked: bool, cut: int):
    """As Java's HTTP client sends it with every request that is not encrypted."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAA\r\n"
    if chunked:
        head += b"transfer-encoding: chunked\r\n\r\n"
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    else:
        head += b"content-length: %d\r\n\r\n" % len(body)
    get = b"GET /version HTTP/1.1\r\nhost: x\r\n"
    sent = (head + body) * 2 + get + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"
    sent += get + b"connection: close\r\n\r\n"
    answer = talk(server, *(sent[i : i + cut] for i in range(0, len(sent), cut)), wait=20)
    assert answer.count(b"HTTP/1.1 200 OK") == 4
    assert answer.count(b'"text_completion"') == 2 and answer.count(b'"version"') == 2


def test_large_bodies(small: LiveServer):
    with httpx.Client(base_url=small.url, timeout=30) as http:
        big = json.dumps({"prompt": "x" * 60_000}).encode()
        assert refusal(http.post("/v1/completions", content=big, headers=JSON), 413)
        chunks = (big[i : i + 1000] for i in range(0, len(big), 1000))  # no content-length
        assert refusal(http.post("/v1/completions", content=chunks, headers=JSON), 413)
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    lie = talk(small, head + b"content-length: 999999999999999999\r\n\r\n{", wait=2)
    assert lie.startswith(b"HTTP/1.1 413")


def test_bodies_that_do_not_come(small: LiveServer):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += b"content-length: 10\r\n\r\n{"
    assert b"did not arrive" in talk(small, head, wait=1.8)
    assert small.settle()["active_requests"] == 0


def test_large_heads(server: LiveServer):
    for head in (
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 1_000_000,
        b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: 1\r\n" % i for i in range(100_000)),
        b"GET /" + b"a" * 1_000_000,
    ):
        pieces = [head[i : i + 32768] for i in range(0, len(head), 32768)]
        answer = talk(server, *pieces)
        assert answer == b"" or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
    ordinary = b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 30_000
    assert talk(server, ordinary + b"\r\nconnection: close\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_heads_that_do_not_come(server: LiveServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    start = time.monotonic()
    assert talk(server, b"GET /health HTTP/1.1\r\n", wait=10) == b""
    assert talk(server, wait=10) == b""
    assert time.monotonic() - start < 8


def test_a_full_queue(small: LiveServer):
    body = {"prompt": ["a"] * 8, "max_tokens": 4}
    with httpx.Client(base_url=small.url, timeout=30) as http:
        response = http.post("/v1/completions", json=body)
        assert refusal(response, 429)["code"] == "overloaded"
        assert response.headers["retry-after"] == "1"
        small.settle()
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_huge_texts_delay_nobody(http: httpx.Client, server: LiveServer):
    gaps: list[float] = []
    stop = threading.Event()

    def poll() -> None:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            while not stop.wait(0.02):
                start = time.perf_counter()
                assert client.get("/health").status_code == 200
                gaps.append(time.perf_counter() - start)

    huge = json.dumps({"prompt": "x " * 10_000_000}).encode()
    medium = json.dumps({"prompt": "hello " * 10_000}).encode()  # tokenized, then too long
    poller = threading.Thread(target=poll)
    poller.start()
    senders = [
        threading.Thread(
            target=lambda raw=raw: refusal(
                httpx.post(f"{server.url}/v1/completions", content=raw, headers=JSON, timeout=60)
            )
        )
        for raw in (huge, medium, huge, medium)
    ]
    for sender in senders:
        sender.start()
    body = {"prompt": "a", "max_tokens": 40, "ignore_eos": True, "stream": True}
    assert events(http.post("/v1/completions", json=body))
    for sender in senders:
        sender.join()
    stop.set()
    poller.join()
    assert max(gaps) < 1.0
