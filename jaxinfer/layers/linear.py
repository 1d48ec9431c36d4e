"""The one place where the layers write a dense matrix multiplication.

Every projection of every model goes through `linear`, and logits through `unembed`, so that form,
precision and, later, quantized weights are chosen here (and, below, by pallas_kernels).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_kernels


def linear(x: jax.Array, w: jax.Array, b: jax.Array | None = None) -> jax.Array:
    """x[T, D] @ w[D, F] (+ b[F]) in x's dtype."""
    y = pallas_kernels.matmul(x, w)
    return y if b is None else y + b


def unembed(x: jax.Array, w: jax.Array, *, transposed: bool) -> jax.Array:
    """float32 logits [N, V] of x[N, D]; w is [D, V], or the embedding [V, D] if `transposed`."""
    product = pallas_kernels.matmul_t if transposed else pallas_kernels.matmul
    return product(x, w, out_dtype=jnp.float32)
