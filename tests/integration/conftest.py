"""Fixtures of the integration tests: started servers, and where third parties' programs live.

Tests marked `clients` need --clients=FOLDER, a virtual environment made by .ci/clients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import Process, Served


@pytest.fixture(scope="session")
def clients(request: pytest.FixtureRequest) -> Path:
    """The `bin` folder of the environment with third parties' clients."""
    folder = request.config.getoption("--clients")
    if not folder:
        pytest.fail(
            "tests marked 'clients' need --clients=FOLDER (see tests/integration/README.md)"
        )
    return Path(folder).resolve() / "bin"


@pytest.fixture(scope="session")
def borrow(clients: Path) -> Iterator[Callable[[str], Any]]:
    """`borrow(name)` imports a module of that environment here; ours come first."""
    found = [str(path) for path in clients.parent.glob("lib/python3*/site-packages")]
    sys.path += found
    yield import_module
    for path in found:
        sys.path.remove(path)


@pytest.fixture(scope="session")
def tiny_server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the tiny model that tests share."""
    log = tmp_path_factory.mktemp("tiny-server") / "server.log"
    served = Served(tiny, log, "--served-model-name", "tiny", "--max-model-len", "128",
                    "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--page-size", "16")  # fmt: skip
    try:
        yield served.wait_ready()
    finally:
        served.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[Process]]:
    """Put a process in here and it is killed after the test."""
    started: list[Process] = []
    yield started
    for process in reversed(started):
        process.close()


@pytest.fixture
def serve(tmp_path: Path, processes: list[Process]) -> Callable[..., Served]:
    """`serve(model, *flags)` starts a server; wait_ready() it yourself."""

    def start(model: str | Path, *flags: str) -> Served:
        served = Served(model, tmp_path / f"server-{len(processes)}.log", *flags)
        processes.append(served)
        return served

    return start


@pytest.fixture
def start(tmp_path: Path, processes: list[Process]) -> Callable[..., Process]:
    """`start(command, env=None)` starts any program."""

    def begin(command: Sequence[str | Path], env: dict[str, str] | None = None) -> Process:
        process = Process(command, tmp_path / f"process-{len(processes)}.log", env)
        processes.append(process)
        return process

    return begin
