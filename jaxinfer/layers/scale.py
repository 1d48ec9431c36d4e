"""Products by a fixed factor whose rounding does not depend on the step.

Called by models and other layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """x times `factor`, rounded to x's dtype."""
    if factor == 1.0:
        return x
    # The factor is rounded to x's dtype first, as published models were trained.
    return rounded(x * jnp.asarray(factor, x.dtype))


def rounded(product: jax.Array) -> jax.Array:
    """`product`, kept from being fused into a following sum: whether XLA does that depends on the number
    of tokens."""
    return jax.lax.optimization_barrier(product)
