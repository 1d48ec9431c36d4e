"""Mixers with a delta rule: Gated DeltaNet (DeltaConfig) and Kimi Delta Attention (KdaConfig).

Projections, a short convolution, norms and gates in float32; the recurrence is layers/delta.py. Taps
"q", "k", "v" (as they enter the recurrence), "g", "beta" and "mixed" (its output, not yet normed). Never
looks at requests or files. Called by decoder.py.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfer.cache.spec import CacheSpec, Field, Scope
from jaxinfer.configs.delta import DeltaConfig, KdaConfig
from jaxinfer.layers.conv import convolve
from jaxinfer.layers.delta import decay, recur, state_fields
from jaxinfer.layers.elementwise import alone
from jaxinfer.layers.linear import linear
from jaxinfer.layers.norm import rms_norm
from jaxinfer.model_config import LayerConfig, ModelConfig
from jaxinfer.models.parts import STATE, Cache, Mixer, Pair, Pairs, Params, Tap, View, pair

_L2_EPS = 1e-6
_SOURCES = {
    "grouped": ("in_proj_qkvz", "in_proj_ba"),
    "flat": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "single": ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
}
_CONVS = ("q_conv1d", "k_conv1d", "v_conv1d")


def pairs(c: ModelConfig, layer: LayerConfig, prefix: str) -> Pairs:
    """in [D, C + Hv dv + 2 Hv], conv [C, K], A_log and dt_bias f32[Hv], delta_norm [dv],
    out [Hv dv, D], where C = 2 Hk dk + Hv dv."""
    m, at, d = _delta(layer), prefix + "linear_attn.", c.hidden_size
    values = m.heads * m.value_dim
    width = m.channels + values + 2 * m.heads
    sources = [f"{at}{name}.weight" for name in _SOURCES[m.layout]]
    single = m.layout == "single"
    convs = [f"{at}{name}.weight" for name in (_CONVS if single else ("conv1d",))]
    norm, out = ("o_norm", "o_proj") if single else ("norm", "out_proj")
    return {
        "in": pair((d, width), ("embed", "qkv"), *sources),
        "conv": _squeezed((m.channels, m.kernel), *convs),
        "A_log": pair((m.heads,), ("heads",), f"{at}A_log", dtype="float32"),
        "dt_bias": pair((m.heads,), ("heads",), f"{at}dt_bias", dtype="float32"),
        "delta_norm": pair((m.value_dim,), (None,), f"{at}{norm}.weight"),
        "out": pair((values, d), ("heads", "embed"), f"{at}{out}.weight"),
    }


def kinds(c: ModelConfig, layer: LayerConfig, dtype: str) -> tuple[CacheSpec, ...]:
    m = _delta(layer)
    fields = state_fields(
        m.key_heads,
        m.key_dim,
        m.heads,
        m.value_dim,
        by_channel=False,
        rule=True,
        replay=c.replay,
    )
    conv = Field("conv", (m.kernel - 1, m.channels), dtype)
    return (CacheSpec(STATE, Scope.STATE, (), (conv, *fields)),)


def apply(
    h: jax.Array,
    weights: Params,
    cache: Cache,
    layer: LayerConfig,
    c: ModelConfig,
    view: View,
    tap: Tap,
) -> tuple[Cache, jax.Array, dict[str, jax.Array]]:
    m = _delta(layer)
    u, z, b, a = _projected(linear(h, weights["in"]), m)
    heads = (m.key_heads, m.key_dim, m.heads, m.value_dim)
    cache, q, k, v = _qkv(u, weights["conv"], cache, heads, view)
    beta = m.span * alone(jax.nn.sigmoid, b.astype(jnp.float32))
    g = decay(a.astype(jnp.float32), weights["dt_bias"], weights["A_log"])
    cache, out = _mixed((q, k, v, g, beta), cache, c, view, tap)
    out = rms_norm(out.astype(h.dtype), weights["delta_norm"], m.norm_eps or c.norm_eps, "A")
    gate = jax.nn.silu(z.reshape(out.shape).astype(jnp.float32))
    out = (out * gate).astype(h.dtype).reshape(len(h), -1)
    return cache, linear(out, weights["out"]), view.shared


def _projected(y: jax.Array, m: DeltaConfig) -> tuple[jax.Array, ...]:
    """u[T, C] (all q, all k, all v), z[T, Hv dv], b and a[T, Hv] of what `in` yields."""
    keys, values = m.key_heads * m.key_dim, m.heads * m.value_dim
    if m.layout != "grouped":
        cuts = [m.channels, m.channels + values, m.channels + values + m.heads]
        return tuple(jnp.split(y, cuts, axis=-1))
    # Each key head's q, k, and the v and z of its value heads; then each one's b and a.
    ratio = m.heads // m.key_heads
    each = ratio * m.value_dim
    qkvz, ba = jnp.split(y, [2 * (keys + values)], axis=-1)
    cuts = [m.key_dim, 2 * m.key_dim, 2 * m.key_dim + each]
    parts = jnp.split(qkvz.reshape(len(y), m.key_heads, -1), cuts, axis=-1)
    parts += jnp.split(ba.reshape(len(y), m.key_heads, -1), 2, axis=-1)
    q, k, v, z, b, a = (part.reshape(len(y), -1) for part in parts)
    return jnp.concatenate([q, k, v], axis=-1), z, b, a


def kda_pairs(c: ModelConfig, layer: LayerConfig, prefix: str) -> Pairs:
    """in [D, 3 H d + 2 d + H] (q, k, v, the ranks of f and g, b), f and g [d, H d], conv f32[3 H d, K],
    A_log f32[H], dt_bias f32[H d], delta_norm [d], out [H d, D]."""
    m, at, d = _kda(layer), prefix + c.names.attn, c.hidden_size
    wide = m.heads * m.head_dim
    first = ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj")
    convs = [f"{at}{name}.weight" for name in _CONVS]
    low_rank = {
        name: pair((m.head_dim, wide), (None, "heads"), f"{at}{name}_b_proj.weight")
        for name in ("f", "g")
    }
    width = 3 * wide + 2 * m.head_dim + m.heads
    return low_rank | {
        "in": pair((d, width), ("embed", "qkv"), *(f"{at}{name}.weight" for name in first)),
        "conv": _squeezed((3 * wide, m.kernel), *convs, dtype="float32"),
        "A_log": _squeezed((m.heads,), f"{at}A_log", dtype="float32"),
        "dt_bias": pair((wide,), ("heads",), f"{at}dt_bias", dtype="float32"),
        "delta_norm": pair((m.head_dim,), (None,), f"{at}o_norm.weight"),
        "out": pair((wide, d), ("heads", "embed"), f"{at}o_proj.weight"),
    }


def _squeezed(shape: tuple[int, ...], *sources: str, dtype: str | None = None) -> Pair:
    """A leaf by heads or channels that files hold with axes of length 1 in between, or without."""
    axes = ("heads", *[None] * (len(shape) - 1))
    spec, rule = pair(shape, axes, *sources, transpose=False, dtype=dtype)
    return spec, replace(rule, squeeze=True)


def kda_kinds(c: ModelConfig, layer: LayerConfig, dtype: str) -> tuple[CacheSpec, ...]:
    m = _kda(layer)
    fields = state_fields(
        m.heads, m.head_dim, m.heads, m.head_dim, by_channel=True, rule=True, replay=c.replay
    )
    conv = Field("conv", (m.kernel - 1, 3 * m.heads * m.head_dim), dtype)
    return (CacheSpec(STATE, Scope.STATE, (), (conv, *fields)),)


def kda_apply(
    h: jax.Array,
    weights: Params,
    cache: Cache,
    layer: LayerConfig,
    c: ModelConfig,
    view: View,
    tap: Tap,
) -> tuple[Cache, jax.Array, dict[str, jax.Array]]:
    m = _kda(layer)
    heads = (m.heads, m.head_dim)
    wide = m.heads * m.head_dim
    cuts = [3 * wide, 3 * wide + m.head_dim, 3 * wide + 2 * m.head_dim]
    u, f, gate, b = jnp.split(linear(h, weights["in"]), cuts, axis=-1)
    f, gate = linear(f, weights["f"]), linear(gate, weights["g"])
    cache, q, k, v = _qkv(u, weights["conv"], cache, heads * 2, view)
    beta = alone(jax.nn.sigmoid, b.astype(jnp.float32))
    rate = jnp.repeat(weights["A_log"], m.head_dim)
    g = decay(f.astype(jnp.float32), weights["dt_bias"], rate).reshape(len(h), *heads)
    cache, out = _mixed((q, k, v, g, beta), cache, c, view, tap)
    norm = weights["delta_norm"].astype(jnp.float32)
    gate = jax.nn.sigmoid(gate.reshape(out.shape).astype(jnp.float32))
    out = rms_norm(out.astype(h.dtype).astype(jnp.float32), norm, c.norm_eps, "A") * gate
    return cache, linear(out.astype(h.dtype).reshape(len(h), -1), weights["out"]), view.shared


def _qkv(
    u: jax.Array, conv: jax.Array, cache: Cache, heads: tuple[int, ...], view: View
) -> tuple[Cache, jax.Array, jax.Array, jax.Array]:
    """The cache with this step's inputs, and q, k f32[T, Hk, dk] of length dk^-0.5 and 1, v[T, Hv, dv]."""
    pool, u = convolve(u, conv, cache["conv"], view.slots, view.batch)
    key_heads, dk, value_heads, dv = heads
    q, k, v = jnp.split(jax.nn.silu(u), [key_heads * dk, 2 * key_heads * dk], axis=-1)
    q, k = (x.reshape(-1, key_heads, dk).astype(jnp.float32) for x in (q, k))
    q, k = _unit(q, dk**-0.5), _unit(k, 1.0)
    return cache | {"conv": pool}, q, k, v.reshape(-1, value_heads, dv)


def _unit(x: jax.Array, length: float) -> jax.Array:
    """x rsqrt(sum(x^2) + eps) length over the last axis, as a norm of the mean (one op for all rows)."""
    dim = x.shape[-1]
    weight = jnp.full(dim, length * dim**-0.5, jnp.float32)
    return pallas_kernels.rms_norm(x, weight, _L2_EPS / dim)


def _mixed(
    inputs: tuple[jax.Array, ...], cache: Cache, c: ModelConfig, view: View, tap: Tap
) -> tuple[Cache, jax.Array]:
    """The recurrence over float32 (q, k, v, g, beta)."""
    names = ("q", "k", "v", "g", "beta")
    arrays = (tap(n, x.astype(jnp.float32)) for n, x in zip(names, inputs, strict=True))
    q, k, v, g, beta = arrays
    cache, out = recur(q, k, v, g, beta, cache, view.slots, view.batch, c.replay)
    return cache, tap("mixed", out)


def _delta(layer: LayerConfig) -> DeltaConfig:
    assert isinstance(layer.mixer, DeltaConfig)
    return layer.mixer


def _kda(layer: LayerConfig) -> KdaConfig:
    assert isinstance(layer.mixer, KdaConfig)
    return layer.mixer


MIXER = Mixer(pairs, kinds, apply)
KDA = Mixer(kda_pairs, kda_kinds, kda_apply)
