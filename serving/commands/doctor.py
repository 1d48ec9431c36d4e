"""`jaxinfer doctor`: what is installed, what would be used and why. Exit code 0 when it can run.

Called by cli.py, which hands over the environment variables that matter.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import typer

from serving.commands.generate import AsJson
from serving.present import print_json

PACKAGES = (
    "jaxinfer", "jax", "jaxlib", "flax", "orbax-checkpoint", "numpy", "safetensors", "gguf",
    "tokenizers", "huggingface_hub", "jinja2", "typer", "rich",
)  # fmt: skip
# Extra of pyproject.toml -> modules that it brings.
EXTRAS = {
    "cuda": ("jax_cuda13_plugin",),
    "serve": ("grpc", "starlette", "uvicorn"),
    "demo": ("ipykernel", "matplotlib"),
    "test": ("pytest", "hypothesis", "ruff", "pyright"),
}


def doctor(context: typer.Context, as_json: AsJson = False) -> int:
    """Show versions, devices and what would be used. Exit code 0 when the engine can run."""
    report: dict[str, Any] = {"python": sys.version.split()[0], "packages": _packages()}
    problems = [f"package {name} is missing" for name, v in report["packages"].items() if v is None]
    try:
        report |= _device_side()
    except (ImportError, RuntimeError) as error:  # what JAX raises when it finds no usable backend
        problems.append(f"JAX cannot compute: {error}")
    report["extras"] = {
        extra: {"installed": not (gone := _missing(modules)), "missing": gone}
        for extra, modules in EXTRAS.items()
    }
    report["environment"] = context.obj
    report |= {"usable": not problems, "problems": problems}
    if as_json:
        print_json(report)
    else:
        _print_report(report)
    return 0 if report["usable"] else 1


def _packages() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _missing(modules: tuple[str, ...]) -> list[str]:
    return [name for name in modules if importlib.util.find_spec(name) is None]


def _device_side() -> dict[str, Any]:
    """What only JAX knows; compiles one small program to see that it can."""
    import jax
    import jax.numpy as jnp

    from jaxinfer.loading import compute_dtype
    from jaxinfer.sizing import free_memory
    from jaxinfer.step.compile import enable_compile_cache
    from pallas_kernels import dispatch

    start = time.perf_counter()
    total = float(jax.jit(jnp.sum)(jnp.ones(8)))
    if total != 8.0:
        raise RuntimeError(f"the sum of eight ones came out as {total}")
    seconds = time.perf_counter() - start
    backend, dtype = jax.default_backend(), compute_dtype("auto", "bfloat16")
    free, whose = free_memory()
    why = (
        "bfloat16 arithmetic of this backend is many times slower"
        if backend == "cpu"
        else "the checkpoint's own dtype, here for a bfloat16 checkpoint"
    )
    return {
        "backend": backend,
        "devices": [{"id": d.id, "kind": d.device_kind} for d in jax.local_devices()],
        "cpu_cores": os.cpu_count(),
        "dtype": {"auto": dtype, "why": why},
        "kernels": dispatch.describe(),
        "compile_cache": _cache_state(enable_compile_cache(None)),
        "memory": {"free_bytes": free, "of": whose},
        "first_program_s": round(seconds, 3),
    }


def _cache_state(path: Path | None) -> dict[str, Any]:
    """The compilation cache: entries are only read by the same versions on the same kind of machine."""
    if path is None:
        return {"path": None, "entries": 0, "bytes": 0, "writable": False}
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else []
    existing = next(p for p in (path, *path.parents) if p.exists())
    return {
        "path": str(path),
        "entries": len(files),
        "bytes": sum(p.stat().st_size for p in files),
        "writable": os.access(existing, os.W_OK),
    }


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for key, value in report.items():
        if key not in ("usable", "problems"):
            table.add_row(key, _text(value), style=None)
    console = Console(highlight=False, markup=False)
    console.print(table)
    for problem in report["problems"]:
        console.print(problem, style="red")
    console.print("ready" if report["usable"] else "NOT usable")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{k}: {_text(v).replace(chr(10), ', ')}" for k, v in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(_text(v).replace("\n", ", ") for v in value) or "none"
    return str(value)
