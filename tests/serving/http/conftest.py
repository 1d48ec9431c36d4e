"""Fixtures of the HTTP tests: a client of the shared server, servers with parsers, a browser."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxinfer.engine import Engine
from serving.config import ServerConfig
from tests.serving.http.dialect_support import chain_engine, start_calling
from tests.serving.live import LiveServer

BROWSER = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom",
)  # fmt: skip


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    """A client of the shared server; afterwards nothing runs there and nothing leaked."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.settle()


@pytest.fixture(scope="session")
def parsing_server(tiny_engine: Engine) -> Iterator[LiveServer]:
    """Tools and reasoning are parsed; two names; admin keys, so that admin routes exist."""
    config = ServerConfig(
        model="tiny",
        served_model_name=("tiny", "org/other"),
        port=0,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        enable_auto_tool_choice=True,
        admin_api_keys=("root",),
    )
    live = LiveServer(config, tiny_engine)
    yield live
    live.close()


@pytest.fixture(scope="session")
def calling_server(chain: Callable[..., Path]) -> Iterator[LiveServer]:
    """A server whose model reasons and calls a tool, whatever it is asked."""
    engine = chain_engine(chain)
    live = start_calling(engine)
    yield live
    live.close()
    engine.close()


@pytest.fixture
def browse(tmp_path: Path) -> Iterator[Any]:
    """`browse(url)`: the page's DOM after five seconds in headless Chromium."""
    program = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None
    )
    if program is None:
        pytest.fail("tests of the status page need Chromium on PATH")

    def dump(url: str) -> str:
        done = subprocess.run(
            [program, *BROWSER, f"--user-data-dir={tmp_path / 'profile'}", url],
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert "Content Security Policy" not in done.stderr, (
            "it stopped something of the page's own"
        )
        return done.stdout

    yield dump
