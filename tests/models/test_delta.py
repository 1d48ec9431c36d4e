"""Qwen3-Next, Qwen3.5, Kimi Linear, Olmo Hybrid: against PyTorch's recordings, layers at full width against
float64 recurrences written from the formulas, and exact replay to the bit.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import get_family
from jaxinfer.weights.loader import load_params
from jaxinfer.weights.tensors import open_safetensors
from tests.models.families import (
    OLD_STYLE,
    Recording,
    composite,
    load_case,
    load_config,
    write_case,
)
from tests.models.paged import BLOCK, PAGE, Driver, Sequence, load
from tests.reference.families import prompt, tensor

CASES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear")
TOLERANCE = 5e-4
ROWS, BLOCKS = 2, 12
EXACT = 64


@cache
def model(case: str, replay: str = "tolerant") -> tuple[ModelConfig, dict[str, Any], Recording]:
    raw, tensors, recording = load_case(case)
    config = dataclasses.replace(ModelConfig.from_hf(raw), replay=replay)
    return config, load(config, tensors), recording


def error(sequence: Sequence, expected: np.ndarray, positions: np.ndarray | None = None) -> float:
    actual = np.stack(sequence.logits)
    return float(np.abs((actual if positions is None else actual[positions]) - expected).max())


def chunks(total: int, seed: int) -> list[int]:
    """Random sizes from those that straddle blocks and pages, with runs of single tokens."""
    sizes, draw = [], random.Random(seed)
    while sum(sizes) < total:
        size = draw.choice((7, BLOCK - 1, BLOCK, BLOCK + 1, PAGE + 1, 1, 1, 2, 40, 64, 65))
        sizes.append(min(size, total - sum(sizes)))
    return sizes


def feed(
    driver: Driver, sequence: Sequence, sizes: list[int], decode: Driver | None = None
) -> Sequence:
    """Single tokens are decode rows, of the driver `decode` if there is one (it shares the caches)."""
    for size in sizes:
        if size > 1:
            driver.step([], [(sequence, size)])
            continue
        (decode or driver).caches = driver.caches
        (decode or driver).step([sequence], [])
        driver.caches = (decode or driver).caches
    return sequence


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str) -> None:
    """One shot, chunks beside a decoding sequence, token by token: the recorded logits."""
    config, params, recording = model(case)
    driver = Driver(config, params, ROWS, BLOCKS)
    short, long, at = len(recording.prompt), len(recording.long_prompt), recording.positions
    whole, longer = (Sequence(i, recording.long_prompt, long) for i in range(2))
    single, other = Sequence(2, recording.prompt, short), Sequence(3, recording.prompt, short)
    driver.step([single], [(other, short), (longer, 100)])  # two of different lengths in one step
    driver.step([single], [(longer, long - 100)])
    assert error(other, recording.logits) < TOLERANCE
    assert error(longer, recording.long_logits, at) < TOLERANCE
    for size in chunks(long, seed=1):
        driver.step([single] if single.done < short else [], [(whole, size)])
    assert error(whole, recording.long_logits, at) < TOLERANCE
    feed(driver, single, [1] * (short - single.done))
    assert error(single, recording.logits) < TOLERANCE
    greedy = Sequence(4, recording.prompt + recording.greedy, short)
    feed(driver, greedy, [short] + [1] * (len(recording.greedy) - 1))
    best = np.argmax(greedy.logits[short - 1 :], axis=-1)
    sure = recording.margins > 10 * TOLERANCE
    assert (best == recording.greedy)[sure].all() and sure.sum() > len(sure) // 2


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5", "kimi_linear"])
def test_exact_replay_is_bitwise(case: str) -> None:
    """One shot, random chunks, token by token, and going on from a copy: the same bits; and right."""
    config, params, recording = model(case, "exact")
    tokens = recording.long_prompt
    driver = Driver(config, params, ROWS, 3, block=EXACT)
    decode = Driver(config, params, 1, 0, block=EXACT)
    whole = feed(driver, Sequence(0, tokens, len(tokens)), [len(tokens)])
    assert error(whole, recording.long_logits, recording.positions) < TOLERANCE
    expected = np.stack(whole.logits)
    chunked, forks = Sequence(1, tokens, len(tokens)), []
    for size in chunks(len(tokens), seed=2):
        feed(driver, chunked, [size], decode)
        if len(forks) < 2 and chunked.done > 30 * (len(forks) + 1):
            forks.append(driver.fork(chunked, 2 + len(forks)))
    for fork, seed in zip(forks, (3, 4), strict=True):
        feed(driver, fork, chunks(len(tokens) - fork.done, seed), decode)
    single = feed(driver, Sequence(4, tokens, len(tokens)), [1] * (EXACT + 6), decode)
    beside, neighbour = Sequence(5, tokens, len(tokens)), Sequence(6, tokens[::-1], len(tokens))
    driver.step([], [(beside, 70)])
    driver.step([beside], [(neighbour, 90)])
    driver.step([neighbour, beside], [])
    for sequence in (chunked, single, *forks, beside):
        np.testing.assert_array_equal(np.stack(sequence.logits), expected[: sequence.done])


@pytest.mark.parametrize(("case", "raw"), [x for x in OLD_STYLE if x[0] in CASES])
def test_published_config_equals_the_new_style(case: str, raw: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(raw) == ModelConfig.from_hf(load_config(case))


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe"])
def test_composite(case: str) -> None:
    """As published, with eyes, a prefix and fused experts: the same weights and logits."""
    raw, tensors = composite(case)
    config = ModelConfig.from_hf(raw)
    driver = Driver(config, load(config, tensors), 0, 3)
    recording = model(case)[2]
    short = len(recording.prompt)
    sequence = feed(driver, Sequence(0, recording.prompt, short), [short])
    assert error(sequence, recording.logits) < TOLERANCE


@pytest.mark.parametrize(
    ("case", "change", "named"),
    [
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_key_heads"),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_5", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ("qwen3_5", {"linear_new_thing": 2}, "linear_new_thing"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope"),
        ("kimi_linear", {"qk_head_dim": 20}, "qk_head_dim"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "scoring_func"),
        (
            "kimi_linear",
            {
                "linear_attn_config": {
                    "kda_layers": [0, 1, 2],
                    "full_attn_layers": [3],
                    "head_dim": 16,
                    "num_heads": 4,
                }
            },
            "kda_layers",
        ),
    ],
)
def test_refusals(case: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_hf(load_config(case) | change)


def test_layers_for_speculation_are_passed_over() -> None:
    plain = load_config("qwen3_5")
    assert ModelConfig.from_hf(plain | {"mtp_num_hidden_layers": 1}) == ModelConfig.from_hf(plain)


def test_decays_without_axes_of_length_1_load(tmp_path: Path) -> None:
    """A_log of Kimi Linear is [1, 1, H, 1], or [H] in files of other tools."""
    _, tensors, _ = load_case("kimi_linear")
    config, params, _ = model("kimi_linear")
    family = get_family(config)
    flat = {k: v.reshape(-1) if k.endswith("A_log") else v for k, v in tensors.items()}
    for name, drawn in (("published", tensors), ("flat", flat)):
        folder = write_case(tmp_path / name, "kimi_linear", drawn)
        loaded = load_params(
            family.param_specs(config),
            family.weight_rules(config),
            open_safetensors(folder),
            "float32",
        )
        jax.tree.map(np.testing.assert_array_equal, loaded, params)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def convolved(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """silu of the causal convolution of x[T, channels] with the published weight [channels, 1, K]."""
    taps = weight.shape[2]
    line = np.pad(x, ((taps - 1, 0), (0, 0)))
    return silu(np.sum([line[j : j + len(x)] * weight[:, 0, j] for j in range(taps)], axis=0))


def delta_rule(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray
) -> np.ndarray:
    """o[T, H, dv], token by token; g[T, H, dk or 1], beta[T, H]."""
    state = np.zeros((q.shape[1], q.shape[2], v.shape[2]))
    out = []
    for t in range(len(q)):
        state = np.exp(g[t])[:, :, None] * state
        wrong = v[t] - np.einsum("hd,hde->he", k[t], state)
        state = state + k[t][:, :, None] * (beta[t][:, None] * wrong)[:, None, :]
        out.append(np.einsum("hd,hde->he", q[t], state))
    return np.stack(out)


def delta_net(x: np.ndarray, w: dict[str, np.ndarray], raw: dict[str, Any]) -> np.ndarray:
    """Qwen3-Next's Gated DeltaNet of x[T, D] in float64; models.md 4.15."""
    keys, count = raw["linear_num_key_heads"], len(x)
    dk, values = raw["linear_key_head_dim"], raw["linear_num_value_heads"] // keys
    qkvz = (x @ w["in_proj_qkvz.weight"].T).reshape(count, keys, -1)
    b, a = np.split((x @ w["in_proj_ba.weight"].T).reshape(count, keys, -1), 2, axis=-1)
    cuts = [dk, 2 * dk, 2 * dk + values * raw["linear_value_head_dim"]]
    parts = (part.reshape(count, -1) for part in (*np.split(qkvz, cuts, axis=-1), b, a))
    return gated_delta(parts, w, raw) @ w["out_proj.weight"].T


def olmo_delta_net(x: np.ndarray, w: dict[str, np.ndarray], raw: dict[str, Any]) -> np.ndarray:
    """Olmo Hybrid's: a tensor for each part, beta up to 2, and a norm with an epsilon of its own."""
    parts = (x @ w[f"{name}_proj.weight"].T for name in "qkvgba")
    renamed = {"norm.weight": w["o_norm.weight"]}
    renamed["conv1d.weight"] = np.concatenate([w[f"{name}_conv1d.weight"] for name in "qkv"])
    out = gated_delta(parts, w | renamed, raw | {"rms_norm_eps": 1e-5}, span=2.0)
    return out @ w["o_proj.weight"].T


def gated_delta(
    parts: Iterable[np.ndarray], w: dict[str, np.ndarray], raw: dict[str, Any], span: float = 1.0
) -> np.ndarray:
    """What the output projection sees, of the projections q, k, v, z, b, a."""
    q, k, v, z, b, a = parts
    keys, heads = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    dk, dv, count = raw["linear_key_head_dim"], raw["linear_value_head_dim"], len(q)
    u = convolved(np.concatenate([q, k, v], axis=-1), w["conv1d.weight"])
    q, k = (part.reshape(count, keys, dk) for part in np.split(u[:, : 2 * keys * dk], 2, axis=-1))
    q, k = (np.repeat(unit(part), heads // keys, axis=1) for part in (q, k))
    v = u[:, 2 * keys * dk :].reshape(count, heads, dv)
    g = -np.exp(w["A_log"]) * np.log1p(np.exp(a + w["dt_bias"]))
    out = delta_rule(q * dk**-0.5, k, v, g[..., None], span * sigmoid(b))
    out = rms(out, w["norm.weight"], raw["rms_norm_eps"]) * silu(z.reshape(out.shape))
    return out.reshape(count, -1)


def kda(x: np.ndarray, w: dict[str, np.ndarray], raw: dict[str, Any]) -> np.ndarray:
    """Kimi Delta Attention of x[T, D] in float64; models.md 4.18."""
    shape = (len(x), raw["linear_num_heads"], raw["linear_head_dim"])
    q, k, v = (
        convolved(x @ w[f"{n}_proj.weight"].T, w[f"{n}_conv1d.weight"]).reshape(shape)
        for n in "qkv"
    )
    f, gate = (x @ w[f"{n}_a_proj.weight"].T @ w[f"{n}_b_proj.weight"].T for n in "fg")
    f, rate = (f + w["dt_bias"]).reshape(shape), np.exp(w["A_log"].reshape(-1, 1))
    g = -rate * np.log1p(np.exp(f))
    beta = sigmoid(x @ w["b_proj.weight"].T)
    out = delta_rule(unit(q) * shape[2] ** -0.5, unit(k), v, g, beta)
    out = rms(out, w["o_norm.weight"], raw["rms_norm_eps"]) * sigmoid(gate.reshape(shape))
    return out.reshape(len(x), -1) @ w["o_proj.weight"].T


@pytest.mark.parametrize(("case", "truth"), [("wide_gdn", delta_net), ("wide_kda", kda)])
def test_full_width(case: str, truth: Callable[..., np.ndarray]) -> None:
    """One layer at the published width, of its own input, against float64; its logits against PyTorch."""
    raw, tensors, recording = load_case(case)
    config = ModelConfig.from_hf(raw)
    params = load(config, tensors)
    start = f"model.layers.0.{'linear_attn.' if case == 'wide_gdn' else 'self_attn.'}"
    weights = {
        k.removeprefix(start): v.astype(np.float64) for k, v in tensors.items() if start in k
    }
    tokens, exact = recording.long_prompt[:70], np.zeros(0)
    for replay in ("tolerant", "exact"):
        config = dataclasses.replace(config, replay=replay)
        driver = Driver(config, params, 1, 2, sequences=1, block=EXACT)
        sequence = Sequence(0, tokens, len(tokens))
        seen, inputs = [], []
        for decode, prefill in (([], [(sequence, 68)]), ([sequence], []), ([sequence], [])):
            driver.step(decode, prefill)
            places = [0] if decode else np.r_[1:69]
            seen.append(driver.taps["layers.0.attn_out"][places])
            inputs.append(driver.taps["layers.0.attn_in"][places])
        if replay == "tolerant":
            exact = truth(np.concatenate(inputs).astype(np.float64), weights, raw)
        assert np.abs(np.concatenate(seen) - exact).max() < 2e-5 * np.abs(exact).max()
        short = np.stack(sequence.logits[: len(recording.prompt)])
        assert np.abs(short - recording.logits).max() < TOLERANCE


OLMO: dict[str, Any] = {
    "architectures": ["OlmoHybridForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_allow_neg_eigval": True,
    "linear_dt_max": 0.1,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    "vocab_size": 64,
}


_DELTA = {"q_proj": (64, 64), "k_proj": (64, 64), "v_proj": (128, 64), "g_proj": (128, 64)}
_DELTA |= {"a_proj": (4, 64), "b_proj": (4, 64), "o_norm": (32,), "o_proj": (64, 128)}
_DELTA |= {"q_conv1d": (64, 1, 4), "k_conv1d": (64, 1, 4), "v_conv1d": (128, 1, 4)}
_PLAIN = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (64, 64))
_PLAIN |= {"q_norm": (64,), "k_norm": (64,)}
_MLP = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}
OLMO_SHAPES: dict[str, tuple[int, ...]] = {
    "lm_head.weight": (64, 64),
    "model.embed_tokens.weight": (64, 64),
    "model.norm.weight": (64,),
    "model.layers.0.attention_layer_norm.weight": (64,),
    "model.layers.0.feedforward_layer_norm.weight": (64,),
    "model.layers.1.post_attention_layernorm.weight": (64,),
    "model.layers.1.post_feedforward_layernorm.weight": (64,),
    "model.layers.0.linear_attn.A_log": (4,),
    "model.layers.0.linear_attn.dt_bias": (4,),
    **{f"model.layers.0.linear_attn.{name}.weight": shape for name, shape in _DELTA.items()},
    **{f"model.layers.1.self_attn.{name}.weight": shape for name, shape in _PLAIN.items()},
    **{f"model.layers.{i}.mlp.{name}.weight": _MLP[name] for i in range(2) for name in _MLP},
}


def test_olmo_hybrid() -> None:
    """Its delta layer in float64; norms before the branches of delta layers, after those of the others."""
    config = ModelConfig.from_hf(OLMO)
    assert config.ropes == () and ModelConfig.from_hf(OLMO | {"rope_parameters": None}).ropes
    tensors = {name: tensor("olmo_hybrid", name, shape) for name, shape in OLMO_SHAPES.items()}
    driver = Driver(config, load(config, tensors), 0, 3)
    driver.step([], [(Sequence(0, prompt("olmo_hybrid", 41), 41), 41)])
    seen = {name: value[:41].astype(np.float64) for name, value in driver.taps.items()}
    wide = {name: value.astype(np.float64) for name, value in tensors.items()}
    start = "model.layers.0.linear_attn."
    part = {k.removeprefix(start): v for k, v in wide.items() if start in k}
    expected = olmo_delta_net(seen["layers.0.attn_in"], part, OLMO)
    np.testing.assert_allclose(seen["layers.0.attn_out"], expected, atol=2e-5)
    weight = wide["model.layers.0.attention_layer_norm.weight"]
    normed = rms(seen["embed"], weight, 1e-6)
    np.testing.assert_allclose(seen["layers.0.attn_in"], normed, atol=1e-5)
    np.testing.assert_array_equal(seen["layers.1.attn_in"], seen["layers.0.out"])
    # What a norm yields has the norm's weight as its size.
    weight = wide["model.layers.1.post_attention_layernorm.weight"]
    size = np.sqrt(np.mean((seen["layers.1.attn_out"] / weight) ** 2, axis=-1))
    np.testing.assert_allclose(size, 1.0, atol=1e-3)
