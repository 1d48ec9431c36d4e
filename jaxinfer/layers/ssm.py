"""The element-wise parts of state spaces: the time step, what it makes of the recurrence, the gated norm.

All in float32. The recurrence itself is layers/delta.py. Called by models/ssm.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfer.layers.elementwise import alone
from jaxinfer.layers.scale import rounded


def time_steps(dt: jax.Array, bias: jax.Array, limits: tuple[float, float]) -> jax.Array:
    """f32[T, H] softplus(dt + bias) between `limits` of dt[T, H] and bias f32[H]."""
    steps = alone(jax.nn.softplus, dt.astype(jnp.float32) + bias)
    return jnp.clip(steps, *limits)


def skip(o: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
    """o + weight x of o and x f32[T, H, P] and weight f32[H]."""
    return o + rounded(x * weight[:, None])


def gated_norm(
    y: jax.Array, z: jax.Array, weight: jax.Array | None, groups: int, eps: float, order: str
) -> jax.Array:
    """y f32[T, N] gated by silu of z[T, N] and normed within each of `groups` equal parts; in z's dtype.

    order: "gate_first": weight * norm(y * silu(z)); "norm_first": weight * norm(y) * silu(z); "none": the
    gate alone, with weight None.
    """
    gate = jax.nn.silu(z.astype(jnp.float32))
    if weight is None:
        return (y * gate).astype(z.dtype)
    if order == "gate_first":
        return weight * _normed(rounded(y * gate), groups, eps).astype(z.dtype)
    return (_normed(y, groups, eps) * weight.astype(jnp.float32) * gate).astype(z.dtype)


def _normed(y: jax.Array, groups: int, eps: float) -> jax.Array:
    parts = y.reshape(len(y), groups, -1)
    one = jnp.ones(parts.shape[-1], jnp.float32)
    return pallas_kernels.rms_norm(parts, one, eps).reshape(y.shape)
