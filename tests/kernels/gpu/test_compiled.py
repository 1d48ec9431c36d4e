"""The decode kernel compiled for an H200 without one: registers, spills, shared memory, instructions.

Needs the compile-only environment: `make test-gpu-compile`. resources.json is what ptxas said when
a person last looked; a change of the kernel that changes it is to be looked at and written there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.kernels.gpu.configs import NAMED
from tests.kernels.gpu.h200 import missing
from tests.kernels.gpu.step import MODELS

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TABLE = json.loads((HERE / "resources.json").read_text())

pytestmark = pytest.mark.gpu_compile


@pytest.fixture(autouse=True)
def limited() -> None:
    """Compilers have the time limit of their own process."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a module that compiles, in a process of its own; returns the reports it prints."""
    if reason := missing():
        pytest.skip(reason)

    def run(module: str, *names: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("dump")
        done = subprocess.run(
            [sys.executable, "-m", f"tests.kernels.gpu.{module}", str(folder), *names],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return {report["name"]: report for report in reports}

    return run


@pytest.fixture(scope="module")
def compiled(run: Any) -> dict[str, Any]:
    return run("h200")


@pytest.fixture(scope="module")
def steps(run: Any) -> dict[str, Any]:
    return run("step")


@pytest.mark.parametrize("name", NAMED)
def test_resources(compiled: dict[str, Any], name: str) -> None:
    kernels = compiled[name]["kernels"]
    assert set(kernels) == {"paged_decode", "paged_decode_merge"}
    for kernel in kernels.values():
        assert kernel["spills"] == 0
        assert not {"LDL", "STL"} & set(kernel["opcodes"])  # nothing lives in local memory
    assert {"HGMMA", "UTMALDG"} <= set(kernels["paged_decode"]["opcodes"])
    table = TABLE.get(jax.__version__)
    if table is None:
        pytest.skip(f"resources.json is of jax {', '.join(TABLE)}, not {jax.__version__}")
    assert kernels == table[name], (
        f"write it to resources.json if it is meant: {json.dumps(kernels)}"
    )


def test_two_blocks_share_a_core_up_to_head_dim_128(compiled: dict[str, Any]) -> None:
    """Of an H200's core: 233,472 bytes of shared memory, 1,024 more a block; 65,536 registers."""
    for name, config in NAMED.items():
        kernel = compiled[name]["kernels"]["paged_decode"]
        if config.dim <= 128:
            assert 2 * (kernel["shared_memory"] + 1024) <= 233_472
            assert 2 * 128 * kernel["registers"] <= 65_536


@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step(steps: dict[str, Any], name: str) -> None:
    """The kernel and its merge are in it once a layer; the whole state is updated in place."""
    report = steps[name]
    assert report["kernels"] == 2 * report["layers"]
    assert report["fallbacks"] == {}
    assert report["alias_bytes"] == report["state_bytes"]
    assert report["temporary_bytes"] < 100 << 20  # a pool of one layer has 134 MB
