"""A Llama written out in float64 numpy: the truth for activations, interventions and derivatives.

Reads the parameter tree, shares no code with the engine, keeps no cache and knows no pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from jaxinfer.model_config import ModelConfig

Hook = Callable[[str, np.ndarray], np.ndarray]


def to_numpy(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def run(
    params: Any, c: ModelConfig, tokens: Sequence[int], hook: Hook | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(logits [T, vocab], activations by name); `hook(name, value)` may replace each of them."""
    found: dict[str, np.ndarray] = {}

    def tap(name: str, value: np.ndarray) -> np.ndarray:
        found[name] = hook(name, value) if hook else value
        return found[name]

    x = tap("embed", params["embed"][list(tokens)])
    for i, w in enumerate(params["layers"]):
        at = f"layers.{i}."
        x = x + tap(at + "attn_out", _attention(w, c, tap, at, _norm(x, w["attn_norm"], c)))
        gate, up = np.split(_norm(x, w["mlp_norm"], c) @ w["gate_up"], 2, axis=-1)
        x = x + tap(at + "mlp_out", (gate / (1 + np.exp(-gate)) * up) @ w["down"])
        x = tap(at + "out", x)
    x = tap("final_norm", _norm(x, params["final_norm"], c))
    return x @ params["lm_head"], found


def _norm(x: np.ndarray, weight: np.ndarray, c: ModelConfig) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * weight


def _attention(w: Any, c: ModelConfig, tap: Hook, at: str, x: np.ndarray) -> np.ndarray:
    x = tap(at + "attn_in", x)
    length, heads, dim = len(x), c.num_heads, c.head_dim
    qkv = (x @ w["qkv"]).reshape(length, -1, dim)
    q, k, v = np.split(qkv, [heads, heads + c.num_kv_heads], axis=1)
    q, k, v = tap(at + "q", _turn(q)), tap(at + "k", _turn(k)), tap(at + "v", v)
    group = heads // c.num_kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    s = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(dim)
    s = np.where(np.tril(np.ones((length, length), bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", p, v).reshape(length, -1) @ w["o"]


def _turn(x: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def logprobs(logits: np.ndarray) -> np.ndarray:
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def score(params: Any, c: ModelConfig, tokens: Sequence[int], hook: Hook | None = None) -> float:
    """Sum of the log-probabilities of all tokens but the first."""
    found = logprobs(run(params, c, tokens, hook)[0])
    return float(found[np.arange(len(tokens) - 1), list(tokens[1:])].sum())


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def is_close(got: ArrayLike, wanted: ArrayLike) -> bool:
    """Equal up to the rounding of float32 sums; logits of the small models reach 50."""
    return np.allclose(np.asarray(got), np.asarray(wanted), rtol=1e-4, atol=2e-4)


def assert_close(got: ArrayLike, wanted: ArrayLike, name: str = "") -> None:
    np.testing.assert_allclose(
        np.asarray(got), np.asarray(wanted), rtol=1e-4, atol=2e-4, err_msg=name
    )
