"""Dense MLPs: the feed-forward part of layers that name no other (ModelConfig describes it), those of their
own width (MlpConfig), and the MLP that all tokens share beside experts.

Never looks at requests or files. Called by decoder.py and moe.py.
"""

from __future__ import annotations

import jax

from jaxinfer.configs.ffn import Activation, MlpConfig
from jaxinfer.layers.mlp import mlp
from jaxinfer.layers.scale import scaled
from jaxinfer.model_config import LayerConfig, ModelConfig
from jaxinfer.models.parts import Ffn, Pairs, Params, Tap, View, pair


def pairs(c: ModelConfig, layer: LayerConfig, prefix: str) -> Pairs:
    """gate_up [D, 2F] (gate first; [D, F] where nothing gates), down [F, D] and their biases."""
    return pairs_of(_config(c, layer), c.hidden_size, prefix)


def pairs_of(config: MlpConfig, hidden: int, prefix: str) -> Pairs:
    """`pairs` of one MLP."""
    inner = config.width * (1 + config.activation.gated)
    linears = [
        ("gate_up", config.up, (hidden, inner), ("embed", "gate_up")),
        ("down", (config.down,), (config.width, hidden), ("mlp", "embed")),
    ]
    out = {}
    for name, sources, shape, axes in linears:
        out[name] = pair(shape, axes, *(f"{prefix}{s}.weight" for s in sources))
        if config.bias:
            biases = (f"{prefix}{s}.bias" for s in sources)
            out[f"{name}_bias"] = pair(shape[1:], axes[1:], *biases)
    return out


def _config(c: ModelConfig, layer: LayerConfig) -> MlpConfig:
    if isinstance(layer.ffn, MlpConfig):
        return layer.ffn
    names = c.names
    up = ("gate_up_proj",) if c.fused else (names.gate, names.up)
    up, down = tuple(names.mlp + name for name in up), names.mlp + names.down
    return MlpConfig(c.intermediate_size, Activation(c.activation), up, down, c.mlp_bias)


def apply(
    h: jax.Array, weights: Params, layer: LayerConfig, c: ModelConfig, _view: View, _tap: Tap
) -> jax.Array:
    return output_of(_config(c, layer), h, weights)


def output_of(config: MlpConfig, h: jax.Array, weights: Params) -> jax.Array:
    """`apply` of one MLP."""
    return scaled(mlp(h, weights, config.activation), config.scale)


FFN = Ffn(pairs, apply)
