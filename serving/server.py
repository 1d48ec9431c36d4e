"""The server process: starts the faces, loads the model, waits for a signal, drains, stops.

Everything runs in one event loop; the model loads in a thread while the ports already answer that
they are not ready. The first SIGTERM or SIGINT drains, the second stops at once. Called by
commands/serve.py and by tests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import uvicorn

from jaxinfer.engine import Engine
from jaxinfer.errors import ConfigError
from jaxinfer.progress import LogProgress
from serving.config import ServerConfig
from serving.http_server import UVICORN_OPTIONS, build_app
from serving.logs import RequestLog, configure_logging
from serving.metrics import Metrics
from serving.posture import posture
from serving.profiler import Profiler
from serving.service import Phase, Service
from serving.sockets import bind

log = logging.getLogger("jaxinfer.server")

LAST_WORDS = 0.5  # seconds that answers which are ready get at least, before the ports close
CUT_SECONDS = 0.8  # then who still does not read is cut off
WATCH_SECONDS = 1.0
CLOSE_SECONDS = 5.0  # for the engine's last step; then the process ends without it
ASIDE = "jaxinfer-aside"  # name of threads that load the model and close it


class Server:
    """One model behind its faces.

    Args:
        config: what to serve. engine: a ready Engine (tests); default: made from `config`.

    Use as `async with Server(config) as server`, or let `run` do it. `http_port` and `grpc_port` are
    the real ones once started.
    """

    def __init__(self, config: ServerConfig, engine: Engine | None = None) -> None:
        self.config = config
        self.service = Service(config)
        self.http_port: int | None = None
        self.grpc_port: int | None = None
        self._engine = engine
        self._own_engine = engine is None
        self._http: _Http | None = None
        self._grpc: Any = None
        self._publisher: Any = None
        self._tracing: Any = None
        self._log = RequestLog(self.service)
        self._watcher: asyncio.Task[None] | None = None

    # --- starting -------------------------------------------------------------------------------

    async def __aenter__(self) -> Server:
        try:
            await self.listen()
            await self.load()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def listen(self) -> None:
        """Open the ports; health says that the server is starting. Raises ConfigError for a taken port."""
        config, service = self.config, self.service
        service.metrics = Metrics(service)
        if config.profile_dir:
            service.profiler = Profiler(config.profile_dir)
            service.metrics.on_step.append(service.profiler.on_step)
        if config.otlp_traces_endpoint:
            from serving.tracing import Tracing

            self._tracing = Tracing(service)
        if config.kv_events is not None:
            self._open_kv_events()
        if config.port is not None:
            self._http = _Http(service)
            self.http_port = await self._http.start()
            log.info("HTTP on %s", _address(config, self.http_port))
        if config.grpc_port is not None:
            from serving.grpc_server import start_grpc

            self._grpc = await start_grpc(service)
            self.grpc_port = self._grpc.port
            log.info("gRPC on %s:%s", config.host, self.grpc_port)

    def _open_kv_events(self) -> None:
        from serving.kv_events import KvEventHub, KvEventsConfig
        from serving.zmq_kv_events import ZmqPublisher

        events = KvEventsConfig.from_dict(self.config.kv_events or {})
        if events.enable_kv_cache_events:
            self.service.kv_hub = KvEventHub(events.buffer_steps)
            if events.publisher == "zmq":
                self._publisher = ZmqPublisher.from_config(self.service.kv_hub, events)

    async def load(self) -> None:
        """Load the model, compile, and become ready."""
        if self._engine is None:
            self._engine = await _in_daemon_thread(
                lambda: Engine(
                    self.config.model,
                    progress=LogProgress(),
                    **({"warmup": "eager"} | dict(self.config.engine)),
                )
            )
        engine = self._engine
        if self.service.kv_hub is not None:
            engine.set_kv_listener(self.service.kv_hub.put)
        self.service.attach(engine)
        self._watcher = asyncio.create_task(self._watch())
        log.info("ready: %s", ", ".join(self.service.model_names))

    # --- running --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Fail health while the engine loop stands still; end streams that nobody reads."""
        service, engine = self.service, self.service.engine
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if not engine.alive:
                log.error("the engine loop has ended; the server stops")
                service.set_phase(Phase.STOPPED)
                return
            stalled = engine.silence() > self.config.watchdog_timeout
            if stalled and service.phase is Phase.READY:
                log.error("no engine round for %.0f s", engine.silence())
                service.set_phase(Phase.STALLED)
            elif not stalled and service.phase is Phase.STALLED:
                log.warning("the engine loop goes on")
                service.set_phase(Phase.READY)
            await service.abort_unread()

    async def failed(self) -> None:
        """Returns when the engine loop has ended by itself."""
        if self._watcher is not None:
            await asyncio.shield(self._watcher)

    # --- stopping -------------------------------------------------------------------------------

    async def drain(self) -> bool:
        """Refuse new requests and let running ones finish and be read; True if all were in time."""
        end = time.monotonic() + self.config.shutdown_timeout
        done = await self.service.drain()
        await self._last_words(end)
        return done and not self._answering

    async def abort(self) -> None:
        """End what runs at once; its clients are told."""
        await self.service.abort_all()
        await self._last_words()

    async def _last_words(self, end: float = 0.0) -> None:
        """Wait for readers until `end`, but some moments in any case."""
        end = max(end, time.monotonic() + LAST_WORDS)
        while self._answering and time.monotonic() < end:
            await asyncio.sleep(0.01)

    @property
    def _answering(self) -> bool:
        """Whether anybody's answer is not read yet."""
        return bool(self.service.running) or (self._http is not None and self._http.answering)

    async def stop(self) -> None:
        """Close the ports and the engine; what still runs is aborted."""
        if self._watcher is not None:
            self._watcher.cancel()
        self.service.set_phase(Phase.STOPPED)
        if self.service.kv_hub is not None:
            self.service.kv_hub.close()
        faces = [self._grpc.stop(0.5)] if self._grpc is not None else []
        if self._http is not None:
            faces.append(self._http.stop())
        for end in await asyncio.gather(*faces, return_exceptions=True):
            if isinstance(end, Exception):
                log.error("a port did not close properly", exc_info=end)
        if self._own_engine:
            await self._close_engine()
        elif self._engine is not None:
            self._engine.set_kv_listener(None)
        for part in (self._publisher, self._tracing, self.service.profiler):
            if part is not None:
                await asyncio.to_thread(part.close)

    async def _close_engine(self) -> None:
        try:
            closing = _in_daemon_thread(self.service.close)
            await asyncio.wait_for(closing, CLOSE_SECONDS)
        except TimeoutError:
            log.error("the engine loop stands still; the server stops without it")


class _Http:
    """uvicorn in our loop, on a socket that we have bound, without its signal handlers."""

    def __init__(self, service: Service) -> None:
        config = service.config
        self._socket = bind(config.host, "port", config.port or 0)
        options: dict[str, Any] = dict(UVICORN_OPTIONS)
        if config.ssl_certfile:
            options |= {"ssl_keyfile": config.ssl_keyfile, "ssl_certfile": config.ssl_certfile}
        if config.ssl_ca_certs:
            options |= {"ssl_ca_certs": config.ssl_ca_certs, "ssl_cert_reqs": 2}  # CERT_REQUIRED
        self._server = uvicorn.Server(
            uvicorn.Config(
                build_app(service),
                log_config=None,
                access_log=False,
                lifespan="off",
                limit_concurrency=config.limits.connections,
                timeout_graceful_shutdown=1,
                **options,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        try:
            self._server.config.load()
        except OSError as error:
            config = self._server.config
            raise ConfigError(
                f"ssl_keyfile={config.ssl_keyfile!r}, ssl_certfile={config.ssl_certfile!r} or "
                f"ssl_ca_certs={config.ssl_ca_certs!r} cannot be used: {error}; give PEM files that "
                "belong together"
            ) from None
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        await self._server.startup(sockets=[self._socket])
        self._task = asyncio.create_task(self._server.main_loop())
        return self._socket.getsockname()[1]

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
            cut = asyncio.get_running_loop().call_later(CUT_SECONDS, self._cut)
            await self._server.shutdown(sockets=[self._socket])
            cut.cancel()
        self._socket.close()

    @property
    def answering(self) -> bool:
        """Whether a request that has arrived is not answered, or its answer waits for its reader."""
        return any(_busy(connection) for connection in self._server.server_state.connections)

    def _cut(self) -> None:
        """Close what is still open: its handlers end as if the client had left."""
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]


def _busy(connection: Any) -> bool:
    cycle = connection.cycle  # uvicorn's, of the connection's last request
    asks = cycle is not None and not cycle.more_body and not cycle.response_complete
    return asks or connection.transport.get_write_buffer_size() > 0


def _address(config: ServerConfig, port: int | None) -> str:
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://{config.host}:{port}"


async def _in_daemon_thread[T](function: Callable[[], T]) -> T:
    """A thread that does not keep the process alive when nobody waits for it any more."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            result = function()
        except BaseException as error:
            if answer.set_running_or_notify_cancel():  # False: the wait has ended
                answer.set_exception(error)
        else:
            if answer.set_running_or_notify_cancel():
                answer.set_result(result)

    threading.Thread(target=work, name=ASIDE, daemon=True).start()
    return await asyncio.wrap_future(answer)


async def serve(config: ServerConfig) -> int:
    """Serve until a signal. Returns the exit code: 0 stopped on request, 1 the engine loop died."""
    stop, force = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (force if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    server = Server(config)
    try:
        await server.listen()
        if await _first(server.load(), stop.wait()) == 1:
            log.info("stopped while the model was loading")
            return 0
        if await _first(server.failed(), stop.wait()) == 0:
            return 1
        log.info("draining: running requests get %g s", config.shutdown_timeout)
        if await _first(server.drain(), force.wait()) == 1:
            log.warning("second signal: running requests are aborted")
            await server.abort()
        return 0
    finally:
        await server.stop()


async def _first(*awaitables: Any) -> int:
    """Index of the one that ends first; its exception is raised, the others are cancelled."""
    tasks = [asyncio.ensure_future(a) for a in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        first = next(task for task in tasks if task in done)
        first.result()
        return tasks.index(first)
    finally:
        for task in tasks:
            task.cancel()


def run(config: ServerConfig) -> int:
    """Serve until a signal; the exit code (see `serve`)."""
    import uvloop

    configure_logging(config)
    for line in posture(config):
        log.warning("open: %s", line)
    code = uvloop.run(serve(config))
    if any(thread.name == ASIDE for thread in threading.enumerate()):
        logging.shutdown()
        os._exit(code)  # compiling and steps can't be interrupted, and Python would wait for them
    return code
