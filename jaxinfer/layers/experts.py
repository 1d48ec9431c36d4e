"""Experts of a layer on the tokens that chose them: no capacity, no token is ever dropped.

Rows (a token and one of its experts) are sorted by expert, multiplied group by group, and brought
back; a token's sum runs over its experts in the router's order, so nothing depends on who else is
in the step. Pure functions. Called by models/moe.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfer.configs.ffn import Activation
from jaxinfer.layers.linear import full_precision
from jaxinfer.layers.mlp import between


def mix_experts(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    params: dict[str, jax.Array],
    activation: Activation,
    *,
    interleaved: bool,
) -> jax.Array:
    """The weighted sum [T, D] of the outputs of each token's experts, summed in float32.

    x: [T, D]. experts: i32[T, k], weights: f32[T, k] of the router. params: "up" [E, D, F or 2 F],
    "down" [E, F, D] and, where experts have biases, "up_bias" [E, F or 2 F] and "down_bias" [E, D].
    interleaved: gate and up alternate along 2 F; else the gate's half comes first.
    """
    tokens, k = experts.shape
    chosen = experts.reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    by_row = chosen[order]
    sizes = jnp.zeros(len(params["up"]), jnp.int32).at[chosen].add(1)
    rows = x[order // k]
    hidden = _grouped(rows, "up", params, sizes, by_row)
    hidden = between(hidden, activation, interleaved=interleaved)
    out = _grouped(hidden, "down", params, sizes, by_row).astype(jnp.float32)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(tokens * k, dtype=order.dtype))
    out = out[place].reshape(tokens, k, -1) * weights[..., None]
    # Rounded products: fused into the sum they would depend on how many tokens there are.
    out = jax.lax.optimization_barrier(out)
    total = out[:, 0]
    for i in range(1, k):
        total = total + out[:, i]
    return total.astype(x.dtype)


def _grouped(
    x: jax.Array, name: str, params: dict[str, jax.Array], sizes: jax.Array, by_row: jax.Array
) -> jax.Array:
    """Row i of x times the projection `name` of its expert by_row[i], and that expert's bias."""
    with full_precision(x.dtype):
        y = pallas_kernels.grouped_matmul(x, params[name], sizes)
    bias = params.get(f"{name}_bias")
    return y if bias is None else y + bias[by_row]
