"""Kernels as ops: a jnp definition of right, faster forms, and the choice between them.

Knows nothing of the engine: never imports jaxinfer. The layers call the ops; `jaxinfer doctor`
prints `describe()`. Every op takes impl="auto" | "reference" | "native" (a static string).
"""

from pallas_kernels.dispatch import describe, fallbacks, get_impl, set_impl
from pallas_kernels.ops import kv_write, matmul, matmul_t, paged_attention, rms_norm
from pallas_kernels.recurrent import conv_chunk, conv_step, delta_chunk, delta_step

__all__ = [
    "conv_chunk",
    "conv_step",
    "delta_chunk",
    "delta_step",
    "describe",
    "fallbacks",
    "get_impl",
    "kv_write",
    "matmul",
    "matmul_t",
    "paged_attention",
    "rms_norm",
    "set_impl",
]
