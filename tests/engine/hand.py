"""Logits of TINY from float64 numpy that shares nothing with the engine: read from the checkpoint file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jaxinfer.loading import LoadedModel

HEADS, KV_HEADS, DIM, EPS = 4, 2, 16, 1e-5  # checkpoints.TINY_CONFIG


def next_logits(model: LoadedModel, tokens: Sequence[int], every: bool = False) -> np.ndarray:
    """f64[vocab] logits after `tokens`, or f64[len(tokens), vocab] after each of them."""
    w = {k: v.astype(np.float64) for k, v in load_file(model.path / "model.safetensors").items()}
    x = w["model.embed_tokens.weight"][list(tokens)]
    for i in range(2):
        layer = {k.split(f"layers.{i}.")[1]: v for k, v in w.items() if f"layers.{i}." in k}
        x = x + _attention(layer, _norm(x, layer["input_layernorm.weight"]))
        h = _norm(x, layer["post_attention_layernorm.weight"])
        gate, up = h @ layer["mlp.gate_proj.weight"].T, h @ layer["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
    logits = _norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T
    return logits if every else logits[-1]


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def _attention(w: dict[str, Any], x: np.ndarray) -> np.ndarray:
    def heads(name: str, count: int) -> np.ndarray:
        return (x @ w[f"self_attn.{name}_proj.weight"].T).reshape(len(x), count, DIM)

    q, k, v = _turn(heads("q", HEADS)), _turn(heads("k", KV_HEADS)), heads("v", KV_HEADS)
    k, v = (np.repeat(a, HEADS // KV_HEADS, axis=1) for a in (k, v))
    s = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(DIM)
    s = np.where(np.tril(np.ones((len(x), len(x)), bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", p, v).reshape(len(x), -1) @ w["self_attn.o_proj.weight"].T


def _turn(x: np.ndarray) -> np.ndarray:
    half = DIM // 2
    angle = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
