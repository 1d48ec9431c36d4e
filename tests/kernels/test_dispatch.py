"""Which form runs: the switch, the fallback without a compiler, and what doctor is told."""

from __future__ import annotations

import logging
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import dispatch, native


@pytest.fixture
def fresh(monkeypatch):
    """The choice with nothing logged, counted or loaded yet, and put back afterwards."""
    monkeypatch.setattr(dispatch, "_default", "auto")
    monkeypatch.setattr(dispatch, "_logged", set())
    monkeypatch.setattr(dispatch, "_fallbacks", dispatch.Counter())
    native._load.cache_clear()
    yield monkeypatch
    native._load.cache_clear()


def traced(impl: str = "auto", dtype: str = "float32") -> str:
    x = jnp.zeros((2, 2), dtype)
    return str(jax.make_jaxpr(lambda a: pallas_kernels.matmul(a, a, impl=impl))(x))  # type: ignore[arg-type]


def test_the_switch(native_kernels, fresh):
    assert "jaxinfer_matmul" in traced()
    pallas_kernels.set_impl("reference")
    assert "jaxinfer_matmul" not in traced()
    assert "jaxinfer_matmul" in traced("native")
    pallas_kernels.set_impl("native")
    assert "jaxinfer_matmul" in traced()
    assert "jaxinfer_matmul" not in traced("reference")
    assert pallas_kernels.fallbacks() == {}
    with pytest.raises(ValueError, match="'quick' is unknown"):
        pallas_kernels.set_impl("quick")  # type: ignore[arg-type]


def test_without_a_compiler_the_reference_runs_and_says_so_once(fresh, caplog):
    fresh.setattr(native.shutil, "which", lambda name: None)
    x = jnp.arange(4, dtype=jnp.float32).reshape(2, 2)
    with caplog.at_level(logging.WARNING, "jaxinfer.kernels"):
        for _ in range(3):
            np.testing.assert_array_equal(pallas_kernels.matmul(x, x), x @ x)
        pallas_kernels.matmul_t(x, x)
    assert pallas_kernels.fallbacks() == {"matmul": 3, "matmul_t": 1}
    assert [r for r in caplog.records if "no C++ compiler" in r.message] == caplog.records
    assert len(caplog.records) == 1
    told = pallas_kernels.describe()
    assert "no C++ compiler" in told["native"]
    assert told["fallbacks"] == "matmul: 3, matmul_t: 1"


def test_a_compiler_that_fails_is_a_fallback_too(fresh, tmp_path, caplog):
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho cannot do that >&2\nexit 1\n")
    broken.chmod(0o755)
    fresh.setattr(native.shutil, "which", lambda name: str(broken))
    fresh.setattr(native, "cache_dir", lambda: tmp_path / "kernels")
    assert "jaxinfer_matmul" not in traced()
    assert "cannot do that" in caplog.text
    assert list((tmp_path / "kernels").iterdir()) == []


def test_a_compiler_that_cannot_be_asked_is_a_fallback_too(fresh, tmp_path, caplog):
    """It vanishes, hangs, or there is no home folder: the reference runs."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    def hang(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, 60)

    fresh.setattr(native.shutil, "which", lambda name: str(tmp_path / "gone"))
    assert "jaxinfer_matmul" not in traced()
    assert "gone" in caplog.text
    native._load.cache_clear()
    with fresh.context() as patch:
        patch.setattr(native.subprocess, "run", hang)
        with pytest.raises(native.BuildError, match="timed out"):
            native.load()
    native._load.cache_clear()
    fresh.setattr(native.Path, "home", homeless)
    with pytest.raises(native.BuildError, match="home directory"):
        native.load()


def test_threads_build_once(fresh):
    runs = []

    def build() -> str:
        runs.append(time.sleep(0.05))
        return "library"

    fresh.setattr(native, "_build_and_register", build)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: native.load(), range(4))) == {"library"}
    assert len(runs) == 1


def test_other_dtypes_are_counted(native_kernels, fresh, caplog):
    assert "jaxinfer_matmul" not in traced(dtype="bfloat16")
    assert pallas_kernels.fallbacks() == {"matmul": 1}
    assert "float32, not bfloat16" in caplog.text


def test_a_library_is_built_once_for_a_compiler_and_cpu(fresh, tmp_path):
    compiler, folder = tmp_path / "g++", tmp_path / "kernels"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\n'
        f'echo run >> {tmp_path}/runs\nfor last; do :; done\necho built > "$last"\n'
    )
    compiler.chmod(0o755)
    first = native._build(str(compiler), folder)
    assert native._build(str(compiler), folder) == first
    assert (tmp_path / "runs").read_text() == "run\n"
    assert first.read_text() == "built\n"
    assert list(folder.iterdir()) == [first]
    fresh.setattr(native, "_cpu", lambda: "another CPU")
    assert native._build(str(compiler), folder) != first


def test_a_damaged_library_is_built_again(native_kernels, fresh, tmp_path):
    good = Path(native_kernels).read_bytes()
    fresh.setattr(native, "cache_dir", lambda: tmp_path)
    fresh.setattr(native, "_build", lambda compiler, folder: _write_once(folder / "k.so", good))
    registered = []  # a process takes each name once, and it has them already
    fresh.setattr(jax.ffi, "register_ffi_target", lambda name, *_, **__: registered.append(name))
    (tmp_path / "k.so").write_bytes(b"junk")
    assert native.load() == str(tmp_path / "k.so")
    assert (tmp_path / "k.so").read_bytes() == good
    assert tuple(registered) == native._TARGETS


def _write_once(path: Path, content: bytes) -> Path:
    if not path.exists():
        path.write_bytes(content)
    return path


def test_doctor_is_told_where_the_library_is(native_kernels):
    assert pallas_kernels.describe()["native"] == native_kernels
