"""The native CPU kernels: built once with the machine's C++ compiler and called through jax.ffi.

Optional: without a compiler `load` says why and the ops stay with the reference. Never builds at
import, only when an op is first traced on a CPU. Derivatives are those of the reference.
Called by dispatch.py and ops.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import reference, sparse

_SOURCES = Path(__file__).parent / "cpu"
_TARGETS = (
    "jaxinfer_matmul",
    "jaxinfer_grouped_matmul",
    "jaxinfer_paged_attention",
    "jaxinfer_latent_attention",
    "jaxinfer_selected_attention",
    "jaxinfer_index_select",
    "jaxinfer_kv_write",
    "jaxinfer_page_write",
    "jaxinfer_rms_norm",
    "jaxinfer_delta",
    "jaxinfer_conv",
)
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-w")
_BUILD_SECONDS = 300
_lock = threading.Lock()


class BuildError(RuntimeError):
    """The native kernels cannot be had on this machine; the message says why."""


def load() -> str:
    """Build (or find) the library, load it and register its targets, once; returns its path.

    Raises:
        BuildError: no compiler, or one that cannot build or load the kernels (kept: no second try).
    """
    with _lock:  # `cache` alone would let two threads build and register
        result = _load()
    if isinstance(result, BuildError):
        raise result
    return result


@cache
def _load() -> str | BuildError:
    try:
        return _build_and_register()
    except BuildError as error:
        return error


def _build_and_register() -> str:
    path = _build(find_compiler(), cache_dir())
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        library = _rebuilt(path)
    for target in _TARGETS:
        capsule = jax.ffi.pycapsule(getattr(library, target))
        jax.ffi.register_ffi_target(target, capsule, platform="cpu")
    return str(path)


def _rebuilt(path: Path) -> ctypes.CDLL:
    """A file that does not load was cut short or damaged: it is made once more."""
    try:
        path.unlink()
        return ctypes.CDLL(str(_build(find_compiler(), cache_dir())))
    except OSError as error:
        raise BuildError(f"the built kernels do not load: {error}") from error


def find_compiler(names: Sequence[str] = _COMPILERS) -> str:
    """Path of the first compiler found; BuildError when there is none."""
    for name in names:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler ({', '.join(names)}) is installed; install g++")


def cache_dir() -> Path:
    """Where built libraries are kept between runs, for this user only; BuildError without a home."""
    try:
        return Path.home() / ".cache" / "jaxinfer" / "kernels"
    except RuntimeError as error:
        raise BuildError(f"there is no place to keep the kernels: {error}") from error


def _build(compiler: str, directory: Path) -> Path:
    """The library for these sources, this compiler and this CPU, built unless it is there."""
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    command = [compiler, *_FLAGS, native, "-I", jax.ffi.include_dir(), str(_SOURCES / "module.cc")]
    try:
        target = directory / f"kernels-{_key(command)}.so"
        if target.exists():
            return target
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as work:
            built = Path(work) / target.name
            run = subprocess.run(
                [*command, "-o", str(built)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_BUILD_SECONDS,
                check=False,
            )
            if run.returncode:
                raise BuildError(f"{compiler} failed to build the kernels: {run.stderr[-2000:]}")
            os.replace(built, target)  # atomic: several processes may build at once
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"building the kernels in {directory} failed: {error}") from error
    return target


def _key(command: Sequence[str]) -> str:
    """Hash of all that decides the result: sources, headers' version, compiler, flags, CPU."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    version = subprocess.run(
        [command[0], "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    for part in (*command, version.stdout, jax.__version__, _cpu()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() + platform.machine()
    kept = ("model name", "flags", "Features", "CPU part")
    lines = info.read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(kept))


@jax.custom_jvp
def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """float32 x[M, K] @ w[K, N]."""
    result = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32)
    return _call("jaxinfer_matmul", result)(x, w, transposed=False)


@jax.custom_jvp
def matmul_t(x: jax.Array, w: jax.Array) -> jax.Array:
    """float32 x[M, D] @ w[V, D].T."""
    result = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    return _call("jaxinfer_matmul", result)(x, w, transposed=True)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """float32 x[T, D], weight[D]; see ops.rms_norm."""
    return _rms_norm(x, weight, eps)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _rms_norm(x, weight, eps) -> jax.Array:
    call = _call("jaxinfer_rms_norm", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return call(x, weight, eps=np.float32(eps))


def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    tables: jax.Array,
    base: jax.Array,
    start: jax.Array,
    sinks: jax.Array | None,
    *,
    scale: float,
    window: int,
    softcap: float,
) -> jax.Array:
    """See ops.paged_attention; all float arrays are float32."""
    return _attention(q, k_pool, v_pool, tables, base, start, sinks, scale, window, softcap)


@partial(jax.custom_jvp, nondiff_argnums=(7, 8, 9))
def _attention(q, k_pool, v_pool, tables, base, start, sinks, scale, window, softcap) -> jax.Array:
    attrs = {
        "window": np.int64(window),
        "scale": np.float32(scale),
        "softcap": np.float32(softcap),
    }
    sinks = jnp.zeros(0, jnp.float32) if sinks is None else sinks
    call = _call("jaxinfer_paged_attention", jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(q, k_pool, v_pool, tables, base, start, sinks, **attrs)


def latent_attention(
    q: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    base: jax.Array,
    start: jax.Array,
    *,
    value_dim: int,
    scale: float,
) -> jax.Array:
    """See ops.latent_attention; all float arrays are float32."""
    return _latent_attention(q, pool, tables, base, start, value_dim, scale)


@partial(jax.custom_jvp, nondiff_argnums=(5, 6))
def _latent_attention(q, pool, tables, base, start, value_dim, scale) -> jax.Array:
    result = jax.ShapeDtypeStruct((*q.shape[:3], value_dim), jnp.float32)
    call = _call("jaxinfer_latent_attention", result)
    return call(q, pool, tables, base, start, scale=np.float32(scale))


def selected_attention(
    q: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    base: jax.Array,
    chosen: jax.Array,
    *,
    value_dim: int,
    scale: float,
) -> jax.Array:
    """See ops.selected_attention; all float arrays are float32."""
    return _selected_attention(q, pool, tables, base, chosen, value_dim, scale)


@partial(jax.custom_jvp, nondiff_argnums=(5, 6))
def _selected_attention(q, pool, tables, base, chosen, value_dim, scale) -> jax.Array:
    result = jax.ShapeDtypeStruct((*q.shape[:3], value_dim), jnp.float32)
    call = _call("jaxinfer_selected_attention", result)
    return call(q, pool, tables, base, chosen, scale=np.float32(scale))


def index_select(
    q: jax.Array,
    w: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    base: jax.Array,
    start: jax.Array,
    *,
    topk: int,
    scale: float,
) -> jax.Array:
    """See ops.index_select; all float arrays are float32."""
    call = _call("jaxinfer_index_select", jax.ShapeDtypeStruct((*q.shape[:2], topk), jnp.int32))
    return call(q, w, pool, tables, base, start, scale=np.float32(scale))


@jax.custom_jvp
def kv_write(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page: jax.Array,
    offset: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See ops.kv_write; all float arrays are float32."""
    result = jax.ShapeDtypeStruct(k_pool.shape, jnp.float32)
    call = _call("jaxinfer_kv_write", (result, result), input_output_aliases={0: 0, 1: 1})
    k_pool, v_pool = call(k_pool, v_pool, k, v, page, offset)
    return k_pool, v_pool


@jax.custom_jvp
def page_write(pool: jax.Array, x: jax.Array, page: jax.Array, offset: jax.Array) -> jax.Array:
    """See ops.page_write; all float arrays are float32."""
    result = jax.ShapeDtypeStruct(pool.shape, jnp.float32)
    return _call("jaxinfer_page_write", result, input_output_aliases={0: 0})(pool, x, page, offset)


@jax.custom_jvp
def grouped_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """float32 x[M, K], w[E, K, N], sizes i32[E]; see ops.grouped_matmul."""
    result = jax.ShapeDtypeStruct((x.shape[0], w.shape[2]), jnp.float32)
    return _call("jaxinfer_grouped_matmul", result)(x, w, sizes)


def _call(target: str, result: Any, **options: Any) -> Callable[..., Any]:
    return jax.ffi.ffi_call(target, result, vmap_method="sequential", **options)


@_attention.defjvp
def _attention_jvp(scale, window, softcap, primals, tangents):
    options = {"scale": scale, "window": window, "softcap": softcap}
    return jax.jvp(partial(reference.paged_attention, **options), primals, tangents)


@_latent_attention.defjvp
def _latent_attention_jvp(value_dim, scale, primals, tangents):
    options = {"value_dim": value_dim, "scale": scale}
    return jax.jvp(partial(reference.latent_attention, **options), primals, tangents)


@_selected_attention.defjvp
def _selected_attention_jvp(value_dim, scale, primals, tangents):
    options = {"value_dim": value_dim, "scale": scale}
    return jax.jvp(partial(sparse.selected_attention, **options), primals, tangents)


@_rms_norm.defjvp
def _rms_norm_jvp(eps, primals, tangents):
    return jax.jvp(partial(reference.rms_norm, eps=eps), primals, tangents)


kv_write.defjvp(partial(jax.jvp, reference.kv_write))
page_write.defjvp(partial(jax.jvp, reference.page_write))
_FLOAT32 = {"out_dtype": jnp.dtype(jnp.float32)}
matmul.defjvp(partial(jax.jvp, partial(reference.matmul, **_FLOAT32)))
matmul_t.defjvp(partial(jax.jvp, partial(reference.matmul_t, **_FLOAT32)))
grouped_matmul.defjvp(partial(jax.jvp, partial(reference.grouped_matmul, **_FLOAT32)))
