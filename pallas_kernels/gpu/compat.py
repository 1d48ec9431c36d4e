"""Every use of an unstable API by the GPU kernels: Mosaic GPU, its interpreter, abstract devices.

The kernels say here what they mean; what a version of JAX calls it is this file's matter alone.
Works with jax 0.11.2 and 0.12.0.1. Called by the kernels, by dispatch.py and by the tests; never imports a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import config
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

mosaic: Any = mosaic_gpu  # its annotations do not fit its own use
callbacks: Any = gpu_callbacks
SMEM, Barrier, RefUnion = mosaic.SMEM, mosaic.Barrier, mosaic.RefUnion
barrier_wait = mosaic.barrier_wait
commit_smem, wait_smem_to_gmem = mosaic.commit_smem, mosaic.wait_smem_to_gmem
copy_gmem_to_smem, copy_smem_to_gmem = mosaic.copy_gmem_to_smem, mosaic.copy_smem_to_gmem

TILE = mosaic.Layout.WGMMA  # a 2-D array in a warpgroup's registers, as wgmma has it
TILE_ROWS = TILE.reduce(1)  # one value of each of its rows


def kernel(body: Callable[..., None], *, fast_math: bool, **shapes: Any) -> Any:
    """A Mosaic GPU kernel whose blocks of threads are one warpgroup, with row reductions only."""
    params = mosaic.CompilerParams(approx_math=fast_math, reduction_scratch_bytes=0)
    return mosaic.kernel(body, compiler_params=params, **shapes)


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the form that both TMA and wgmma take: 8 rows of 128 bytes, swizzled."""
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = (mosaic.TilingTransform((8, columns)), mosaic.SwizzleTransform(128))
    return SMEM(shape, dtype, transforms=transforms)


def load(ref: Any, layout: Any = TILE) -> jax.Array:
    """The array behind `ref`, in shared memory or not, in registers."""
    return mosaic.load(ref, layout=layout, optimized=False)


def store(ref: Any, value: jax.Array) -> None:
    """Put what is in registers to `ref`, in shared memory or not."""
    if hasattr(mosaic, "store"):  # jax 0.12; before that, a plain assignment took any layout
        mosaic.store(ref, value, optimized=False)
    else:
        ref[...] = value


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    """i32[shape] that counts along `axis`."""
    return mosaic.broadcasted_iota(jnp.int32, shape, axis, layout=TILE)


def full(shape: tuple[int, ...], value: float) -> jax.Array:
    """float32[shape] in registers, every place `value`."""
    return mosaic.layout_cast(
        jnp.full(shape, value, jnp.float32), TILE if len(shape) == 2 else TILE_ROWS
    )


def matmul(a: Any, b: Any, shape: tuple[int, ...]) -> jax.Array:
    """float32[shape]: a @ b by wgmma, both in shared memory."""

    if interpreted():
        load(a)  # the interpreter looks for races in loads, not in wgmma

    def run(acc: Any) -> jax.Array:
        mosaic.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, mosaic.ACC(shape, jnp.float32))


def add_matmul(acc: jax.Array, a: jax.Array, b: Any, spare: Any) -> jax.Array:
    """acc + a @ b with `a` in registers.

    The interpreter knows neither that nor a start value: there `a` goes through `spare`, shared
    memory of a's shape, which on a GPU is None.
    """
    if spare is not None:
        spare[...] = a
        load(b)
        commit_smem()
        return acc + matmul(spare, b, acc.shape)
    return pl.run_state(lambda ref: mosaic.wgmma(ref, a, b))(mosaic.ACC.init(acc))


def interpreted() -> bool:
    """Whether kernels traced now run in the interpreter (see `interpreter`)."""
    return config.pallas_tpu_interpret_mode_context_manager.value is not None


@contextmanager
def interpreter() -> Iterator[Callable[[], bool]]:
    """Kernels traced inside run on this CPU, slowly; yields a question: was there a race so far?"""
    states: list[Any] = []  # one of each kernel that ran; the interpreter keeps the last one only
    make_state = callbacks.GPURaceDetectionState

    def recorded(**options: Any) -> Any:
        states.append(make_state(**options))
        return states[-1]

    callbacks.GPURaceDetectionState = recorded
    try:
        with mosaic.force_gpu_interpret_mode(mosaic.InterpretGPUParams(detect_races=True)):
            yield lambda: any(state.races_found for state in states)
    finally:
        callbacks.GPURaceDetectionState = make_state
        callbacks.reset_gpu_interpret_mode_state()


@contextmanager
def abstract_gpu(kind: str = "NVIDIA H200", cores: int = 132) -> Iterator[None]:
    """Functions traced and lowered inside are for such a GPU, which this machine need not have."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform="gpu")  # type: ignore[attr-defined]
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("gpu",), auto, abstract_device=device)  # type: ignore[call-arg]
    with jax.sharding.use_abstract_mesh(mesh):
        yield
