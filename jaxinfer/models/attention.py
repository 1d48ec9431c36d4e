"""Plain attention (GQA) as ModelConfig describes it: the mixer of layers that name no other.

Window, rope, q/k norms, sinks, an output gate. Never looks at requests or files. Called by
decoder.py and by mixers that contain it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.cache.spec import CacheSpec, Field, Scope
from jaxinfer.layers.attention import attend
from jaxinfer.layers.elementwise import alone
from jaxinfer.layers.linear import linear
from jaxinfer.layers.rope import apply_rope
from jaxinfer.layers.scale import rounded
from jaxinfer.model_config import LayerConfig, ModelConfig
from jaxinfer.models.parts import Cache, Mixer, Pairs, Params, Tap, View, norm, pair


def pairs(c: ModelConfig, _layer: LayerConfig, prefix: str) -> Pairs:
    """qkv [D, (1 or 2) H hd + 2 Hk hd], o [H hd, D], their biases, q_norm, k_norm, sinks."""
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    d, attn = c.hidden_size, prefix + c.names.attn
    qkv = ["qkv_proj"] if c.fused else ["q_proj", "k_proj", "v_proj"]
    width = heads * (1 + c.gated) + 2 * kv
    linears = [
        ("qkv", qkv, (d, width), ("embed", "qkv"), c.qkv_bias),
        ("o", [c.names.o], (heads, d), ("heads", "embed"), c.o_bias),
    ]
    out = {}
    for name, sources, shape, axes, bias in linears:
        sources = [attn + source for source in sources]
        out[name] = pair(shape, axes, *(s + ".weight" for s in sources))
        if bias:
            out[f"{name}_bias"] = pair(shape[1:], axes[1:], *(s + ".bias" for s in sources))
    if c.qk_norm != "none":
        full = c.qk_norm == "full"
        norms = (("q_norm", c.names.q_norm, heads), ("k_norm", c.names.k_norm, kv))
        for name, source, width in norms:
            shape = (width if full else c.head_dim,)
            out[name] = pair(shape, (None,), f"{attn}{source}.weight")
    if c.sinks:
        out["sinks"] = pair((c.num_heads,), ("heads",), f"{attn}sinks", dtype="float32")
    return out


def kinds(c: ModelConfig, layer: LayerConfig, dtype: str) -> tuple[CacheSpec, ...]:
    shape = (c.num_kv_heads, c.head_dim)
    fields = (Field("k", shape, dtype), Field("v", shape, dtype))
    scope = Scope.WINDOW if layer.window else Scope.TOKEN
    return (CacheSpec(kind_name(layer), scope, (), fields, window=layer.window),)


def kind_name(layer: LayerConfig) -> str:
    return f"window{layer.window}" if layer.window else "full"


def apply(
    h: jax.Array,
    weights: Params,
    cache: Cache,
    layer: LayerConfig,
    c: ModelConfig,
    view: View,
    tap: Tap,
) -> tuple[Cache, jax.Array, dict[str, jax.Array]]:
    q, k, v, gate = _qkv(h, weights, c)
    if view.rope is not None:
        q, k = (apply_rope(y, *view.rope) for y in (q, k))
    q = grown(q, c, view)
    q, k, v = tap("q", q), tap("k", k), tap("v", v)
    cache, out = attend(
        q,
        k,
        v,
        cache,
        view.pages(kind_name(layer)),
        view.batch,
        scale=c.scale,
        window=layer.window,
        softcap=c.attention_softcap,
        sinks=weights.get("sinks"),
    )
    out = out.reshape(len(h), -1)
    if gate is not None:
        out = out * jax.nn.sigmoid(gate)
    return cache, linear(out, weights["o"], weights.get("o_bias")), view.shared


def _qkv(
    x: jax.Array, weights: Params, c: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """q[T, H, hd], k, v[T, Hk, hd] of one layer, normed but not yet turned, and the gate [T, H hd]."""
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv = linear(x, weights["qkv"], weights.get("qkv_bias"))
    wide = heads * (1 + c.gated)
    q, k, v = jnp.split(qkv, [wide, wide + kv], axis=-1)
    gate = None
    if c.gated:  # rows of q_proj are, head by head, the query's and then the gate's
        q, gate = jnp.split(q.reshape(len(x), c.num_heads, 2 * c.head_dim), 2, axis=-1)
        q, gate = q.reshape(len(x), heads), gate.reshape(len(x), heads)
    if c.qk_norm == "full":
        q, k = norm(q, weights, "q_norm", c), norm(k, weights, "k_norm", c)
    q, k, v = (y.reshape(len(x), -1, c.head_dim) for y in (q, k, v))
    if c.qk_norm == "head":
        q, k = norm(q, weights, "q_norm", c), norm(k, weights, "k_norm", c)
    return q, k, v, gate


def grown(q: jax.Array, c: ModelConfig, view: View) -> jax.Array:
    """q[T, H, hd] scaled by position, where the model does so (query_growth)."""
    beta, length = c.query_growth
    if not beta:
        return q
    turns = jnp.floor(view.batch.positions / length)
    growth = 1.0 + rounded(beta * alone(jnp.log1p, turns[:, None]))
    return q * growth[:, :, None].astype(q.dtype)


MIXER = Mixer(pairs, kinds, apply)
