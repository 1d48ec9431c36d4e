"""The one place where the layers write a dense matrix multiplication.

Every projection of every model goes through `linear`, and logits through `unembed`, so that form,
precision and, later, quantized weights are chosen here (and, below, by pallas_kernels).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import pallas_kernels


def full_precision(dtype: DTypeLike) -> AbstractContextManager[object]:
    """While tracing: products of float32 operands are not rounded (a GPU would take TF32)."""
    exact = jnp.dtype(dtype) == jnp.float32
    return jax.default_matmul_precision("highest") if exact else nullcontext()


def linear(x: jax.Array, w: jax.Array, b: jax.Array | None = None) -> jax.Array:
    """x[T, D] @ w[D, F] (+ b[F]) in x's dtype."""
    with full_precision(x.dtype):
        y = pallas_kernels.matmul(x, w)
    return y if b is None else y + b


def head_linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """[T, H, F]: head h of x[T, H, D] @ w[h] of w[H, D, F], in x's dtype."""
    with full_precision(x.dtype):
        return pallas_kernels.head_matmul(x, w)


def unembed(x: jax.Array, w: jax.Array, *, transposed: bool) -> jax.Array:
    """float32 logits [N, V] of x[N, D]; w is [D, V], or the embedding [V, D] if `transposed`."""
    product = pallas_kernels.matmul_t if transposed else pallas_kernels.matmul
    with full_precision(x.dtype):
        return product(x, w, out_dtype=jnp.float32)
