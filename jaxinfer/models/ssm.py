"""Mamba-2 mixers (SsmConfig), and those that run beside plain attention in one layer (ParallelConfig).

Taps "z", "x", "B", "C" (after the convolution), "dt" (clamped) and "mixed" (the recurrence's output with
D x added). Never looks at requests or files. Called by decoder.py.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.spec import CacheSpec, Field, Scope
from jaxinfer.configs.ssm import ParallelConfig, SsmConfig
from jaxinfer.layers.conv import convolve
from jaxinfer.layers.delta import recur, state_fields
from jaxinfer.layers.elementwise import alone
from jaxinfer.layers.linear import linear
from jaxinfer.layers.scale import rounded, scaled
from jaxinfer.layers.ssm import gated_norm, skip, time_steps
from jaxinfer.model_config import LayerConfig, ModelConfig
from jaxinfer.models import attention
from jaxinfer.models.parts import STATE, Cache, Mixer, Pairs, Params, Tap, View, pair


def pairs(c: ModelConfig, layer: LayerConfig, prefix: str) -> Pairs:
    """in [D, 2 N + 2 G S + H] (z, x, B, C, dt), conv [N + 2 G S, 1, K], A_log, dt_bias and skip f32[H],
    gate_norm [N], out [N, D], and biases; N = H P."""
    m, d = _ssm(layer), c.hidden_size
    at, heads = prefix + m.prefix, (m.heads,)
    wide = m.inner + m.channels + m.heads
    out = {
        "in": pair((d, wide), ("embed", "qkv"), f"{at}in_proj.weight"),
        "conv": pair((m.channels, 1, m.kernel), ("heads", None, None), f"{at}conv1d.weight"),
        "A_log": pair(heads, ("heads",), f"{at}A_log", dtype="float32"),
        "dt_bias": pair(heads, ("heads",), f"{at}dt_bias", dtype="float32"),
        "skip": pair(heads, ("heads",), f"{at}D", dtype="float32"),
        "out": pair((m.inner, d), ("heads", "embed"), f"{at}out_proj.weight"),
    }
    if m.norm != "none":
        out["gate_norm"] = pair((m.inner,), ("heads",), f"{at}norm.weight")
    if m.conv_bias:
        out["conv_bias"] = pair((m.channels,), ("heads",), f"{at}conv1d.bias")
    if m.in_bias:
        out["in_bias"] = pair((wide,), ("qkv",), f"{at}in_proj.bias")
    if m.out_bias:
        out["out_bias"] = pair((d,), ("embed",), f"{at}out_proj.bias")
    return out


def kinds(c: ModelConfig, layer: LayerConfig, dtype: str) -> tuple[CacheSpec, ...]:
    m = _ssm(layer)
    conv = Field("conv", (m.kernel - 1, m.channels), dtype)
    fields = state_fields(
        m.groups, m.state, m.heads, m.head_dim, by_channel=False, rule=False, replay=c.replay
    )
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
    m, state = _ssm(layer), view.slots
    z, u, dt = _projected(h, weights, m)
    pool, u = convolve(u, weights["conv"], cache["conv"], state, view.batch)
    cache = cache | {"conv": pool}
    u = jax.nn.silu(u + weights["conv_bias"] if m.conv_bias else u).astype(jnp.float32)
    x, b, k = jnp.split(u, [m.inner, m.inner + m.groups * m.state], axis=-1)
    x = tap("x", x.reshape(len(h), m.heads, m.head_dim))
    b = tap("B", b.reshape(len(h), m.groups, m.state))
    k = tap("C", k.reshape(len(h), m.groups, m.state))
    dt = tap("dt", time_steps(dt, weights["dt_bias"], m.limits))
    g = -alone(jnp.exp, weights["A_log"][None]) * dt
    cache, y = recur(k, b, x * dt[..., None], g, None, cache, state, view.batch, c.replay)
    y = tap("mixed", skip(y, x, weights["skip"])).reshape(len(h), -1)
    norm = weights.get("gate_norm")
    y = gated_norm(y, tap("z", z), norm, m.groups, c.norm_eps, m.norm)
    return cache, linear(y, weights["out"], weights.get("out_bias")), view.shared


def _projected(
    h: jax.Array, weights: Params, m: SsmConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """z[T, N], u[T, N + 2 G S] (x, B and C before the convolution) and dt[T, H]."""
    y = linear(h, weights["in"], weights.get("in_bias"))
    if any(factor != 1.0 for factor in m.parts):
        each = m.groups * m.state
        factors = np.repeat(m.parts, [m.inner, m.inner, each, each, m.heads])
        y = rounded(y * jnp.asarray(factors, y.dtype))
    z, u, dt = jnp.split(y, [m.inner, m.inner + m.channels], axis=-1)
    return z, u, dt


def _ssm(layer: LayerConfig) -> SsmConfig:
    assert isinstance(layer.mixer, SsmConfig)
    return layer.mixer


def parallel_pairs(c: ModelConfig, layer: LayerConfig, prefix: str) -> Pairs:
    """The weights of both mixers."""
    first, second = _both(layer)
    return pairs(c, first, prefix) | attention.pairs(c, second, prefix)


def parallel_kinds(c: ModelConfig, layer: LayerConfig, dtype: str) -> tuple[CacheSpec, ...]:
    first, second = _both(layer)
    return kinds(c, first, dtype) + attention.kinds(c, second, dtype)


def parallel_apply(
    h: jax.Array,
    weights: Params,
    cache: Cache,
    layer: LayerConfig,
    c: ModelConfig,
    view: View,
    tap: Tap,
) -> tuple[Cache, jax.Array, dict[str, jax.Array]]:
    m, outs = _parallel(layer), []
    scales = (m.ssm_scales, m.attention_scales)
    for part, mixer, (before, after) in zip(_both(layer), _MIXERS, scales, strict=True):
        new, out, _ = mixer(scaled(h, before), weights, cache, part, c, view, tap)
        cache = cache | new
        outs.append(scaled(out, after))
    return cache, outs[0] + outs[1], view.shared


_MIXERS = (apply, attention.apply)


def _parallel(layer: LayerConfig) -> ParallelConfig:
    assert isinstance(layer.mixer, ParallelConfig)
    return layer.mixer


def _both(layer: LayerConfig) -> tuple[LayerConfig, LayerConfig]:
    """The layer as that of the state space, and as that of plain attention."""
    return replace(layer, mixer=_parallel(layer).ssm), replace(layer, mixer=None)


MIXER = Mixer(pairs, kinds, apply)
PARALLEL = Mixer(parallel_pairs, parallel_kinds, parallel_apply)
