"""What stands still, or wants to make the server stand still: the engine loop, readers, huge prompts.

Health must say so and come back, and others must go on.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxinfer.engine import Engine
from serving import server as server_module
from serving.config import Limits, ServerConfig
from serving.grpc_engine import NAME
from serving.server import serve
from serving.sockets import bind
from tests.integration.processes import free_port
from tests.serving import faces
from tests.serving.conftest import SMALL
from tests.serving.faces import Asker
from tests.serving.grpc_support import request, slow_steps, until
from tests.serving.live import LiveServer

SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)
BODY = {"prompt": "hello", "max_tokens": 60, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def start(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LiveServer]:
    """`start(idle_seconds)`: a server that looks often; close it yourself."""
    monkeypatch.setattr(server_module, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(server_module, "bind", small_buffers)

    def begin(idle_seconds: float) -> LiveServer:
        limits = Limits(idle_seconds=idle_seconds)
        options = {"model": "tiny", "served_model_name": ("tiny",), "port": 0, "grpc_port": 0}
        config = ServerConfig(**options, watchdog_timeout=1.0, limits=limits)
        return LiveServer(config, tiny_engine)

    return begin


@pytest.fixture
def watched(start: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    """A server with little patience with its loop and with readers."""
    live = start(0.5)
    yield live
    live.close()


def small_buffers(host: str, option: str, port: int) -> socket.socket:
    """A listening socket whose connections hold little that nobody reads."""
    found = bind(host, option, port)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return found


async def becomes(asker: Asker, status: int) -> None:
    """Wait until /ready answers `status`; /health and gRPC's health say the same then."""
    end = time.monotonic() + 20
    while (await asker.http.get("/ready")).status_code != status:
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
    assert (await asker.http.get("/health")).status_code == status
    health: Any = health_pb2_grpc.HealthStub(asker.channel)
    for name in ("", NAME):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == (SERVING if status == 200 else NOT_SERVING)


async def test_a_loop_that_stands_still(watched: LiveServer):
    core, gate = watched.engine.core, threading.Event()
    step = core.step

    def blocked() -> Any:
        assert gate.wait(30)
        return step()

    params = {key: value for key, value in BODY.items() if key != "prompt"}
    async with faces.asking(watched.url, watched.target, watched.engine) as asker:
        alone = await faces.completions_stream(asker, "hello", params)
        await becomes(asker, 200)
        with patch.object(core, "step", blocked):
            streams = [
                asyncio.ensure_future(face(asker, "hello", params))
                for face in (faces.completions_stream, faces.grpc_stream)
            ]
            await becomes(asker, 503)
            gate.set()
            await becomes(asker, 200)
            over_http, over_grpc = await asyncio.gather(*streams)
    assert over_http.outputs == alone.outputs
    assert over_grpc.outputs == alone.without_text().outputs
    watched.settle()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_loop_that_dies_ends_the_server(
    tiny_engine: Engine, tiny: Path, monkeypatch: pytest.MonkeyPatch
):
    """When not even a reset helps, streams end with an error and the process with code 1."""
    options: dict[str, Any] = SMALL
    engine = Engine(tiny_engine.model, progress=False, **options)
    monkeypatch.setattr(server_module, "Engine", lambda *args, **kwargs: engine)
    monkeypatch.setattr(server_module, "WATCH_SECONDS", 0.05)
    port, grpc_port = free_port(), free_port()
    config = ServerConfig(model=str(tiny), port=port, grpc_port=grpc_port)
    running = asyncio.ensure_future(serve(config))

    def fail() -> Any:
        raise RuntimeError("the device is gone")

    async with faces.asking(f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}") as asker:
        async with asyncio.timeout(20):
            while not await answers(asker):
                await asyncio.sleep(0.05)
        begun: list[str] = []
        with slow_steps(engine):
            over_http = asyncio.ensure_future(http_text(asker, begun))
            over_grpc = asyncio.ensure_future(grpc_error(asker, begun))
            await until(lambda: set(begun) == {"http", "grpc"}, 20)
            with patch.object(engine.core, "step", fail), patch.object(engine.core, "reset", fail):
                assert await asyncio.wait_for(running, 20) == 1
        error, text = await over_grpc, await over_http
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "device" not in f"{error.details()}{text}"
        assert '"code":"internal"' in text and text.endswith("data: [DONE]\n\n")
    assert not engine.alive


async def http_text(asker: Asker, begun: list[str]) -> str:
    text, body = "", BODY | {"stream": True, "max_tokens": 200}
    async with asker.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for piece in response.aiter_text():
            text += piece
            begun.append("http")
    return text


async def grpc_error(asker: Asker, begun: list[str]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in asker.stub.Generate(request("hello", stream=True, max_tokens=200)):
            begun.append("grpc")
    return raised.value


async def answers(asker: Asker) -> bool:
    try:
        return (await asker.http.get("/ready")).status_code == 200
    except httpx.ConnectError:
        return False


async def test_a_client_that_stops_reading(watched: LiveServer):
    """It is dropped after idle_seconds and its pages come back; who reads is not disturbed."""
    engine, address = watched.engine, watched.url.removeprefix("http://").split(":")
    params = {key: value for key, value in BODY.items() if key != "prompt"}
    records: list[Any] = []
    async with faces.asking(watched.url, watched.target, engine) as asker:
        alone = await faces.completions_stream(asker, "hello", params)
        watched.service.on_finish.append(records.append)
        with slow_steps(engine, 0.03), socket.socket() as idle:
            idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            idle.connect((address[0], int(address[1])))
            # The echoed prompt's scores alone are more than the buffers hold.
            idle.sendall(post(BODY | {"prompt": "x " * 90, "echo": True, "logprobs": 20}))
            await until(lambda: bool(watched.service.running), 20)
            (name,) = watched.service.running
            good = asyncio.ensure_future(faces.completions_stream(asker, "hello", params))
            await until(lambda: name not in watched.service.running, 20)
            await until(lambda: engine.stats()["running"] == 1, 1.0)
            assert not good.done(), "the others must still run"
            assert (await good).outputs == alone.outputs
    assert [record.reason for record in records] == ["abort", "length"]
    assert records[0].output_tokens[0] < BODY["max_tokens"]
    stats = watched.settle()
    assert [kind["protected"] for kind in stats["kinds"]] == [0] * len(stats["kinds"])


def post(body: dict[str, Any]) -> bytes:
    raw = json.dumps(body | {"stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


def test_a_server_stops_in_spite_of_clients_that_do_not_read(
    start: Callable[..., LiveServer], caplog: pytest.LogCaptureFixture
):
    """The stop cuts them off long before idle_seconds, and that is no error."""
    live = start(600.0)
    address, running = live.url.removeprefix("http://").split(":"), live.service.running
    with slow_steps(live.engine, 0.03), socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.connect((address[0], int(address[1])))
        idle.sendall(post(BODY | {"prompt": "x " * 90, "echo": True, "logprobs": 20}))
        live.call(until(lambda: any(record.handed for record in running.values()), 20))
        begun = time.monotonic()
        live.close()
        assert time.monotonic() - begun < 5
    assert not running
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# --- huge prompts ---------------------------------------------------------------------------------------


def threads(functions: list[Callable[[], None]]) -> list[BaseException]:
    """Run functions at once; what they raised."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return errors


def test_huge_prompts_delay_nobody(server: LiveServer):
    """R-SRV-03: five prompts of 20 MB, while a stream runs and health is looked at every 50 ms."""
    gaps: dict[str, list[float]] = {"health": [], "stream": []}
    done = threading.Event()
    huge = json.dumps({"prompt": "hello " * 3_500_000}).encode()
    ids = json.dumps({"prompt": [1] * 900_000, "x": "y" * 17_000_000}).encode()
    too_large = json.dumps({"prompt": "x" * 34_000_000}).encode()

    def poll() -> None:
        with httpx.Client(base_url=server.url, timeout=30) as http:
            while not done.wait(0.05):
                start = time.perf_counter()
                assert http.get("/health").status_code == 200
                gaps["health"].append(time.perf_counter() - start)

    def follow() -> None:
        body = BODY | {"stream": True, "max_tokens": 200}
        while not done.is_set():
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                last = time.perf_counter()
                for _ in response.iter_lines():
                    now = time.perf_counter()
                    gaps["stream"].append(now - last)
                    last = now

    def send(raw: bytes, status: int) -> None:
        kind = {"content-type": "application/json"}
        url = f"{server.url}/v1/completions"
        answer = httpx.post(url, content=raw, headers=kind, timeout=60)
        assert answer.status_code == status, answer.text[:200]

    def send_all() -> None:
        work = [(huge, 400), (huge, 400), (huge, 400), (ids, 400), (too_large, 413)]
        errors = threads([lambda raw=raw, want=want: send(raw, want) for raw, want in work])
        done.set()
        assert not errors, errors

    assert not threads([poll, follow, send_all])
    assert len(gaps["health"]) >= 1 and len(gaps["stream"]) > 10
    assert max(gaps["health"]) < 1.0 and max(gaps["stream"]) < 1.0
    server.settle()
