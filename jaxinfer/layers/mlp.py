"""Feed-forward blocks: down(act(gate x) * up x), gate and up in one matrix, and down(act(up x)).

Called by models; knows nothing of tokens or caches.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.configs.ffn import Activation
from jaxinfer.layers.linear import linear
from jaxinfer.layers.scale import scaled


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


def between(x: jax.Array, activation: Activation, *, interleaved: bool = False) -> jax.Array:
    """[T, F] from the first projection: x[T, 2 F] (gate and up, alternating if `interleaved`, else the gate's
    half first), or x[T, F] where nothing gates."""
    if not activation.gated:
        return activate(x, activation.name)
    gate, up = (x[:, ::2], x[:, 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    gate = scaled(gate, activation.gate_scale)
    if activation.limit:
        gate = jnp.minimum(gate, activation.limit)
        up = jnp.clip(up, -activation.limit, activation.limit)
    if activation.alpha:
        return (up + 1) * (gate * jax.nn.sigmoid(gate * activation.alpha))
    return activate(gate, activation.name) * up


def mlp(x: jax.Array, params: dict[str, jax.Array], activation: Activation) -> jax.Array:
    """x[T, D] through gate_up [D, 2F] (gate first; [D, F] where nothing gates) and down [F, D], with biases
    where given."""
    hidden = between(linear(x, params["gate_up"], params.get("gate_up_bias")), activation)
    return linear(hidden, params["down"], params.get("down_bias"))
