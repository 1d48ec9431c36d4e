"""State spaces, lightning attention, short convolutions, attention and experts of one layer in float64, token
by token, written from the formulas; and a way to run the engine's layer on random weights.

`w` are a layer's leaves ([in, out]); `h` [T, D] is the layer's normed input.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.configs.ffn import MoeConfig
from jaxinfer.configs.ssm import SsmConfig
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import get_family
from tests.models.paged import BLOCK, Driver, Sequence

Weights = dict[str, Any]


def random_params(config: ModelConfig, seed: int = 0) -> Weights:
    """Weights of `config` that keep activations near 1 and states apart."""
    rng = np.random.default_rng(seed)

    def leaf(path: Any, spec: Any) -> jax.Array:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        value = rng.random(spec.shape, np.float32)
        value -= np.float32(0.5)
        value *= np.float32(12**0.5)  # of variance 1
        if name == "A_log":
            value = rng.uniform(-0.7, 2.1, spec.shape)
        elif name == "dt_bias":
            value = rng.uniform(-4.6, -0.4, spec.shape)
        elif "norm" in name or name == "skip":
            value = 1 + 0.3 * value
        elif len(spec.shape) > 1 and name != "conv":
            value *= np.float32(spec.shape[-2] ** -0.5)
        return jnp.asarray(value, jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, get_family(config).param_specs(config))


def run_layer(config: ModelConfig, params: Weights, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The first layer's normed inputs and its mixer's outputs [tokens, D]: a chunk, another, and from three
    quarters of the (at most 2 * BLOCK) tokens on one by one."""
    assert tokens <= 2 * BLOCK
    ids = np.random.default_rng(1).integers(0, config.vocab_size, tokens).tolist()
    sequence, driver = Sequence(0, ids, 0), Driver(config, params, 1, 2, sequences=1)
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    for size in (tokens // 2, tokens // 4):
        driver.step([], [(sequence, size)])
        seen.append(tapped(driver, slice(1, 1 + size)))
    while sequence.done < tokens:
        driver.step([sequence], [])
        seen.append(tapped(driver, slice(1)))
    h, out = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    return h, out


def tapped(driver: Driver, at: slice) -> tuple[np.ndarray, np.ndarray]:
    return driver.taps["layers.0.attn_in"][at], driver.taps["layers.0.attn_out"][at]


def times(x: np.ndarray, w: Any) -> np.ndarray:
    """x @ w in float64 without a float64 copy of all of w."""
    x, w = np.asarray(x, np.float64), np.asarray(w)
    cuts = range(0, w.shape[1], 1024)
    return np.concatenate([x @ w[:, i : i + 1024].astype(np.float64) for i in cuts], axis=1)


def bias(w: Weights, name: str) -> np.ndarray:
    return np.asarray(w.get(f"{name}_bias", 0.0), np.float64)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def convolved(x: np.ndarray, w: Any) -> np.ndarray:
    """y_t = sum_j w[:, j] x_{t - K + 1 + j}; w is [channels, 1, K]."""
    taps = np.asarray(w, np.float64)[:, 0]
    k = taps.shape[1]
    padded = np.concatenate([np.zeros((k - 1, x.shape[1])), x])
    return np.sum([taps[:, j] * padded[j : j + len(x)] for j in range(k)], axis=0)


def mamba2(h: np.ndarray, w: Weights, m: SsmConfig, eps: float) -> np.ndarray:
    """out [T, D] of S <- exp(-exp(A_log) dt) S + (dt x) B^T, y = S C + D x, gate, norm and projection."""
    w = {k: v if k in ("in", "out") else np.asarray(v, np.float64) for k, v in w.items()}
    each = m.groups * m.state
    sizes = np.array([m.inner, m.inner, each, each, m.heads])
    y = (times(h, w["in"]) + bias(w, "in")) * np.repeat(m.parts, sizes)
    z, u, dt = np.split(y, [m.inner, 2 * m.inner + 2 * each], axis=1)
    u = silu(convolved(u, w["conv"]) + bias(w, "conv"))
    x, b, c = np.split(u, [m.inner, m.inner + each], axis=1)
    x = x.reshape(-1, m.heads, m.head_dim)
    b, c = (np.repeat(v.reshape(-1, m.groups, m.state), m.heads // m.groups, 1) for v in (b, c))
    dt = np.clip(np.log1p(np.exp(dt + w["dt_bias"])), *m.limits)
    state, outs = np.zeros((m.heads, m.head_dim, m.state)), []
    for t in range(len(h)):
        decay = np.exp(-np.exp(w["A_log"]) * dt[t])[:, None, None]
        state = decay * state + (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
        outs.append(np.einsum("hpn,hn->hp", state, c[t]) + w["skip"][:, None] * x[t])
    y = np.stack(outs).reshape(len(h), -1)
    if m.norm == "none":
        y = y * silu(z)
    else:
        y = y * silu(z) if m.norm == "gate_first" else y
        y = rms(y.reshape(len(h), m.groups, -1), eps).reshape(len(h), -1) * w["gate_norm"]
        y = y * silu(z) if m.norm == "norm_first" else y
    return times(y, w["out"]) + bias(w, "out")


def attention(h: np.ndarray, w: Weights, c: ModelConfig) -> np.ndarray:
    """out [T, D] of causal grouped-query attention with half-rotated rope over whole heads."""
    heads, dim = c.num_heads, c.head_dim
    qkv = times(h, w["qkv"]).reshape(len(h), -1, dim)
    q, k, v = np.split(qkv, [heads, heads + c.num_kv_heads], axis=1)
    (rope,) = c.ropes
    angle = np.arange(len(h))[:, None] * rope.theta ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    halves = [np.split(x, 2, axis=-1) for x in (q, k)]
    q, k = (np.concatenate([a * cos - b * sin, b * cos + a * sin], -1) for a, b in halves)
    k, v = (np.repeat(x, heads // c.num_kv_heads, axis=1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * c.scale
    scores[:, np.triu(np.ones((len(h), len(h)), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)
    return times(out.reshape(len(h), -1), w["o"])


def lightning(h: np.ndarray, w: Weights, c: ModelConfig, layer: int) -> np.ndarray:
    """out [T, D] of S <- e^(-slope) S + k v^T, o = q S, the full-width norm and the gate."""
    heads, dim, depth = c.num_heads, c.head_dim, c.num_layers
    qkv = silu(times(h, w["qkv"])).reshape(len(h), heads, 3 * dim)
    q, k, v = np.split(qkv, 3, axis=-1)
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
    slopes = slopes * (1 - layer / (depth - 1 + 1e-5) + 1e-5)
    state, outs = np.zeros((heads, dim, dim)), []
    for t in range(len(h)):
        state = np.exp(-slopes)[:, None, None] * state + k[t][:, :, None] * v[t][:, None, :]
        outs.append(np.einsum("hd,hde->he", q[t], state))
    out = np.stack(outs).reshape(len(h), -1)
    out = rms(out, 1e-6) * np.asarray(w["full_norm"], np.float64)
    return times(out / (1 + np.exp(-times(h, w["gate"]))), w["out"])


def short_conv(h: np.ndarray, w: Weights) -> np.ndarray:
    """out [T, D] of C * conv(B * x), with biases where there are any."""
    b, c, x = np.split(times(h, w["in"]) + bias(w, "in"), 3, axis=1)
    y = convolved(b * x, w["conv"]) + bias(w, "conv")
    return times(c * y, w["out"]) + bias(w, "out")


def experts(h: np.ndarray, w: Weights, moe: MoeConfig) -> np.ndarray:
    """out [T, D] of experts chosen by sigmoid + correction, with relu2 or a silu gate, in one group."""
    router, w = moe.router, {k: np.asarray(v, np.float64) for k, v in w.items()}

    def act(x: np.ndarray) -> np.ndarray:
        if not moe.activation.gated:
            return np.maximum(x, 0) ** 2
        gate, up = np.split(x, 2, axis=-1)
        return silu(gate) * up

    scores = 1 / (1 + np.exp(-times(h, w["router"])))
    chosen = np.argsort(-(scores + w["correction"]), axis=1)[:, : router.chosen]
    shares = np.take_along_axis(scores, chosen, 1)
    shares = shares / (shares.sum(1, keepdims=True) + router.epsilon) * router.scale
    x = times(h, w["latent_in"]) if moe.latent else np.asarray(h, np.float64)
    out = np.zeros_like(x)
    for t in range(len(x)):
        for e, share in zip(chosen[t], shares[t], strict=True):
            out[t] += share * (act(x[t] @ w["expert_up"][e]) @ w["expert_down"][e])
    out = times(out, w["latent_out"]) if moe.latent else out
    if moe.shared is not None:
        out = out + times(act(times(h, w["shared_gate_up"])), w["shared_down"])
    return out
