"""Decoders of every supported family: one forward pass over layers that each name a mixer and a
feed-forward part.

Pure functions on arrays; layers are unrolled and each weight is a leaf of its own. Never looks at
requests, devices or files. Reached through models/registry.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfer.cache.spec import CacheSpec, Scope
from jaxinfer.configs.delta import DeltaConfig, KdaConfig
from jaxinfer.configs.ffn import MlpConfig, MoeConfig
from jaxinfer.configs.latent import LatentConfig
from jaxinfer.configs.lightning import LightningConfig
from jaxinfer.configs.shortconv import ShortConvConfig
from jaxinfer.configs.ssm import ParallelConfig, SsmConfig
from jaxinfer.layers.batch import Batch
from jaxinfer.layers.linear import unembed
from jaxinfer.layers.rope import rope_table
from jaxinfer.layers.scale import scaled
from jaxinfer.model_config import (
    FfnConfig,
    LayerConfig,
    MixerConfig,
    ModelConfig,
    NoFfn,
    NoMixer,
)
from jaxinfer.models import attention, delta, latent, lightning, mlp, moe, shortconv, ssm
from jaxinfer.models.parts import Cache, Ffn, Mixer, Pairs, Params, Tap, View, norm, pair
from jaxinfer.params import WeightRule
from jaxinfer.rope_config import RopeConfig

# How each kind of configuration is computed; None is what ModelConfig itself describes.
MIXERS: dict[type[MixerConfig] | type[None], Mixer] = {type(None): attention.MIXER}
MIXERS |= {DeltaConfig: delta.MIXER, KdaConfig: delta.KDA}
MIXERS[LatentConfig] = latent.MIXER
MIXERS |= {SsmConfig: ssm.MIXER, ParallelConfig: ssm.PARALLEL}
MIXERS |= {ShortConvConfig: shortconv.MIXER, LightningConfig: lightning.MIXER}
FFNS: dict[type[FfnConfig] | type[None], Ffn] = {type(None): mlp.FFN, MlpConfig: mlp.FFN}
FFNS[MoeConfig] = moe.FFN
_SCOPES = (Scope.TOKEN, Scope.WINDOW, Scope.STATE)


def cache_specs(config: ModelConfig, dtype: str) -> tuple[CacheSpec, ...]:
    """The kinds of all layers: TOKEN kinds, then windows, smallest first, then STATE kinds."""
    found: dict[str, CacheSpec] = {}
    for i, layer in enumerate(config.layers):
        if isinstance(layer.mixer, NoMixer):
            continue
        for spec in MIXERS[type(layer.mixer)].kinds(config, layer, dtype):
            known = found.get(spec.name, spec)
            assert replace(known, layers=()) == spec, (
                f"two different kinds are called {spec.name!r}"
            )
            found[spec.name] = replace(known, layers=(*known.layers, i))
    return tuple(sorted(found.values(), key=lambda s: (_SCOPES.index(s.scope), s.window)))


def param_specs(config: ModelConfig) -> Params:
    """Tree of ParamSpec: linear leaves are [in, out], the embedding is [vocab, hidden]."""
    return _tree(config, 0)


def weight_rules(config: ModelConfig) -> Params:
    """Tree of WeightRule with the structure of param_specs."""
    return _tree(config, 1)


def ignored_tensors(config: ModelConfig) -> list[re.Pattern[str]]:
    """Tensors that some checkpoints carry and that the model does not need."""
    patterns = [r".*rotary_emb\.inv_freq$", *config.ignored]
    if config.tied:
        patterns.append(r"(.*\.)?lm_head\.weight$")
    return [re.compile(p) for p in patterns]


def _tree(config: ModelConfig, which: int) -> Params:
    """Build every leaf as a (ParamSpec, WeightRule) pair and keep one side."""
    c, names = config, config.names
    embed = f"{c.prefix}{names.embed}.weight"
    tree = {
        "embed": pair((c.vocab_size, c.hidden_size), ("vocab", "embed"), embed, transpose=False),
        "layers": [_layer_pairs(c, i) for i in range(c.num_layers)],
        "final_norm": pair((c.hidden_size,), ("embed",), f"{c.prefix}{names.final_norm}.weight"),
    }
    if not c.tied:
        head = f"{names.lm_head}.weight"
        tree["lm_head"] = pair((c.hidden_size, c.vocab_size), ("embed", "vocab"), head)
    return jax.tree.map(lambda leaf: leaf[which], tree, is_leaf=lambda x: isinstance(x, tuple))


def _layer_pairs(c: ModelConfig, index: int) -> Pairs:
    layer, prefix = c.layers[index], c.prefix + c.names.layer.format(i=index)
    out: Pairs = {}
    if not isinstance(layer.mixer, NoMixer):
        out |= MIXERS[type(layer.mixer)].pairs(c, layer, prefix)
    if not isinstance(layer.ffn, NoFfn):
        out |= FFNS[type(layer.ffn)].pairs(c, layer, prefix)
    norms = layer.norms or c.names.norms or tuple(_NORMS[c.placement].items())
    for name, source, *others in norms:
        missing = NoMixer if name.startswith("attn") else NoFfn
        if not isinstance(layer.mixer, missing) and not isinstance(layer.ffn, missing):
            rules = tuple(WeightRule((f"{prefix}{other}.weight",)) for other in others)
            source = f"{prefix}{source}.weight"
            out[name] = pair((c.hidden_size,), ("embed",), source, others=rules)
    return out


# Leaf -> checkpoint name: where norms stand decides what the same two names mean.
_NORMS = {
    "pre": {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "post": {
        "attn_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "sandwich": {
        "attn_norm": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}


def forward(
    params: Params,
    config: ModelConfig,
    caches: list[Cache],
    batch: Batch,
    tap: Tap | None = None,
) -> tuple[list[Cache], jax.Array]:
    """Run all layers over a step's tokens: (caches with the new entries, hidden[T, D] normed).

    `tap` sees, and may replace, the named values: "embed", "layers.N.{attn_in,q,k,v,attn_out,mlp_out,
    out}" and "final_norm"; q and k come after rope, attn_out and mlp_out just before they are added.
    What mixers other than plain attention tap is said in their files.
    """
    kinds = {spec.name: kind for spec, kind in zip(_specs(config), batch.kinds, strict=True)}
    tables: dict[RopeConfig | None, Any] = {
        r: rope_table(r, batch.positions, batch.rope_length) for r in config.ropes
    }
    tables[None] = None
    x = scaled(params["embed"][batch.tokens], config.embed_scale)
    x = x.astype(jnp.float32) if config.wide_residual else x
    x = x if tap is None else tap("embed", x)
    out_caches, shared = [], {}
    for i, (layer, weights) in enumerate(zip(config.layers, params["layers"], strict=True)):
        view = View(batch, kinds, tables[layer.rope], shared)
        if tap is None:
            impl = pallas_kernels.get_impl()
            cache, x, shared = _traced_once(layer, config, impl, x, weights, caches[i], view)
        else:
            prefixed = partial(_prefixed, tap, f"layers.{i}.")
            cache, x, shared = _layer(layer, config, x, weights, caches[i], view, tap=prefixed)
        out_caches.append(cache)
    x = norm(x, params, "final_norm", config)
    return out_caches, x if tap is None else tap("final_norm", x)


def _specs(config: ModelConfig) -> tuple[CacheSpec, ...]:
    return cache_specs(config, "float32")  # names and order do not depend on the dtype


def _layer(
    layer: LayerConfig,
    config: ModelConfig,
    x: jax.Array,
    weights: Params,
    cache: Cache,
    view: View,
    *,
    tap: Tap,
) -> tuple[Cache, jax.Array, dict[str, jax.Array]]:
    """One layer on x[T, D]: (its cache with the new entries, its output[T, D], what it leaves for others)."""
    shared = view.shared
    if not isinstance(layer.mixer, NoMixer):
        h = tap("attn_in", norm(x, weights, "attn_norm", config))
        mixer = MIXERS[type(layer.mixer)]
        cache, out, shared = mixer.apply(h, weights, cache, layer, config, view, tap)
        out = tap("attn_out", _branch(out, weights, "attn_post_norm", config))
        x = _joined(x, h, out, layer.mixer_factors)
    if not isinstance(layer.ffn, NoFfn):
        h = norm(x, weights, "mlp_norm", config)
        out = FFNS[type(layer.ffn)].apply(h, weights, layer, config, view, tap)
        out = tap("mlp_out", _branch(out, weights, "mlp_post_norm", config))
        x = _joined(x, h, out, layer.ffn_factors)
    return cache, tap("out", x), shared


@partial(jax.jit, static_argnums=(0, 1, 2))
def _traced_once(
    layer: LayerConfig, config: ModelConfig, impl: str, *inputs: Any
) -> tuple[Cache, jax.Array, dict[str, jax.Array]]:
    """`_layer` without taps. Equal layers share one trace and one function of the program, which XLA
    inlines: the step is the same, and Python has a third of the work to make it.

    impl: what the ops read while they are traced, so that the trace is kept under it.
    """
    del impl
    return _layer(layer, config, *inputs, tap=_no_tap)


def _no_tap(_name: str, value: jax.Array) -> jax.Array:
    return value


def _prefixed(tap: Tap, prefix: str, name: str, value: jax.Array) -> jax.Array:
    return tap(prefix + name, value)


def _branch(x: jax.Array, weights: Params, post_norm: str, c: ModelConfig) -> jax.Array:
    return scaled(norm(x, weights, post_norm, c), c.residual_scale)


def _joined(
    x: jax.Array, h: jax.Array, out: jax.Array, factors: tuple[float, float] | None
) -> jax.Array:
    """The residual stream x[T, D] after a branch that yields `out` for the normed h."""
    if factors is None:
        return x + out
    return scaled(h, factors[0]) + scaled(out, factors[1])


def logits(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """f32[N, vocab] of hidden[N, D] (normed by forward), soft-capped where the model says so."""
    if config.tied:
        out = unembed(hidden, params["embed"], transposed=True)
    else:
        out = unembed(hidden, params["lm_head"], transposed=False)
    out = out * config.logits_scale
    if config.final_softcap:
        out = config.final_softcap * jnp.tanh(out / config.final_softcap)
    return out
