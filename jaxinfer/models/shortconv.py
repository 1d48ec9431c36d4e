"""Gated short convolutions (ShortConvConfig) as mixers of a layer.

Taps "conv_in" (B * x) and "conv_out". Never looks at requests or files. Called by decoder.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.cache.spec import CacheSpec, Field, Scope
from jaxinfer.configs.shortconv import ShortConvConfig
from jaxinfer.layers.conv import convolve
from jaxinfer.layers.linear import linear
from jaxinfer.layers.scale import rounded
from jaxinfer.model_config import LayerConfig, ModelConfig
from jaxinfer.models.parts import STATE, Cache, Mixer, Pairs, Params, Tap, View, pair


def pairs(c: ModelConfig, layer: LayerConfig, prefix: str) -> Pairs:
    """in [D, 3 D] (B, C, x), conv [D, 1, K], out [D, D], and their biases."""
    m, d, at = _conv(layer), c.hidden_size, f"{prefix}conv."
    out = {
        "in": pair((d, 3 * d), ("embed", "qkv"), f"{at}in_proj.weight"),
        "conv": pair((d, 1, m.kernel), ("heads", None, None), f"{at}conv.weight"),
        "out": pair((d, d), ("heads", "embed"), f"{at}out_proj.weight"),
    }
    if m.bias:
        out["in_bias"] = pair((3 * d,), ("qkv",), f"{at}in_proj.bias")
        out["conv_bias"] = pair((d,), ("heads",), f"{at}conv.bias")
        out["out_bias"] = pair((d,), ("embed",), f"{at}out_proj.bias")
    return out


def kinds(c: ModelConfig, layer: LayerConfig, dtype: str) -> tuple[CacheSpec, ...]:
    field = Field("conv", (_conv(layer).kernel - 1, c.hidden_size), dtype)
    return (CacheSpec(STATE, Scope.STATE, (), (field,)),)


def apply(
    h: jax.Array,
    weights: Params,
    cache: Cache,
    layer: LayerConfig,
    _c: ModelConfig,
    view: View,
    tap: Tap,
) -> tuple[Cache, jax.Array, dict[str, jax.Array]]:
    m = _conv(layer)
    b, c, x = jnp.split(linear(h, weights["in"], weights.get("in_bias")), 3, axis=-1)
    inputs = tap("conv_in", rounded(b * x))
    pool, y = convolve(inputs, weights["conv"], cache["conv"], view.slots, view.batch)
    y = tap("conv_out", y + weights["conv_bias"] if m.bias else y)
    out = linear(c * y, weights["out"], weights.get("out_bias"))
    return cache | {"conv": pool}, out, view.shared


def _conv(layer: LayerConfig) -> ShortConvConfig:
    assert isinstance(layer.mixer, ShortConvConfig)
    return layer.mixer


MIXER = Mixer(pairs, kinds, apply)
