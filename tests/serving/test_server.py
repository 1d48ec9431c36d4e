"""Server: how it starts with bad files, and how it stops when the engine thread does not answer."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest

from jaxinfer.engine import Engine
from jaxinfer.errors import ConfigError, Unavailable
from jaxinfer.types import SamplingParams
from serving import server as server_module
from serving.calls import Call
from serving.config import ServerConfig
from serving.server import Server
from serving.service import Phase, Service
from tests.serving.conftest import SMALL


async def first_item(service: Service) -> None:
    call = Call("stuck", await service.prompt("hello"), SamplingParams(max_tokens=8))
    await anext(service.generate(call))


async def test_a_loop_that_stands_still_does_not_keep_the_server(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The grace time ends the drain, and the stop goes on without the engine."""
    options: dict[str, Any] = SMALL
    engine, gate = Engine(tiny_engine.model, progress=False, **options), threading.Event()
    monkeypatch.setattr(server_module, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(server_module, "Engine", lambda *args, **kwargs: engine)
    server = Server(ServerConfig(model="tiny", port=0, shutdown_timeout=0.1))
    await server.__aenter__()
    step = engine.core.step

    def blocked() -> Any:
        assert gate.wait(60)
        return step()

    with patch.object(engine.core, "step", blocked):
        asking = asyncio.create_task(first_item(server.service))
        while not engine.silence():
            await asyncio.sleep(0.01)
        start = time.monotonic()
        assert not await server.drain()
        await server.stop()
        assert time.monotonic() - start < 10
        assert "stands still" in caplog.text
        asking.cancel()
        gate.set()
        await asyncio.to_thread(engine._thread.join)


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.STALLED, Phase.STOPPED])
async def test_phases_that_take_nothing_new(tiny_engine: Engine, phase: Phase):
    service = Service(ServerConfig(model="tiny"), tiny_engine)
    rejected: list[Any] = []
    service.on_reject.append(rejected.append)
    service.set_phase(phase)
    with pytest.raises(Unavailable):
        await first_item(service)
    assert len(rejected) == 1 and not service.running


async def test_slow_readers_have_the_grace_time_too(tiny_engine: Engine):
    """What the engine has finished is still to be read."""
    for grace, all_read in ((20.0, True), (0.1, False)):
        server = Server(ServerConfig(model="tiny", port=0, shutdown_timeout=grace))
        server.service.attach(tiny_engine)
        call = Call(f"slow{grace}", await server.service.prompt("hi"), SamplingParams(max_tokens=8))
        stream = server.service.generate(call)
        await anext(stream)
        with patch.object(tiny_engine, "drain", AsyncMock(return_value=True)):
            draining = asyncio.create_task(server.drain())
            await asyncio.sleep(1.0)  # longer than LAST_WORDS
            assert draining.done() is not all_read
            async for _ in stream:
                pass
            assert await draining is all_read


async def test_half_a_request_does_not_hold_up_the_stop(tiny_engine: Engine):
    server = Server(ServerConfig(model="tiny", port=0, shutdown_timeout=20.0), tiny_engine)
    await server.listen()
    await server.load()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: 100\r\n\r\n{{".encode())
    await asyncio.sleep(0.2)
    with patch.object(tiny_engine, "drain", AsyncMock(return_value=True)):
        assert await asyncio.wait_for(server.drain(), 5.0)
    await server.stop()
    await reader.read()
    writer.close()


@pytest.mark.parametrize("port", ["port", "grpc_port"])
async def test_files_for_tls_are_named(port: str, tmp_path: Path):
    ports: dict[str, Any] = {"port": None} | {port: 0}
    missing, bad = str(tmp_path / "missing.pem"), tmp_path / "bad.pem"
    bad.write_text("no key")
    for file in (missing, str(bad)):
        config = ServerConfig(model="tiny", ssl_keyfile=file, ssl_certfile=file, **ports)
        server = Server(config)
        with pytest.raises(ConfigError, match="ssl_|certificates"):
            await server.listen()
        await server.stop()
