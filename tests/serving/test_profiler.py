"""Profiles: a trace appears where the owner said, one at a time, and ends after its steps."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.core import StepReport
from jaxinfer.errors import ConfigError, InvalidRequest
from serving.profiler import Profiler

STEP = StepReport(1, 1, 1, 0.001)


def work() -> None:
    jax.block_until_ready(jnp.ones(8) + 1)


def events(folder: Path) -> list[dict]:
    (path,) = folder.rglob("*.trace.json.gz")
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_profiles(tmp_path):
    profiler = Profiler(tmp_path / "made" / "here")
    with pytest.raises(InvalidRequest, match="no profile is running"):
        profiler.stop()
    name = profiler.start()
    with pytest.raises(InvalidRequest, match=f"{name} is running"):
        profiler.start()
    work()
    assert profiler.running
    assert profiler.stop() == name
    assert "/" not in name and not profiler.running
    assert events(tmp_path / "made" / "here" / name)

    second = profiler.start(num_steps=2)  # ends by itself
    assert second != name
    work()
    profiler.on_step(STEP)
    assert profiler.running
    profiler.on_step(STEP)
    profiler.on_step(STEP)
    end = time.monotonic() + 30
    while profiler.running and time.monotonic() < end:
        time.sleep(0.01)
    assert events(tmp_path / "made" / "here" / second)
    third = profiler.start(num_steps=5)
    profiler.close()
    profiler.close()
    assert events(tmp_path / "made" / "here" / third) is not None
    assert sorted(p.name for p in (tmp_path / "made" / "here").iterdir()) == [name, second, third]

    with jax.profiler.trace(tmp_path / "other"):  # somebody else in this process
        with pytest.raises(InvalidRequest, match="another profile"):
            profiler.start()
        assert not profiler.running


@pytest.mark.parametrize("steps", [0, -1, 100_001, True, 1.5, "3"])
def test_bad_numbers_of_steps(tmp_path, steps):
    with pytest.raises(InvalidRequest, match=r"num_steps=.*\[1, 100000\]"):
        Profiler(tmp_path).start(steps)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="profile_dir="):
        Profiler(tmp_path / "file" / "below")
