"""How a real `jaxinfer serve` starts and stops: signals under load and while loading, exit codes, kill -9.

R-SRV-04. The servers of the signal tests start together, each is stopped by one test.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.grpc_engine import NAME
from tests import checkpoints
from tests.integration.processes import Process, Served, free_port
from tests.serving import faces
from tests.serving.faces import Asker
from tests.serving.grpc_support import join, request
from tests.serving.wave import gauges

FLAGS = ("--served-model-name", "tiny", "--max-num-seqs", "8", "--max-num-batched-tokens", "64",
         "--page-size", "16", "--max-model-len", "4096")  # fmt: skip
GRACE = {"finish": 30, "cut": 1, "force": 60}
EXTRA = (
    2.0 + 4.0
)  # seconds that a stop may take beyond its grace time, and what a busy machine adds


@pytest.fixture(scope="module")
def long_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY with room for long answers."""
    folder = tmp_path_factory.mktemp("long") / "tiny"
    return checkpoints.write_tiny(folder, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def servers(
    long_tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Served]]:
    """A server for each grace time."""
    logs = tmp_path_factory.mktemp("logs")
    started: dict[str, Served] = {}
    try:
        for name, grace in GRACE.items():
            flags = (*FLAGS, "--shutdown-timeout", str(grace))
            started[name] = Served(long_tiny, logs / f"{name}.log", *flags)
        for server in started.values():
            server.wait_ready()
        yield started
    finally:
        for server in started.values():
            server.close()


# --- clients ------------------------------------------------------------------------------------------


async def http_stream(asker: Asker, tokens: int) -> tuple[int, str]:
    """(tokens, how it ended): a finish reason, or the code of the error event."""
    body = {"prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body |= {"return_token_ids": True, "temperature": 0}
    response = await asker.http.post("/v1/completions", json=body)
    if response.status_code == 503:  # it had not begun
        return 0, response.json()["error"]["code"]
    count, end = 0, "none"
    for chunk in faces.events(response):
        if "error" in chunk:
            end = chunk["error"]["code"]
            continue
        (choice,) = chunk["choices"]
        count += len(choice["token_ids"])
        end = choice["finish_reason"] or end
    return count, end


async def grpc_stream(asker: Asker, tokens: int) -> tuple[int, str]:
    sent = request("hello", stream=True, max_tokens=tokens, ignore_eos=True)
    output = join([message async for message in asker.stub.Generate(sent)])[0]
    return len(output.ids), output.complete.finish_reason


def load(asker: Asker, count: int, tokens: int) -> list[asyncio.Task[tuple[int, str]]]:
    return [
        asyncio.ensure_future((http_stream, grpc_stream)[i % 2](asker, tokens))
        for i in range(count)
    ]


async def accepted(asker: Asker, count: int) -> None:
    """Wait until the server has taken that many requests, and some of them run."""
    async with asyncio.timeout(30):
        while True:
            found = await gauges(asker.http)
            flight = sum(v for k, v in found.items() if k.startswith("jaxinfer:requests_in_flight"))
            if flight == count and sum(v for k, v in found.items() if "running" in k):
                return
            await asyncio.sleep(0.02)


async def refuses_new_ones(asker: Asker) -> None:
    """Both faces say that the server takes nothing new, and so does health."""
    async with asyncio.timeout(10):  # the signal is on its way
        while (await asker.http.get("/ready")).status_code != 503:
            await asyncio.sleep(0.01)
    assert (await asker.http.get("/health")).status_code == 503
    assert (await asker.http.get("/live")).status_code == 200  # it finishes its work
    for stream in (False, True):
        body = {"prompt": "a", "stream": stream}
        answer = await asker.http.post("/v1/completions", json=body)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert "shutting down" in answer.json()["error"]["message"]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asker.stub.Generate(request("a", stream=stream)).read()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    health: Any = health_pb2_grpc.HealthStub(asker.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=NAME))
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


def ended(server: Process, seconds: float) -> None:
    """It ends with code 0 in that time, and quietly."""
    assert server.wait(seconds) == 0, server.output()
    assert "Traceback" not in server.output(), server.output()


# --- SIGTERM ------------------------------------------------------------------------------------------


async def test_what_fits_into_the_grace_time_finishes(servers: dict[str, Served]):
    server, tokens = servers["finish"], 400
    async with faces.asking(server.url, server.target) as asker:
        alone = [await http_stream(asker, tokens), await grpc_stream(asker, tokens)]
        assert alone == [(tokens, "length")] * 2
        streams = load(asker, 20, tokens)
        await accepted(asker, 20)
        server.signal()
        start = time.monotonic()
        await refuses_new_ones(asker)
        assert not all(stream.done() for stream in streams), "too fast to tell"
        assert await asyncio.gather(*streams) == [(tokens, "length")] * 20
    ended(server, GRACE["finish"] + EXTRA - (time.monotonic() - start))


async def test_what_does_not_fit_is_told(servers: dict[str, Served]):
    server = servers["cut"]
    async with faces.asking(server.url, server.target) as asker:
        streams = load(asker, 20, 4000)
        await accepted(asker, 20)
        server.signal(signal.SIGINT)
        start = time.monotonic()
        results = await asyncio.gather(*streams)
        await asyncio.to_thread(ended, server, GRACE["cut"] + EXTRA - (time.monotonic() - start))
    assert all(count < 4000 for count, _ in results)
    assert {end for _, end in results[0::2]} == {"unavailable"}  # in HTTP an error event
    assert {end for _, end in results[1::2]} == {"abort"}


async def test_the_second_signal_forces(servers: dict[str, Served]):
    server = servers["force"]
    async with faces.asking(server.url, server.target) as asker:
        streams = load(asker, 20, 4000)
        await accepted(asker, 20)
        server.signal()
        await refuses_new_ones(asker)
        assert server.popen.poll() is None
        server.signal()
        await asyncio.to_thread(ended, server, 10.0)
        results = await asyncio.gather(*streams)
    assert {end for _, end in results[0::2]} == {"unavailable"}
    assert {end for _, end in results[1::2]} == {"abort"}
    for port in (server.http_port, server.grpc_port):
        with socket.socket() as probe:  # free again
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))


def test_a_signal_while_it_loads(long_tiny: Path, tmp_path: Path):
    # So many shapes that compiling takes far longer than the test.
    server = Served(long_tiny, tmp_path / "log", "--served-model-name", "tiny")
    try:
        server.wait_http(f"{server.url}/ready", status=503)
        assert httpx.get(f"{server.url}/live").status_code == 200
        server.signal()
        ended(server, 10.0)
        assert "while the model was loading" in server.output()
    finally:
        server.close()


# --- starts that fail -----------------------------------------------------------------------------------


def failed(tmp_path: Path, *arguments: str | Path) -> str:
    """What a start that must fail with code 2 says: one clear line, beside the log's."""
    command = [sys.executable, "-m", "serving.cli", "serve", *arguments]
    process = Process(command, tmp_path / "log")
    try:
        assert process.wait(60) == 2, process.output()
    finally:
        process.close()
    *lines, last = process.output().splitlines()
    assert last.startswith("jaxinfer: "), process.output()
    assert all(" INFO " in line or " WARNING " in line for line in lines), process.output()
    return last


@pytest.mark.parametrize("option", ["--port", "--grpc-port"])
def test_a_taken_port(option: str, tiny: Path, tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ports = {"--port": "0", "--grpc-port": "0"} | {option: port}
        flags = [part for pair in ports.items() for part in pair]
        line = failed(tmp_path, tiny, *flags)
    assert port in line and option in line


def test_a_model_that_is_not_there(tmp_path: Path):
    assert "nowhere" in failed(tmp_path, tmp_path / "nowhere", "--port", "0")


# --- kill -9 --------------------------------------------------------------------------------------------


@pytest.mark.slow  # compiles the whole ladder where there is no warm cache
@pytest.mark.demo
async def test_a_killed_server_comes_back(demo_model: Path, tmp_path: Path):
    """On the same ports, with warm caches: nothing that it left behind is in the way."""
    ports = ["--port", str(free_port()), "--grpc-port", str(free_port())]
    command = [sys.executable, "-m", "serving.cli", "serve", demo_model, *ports]
    url, target = f"http://127.0.0.1:{ports[1]}", f"127.0.0.1:{ports[3]}"
    answers = []
    for attempt in range(2):
        start = time.monotonic()
        server = Process(command, tmp_path / f"{attempt}.log")
        try:
            server.wait_http(f"{url}/ready", 300)
            print(f"start {attempt}: ready after {time.monotonic() - start:.1f} s")
            async with faces.asking(url, target) as asker:
                params = {"max_tokens": 12, "temperature": 0.0}
                answers.append(await faces.grpc_stream(asker, "The capital of France is", params))
                streams = load(asker, 6, 400)
                await accepted(asker, 6)
                server.signal(signal.SIGKILL)
                assert server.wait(10) == -signal.SIGKILL
                await asyncio.gather(*streams, return_exceptions=True)
        finally:
            server.close()
    assert answers[0].outputs == answers[1].outputs
