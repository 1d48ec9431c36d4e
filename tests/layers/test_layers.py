"""Norms, feed-forward and one full-width decoder layer against numpy in float64."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.configs.ffn import Activation
from jaxinfer.layers.mlp import activate, mlp
from jaxinfer.layers.norm import rms_norm
from jaxinfer.model_config import ACTIVATIONS, ModelConfig
from tests.models.paged import Driver, Sequence

RNG = np.random.default_rng(7)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


FUNCTIONS = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


def normed(x: np.ndarray, weight: np.ndarray | float, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("kind", ["A", "B", "C"])
def test_norm(kind: str) -> None:
    x, weight = RNG.standard_normal((5, 24)) * 3, RNG.standard_normal(24)
    expected = normed(x, 1 + weight if kind == "C" else weight, 1e-3)
    actual = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), 1e-3, kind)
    assert np.abs(actual - expected).max() < 1e-5


@pytest.mark.parametrize("kind", ["A", "B", "C"])
def test_norm_statistics_are_float32(kind: str) -> None:
    """In bfloat16 the sum of 4,096 squares would stop growing; the norm must not notice."""
    x = jnp.full((1, 4096), 1.0, jnp.bfloat16)
    weight = jnp.full(4096, 0.0 if kind == "C" else 1.0, jnp.bfloat16)
    out = rms_norm(x, weight, 1e-6, kind)
    assert out.dtype == jnp.bfloat16
    assert np.abs(np.asarray(out, np.float32) - 1.0).max() == 0.0


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_mlp(name: str) -> None:
    x = np.linspace(-6, 6, 200)
    assert np.abs(activate(jnp.asarray(x, jnp.float32), name) - FUNCTIONS[name](x)).max() < 1e-5
    x, gate, up = (RNG.standard_normal(s) for s in ((3, 8), (8, 12), (8, 12)))
    down, bias, down_bias = (RNG.standard_normal(s) for s in ((12, 8), (24,), (8,)))
    hidden = FUNCTIONS[name](x @ gate + bias[:12]) * (x @ up + bias[12:])
    params = {"gate_up": np.concatenate([gate, up], 1), "gate_up_bias": bias}
    params |= {"down": down, "down_bias": down_bias}
    params = {key: jnp.asarray(value, jnp.float32) for key, value in params.items()}
    out = mlp(jnp.asarray(x, jnp.float32), params, Activation(name))
    assert np.abs(out - (hidden @ down + down_bias)).max() < 2e-3 * np.abs(hidden).max()


# The sizes of Llama-3.2-1B, with a small vocabulary.
WIDTH, MLP, HEADS, KV_HEADS, DIM, VOCAB, THETA, EPS = 2048, 8192, 32, 8, 64, 64, 500000.0, 1e-5
LENGTH = 20


def full_width_parameters() -> dict[str, Any]:
    rng = np.random.default_rng(3)

    def draw(*shape: int) -> np.ndarray:
        return (rng.random(shape, np.float32) - 0.5) * np.float32((12 / shape[0]) ** 0.5)

    layer = {
        "qkv": 2 * draw(WIDTH, (HEADS + 2 * KV_HEADS) * DIM),
        "o": draw(HEADS * DIM, WIDTH),
        "gate_up": draw(WIDTH, 2 * MLP),
        "down": draw(MLP, WIDTH),
        "attn_norm": 1 + draw(WIDTH) * 16,
        "mlp_norm": 1 + draw(WIDTH) * 16,
    }
    return {
        "embed": draw(VOCAB, WIDTH) * 8,
        "layers": [layer],
        "final_norm": 1 + draw(WIDTH) * 16,
        "lm_head": draw(WIDTH, VOCAB),
    }


def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32) @ w).astype(np.float64)


def full_width_logits(params: dict[str, Any], tokens: list[int]) -> np.ndarray:
    """One Llama layer in numpy, float64 except for the large products."""
    (layer,) = params["layers"]
    x, half, count = params["embed"][tokens].astype(np.float64), DIM // 2, len(tokens)
    qkv = product(normed(x, layer["attn_norm"], EPS), layer["qkv"]).reshape(count, -1, DIM)
    turn = np.exp(1j * np.arange(count)[:, None] * THETA ** (-np.arange(0, DIM, 2) / DIM))
    turned = (qkv[..., :half] + 1j * qkv[..., half:]) * turn[:, None]
    turned = np.concatenate([turned.real, turned.imag], -1)
    q, k, v = turned[:, :HEADS], turned[:, HEADS:-KV_HEADS], qkv[:, -KV_HEADS:]
    k, v = (np.repeat(y, HEADS // KV_HEADS, axis=1) for y in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
    scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    x = x + product(np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1), layer["o"])
    gate, up = np.split(product(normed(x, layer["mlp_norm"], EPS), layer["gate_up"]), 2, axis=1)
    x = x + product(silu(gate) * up, layer["down"])
    return normed(x, params["final_norm"], EPS) @ params["lm_head"]


def test_layer_at_full_width() -> None:
    """20 tokens, of which 3 are decoded: head counts and widths are those of a real model."""
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "intermediate_size": MLP,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "rope_theta": THETA,
            "rms_norm_eps": EPS,
        }
    )
    params = full_width_parameters()
    tokens = [int(t) for t in RNG.integers(0, VOCAB, LENGTH)]
    driver = Driver(config, params, rows=1, blocks=2, sequences=1)
    sequence = Sequence(0, tokens, LENGTH)
    driver.step([], [(sequence, 17)])
    while sequence.done < LENGTH:
        driver.step([sequence], [])
    expected = full_width_logits(params, tokens)
    assert np.abs(np.stack(sequence.logits) - expected).max() < 1e-3
    assert np.abs(expected).max() > 1.0
