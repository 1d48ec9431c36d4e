"""Dense decoders: Llama and its relatives, one forward pass driven by ModelConfig's flags.

Pure functions on arrays; layers are unrolled and each weight is a leaf of its own. Never looks at
requests, devices or files. Reached through models/registry.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfer.cache.spec import CacheSpec, Field, Scope
from jaxinfer.layers.attention import Cache, attend
from jaxinfer.layers.batch import Batch, KindBatch
from jaxinfer.layers.linear import linear, unembed
from jaxinfer.layers.mlp import gated_mlp
from jaxinfer.layers.norm import rms_norm
from jaxinfer.layers.rope import apply_rope, rope_table
from jaxinfer.model_config import LayerConfig, ModelConfig
from jaxinfer.params import ParamSpec, WeightRule
from jaxinfer.rope_config import RopeConfig

Params = dict[str, Any]
Tap = Callable[[str, jax.Array], jax.Array]


def cache_specs(config: ModelConfig, dtype: str) -> tuple[CacheSpec, ...]:
    """One kind for all full layers, then one for each distinct window, smallest first."""
    shape = (config.num_kv_heads, config.head_dim)
    fields = (Field("k", shape, dtype), Field("v", shape, dtype))
    specs = []
    for window in _windows(config):
        layers = tuple(i for i, layer in enumerate(config.layers) if layer.window == window)
        name, scope = (f"window{window}", Scope.WINDOW) if window else ("full", Scope.TOKEN)
        specs.append(CacheSpec(name, scope, layers, fields, window=window))
    return tuple(specs)


def _windows(config: ModelConfig) -> list[int]:
    return sorted({layer.window for layer in config.layers})


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
    c, prefix = config, config.prefix
    embed = f"{prefix}embed_tokens.weight"
    tree = {
        "embed": _pair((c.vocab_size, c.hidden_size), ("vocab", "embed"), embed, transpose=False),
        "layers": [_layer_pairs(c, f"{prefix}layers.{i}.") for i in range(c.num_layers)],
        "final_norm": _pair((c.hidden_size,), ("embed",), f"{prefix}norm.weight"),
    }
    if not c.tied:
        tree["lm_head"] = _pair((c.hidden_size, c.vocab_size), ("embed", "vocab"), "lm_head.weight")
    return jax.tree.map(lambda pair: pair[which], tree, is_leaf=lambda x: isinstance(x, tuple))


def _layer_pairs(c: ModelConfig, prefix: str) -> dict[str, tuple[ParamSpec, WeightRule]]:
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    d, f, attn, mlp = c.hidden_size, c.intermediate_size, prefix + "self_attn.", prefix + "mlp."
    qkv = ["qkv_proj"] if c.fused else ["q_proj", "k_proj", "v_proj"]
    gate_up = ["gate_up_proj"] if c.fused else ["gate_proj", "up_proj"]
    qkv, gate_up = [attn + n for n in qkv], [mlp + n for n in gate_up]
    linears = [
        ("qkv", qkv, (d, heads + 2 * kv), ("embed", "qkv"), c.qkv_bias),
        ("o", [attn + "o_proj"], (heads, d), ("heads", "embed"), c.o_bias),
        ("gate_up", gate_up, (d, 2 * f), ("embed", "gate_up"), c.mlp_bias),
        ("down", [mlp + "down_proj"], (f, d), ("mlp", "embed"), c.mlp_bias),
    ]
    pairs = {}
    for name, sources, shape, axes, bias in linears:
        pairs[name] = _pair(shape, axes, *(s + ".weight" for s in sources))
        if bias:
            pairs[f"{name}_bias"] = _pair(shape[1:], axes[1:], *(s + ".bias" for s in sources))
    for name, source in _NORMS[c.placement].items():
        pairs[name] = _pair((d,), ("embed",), f"{prefix}{source}.weight")
    if c.qk_norm != "none":
        full = c.qk_norm == "full"
        for name, width in (("q_norm", heads), ("k_norm", kv)):
            shape = (width if full else c.head_dim,)
            pairs[name] = _pair(shape, (None,), f"{attn}{name}.weight")
    return pairs


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


def _pair(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *sources: str,
    transpose: bool | None = None,
) -> tuple[ParamSpec, WeightRule]:
    # Checkpoints hold [out, in]: several sources are joined along `out`, then turned.
    turn = len(shape) == 2 if transpose is None else transpose
    return ParamSpec(shape, axes), WeightRule(sources, concat=0, transpose=turn)


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
    """
    kind_of = {window: batch.kinds[i] for i, window in enumerate(_windows(config))}
    tables: dict[RopeConfig | None, Any] = {
        r: rope_table(r, batch.positions, batch.rope_length) for r in config.ropes
    }
    tables[None] = None
    x = _scaled(params["embed"][batch.tokens], config.embed_scale)
    x = x if tap is None else tap("embed", x)
    out_caches = []
    for i, (layer, weights) in enumerate(zip(config.layers, params["layers"], strict=True)):
        inputs = (x, weights, caches[i], kind_of[layer.window], tables[layer.rope], batch)
        if tap is None:
            cache, x = _traced_once(layer, config, pallas_kernels.get_impl(), *inputs)
        else:
            cache, x = _layer(layer, config, *inputs, tap=partial(_prefixed, tap, f"layers.{i}."))
        out_caches.append(cache)
    x = rms_norm(x, params["final_norm"], config.norm_eps, config.norm)
    return out_caches, x if tap is None else tap("final_norm", x)


def _layer(
    layer: LayerConfig,
    config: ModelConfig,
    x: jax.Array,
    weights: Params,
    cache: Cache,
    kind: KindBatch,
    table: tuple[jax.Array, jax.Array] | None,
    batch: Batch,
    *,
    tap: Tap,
) -> tuple[Cache, jax.Array]:
    """One layer on x[T, D]: (its cache with the new entries, its output[T, D])."""
    h = tap("attn_in", _norm(x, weights, "attn_norm", config))
    q, k, v = _qkv(h, weights, config)
    if table is not None:
        q, k = (apply_rope(y, *table) for y in (q, k))
    q = _grown(q, config, batch)
    q, k, v = tap("q", q), tap("k", k), tap("v", v)
    cache, out = attend(
        q,
        k,
        v,
        cache,
        kind,
        batch,
        scale=config.scale,
        window=layer.window,
        softcap=config.attention_softcap,
    )
    out = linear(out.reshape(len(x), -1), weights["o"], weights.get("o_bias"))
    x = x + tap("attn_out", _branch(out, weights, "attn_post_norm", config))
    out = gated_mlp(_norm(x, weights, "mlp_norm", config), weights, config.activation)
    x = x + tap("mlp_out", _branch(out, weights, "mlp_post_norm", config))
    return cache, tap("out", x)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _traced_once(
    layer: LayerConfig, config: ModelConfig, impl: str, *inputs: Any
) -> tuple[Cache, jax.Array]:
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


def _qkv(x: jax.Array, weights: Params, c: ModelConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q[T, H, head_dim] and k, v[T, kv_heads, head_dim] of one layer, normed but not yet turned."""
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv = linear(x, weights["qkv"], weights.get("qkv_bias"))
    q, k, v = jnp.split(qkv, [heads, heads + kv], axis=-1)
    if c.qk_norm == "full":
        q, k = _norm(q, weights, "q_norm", c), _norm(k, weights, "k_norm", c)
    q, k, v = (y.reshape(len(x), -1, c.head_dim) for y in (q, k, v))
    if c.qk_norm == "head":
        q, k = _norm(q, weights, "q_norm", c), _norm(k, weights, "k_norm", c)
    return q, k, v


def _grown(q: jax.Array, c: ModelConfig, batch: Batch) -> jax.Array:
    """q[T, H, head_dim] scaled by position, where the model does so (query_growth)."""
    beta, length = c.query_growth
    if not beta:
        return q
    growth = 1.0 + beta * jnp.log1p(jnp.floor(batch.positions / length))
    return q * growth[:, None, None].astype(q.dtype)


def _norm(x: jax.Array, weights: Params, name: str, c: ModelConfig) -> jax.Array:
    """x normed by the leaf `name`, or x itself where the placement has no such norm."""
    weight = weights.get(name)
    return x if weight is None else rms_norm(x, weight, c.norm_eps, c.norm)


def _branch(x: jax.Array, weights: Params, post_norm: str, c: ModelConfig) -> jax.Array:
    return _scaled(_norm(x, weights, post_norm, c), c.residual_scale)


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    if scale == 1.0:
        return x
    # The factor is rounded to x's dtype first, as published models were trained. The barrier keeps the product
    # from being fused into a following sum: whether XLA does that depends on the number of tokens.
    return jax.lax.optimization_barrier(x * jnp.asarray(scale, x.dtype))


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
