"""Compiles functions for an H200 on a machine without one; run as a program by test_compiled.py.

`python -m tests.kernels.gpu.h200 FOLDER NAME...` prints one JSON line a configuration: what ptxas
says of each Mosaic kernel, and the instructions that it is made of. Needs the wheels of
.ci/gpu-compile; FOLDER is where the compiler leaves its files.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

OPCODES = ("HGMMA", "UTMALDG", "LDL", "STL")
_TARGET = Path(__file__).with_name("h200_target.txtpb")


def missing() -> str:
    """Why nothing can be compiled here; "" when it can."""
    wheels = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm")
    absent = []
    for wheel in wheels:
        try:
            version(wheel)
        except PackageNotFoundError:
            absent.append(wheel)
    return f"{', '.join(absent)} not installed: run make test-gpu-compile" if absent else ""


def prepare(folder: Path) -> None:
    """Set what the plugin reads from the environment; call it before JAX is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # no cuDNN, no driver: none is used
    os.environ["LLVM_DISABLE_SYMBOLIZATION"] = "1"  # else each status starts a symbolizer: slow
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
    for what in ("RESOURCES", "PTXAS", "SASS"):
        os.environ[f"MOSAIC_GPU_DUMP_{what}"] = "1"


def compile_for_h200(function: Callable[..., Any], shapes: Any, **jit_options: Any) -> Any:
    """`function` jitted and compiled for one H200; `shapes` are its arguments'."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from pallas_kernels.gpu import compat

    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="h200",
        target_config=_TARGET.read_text(),
        topology="1x1x1",
    )
    device = SingleDeviceSharding(topology.devices[0])
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes)
    with compat.abstract_gpu():
        traced = jax.jit(function, **jit_options).trace(*placed)
        return traced.lower(lowering_platforms=("cuda",)).compile()


def kernels(folder: Path) -> dict[str, dict[str, Any]]:
    """What was compiled since the last call, by kernel; takes the files away."""
    found = {}
    for log in sorted(folder.glob("*.ptxas")):
        name = log.name.removesuffix(".ptxas")
        text = log.read_text()
        stores, loads = map(int, _match(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text))
        launch = folder.joinpath(f"{name}.after_layout_inference.txt").read_text()
        counts = Counter(re.findall(r"\b([A-Z][A-Z0-9]+)[.\s]", _sass(folder, name)))
        found[name.rstrip("0123456789").rstrip("_")] = {
            "registers": int(_match(r"Used (\d+) registers", text)[0]),
            "spills": stores + loads,
            "shared_memory": int(_match(r"dynamic_shared_memory_size %c(\d+)_", launch)[0]),
            "opcodes": {opcode: counts[opcode] for opcode in OPCODES if counts[opcode]},
        }
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    return found


def _sass(folder: Path, name: str) -> str:
    return folder.joinpath(f"{name}.sass_ctrl").read_text()


def _match(pattern: str, text: str) -> tuple[str, ...]:
    if found := re.search(pattern, text):
        return found.groups()
    raise ValueError(f"the compiler's report has no {pattern!r}: {text[:500]}")


def main(folder: Path, names: list[str]) -> None:
    from tests.kernels.gpu.configs import NAMED

    for name in names or list(NAMED):
        start = time.perf_counter()
        compiled = compile_for_h200(NAMED[name].call, NAMED[name].shapes())
        report = {
            "name": name,
            "kernels": kernels(folder),
            "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
            "seconds": round(time.perf_counter() - start, 1),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
    main(Path(sys.argv[1]), sys.argv[2:])
