"""Server: how it starts with bad files, and how it stops when the engine thread does not answer."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from jaxinfer.engine import Engine
from jaxinfer.errors import ConfigError
from jaxinfer.types import SamplingParams
from serving import server as server_module
from serving.config import ServerConfig
from serving.server import Server
from serving.service import Call, Service
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
