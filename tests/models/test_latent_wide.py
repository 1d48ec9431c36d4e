"""One layer of DeepSeek-V3 and of V3.2 at their published widths against the formulas in float64.

The layer runs as a model without a feed-forward part; what entered and left its mixer is compared, so that
no rounding but the mixer's own counts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.configs.latent import IndexConfig, LatentConfig
from jaxinfer.model_config import ModelConfig, NoFfn
from jaxinfer.models.registry import get_family
from jaxinfer.params import ParamSpec
from tests.models.families import load_case
from tests.models.paged import Driver, Sequence, load
from tests.models.test_latent import DEEPSEEK_V3, check

HEADS, RANK, NOPE, ROPE, VALUE, Q_RANK, HIDDEN = 128, 512, 128, 64, 128, 1536, 7168
INDEX_HEADS, INDEX_DIM, TOPK = 64, 128, 16
TOKENS = 40


def draw(name: str, spec: ParamSpec) -> np.ndarray:
    """Uniform values; products have the size of their input."""
    rng = np.random.default_rng(sum(map(ord, name)))
    value = rng.random(spec.shape, np.float32)
    value -= 0.5
    if "norm" in name:
        value += 0.0 if "bias" in name else 1.0
    elif name != "embed":
        inner = spec.shape[-2] if name != "w_uk" else spec.shape[-1]
        value *= np.float32(math.sqrt(12.0 / inner))
    return value


@pytest.fixture(scope="module")
def layer() -> tuple[ModelConfig, dict[str, Any]]:
    """A V3.2 layer, its choice cut to 16 tokens."""
    raw = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    raw |= {"num_hidden_layers": 1, "vocab_size": 64, "tie_word_embeddings": True}
    raw |= {"index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_DIM, "index_topk": TOPK}
    raw |= {"num_nextn_predict_layers": 0}
    config = ModelConfig.from_hf(DEEPSEEK_V3 | raw)
    config = replace(config, layers=(replace(config.layers[0], ffn=NoFfn()),))
    specs = get_family(config).param_specs(config)
    params = {name: jnp.asarray(draw(name, specs[name])) for name in ("embed", "final_norm")}
    leaves = {name: jnp.asarray(draw(name, spec)) for name, spec in specs["layers"][0].items()}
    return config, params | {"layers": [leaves]}


def run(config: ModelConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Taps of TOKENS tokens in three blocks."""
    driver = Driver(config, params, 0, 3, sequences=1)
    driver.step([], [(Sequence(0, [(7 * i * i + 3) % 64 for i in range(TOKENS)], 0), TOKENS)])
    return {name.removeprefix("layers.0."): value for name, value in driver.taps.items()}


def angles() -> np.ndarray:
    """[TOKENS, ROPE / 2] of yarn with factor 40 over 4096 positions."""
    i = np.arange(ROPE // 2)
    inv = 10000.0 ** (-2 * i / ROPE)
    turns = [ROPE * math.log(4096 / (2 * math.pi * n)) / (2 * math.log(10000.0)) for n in (32, 1)]
    low, high = math.floor(turns[0]), math.ceil(turns[1])
    ramp = np.clip((i - low) / (high - low), 0, 1)
    return np.arange(TOKENS)[:, None] * (inv * (1 - ramp) + inv * ramp / 40)


def turned(x: np.ndarray, *, pairs: bool) -> np.ndarray:
    """x[T, heads, dims] with its first ROPE dims turned, neighbours or halves together."""
    cos, sin = np.cos(angles())[:, None], np.sin(angles())[:, None]
    first = slice(0, ROPE, 2) if pairs else slice(0, ROPE // 2)
    second = slice(1, ROPE, 2) if pairs else slice(ROPE // 2, ROPE)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * weight


def times(x: np.ndarray, w: Any) -> np.ndarray:
    """x @ w in float64, a few thousand columns at a time."""
    w = np.asarray(w)
    parts = [x @ w[:, i : i + 2048].astype(np.float64) for i in range(0, w.shape[1], 2048)]
    return np.concatenate(parts, axis=1)


def projected(h: np.ndarray, w: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The latent of queries, of keys and values, and the key for rope."""
    down = times(h, w["qkv_a"])
    q, latent = down[:, :Q_RANK], down[:, Q_RANK : Q_RANK + RANK]
    q, latent = (rms(x, np.asarray(w[n])) for x, n in ((q, "q_norm"), (latent, "kv_norm")))
    return q, latent, down[:, Q_RANK + RANK :]


def attended(h: np.ndarray, w: dict[str, Any], seen: np.ndarray) -> np.ndarray:
    """The mixer's output [T, D] in expanded form, head by head; seen[t, s]: t attends to s."""
    q_latent, latent, rope_key = projected(h, w)
    rope_key = turned(rope_key[:, None], pairs=True)[:, 0]
    scale = (NOPE + ROPE) ** -0.5 * (0.1 * math.log(40) + 1) ** 2
    q_b, w_uk, w_uv, o = (np.asarray(w[name]) for name in ("q_b", "w_uk", "w_uv", "o"))
    out = np.zeros((len(h), HIDDEN))
    for head in range(HEADS):
        width = NOPE + ROPE
        q = q_latent @ q_b[:, head * width : (head + 1) * width].astype(np.float64)
        q_rope = turned(q[:, None, NOPE:], pairs=True)[:, 0]
        key = latent @ w_uk[head].astype(np.float64).T
        s = (q[:, :NOPE] @ key.T + q_rope @ rope_key.T) * scale
        p = np.exp(np.where(seen, s - s.max(axis=1, keepdims=True), -np.inf))
        value = latent @ w_uv[head].astype(np.float64)
        mixed = p / p.sum(axis=1, keepdims=True) @ value
        out += mixed @ o[head * VALUE : (head + 1) * VALUE].astype(np.float64)
    return out


def index_scores(h: np.ndarray, w: dict[str, Any]) -> np.ndarray:
    """[T, T] scores, -inf for what comes later."""
    q = times(projected(h, w)[0], w["index_q"]).reshape(len(h), INDEX_HEADS, INDEX_DIM)
    k = times(h, w["index_k"])
    k -= k.mean(axis=1, keepdims=True)
    k /= np.sqrt((k * k).mean(axis=1, keepdims=True) + 1e-6)
    k = k * np.asarray(w["index_norm"]) + np.asarray(w["index_norm_bias"])
    q, k = turned(q, pairs=False), turned(k[:, None], pairs=False)[:, 0]
    weight = times(h, w["index_w"]) * INDEX_HEADS**-0.5
    hits = np.maximum(np.einsum("thd,sd->ths", q, k) * INDEX_DIM**-0.5, 0)
    scores = np.einsum("th,ths->ts", weight, hits)
    return np.where(np.tril(np.ones_like(scores)) > 0, scores, -np.inf)


def mixer(config: ModelConfig) -> LatentConfig:
    found = config.layers[0].mixer
    assert isinstance(found, LatentConfig)
    return found


def test_latent_attention_of_v3(layer: tuple[ModelConfig, dict[str, Any]]) -> None:
    config, params = layer
    dense = replace(config.layers[0], mixer=replace(mixer(config), topk=0, index=None))
    taps = run(replace(config, layers=(dense,)), params)
    assert taps["attn_in"].shape == (48, HIDDEN)
    h = taps["attn_in"][:TOKENS].astype(np.float64)
    expected = attended(h, params["layers"][0], np.tril(np.ones((TOKENS, TOKENS))) > 0)
    error = np.abs(taps["attn_out"][:TOKENS] - expected).max()
    assert error < 1e-5 * np.abs(expected).max()


def test_sparse_attention_of_v32(layer: tuple[ModelConfig, dict[str, Any]]) -> None:
    config, params = layer
    assert mixer(config).index == IndexConfig(INDEX_HEADS, INDEX_DIM, False)
    taps = run(config, params)
    h = taps["attn_in"][:TOKENS].astype(np.float64)
    chosen = taps["chosen_blocks"].reshape(-1, TOPK)[:TOKENS]
    scores, seen = index_scores(h, params["layers"][0]), np.zeros((TOKENS, TOKENS), bool)
    ranked = -np.sort(-scores, axis=1)
    for t in range(TOKENS):
        found = chosen[t][chosen[t] >= 0]
        seen[t, found] = True
        assert len(set(found)) == len(found) == min(t + 1, TOPK)
        # Every choice is one of the best; a tie within rounding may fall either way.
        assert (scores[t, found] > ranked[t, len(found) - 1] - 1e-5).all()
    assert not seen.all(axis=1).any()
    expected = attended(h, params["layers"][0], seen)
    error = np.abs(taps["attn_out"][:TOKENS] - expected).max()
    assert error < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("case", ["wide_mla", "wide_dsa"])
def test_recorded_layers(case: str) -> None:
    """DeepSeek-V2-Lite's attention, and V3.2's with 24 tokens chosen, against PyTorch; decoding gives the
    very bits of prefill."""
    raw, tensors, recording = load_case(case)
    config = ModelConfig.from_hf(raw | {"num_experts_per_tok": 1})  # of experts there are none
    params = load(config, tensors)
    del tensors
    driver = Driver(config, params, 0, 3, sequences=1)
    sequence = Sequence(0, recording.prompt, 0)
    for size in (30, 11):
        driver.step([], [(sequence, size)])
    check(sequence, recording)
    decode, single = Driver(config, params, 1, 0, sequences=1), Sequence(0, recording.prompt, 0)
    for _ in range(30):
        decode.step([single], [])
    np.testing.assert_array_equal(np.stack(single.logits), np.stack(sequence.logits[:30]))
