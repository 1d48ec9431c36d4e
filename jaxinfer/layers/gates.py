"""Sigmoid and the decays of states, whose bits do not depend on how many tokens are computed at once.

A compiler rounds exp and log1p differently where it fuses them with their neighbours, and it decides by
the shape. Barriers leave them alone. For narrow arrays of float32 (one value a head); in wide ones whole
vectors are computed in one way, and jax.nn serves.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_sealed = jax.lax.optimization_barrier


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + e^-x)."""
    e = _exp(-jnp.abs(x))
    return _sealed(jnp.where(x >= 0, 1.0, e) / (1.0 + e))


def softplus(x: jax.Array) -> jax.Array:
    """log(1 + e^x)."""
    return _sealed(jnp.maximum(x, 0.0) + _sealed(jnp.log1p(_exp(-jnp.abs(x)))))


def decay(x: jax.Array, bias: jax.Array, rate: jax.Array) -> jax.Array:
    """-e^rate softplus(x + bias): the logarithm of what is kept of a state, in x's shape."""
    return _sealed(-_exp(rate) * softplus(_sealed(x + bias)))


def bounded_decay(x: jax.Array, bias: jax.Array, rate: jax.Array, lower: float) -> jax.Array:
    """lower sigmoid(e^rate (x + bias)): the same, never below `lower`."""
    return _sealed(lower * sigmoid(_sealed(_exp(rate) * _sealed(x + bias))))


def _exp(x: jax.Array) -> jax.Array:
    return _sealed(jnp.exp(_sealed(x)))
