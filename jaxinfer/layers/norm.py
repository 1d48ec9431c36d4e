"""RMS norms in three ways to apply the weight, and the layer norm; all with float32 statistics.

The three differ only in rounding (A, B) and in the weight's zero (C). Called by models and by q/k norms.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfer.layers.linear import linear


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, kind: str) -> jax.Array:
    """Normalize the last axis of `x`; the result has x's dtype.

    kind: "A" weight * cast(normed), "B" cast(weight * normed), "C" cast((1 + weight) * normed).
    """
    if x.dtype == jnp.float32:  # one rounding: A and B are the same
        return pallas_kernels.rms_norm(x, 1.0 + weight if kind == "C" else weight, eps)
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    if kind == "A":
        return weight * normed.astype(x.dtype)
    weight = weight.astype(jnp.float32)
    return (normed * (weight if kind == "B" else 1.0 + weight)).astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis, in float32, cast to x's dtype."""
    # The mean as a product: how XLA orders the sums of a row depends on the number of rows.
    dim, x32 = x.shape[-1], x.astype(jnp.float32).reshape(-1, x.shape[-1])
    centred = x32 - linear(x32, jnp.full((dim, 1), 1 / dim, jnp.float32))
    normed = pallas_kernels.rms_norm(centred, weight.astype(jnp.float32), eps)
    return (normed + bias.astype(jnp.float32)).reshape(x.shape).astype(x.dtype)
