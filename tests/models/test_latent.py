"""Latent attention and the indexer: every recorded case in every cut, the two forms, published widths."""

from __future__ import annotations

import re
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache.spec import Scope
from jaxinfer.configs.ffn import MoeConfig, RouterConfig
from jaxinfer.configs.latent import LatentConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import get_family
from jaxinfer.weights.loader import load_params, read_shard
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

DENSE = ["deepseek_v2", "deepseek_v2_greedy", "deepseek_v3", "deepseek_v3_norope_interleave"]
DENSE += ["glm4_moe_lite"]
SPARSE = ["deepseek_v32", "glm_moe_dsa"]
MINE = [*DENSE, *SPARSE, "mistral4"]
ROWS, BLOCKS = 1, 10


def model(case: str, **fields: Any) -> tuple[ModelConfig, dict[str, Any], Recording]:
    raw, tensors, recording = load_case(case)
    config = ModelConfig.from_hf(raw | fields)
    return config, load(config, tensors), recording


def check(sequence: Sequence, recording: Recording) -> None:
    """The logits of a sequence that fed the beginning of the long prompt, at every recorded position."""
    logits = np.stack(sequence.logits)
    tolerance = 1e-4 * max(1.0, float(np.abs(recording.logits).max()) / 5)
    short = min(len(logits), len(recording.logits))
    assert np.abs(logits[:short] - recording.logits[:short]).max() < tolerance
    known = recording.positions < len(logits)
    there = recording.positions[known]
    assert np.abs(logits[there] - recording.long_logits[known]).max() < tolerance


def run_every_cut(config: ModelConfig, params: dict[str, Any], recording: Recording) -> Driver:
    """One shot, two prompts at once, random chunks beside a decoding row, token by token."""
    driver = Driver(config, params, ROWS, BLOCKS)
    prompt, short = recording.long_prompt, len(recording.prompt)
    whole, single, pair, chunked = (Sequence(i, prompt, 0) for i in range(4))
    driver.step([], [(whole, len(prompt))])
    driver.step([single], [(pair, short), (chunked, 2 * BLOCK + 3)])
    rng = np.random.default_rng(zlib.crc32(repr(config.layers[0]).encode()))
    sizes = [7, 1, BLOCK - 1, BLOCK, BLOCK + 1, PAGE - 1, PAGE + 1, 3 * PAGE]
    while chunked.done < len(prompt):
        size = min(int(rng.choice(sizes)), len(prompt) - chunked.done)
        driver.step([single], [(chunked, size)])
    while single.done < len(prompt):
        driver.step([single], [])
    for sequence in (whole, single, pair, chunked):
        check(sequence, recording)
    return driver


@pytest.mark.parametrize("case", MINE)
def test_logits(case: str) -> None:
    config, params, recording = model(case)
    driver = run_every_cut(config, params, recording)
    # The tokens that follow the prompt, decoded; near ties may fall otherwise.
    greedy = Sequence(4, recording.prompt + recording.greedy[:-1], 0)
    driver.step([], [(greedy, len(recording.prompt))])
    while greedy.done < len(greedy.tokens):
        driver.step([greedy], [])
    found = np.stack(greedy.logits[len(recording.prompt) - 1 :]).argmax(axis=-1)
    clear = recording.margins > 1e-3
    assert clear.sum() > 6
    assert (found == recording.greedy)[clear].all()


def test_the_expanded_form_agrees() -> None:
    config, params, recording = model("deepseek_v3")
    run_every_cut(replace(config, latent_form="expanded"), params, recording)


@pytest.mark.parametrize(
    ("case", "form"),
    [("deepseek_v3", "absorbed"), ("deepseek_v3", "expanded"), ("glm_moe_dsa", "absorbed")],
)
def test_what_unseen_places_hold_does_not_matter(case: str, form: str) -> None:
    """Pools full of NaN, the page that padding writes to among them."""
    config, params, recording = model(case)
    config, params = shallow(replace(config, latent_form=form), params)
    driver, logits = Driver(config, params, ROWS, 3), []
    for fill in (0.0, np.nan):
        driver.caches = jax.tree.map(lambda x, fill=fill: jnp.full_like(x, fill), driver.caches)
        first, second = (Sequence(i, recording.prompt, 0) for i in range(2))
        driver.step([], [(first, 21)])
        driver.step([first], [(second, 37)])
        logits.append(np.stack(first.logits + second.logits))
    np.testing.assert_array_equal(*logits)


def mixers(config: ModelConfig) -> list[LatentConfig]:
    return [layer.mixer for layer in config.layers if isinstance(layer.mixer, LatentConfig)]


def router(config: ModelConfig, layer: int) -> RouterConfig:
    moe = config.layers[layer].ffn
    assert isinstance(moe, MoeConfig)
    return moe.router


def shallow(config: ModelConfig, params: dict[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
    """The first layer and, where selections are shared, one that shares its; without experts."""
    layers = config.layers
    at = [0, *(i for i, m in enumerate(mixers(config)) if m.topk and not m.index)]
    mlp = {k: v for k, v in params["layers"][0].items() if k in ("gate_up", "down")}
    config = replace(config, layers=tuple(replace(layers[i], ffn=None) for i in at))
    keep = [
        {k: v for k, v in params["layers"][i].items() if not k.startswith(("expert", "router"))}
        for i in at
    ]
    return config, params | {"layers": [layer | mlp for layer in keep]}


@pytest.mark.parametrize("case", ["deepseek_v3", "glm_moe_dsa"])
def test_logits_are_bitwise_independent_of_the_batch(case: str) -> None:
    """Decoded or prefilled, alone or in company, in steps of other shapes."""
    assert shutil.which("g++") or shutil.which("clang++"), "the native ops need a C++ compiler"
    config, params, recording = model(case)
    config, params = shallow(config, params)
    prefill, decode, mixed = (Driver(config, params, *shape) for shape in ((0, 3), (1, 0), (3, 3)))
    tokens = recording.prompt
    whole, single, other, third = (Sequence(i, tokens, 0) for i in range(4))
    prefill.step([], [(whole, len(tokens))])
    while single.done < len(tokens):
        decode.step([single], [])
    mixed.step([], [(other, 5), (third, 9)])
    chunked = Sequence(4, tokens, 0)
    mixed.step([other, third], [(chunked, 20)])
    while chunked.done < len(tokens):
        mixed.step([third, other, chunked] if third.done < len(tokens) else [chunked], [])
    for sequence in (single, chunked, third):
        found = np.stack(sequence.logits)
        np.testing.assert_array_equal(found, np.stack(whole.logits)[: len(found)])


def test_a_short_table_needs_no_choice() -> None:
    """With topk not below what a row can hold, the sparse model is the dense one, to the last bit."""
    config, params, recording = model("glm_moe_dsa")
    config, params = shallow(config, params)
    dense = [replace(m, topk=0, index=None) for m in mixers(config)]
    whole = [replace(m, topk=12 * PAGE) for m in mixers(config)]
    logits = []
    for kind in (dense, whole):
        pairs = zip(config.layers, kind, strict=True)
        layers = tuple(replace(layer, mixer=mixer) for layer, mixer in pairs)
        driver = Driver(replace(config, layers=layers), params, 0, 3)
        sequence = Sequence(0, recording.prompt, 0)
        driver.step([], [(sequence, 41)])
        logits.append(np.stack(sequence.logits))
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize(
    ("case", "raw"), [(c, raw) for c, raw in OLD_STYLE if c in MINE], ids=lambda x: str(x)[:30]
)
def test_old_and_new_style_are_the_same_model(case: str, raw: dict[str, Any]) -> None:
    old, new = ModelConfig.from_hf(raw), ModelConfig.from_hf(load_config(case))
    # The styles may differ in whether they tell of layers for drafts.
    assert replace(old, ignored=()) == replace(new, ignored=())


def test_composite_kimi() -> None:
    """As published: nested fields, prefixed names, a tensor of the vision tower."""
    raw, tensors = composite("deepseek_v3")
    config, (plain, params, _) = ModelConfig.from_hf(raw), model("deepseek_v3")
    differs = ("architecture", "prefix", "names", "ignored")
    fields = {name: getattr(plain, name) for name in differs}
    assert replace(config, **fields) == plain
    same = jax.tree.map(lambda a, b: bool((a == b).all()), load(config, tensors), params)
    assert all(jax.tree.leaves(same))
    for name in ("mm_projector.proj.0.bias", "model.mm_projector.pre_norm.weight"):
        assert any(re.fullmatch(pattern, name) for pattern in config.ignored)


def test_weights_are_loaded_head_by_head(tmp_path: Path) -> None:
    """The loader gives what the rules mean in plain numpy; also a part of the heads alone."""
    config, params, _ = model("deepseek_v3")
    family = get_family(config)
    specs, rules = family.param_specs(config), family.weight_rules(config)
    source = open_safetensors(write_case(tmp_path / "model", "deepseek_v3"))
    ignored = family.ignored_tensors(config)
    loaded = load_params(specs, rules, source, "float32", ignored=ignored)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), loaded, params)
    assert all(jax.tree.leaves(same))
    kv_b = load_case("deepseek_v3")[1]["model.layers.1.self_attn.kv_b_proj.weight"]
    heads = kv_b.reshape(4, 32, 32)
    layer, rule = loaded["layers"][1], rules["layers"][1]
    np.testing.assert_array_equal(layer["w_uk"], heads[:, :16])
    np.testing.assert_array_equal(layer["w_uv"], heads[:, 16:].swapaxes(1, 2))
    index = (slice(1, 3), slice(4, 20), slice(0, 16))
    part = read_shard(rule["w_uv"], source, index, np.dtype(np.float32))
    np.testing.assert_array_equal(part, np.asarray(layer["w_uv"])[index])


DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_sizes_of_published_models() -> None:
    config = ModelConfig.from_hf(DEEPSEEK_V3)
    (latent,) = get_family(config).cache_specs(config, "bfloat16")
    assert (latent.name, latent.scope, latent.bytes_per_token()) == ("latent", Scope.TOKEN, 70_272)
    assert config.max_length == 163840 and config.dtype == "bfloat16"
    assert config.scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2, rel=1e-12)
    assert [layer.ffn is None for layer in config.layers] == [True] * 3 + [False] * 58
    # Kimi-K2: the same class in other sizes, under a model_type of its own.
    kimi = {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "n_routed_experts": 384}
    assert router(ModelConfig.from_hf(DEEPSEEK_V3 | kimi), 60).experts == 384
    # V3.2 keeps an index key of 128 beside each latent.
    sparse = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    sparse |= {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
    config = ModelConfig.from_hf(DEEPSEEK_V3 | sparse)
    specs = get_family(config).cache_specs(config, "bfloat16")
    assert {s.name: s.bytes_per_token() for s in specs} == {"latent": 70_272, "index": 61 * 256}
    # GLM-5: only layers with an indexer of their own keep index keys.
    glm = {"architectures": ["GlmMoeDsaForCausalLM"], "rope_scaling": None, "index_topk_freq": 4}
    config = ModelConfig.from_hf(DEEPSEEK_V3 | sparse | glm)
    index = get_family(config).cache_specs(config, "bfloat16")[1]
    assert index.layers[:5] == (0, 1, 5, 9, 13)
    assert all(m.index.interleaved for m in mixers(config) if m.index)


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        ("deepseek_v3", {"attention_bias": True}, "attention_bias=True"),
        ("deepseek_v3", {"qk_head_dim": 25}, "qk_head_dim=25"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank=0"),
        ("deepseek_v3", {"index_n_heads": 4}, "index_n_heads=4"),
        ("deepseek_v3", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("deepseek_v3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek_v32", {"index_head_dim": 4}, "index_head_dim=4"),
        ("glm_moe_dsa", {"indexer_types": ["shared"] + ["full"] * 3}, "first layer"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "indexer_types"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FXFF"}, "FXFF"),
    ],
)
def test_what_is_refused(case: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(load_config(case) | fields)
