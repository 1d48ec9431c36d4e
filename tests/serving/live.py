"""A real server on loopback for tests: its own thread and event loop, free ports, a tiny model.

`LiveServer(config, engine)` starts `serving.server.Server` as `jaxinfer serve` does, but for signals.
Called by conftest.py and by tests that need a configuration of their own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import uvloop

from jaxinfer.engine import Engine
from serving.config import ServerConfig
from serving.server import Server
from serving.service import Service


class LiveServer:
    """Started in the constructor, stopped by `close`. The engine stays open: it is the caller's.

    Attributes:
        url: of the HTTP port. target: of the gRPC port. engine: what it serves.
    """

    def __init__(self, config: ServerConfig, engine: Engine) -> None:
        self.engine = engine
        self._server = Server(config, engine)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="live-server", daemon=True
        )
        self._thread.start()
        try:
            self.call(self._server.__aenter__())
        except BaseException:
            self._end_loop()
            raise
        scheme = "https" if config.ssl_certfile else "http"
        self.url = f"{scheme}://127.0.0.1:{self._server.http_port}"
        self.target = f"127.0.0.1:{self._server.grpc_port}"

    @property
    def service(self) -> Service:
        return self._server.service

    def call[T](self, coroutine: Coroutine[Any, Any, T], timeout: float = 60.0) -> T:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def settle(self, timeout: float = 5.0) -> dict[str, Any]:
        """Wait until nothing runs, check every invariant, return the engine's stats."""
        self.call(self._idle(), timeout)
        self.engine.core.check()
        return self.engine.stats()

    async def _idle(self) -> None:
        while self.service.running or self.engine.core.has_work():
            await asyncio.sleep(0.01)

    def close(self) -> None:
        try:
            self.call(self._server.stop())
        finally:
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
