"""The dense gated MLP as ModelConfig describes it: the feed-forward part of layers that name no other.

Never looks at requests or files. Called by decoder.py.
"""

from __future__ import annotations

import jax

from jaxinfer.layers.mlp import gated_mlp
from jaxinfer.model_config import LayerConfig, ModelConfig
from jaxinfer.models.parts import Ffn, Pairs, Params, Tap, View, pair


def pairs(c: ModelConfig, _layer: LayerConfig, prefix: str) -> Pairs:
    """gate_up [D, 2F] (gate first), down [F, D] and their biases."""
    d, f, names = c.hidden_size, c.intermediate_size, c.names
    gate_up = ["gate_up_proj"] if c.fused else [names.gate, names.up]
    linears = [
        ("gate_up", gate_up, (d, 2 * f), ("embed", "gate_up")),
        ("down", [names.down], (f, d), ("mlp", "embed")),
    ]
    out = {}
    for name, sources, shape, axes in linears:
        sources = [prefix + names.mlp + source for source in sources]
        out[name] = pair(shape, axes, *(s + ".weight" for s in sources))
        if c.mlp_bias:
            out[f"{name}_bias"] = pair(shape[1:], axes[1:], *(s + ".bias" for s in sources))
    return out


def apply(
    h: jax.Array, weights: Params, _layer: LayerConfig, c: ModelConfig, _view: View, _tap: Tap
) -> jax.Array:
    return gated_mlp(h, weights, c.activation)


FFN = Ffn(pairs, apply)
