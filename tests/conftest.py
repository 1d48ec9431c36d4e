"""Fixtures that tests share: the platform, small checkpoints, the demo model, other interpreters.

Tests run on the CPU unless JAX_PLATFORMS says otherwise. Nothing here imports the engine, so a
test of host code stays fast.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from tests import checkpoints

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports JAX
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# CI tries the same examples every time, so that a change is judged by what it changes; runs by hand explore.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reference-python", help="a Python that has torch and transformers")
    parser.addoption("--clients", help="a virtual environment with third parties' clients")


@pytest.fixture(scope="session")
def reference_python(request: pytest.FixtureRequest) -> Path:
    """The interpreter with PyTorch; tests marked `torch` fail where it is not given."""
    path = request.config.getoption("--reference-python")
    if not path:
        pytest.fail("tests marked 'torch' need --reference-python=PATH (a Python with torch)")
    return Path(path)


@pytest.fixture(scope="session")
def checkpoint_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def tiny(checkpoint_root: Path) -> Path:
    """TINY: a random two-layer Llama directory."""
    return checkpoints.write_tiny(checkpoint_root / "tiny")


@pytest.fixture(scope="session")
def chain(checkpoint_root: Path) -> Callable[..., Path]:
    """CHAIN maker: `chain(ids, cycle=False)` is a directory whose model emits ids[1:] after ids[0]."""
    made: dict[tuple[tuple[int, ...], bool], Path] = {}

    def make(ids: Sequence[int], cycle: bool = False) -> Path:
        key = (tuple(ids), cycle)
        if key not in made:
            folder = checkpoint_root / f"chain-{len(made)}"
            made[key] = checkpoints.write_chain(folder, ids, cycle)
        return made[key]

    return make


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched once; for tests marked `demo`."""
    from jaxinfer.weights.demo import fetch_demo

    return fetch_demo()


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """Run code in a fresh interpreter with `devices` virtual CPU devices; returns what it printed."""

    def run(code: str, devices: int = 1, timeout: float = 300) -> str:
        env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run
