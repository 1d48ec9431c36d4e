"""Kernels as ops: a jnp definition of right, faster forms, and the choice between them.

Knows nothing of the engine: never imports jaxinfer. The layers call the ops; `jaxinfer doctor`
prints `describe()`. Every op takes impl="auto" | "reference" | "native" (a static string).
"""

from pallas_kernels.dispatch import describe, fallbacks, get_impl, set_impl
from pallas_kernels.ops import (
    grouped_matmul,
    head_matmul,
    index_select,
    kv_write,
    latent_attention,
    matmul,
    matmul_t,
    page_write,
    paged_attention,
    rms_norm,
    selected_attention,
)
from pallas_kernels.recurrent import (
    EXACT,
    conv_chunk,
    conv_step,
    delta_chunk,
    delta_exact,
    delta_step,
    pending_width,
)

__all__ = [
    "EXACT",
    "conv_chunk",
    "conv_step",
    "delta_chunk",
    "delta_exact",
    "delta_step",
    "describe",
    "fallbacks",
    "get_impl",
    "grouped_matmul",
    "head_matmul",
    "index_select",
    "kv_write",
    "latent_attention",
    "matmul",
    "matmul_t",
    "page_write",
    "paged_attention",
    "pending_width",
    "rms_norm",
    "selected_attention",
    "set_impl",
]
