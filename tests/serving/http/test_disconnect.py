"""Clients that leave: whatever they asked for ends, and its pages are free (R-SRV-07, CVE-2026-9540).

Whole answers, streams, several prompts, readers that stop reading; the neighbour is not disturbed.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from jaxinfer.types import CompletionOutput, RequestOutput
from serving.calls import Call
from serving.config import Limits, ServerConfig
from tests.serving.http.scripted import item, scripted
from tests.serving.http.wire import completion, events
from tests.serving.live import LiveServer

LONG = {"max_tokens": 240, "ignore_eos": True}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", **LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 200},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": LONG},
}


def post_raw(server: LiveServer, path: str, body: dict[str, Any]) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
    return connection


def until(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ROUTES)
def test_leaving_frees_everything(path: str, stream: bool, server: LiveServer):
    before = server.settle()
    service = server.service
    ends: list[str] = []

    async def endless(call: Call) -> AsyncGenerator[RequestOutput]:
        try:
            async for output in original(call):
                yield output
        finally:
            ends.append(call.request_id)

    original = service._start
    with scripted(service, endless):
        connection = post_raw(server, path, ROUTES[path] | {"stream": stream})
        if stream:
            assert connection.recv(10)
        else:
            until(lambda: service.running)
        connection.close()
        until(lambda: ends)
    after = server.settle()
    assert not service.running
    assert after["active_requests"] == after["running"] == after["waiting"] == 0
    assert [kind["protected"] for kind in after["kinds"]] == [0] * len(before["kinds"])


def test_leaving_several_prompts_behind(server: LiveServer):
    body = {"prompt": ["a", "b", "c"], "n": 2, "stream": True, **LONG}
    connection = post_raw(server, "/v1/completions", body)
    assert connection.recv(10)
    connection.close()
    until(lambda: not server.service.running)
    server.settle()


def test_the_neighbour_is_not_disturbed(http: httpx.Client, server: LiveServer):
    body = {"prompt": "hello", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = completion(http.post("/v1/completions", json=body))["choices"]
    leaving = []
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        text = ""
        for piece in response.iter_text():
            text += piece
            if len(leaving) < 6:
                connection = post_raw(server, "/v1/completions", {"prompt": "x", **LONG})
                connection.close()
                leaving.append(connection)
    kept = httpx.Response(200, headers=response.headers, text=text)
    assert "".join(c["text"] for e in events(kept) for c in e["choices"]) == alone[0]["text"]


def test_half_a_request_and_pipelines(server: LiveServer):
    """Clients that leave in the middle of a body, or send two requests at once."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head + b"content-length: 100\r\n\r\n{")
    raw = b'{"prompt":"a","max_tokens":1}'
    request = head + b"content-length: %d\r\n\r\n" % len(raw) + raw
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request * 2)
        answer = b""
        while answer.count(b"HTTP/1.1 200") < 2:
            received = connection.recv(65536)
            assert received, answer
            answer += received
    assert server.settle()["active_requests"] == 0


def test_a_stream_that_nobody_reads_ends(server: LiveServer):
    limits = Limits(idle_seconds=0.5)
    live = LiveServer(ServerConfig(model="tiny", port=0, limits=limits), server.engine)
    ended: list[bool] = []

    async def flood(call: Call) -> AsyncGenerator[RequestOutput]:
        try:
            while True:
                yield item(call, [CompletionOutput(0, "x" * 100_000, [1])])
        finally:
            ended.append(True)

    try:
        with scripted(live.service, flood):
            connection = post_raw(live, "/v1/completions", {"prompt": "a", "stream": True})
            until(lambda: ended)
            connection.close()
        live.settle()
    finally:
        live.close()
