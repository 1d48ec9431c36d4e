"""The one place where a dense matrix multiplication is written.

Every projection of every model goes through `linear` (or `unembed`), so that its form, precision
and, later, quantized weights are chosen here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def _precision(dtype: jnp.dtype) -> lax.Precision | None:
    # Accelerators round float32 operands (TF32, bfloat16) unless told not to.
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def linear(x: jax.Array, w: jax.Array, b: jax.Array | None = None) -> jax.Array:
    """x[..., D] @ w[D, F] (+ b[F]) in x's dtype."""
    y = jnp.matmul(x, w, precision=_precision(x.dtype))
    return y if b is None else y + b


def unembed(x: jax.Array, w: jax.Array, *, transposed: bool) -> jax.Array:
    """float32 logits [N, V] of x[N, D]; w is [D, V], or the embedding [V, D] if `transposed`."""
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(
        x, w, dims, precision=_precision(x.dtype), preferred_element_type=jnp.float32
    )
