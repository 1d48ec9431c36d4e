"""Lightning attention (LightningConfig) as the mixer of a layer.

Taps "q", "k", "v" (as they enter the recurrence) and "mixed" (its output, not yet normed). Never looks at
requests or files. Called by decoder.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.cache.spec import CacheSpec, Scope
from jaxinfer.configs.lightning import LightningConfig
from jaxinfer.layers.delta import recur, state_fields
from jaxinfer.layers.linear import linear
from jaxinfer.layers.mlp import activate
from jaxinfer.layers.norm import rms_norm
from jaxinfer.model_config import LayerConfig, ModelConfig
from jaxinfer.models.parts import STATE, Cache, Mixer, Pairs, Params, Tap, View, pair


def pairs(c: ModelConfig, _layer: LayerConfig, prefix: str) -> Pairs:
    """qkv [D, 3 H hd] (head by head q, k, v), gate [D, H hd], full_norm [H hd], out [H hd, D]."""
    d, wide, at = c.hidden_size, c.num_heads * c.head_dim, prefix + c.names.attn
    return {
        "qkv": pair((d, 3 * wide), ("embed", "qkv"), f"{at}qkv_proj.weight"),
        "gate": pair((d, wide), ("embed", "heads"), f"{at}output_gate.weight"),
        "full_norm": pair((wide,), ("heads",), f"{at}norm.weight"),
        "out": pair((wide, d), ("heads", "embed"), f"{at}out_proj.weight"),
    }


def kinds(c: ModelConfig, _layer: LayerConfig, _dtype: str) -> tuple[CacheSpec, ...]:
    sizes = (c.num_heads, c.head_dim, c.num_heads, c.head_dim)
    fields = state_fields(*sizes, by_channel=False, rule=False, replay=c.replay)
    return (CacheSpec(STATE, Scope.STATE, (), fields),)


def apply(
    h: jax.Array,
    weights: Params,
    cache: Cache,
    layer: LayerConfig,
    c: ModelConfig,
    view: View,
    tap: Tap,
) -> tuple[Cache, jax.Array, dict[str, jax.Array]]:
    m = layer.mixer
    assert isinstance(m, LightningConfig)
    qkv = activate(linear(h, weights["qkv"]), c.activation)
    q, k, v = jnp.split(qkv.reshape(len(h), c.num_heads, -1).astype(jnp.float32), 3, axis=-1)
    q, k, v = tap("q", q), tap("k", k), tap("v", v)
    slopes = jnp.asarray(m.slopes(c.num_heads), jnp.float32)
    g = jnp.broadcast_to(-slopes, (len(h), c.num_heads))
    cache, out = recur(q, k, v, g, None, cache, view.slots, view.batch, c.replay)
    out = tap("mixed", out).reshape(len(h), -1).astype(h.dtype)
    out = rms_norm(out, weights["full_norm"], m.eps, "A")
    out = jax.nn.sigmoid(linear(h, weights["gate"])) * out
    return cache, linear(out, weights["out"]), view.shared


MIXER = Mixer(pairs, kinds, apply)
