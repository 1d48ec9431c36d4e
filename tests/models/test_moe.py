"""Decoders of plain attention with experts: recorded logits, published names, both config vocabularies."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.configs.ffn import MlpConfig, MoeConfig
from jaxinfer.errors import ConfigError, WeightsError
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import get_family
from jaxinfer.weights.loader import load_params
from tests.models.families import OLD_STYLE, load_case, load_config
from tests.models.paged import BLOCK, PAGE, Driver, Sequence, load
from tests.models.test_invariance import LENGTH, run_alone, run_together
from tests.weights.test_loader import ArraySource

CASES = ["mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "glm4_moe", "granitemoe"]
CASES += ["olmoe", "dots1", "minimax_m2"]
TOLERANCE = 1e-4
RNG = np.random.default_rng(21)


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual - expected).max())


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str) -> None:
    """150 tokens at once, in chunks, token by token beside them: recorded logits, greedy tokens,
    and the same bits."""
    raw, tensors, recording = load_case(case)
    config = ModelConfig.from_hf(raw)
    driver = Driver(config, load(config, tensors), rows=1, blocks=10, sequences=4)
    prompt, count = recording.long_prompt, len(recording.long_prompt)
    single = Sequence(0, list(recording.prompt), count)
    whole = Sequence(1, prompt, count)
    driver.step([single], [(whole, count)])
    logits = np.stack(whole.logits)
    assert error(logits[: len(recording.prompt)], recording.logits) < TOLERANCE
    assert error(logits[recording.positions], recording.long_logits) < TOLERANCE

    chunked = Sequence(2, prompt, count)
    for size in (7, BLOCK - 1, BLOCK + 1, 1, PAGE - 1, PAGE + 1, 1, 2, count):
        short = Sequence(3, prompt[:5], count)  # another length beside it
        rest = min(size, count - chunked.done)
        fits = rest + BLOCK <= 10 * BLOCK
        driver.step([single], [(chunked, rest)] + ([(short, 5)] if fits else []))
        if short.logits:
            np.testing.assert_array_equal(np.stack(short.logits), logits[:5])
    assert chunked.done == count
    np.testing.assert_array_equal(np.stack(chunked.logits), logits)

    while single.done < len(recording.prompt):
        driver.step([single], [])
    np.testing.assert_array_equal(np.stack(single.logits), logits[: len(recording.prompt)])
    for expected, margin in zip(recording.greedy, recording.margins, strict=True):
        assert margin < 10 * TOLERANCE or single.logits[-1].argmax() == expected
        single.tokens.append(expected)
        driver.step([single], [])


@pytest.mark.parametrize("case", ["qwen2_moe", "gpt_oss", "glm4_moe"])
def test_logits_are_bitwise_independent_of_the_batch(case: str) -> None:
    """Alone, in a batch, in any chunking, in steps of other shapes."""
    raw, tensors, recording = load_case(case)
    config = ModelConfig.from_hf(raw)
    params, tokens = load(config, tensors), recording.prompt[:LENGTH]
    whole = run_alone(config, params, tokens, [LENGTH])
    chunked = run_alone(config, params, tokens, [16, 1, 1, 2, 15, 1, 1])
    np.testing.assert_array_equal(chunked, whole)
    np.testing.assert_array_equal(run_together(config, params, tokens), whole)


@pytest.mark.parametrize("case", ["qwen2_moe", "gpt_oss"])
def test_bfloat16_stays_near(case: str) -> None:
    """Rounding may turn a near choice of an expert, so that the mean tells and the largest does not."""
    raw, tensors, recording = load_case(case)
    config = ModelConfig.from_hf(raw)
    params = load(config, tensors, "bfloat16")
    driver = Driver(config, params, rows=0, blocks=3, sequences=1, dtype="bfloat16")
    sequence = Sequence(0, recording.prompt, len(recording.prompt))
    driver.step([], [(sequence, len(recording.prompt))])
    assert np.abs(np.stack(sequence.logits) - recording.logits).mean() < 0.1


@pytest.mark.parametrize(("case", "old"), [e for e in OLD_STYLE if e[0] in CASES])
def test_published_configs_read_alike(case: str, old: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(load_config(case))


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Qwen's experts as one tensor of all gates and ups and one of all downs."""
    out = {name: value for name, value in tensors.items() if ".experts." not in name}
    blocks = {re.sub(r"experts\..*", "experts.", n) for n in tensors if ".experts." in n}
    for at in blocks:
        stack = {
            part: np.stack([tensors[f"{at}{e}.{part}_proj.weight"] for e in range(8)])
            for part in ("gate", "up", "down")
        }
        out[f"{at}gate_up_proj"] = np.concatenate([stack["gate"], stack["up"]], axis=1)
        out[f"{at}down_proj"] = stack["down"]
    return out


def test_experts_load_from_either_form() -> None:
    """One tensor an expert, or all in one: the same leaves, by the loader and by hand."""
    raw, tensors, _ = load_case("qwen3_moe")
    config = ModelConfig.from_hf(raw)
    family = get_family(config)
    specs, rules = family.param_specs(config), family.weight_rules(config)
    leaves = []
    for form in (tensors, fused(tensors)):
        params = load_params(specs, rules, ArraySource(**form), "float32")
        leaves += [params["layers"][1], load(config, form)["layers"][1]]
    for other in leaves[1:]:
        for name, value in leaves[0].items():
            np.testing.assert_array_equal(value, other[name])
    assert leaves[0]["expert_up"].shape == (8, 64, 64)


def test_missing_and_surplus_experts_are_named() -> None:
    raw, tensors, _ = load_case("qwen3_moe")
    config = ModelConfig.from_hf(raw)
    family = get_family(config)
    trees = family.param_specs(config), family.weight_rules(config)
    name = "model.layers.1.mlp.experts.{}.up_proj.weight"
    less = {k: v for k, v in tensors.items() if k != name.format(7)}
    with pytest.raises(
        WeightsError, match=r"missing tensors: model\.layers\.1.*experts\.7\.up_proj"
    ):
        load_params(*trees, ArraySource(**less), "float32")
    more = tensors | {name.format(8): tensors[name.format(7)]}
    with pytest.raises(WeightsError, match=r"nothing uses: model\.layers\.1.*experts\.8\.up_proj"):
        load_params(*trees, ArraySource(**more), "float32")


def test_correction_biases_and_exact_routers_stay_float32() -> None:
    raw, tensors, _ = load_case("glm4_moe")
    config = ModelConfig.from_hf(raw)
    layer = load(config, tensors, "bfloat16")["layers"][1]
    assert {layer["correction"].dtype, layer["router"].dtype} == {jnp.dtype("float32")}
    assert layer["expert_up"].dtype == jnp.bfloat16


def test_layers_with_experts() -> None:
    """mlp_only_layers, decoder_sparse_step and first_k_dense_replace choose them."""
    kinds = {
        case: [type(layer.ffn) for layer in ModelConfig.from_hf(load_config(case)).layers]
        for case in CASES
    }
    dense = type(None)
    assert kinds["qwen3_moe"] == [dense, MoeConfig, MoeConfig]
    assert kinds["qwen2_moe"] == [dense, MoeConfig, dense]
    assert kinds["glm4_moe"] == kinds["dots1"] == [dense, MoeConfig, MoeConfig]
    assert set(kinds["mixtral"] + kinds["gpt_oss"] + kinds["granitemoe"]) == {MoeConfig}


def test_shared_experts() -> None:
    qwen = ModelConfig.from_hf(load_config("qwen2_moe")).layers[1].ffn
    glm = ModelConfig.from_hf(load_config("glm4_moe") | {"n_shared_experts": 2}).layers[1].ffn
    assert isinstance(qwen, MoeConfig) and isinstance(glm, MoeConfig)
    assert isinstance(qwen.shared, MlpConfig) and isinstance(glm.shared, MlpConfig)
    assert (qwen.shared.width, qwen.shared_gate) == (48, "mlp.shared_expert_gate")
    assert (glm.shared.width, glm.shared_gate) == (64, "")


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 of 4"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts=0"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ("qwen3_moe", {"moe_intermediate_size": None}, None),
        ("qwen2_moe", {"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit=0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm=False"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list"),
        ("glm4_moe", {"n_group": 3}, "3 groups"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("glm4_moe", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("glm4_moe", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
        ("glm4_moe", {"moe_router_use_sigmoid": True}, "moe_router_use_sigmoid"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals(case: str, change: dict[str, Any], message: str | None) -> None:
    raw = load_config(case) | change
    if message is None:  # null stands for the default
        raw = {k: v for k, v in raw.items() if v is not None}
        moe = ModelConfig.from_hf(raw).layers[1].ffn
        assert isinstance(moe, MoeConfig) and moe.width == 768
        return
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(raw)


# GPT-OSS 120B: 64 query and 8 key heads of 64, biases, sinks, a window.
HEADS, KV_HEADS, DIM, WIDTH, WINDOW = 64, 8, 64, 2880, 12


def test_gpt_oss_attention_at_full_width() -> None:
    """One layer of attention, in two chunks and by decoding, against numpy in float64."""
    raw = load_config("gpt_oss") | {"hidden_size": WIDTH, "head_dim": DIM, "num_hidden_layers": 1}
    raw |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "sliding_window": WINDOW}
    raw |= {"layer_types": ["sliding_attention"], "num_local_experts": 2, "num_experts_per_tok": 1}
    config = ModelConfig.from_hf(raw)
    family = get_family(config)
    params = {}

    def draw(spec: Any) -> Any:
        scale = spec.shape[-2] ** -0.5 if len(spec.shape) > 1 else 0.5
        values = RNG.random(spec.shape, dtype=np.float32) * 2 - 1
        return values * np.float32(scale * 3)

    specs = family.param_specs(config)
    params = {k: draw(v) for k, v in specs.items() if k != "layers"}
    params["embed"] = RNG.standard_normal((config.vocab_size, WIDTH)).astype(np.float32)
    layer = {k: draw(v) for k, v in specs["layers"][0].items()}
    params["layers"] = [layer]
    tokens = [int(t) for t in RNG.integers(0, config.vocab_size, 24)]
    driver = Driver(config, params, rows=1, blocks=2, sequences=1)
    sequence, seen = Sequence(0, tokens, len(tokens)), []
    for size in (17, 5, 1, 1):
        if size == 1:
            driver.step([sequence], [])
            seen.append(driver.taps["layers.0.attn_out"][:1])
        else:
            driver.step([], [(sequence, size)])
            seen.append(driver.taps["layers.0.attn_out"][1 : 1 + size])
    expected = sink_attention(config, layer, params["embed"][tokens].astype(float))
    assert error(np.concatenate(seen), expected) < 2e-5 * np.abs(expected).max()


def sink_attention(c: ModelConfig, layer: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    count, half, rope = len(x), DIM // 2, c.layers[0].rope
    assert rope is not None and rope.type == "yarn"
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps) * layer["attn_norm"]
    qkv = (x @ layer["qkv"].astype(float) + layer["qkv_bias"]).reshape(count, -1, DIM)
    inv = 150000.0 ** (-np.arange(0, DIM, 2) / DIM)
    low, high = (DIM * np.log(64 / (n * 2 * np.pi)) / (2 * np.log(150000.0)) for n in (32.0, 1.0))
    ramp = np.clip((np.arange(half) - max(low, 0)) / (high - max(low, 0)), 0, 1)
    inv = inv * (1 - ramp + ramp / 32)
    turn = np.exp(1j * np.arange(count)[:, None, None] * inv) * (0.1 * np.log(32) + 1)
    turned = (qkv[..., :half] + 1j * qkv[..., half:]) * turn
    turned = np.concatenate([turned.real, turned.imag], -1)
    q, k, v = turned[:, :HEADS], turned[:, HEADS:-KV_HEADS], qkv[:, -KV_HEADS:]
    k, v = (np.repeat(y, HEADS // KV_HEADS, axis=1) for y in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
    distance = np.arange(count)[:, None] - np.arange(count)
    scores = np.where((distance >= 0) & (distance < WINDOW), scores, -np.inf)
    sinks = np.broadcast_to(layer["sinks"][:, None, None], (HEADS, count, 1))
    scores = np.concatenate([scores, sinks], -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[..., :-1]
    out = np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1)
    return out @ layer["o"].astype(float) + layer["o_bias"]
