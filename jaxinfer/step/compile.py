"""Executables of the shape ladder: compiled once each, counted, and kept in the persistent cache.

`Executables` is the only place that compiles in service. A shape off the ladder is an error; so is,
in strict mode, a compilation after warm-up.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from jaxinfer.errors import CapacityError
from jaxinfer.layout import StepShape
from jaxinfer.step.forward import StepModel, load, step
from jaxinfer.step.pack import LOAD_SIZE, buffer_size
from jaxinfer.step.state import DeviceState

log = logging.getLogger(__name__)
MAX_COMPILERS = 4  # rungs that compile at once: each takes a core and some hundred MB
DEFAULT_CACHE = Path.home() / ".cache" / "jaxinfer" / "xla"


_chosen: list[str | None] = []  # the folder that jaxinfer set last, if it did
_given: list[str] = []  # the user's own folder, if there is one


def enable_compile_cache(folder: str | None) -> Path | None:
    """Switch on JAX's persistent compilation cache, for the whole process; returns its folder.

    "" switches it off. None takes the folder that the user gave JAX (JAX_COMPILATION_CACHE_DIR, or
    jax.config), else the default. Other folders get a subfolder whose name has the versions, backend and
    CPU features in it, so that an executable is never read by a machine or a version that did not
    make it. A bad entry only costs a compilation, and a folder that cannot be written to a warning:
    service goes on without the cache. Everything is kept, however small.
    """
    current = jax.config.jax_compilation_cache_dir
    if [current] != _chosen:  # set by somebody else since
        _given[:] = [current] if current else []
    if folder is None and _given:
        path = Path(_given[0])
    else:
        path = (
            None if folder == "" else (Path(folder) if folder else DEFAULT_CACHE) / _fingerprint()
        )
    if path is not None and (reason := _unusable(path)):
        log.warning("compile_cache=%r cannot be used (%s); nothing is kept", str(path), reason)
        path = None
    wanted = None if path is None else str(path)
    if current != wanted:
        compilation_cache.reset_cache()  # JAX keeps the folder that it opened first
        jax.config.update("jax_compilation_cache_dir", wanted)
    _chosen[:] = [wanted]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


def _unusable(folder: Path) -> str:
    """Why a folder cannot hold the cache, or ""."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return "" if os.access(folder, os.W_OK | os.X_OK) else "it may not be written to"


def ensure_compile_cache() -> None:
    """Switch the cache on where no engine has decided about it yet (research has no EngineConfig)."""
    if not _chosen:
        enable_compile_cache(None)


def _fingerprint() -> str:
    parts = [jax.__version__, version("jaxlib"), jax.default_backend(), platform.machine()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        parts += sorted(
            {line for line in lines if line.startswith(("flags", "model name", "Features"))}
        )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


class Executables:
    """step and load for every rung, compiled on first use or by `warm_up`."""

    def __init__(
        self,
        model: StepModel,
        ladder: list[StepShape],
        params: Any,
        state: DeviceState,
        strict: bool,
    ) -> None:
        self.model = model
        self.ladder = ladder
        self.compiles = 0
        self.compile_seconds = 0.0
        self.warm = False
        self._strict = strict
        self._lock = threading.Lock()  # of the counters, while several rungs compile
        self._params = jax.tree.map(_abstract, params)
        self._state = jax.tree.map(_abstract, state)
        self._steps: dict[StepShape, Any] = {}
        self._load: Any = None

    def step(self, shape: StepShape) -> Any:
        """The executable of a rung: (params, state, buffer) -> (state, (result, scored))."""
        compiled = self._steps.get(shape)
        if compiled is None:
            if shape not in self.ladder:
                raise CapacityError(f"step shape {shape} is not on the ladder {self.ladder}")
            run = functools.partial(step, self.model, shape)
            named = f"step_{shape.rows}_rows_{shape.blocks}_blocks"
            run.__name__ = named  # type: ignore[attr-defined]  # what profiles show
            size = buffer_size(shape, self.model.layout)
            compiled = self._compile(
                f"the rung {shape}", run, (self._params, self._state), size, donate=1
            )
            self._steps[shape] = compiled
        return compiled

    def load(self) -> Any:
        """The executable of a LoadPlan: (state, buffer) -> state."""
        if self._load is None:
            self._load = self._compile("load", load, (self._state,), LOAD_SIZE, donate=0)
        return self._load

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile everything that service can need, several rungs at once."""
        workers = min(MAX_COMPILERS, os.cpu_count() or 1)
        with ThreadPoolExecutor(workers, thread_name_prefix="jaxinfer-compile") as pool:
            jobs = [pool.submit(self.step, shape) for shape in self.ladder]
            jobs.append(pool.submit(self.load))
            try:
                for i, job in enumerate(as_completed(jobs), start=1):
                    job.result()
                    if progress:
                        progress(i, len(jobs))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        self.warm = True

    def _compile(self, what: str, function: Callable, args: tuple, size: int, donate: int) -> Any:
        if self.warm and self._strict:
            raise CapacityError(f"{what} would compile after warm-up, which strict_compile forbids")
        start = time.perf_counter()
        buffer = jax.ShapeDtypeStruct((size,), jnp.int32)
        compiled = jax.jit(function, donate_argnums=donate).lower(*args, buffer).compile()
        with self._lock:
            self.compiles += 1
            self.compile_seconds += time.perf_counter() - start
        return compiled


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
