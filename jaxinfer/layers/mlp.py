"""The gated feed-forward block: down(act(gate x) * up x), gate and up in one matrix.

Called by models; knows nothing of tokens or caches.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.layers.linear import linear


def activate(x: jax.Array, name: str) -> jax.Array:
    """The activation `name`, one of model_config.ACTIVATIONS, in x's dtype."""
    if name == "silu":
        return jax.nn.silu(x)
    if name == "gelu":
        return jax.nn.gelu(x, approximate=False)
    if name == "gelu_tanh":
        return jax.nn.gelu(x, approximate=True)
    relu = jnp.maximum(x, 0)
    return relu if name == "relu" else relu * relu


def gated_mlp(x: jax.Array, params: dict[str, jax.Array], activation: str) -> jax.Array:
    """x[T, D] through gate_up [D, 2F] (gate first) and down [F, D], with biases where given."""
    gate, up = jnp.split(linear(x, params["gate_up"], params.get("gate_up_bias")), 2, axis=-1)
    return linear(activate(gate, activation) * up, params["down"], params.get("down_bias"))
