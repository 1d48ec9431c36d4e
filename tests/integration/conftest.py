"""Fixtures of the integration tests: started servers, and where third parties' programs live.

Tests marked `clients` need --clients=FOLDER, a virtual environment made by .ci/clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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
