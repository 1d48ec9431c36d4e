"""State spaces and their hybrids: every recorded case in every cut, both vocabularies of config.json, what
is refused, clamped time steps, layers at published widths.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxinfer.configs.ffn import MoeConfig
from jaxinfer.configs.ssm import ParallelConfig, SsmConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import get_family
from jaxinfer.weights.loader import load_params
from jaxinfer.weights.tensors import open_safetensors
from tests.models import truth
from tests.models.cuts import (
    check_every_cut,
    check_exact_replay,
    error,
    model,
    published,
    written,
)
from tests.models.families import load_case, load_config, write_case
from tests.models.paged import Driver, Sequence, load

CASES = ("mamba2", "bamba", "granitemoehybrid", "granitemoehybrid_dense", "nemotron_h")
CASES += ("falcon_h1", "falcon_h1_gate_first", "falcon_h1_plain")
TOLERANCE = 1e-4


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str) -> None:
    check_every_cut(case, TOLERANCE)


@pytest.mark.parametrize("case", ["falcon_h1"])
def test_exact_replay_is_bitwise(case: str) -> None:
    check_exact_replay(case, TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_published_config_is_the_same_model(case: str) -> None:
    assert published(case) == written(case)


@pytest.mark.parametrize("case", ["granitemoehybrid", "nemotron_h"])
def test_weights_load_from_files(case: str, tmp_path: Path) -> None:
    """The loader reads what the tests' own loader reads; every tensor has a place."""
    config, params, _ = model(case)
    source = open_safetensors(write_case(tmp_path / case, case))
    family = get_family(config)
    specs, rules = family.param_specs(config), family.weight_rules(config)
    ignored = family.ignored_tensors(config)
    loaded = load_params(specs, rules, source, "float32", ignored=ignored)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_kinds() -> None:
    """Mamba2 keeps slots alone; Falcon-H1's layers keep slots and pages."""
    (state,) = get_family(written("mamba2")).cache_specs(written("mamba2"), "bfloat16")
    assert [f.name for f in state.fields] == ["conv", "state"] and not state.paged
    assert [f.dtype for f in state.fields] == ["bfloat16", "float32"]
    config = written("falcon_h1")
    full, state = get_family(config).cache_specs(config, "float32")
    assert full.layers == state.layers == (0, 1) and full.paged


def test_time_steps_are_clamped_in_every_cut() -> None:
    """time_step_limit binds in prefill and in decoding alike (transformers: in prefill only)."""
    config = written("mamba2", time_step_limit=[0.05, 0.3])
    mixer = config.layers[0].mixer
    assert isinstance(mixer, SsmConfig) and mixer.limits == (0.05, 0.3)
    params = truth.random_params(config)
    h, out = truth.run_layer(config, params, 20)
    weights = params["layers"][0]
    expected = truth.mamba2(h, weights, mixer, config.norm_eps)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    free = truth.mamba2(h, weights, replace(mixer, limits=(0.0, math.inf)), config.norm_eps)
    assert np.abs(free - expected)[15:].max() > 0.01  # 15 on: decoded


def test_biases_are_where_the_file_says() -> None:
    config = written("mamba2", use_bias=True, use_conv_bias=False)
    params = truth.random_params(config)
    (mixer, _) = (layer.mixer for layer in config.layers)
    assert isinstance(mixer, SsmConfig)
    assert {"in_bias", "out_bias"} <= set(params["layers"][0])
    assert "conv_bias" not in params["layers"][0]
    h, out = truth.run_layer(config, params, 12)
    expected = truth.mamba2(h, params["layers"][0], mixer, config.norm_eps)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("case", ["wide_mamba2", "wide_short_conv", "wide_lightning"])
def test_wide_recordings(case: str) -> None:
    """Granite 4's mixer of 48 heads and one group, LFM2's of 2048 channels, MiniMax's of 64 heads."""
    raw, tensors, recording = load_case(case)
    config = ModelConfig.from_hf(raw)
    prompt, driver = recording.long_prompt, Driver(config, load(config, tensors), 1, 3, sequences=1)
    sequence = Sequence(0, prompt, 0)
    for size in (20, 1, 1, 30, 1):
        driver.step([sequence] if size == 1 else [], [(sequence, size)] if size > 1 else [])
    assert error(sequence.logits, recording) < TOLERANCE


def test_wide_mamba2() -> None:
    """Nemotron-H 8B's mixer: 128 heads of 64, 8 groups of 128, hidden size 4096."""
    sizes = {"hidden_size": 4096, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8}
    sizes |= {"ssm_state_size": 128, "layers_block_type": ["linear_attention"], "vocab_size": 16}
    config = written("nemotron_h", **sizes)
    mixer = config.layers[0].mixer
    assert isinstance(mixer, SsmConfig)
    params = truth.random_params(config)
    h, out = truth.run_layer(config, params, 6)
    expected = truth.mamba2(h, params["layers"][0], mixer, config.norm_eps)
    assert np.abs(out - expected).max() < 2e-5 * np.abs(expected).max()


def test_wide_falcon_h1() -> None:
    """Falcon-H1 7B's layer: 24 heads of 128 with a state of 256 beside 12 heads of 256."""
    sizes = {"hidden_size": 3072, "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128}
    sizes |= {"mamba_d_state": 256, "mamba_n_groups": 1, "num_attention_heads": 12}
    sizes |= {"head_dim": 256, "num_hidden_layers": 1, "vocab_size": 16, "intermediate_size": 32}
    config = written("falcon_h1_plain", **sizes)
    mixer = config.layers[0].mixer
    assert isinstance(mixer, ParallelConfig)
    params = truth.random_params(config)
    h, out = truth.run_layer(config, params, 12)
    weights, eps = params["layers"][0], config.norm_eps
    expected = 0.6 * truth.mamba2(1.25 * h, weights, mixer.ssm, eps)
    expected += 0.8 * truth.attention(0.9 * h, weights, config)
    assert np.abs(out - expected).max() < 2e-5 * np.abs(expected).max()


def test_experts_of_a_latent_width() -> None:
    """moe_latent_size: the router and the shared expert read the layer's input, the experts a projection."""
    config = written("nemotron_h", moe_latent_size=24)
    moe = config.layers[1].ffn
    assert isinstance(moe, MoeConfig) and moe.latent == 24
    params = truth.random_params(config)
    driver, sequence = Driver(config, params, 1, 1, sequences=1), Sequence(0, list(range(3, 19)), 0)
    driver.step([], [(sequence, 16)])
    weights = params["layers"][1]
    x = driver.taps["layers.0.out"][1:].astype(np.float64)
    h = truth.rms(x, config.norm_eps) * np.asarray(weights["mlp_norm"], np.float64)
    expected = truth.experts(h, weights, moe)
    np.testing.assert_allclose(driver.taps["layers.1.mlp_out"][1:], expected, atol=2e-5)


REFUSED = [
    ("mamba2", {"num_heads": 6}, "num_heads=6"),
    ("mamba2", {"n_groups": 3}, "n_groups=3 must divide num_heads=8"),
    ("mamba2", {"rms_norm": False}, "rms_norm=False"),
    ("mamba2", {"time_step_limit": [0.2, 0.1]}, "time_step_limit"),
    ("mamba2", {"hidden_act": "tanh"}, "hidden_act='tanh'"),
    ("bamba", {"attn_layer_indices": [4]}, "attn_layer_indices holds 4"),
    ("bamba", {"attn_rotary_emb": 4}, "attn_rotary_emb=4"),
    ("bamba", {"mamba_d_head": 8}, "mamba_d_head=8"),
    ("granitemoehybrid", {"layer_types": ["mamba"]}, "layer_types"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
    ("granitemoehybrid", {"normalization_function": "layernorm"}, "normalization_function"),
    ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers"),
    ("falcon_h1", {"mamba_use_mlp": False}, "mamba_use_mlp=False"),
    ("nemotron_h", {"moe_latent_size": 16, "mlp_bias": True}, "moe_latent_size=16"),
    ("nemotron_h", {"norm_eps": 1e-6}, "norm_eps=1e-06 must be 1e-05"),
    ("nemotron_h", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern"),
    ("nemotron_h", {"mamba_hidden_act": "relu"}, "mamba_hidden_act='relu'"),
]


@pytest.mark.parametrize(("case", "fields", "message"), REFUSED)
def test_refusals_name_the_field(case: str, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match="config.json") as raised:
        written(case, **fields)
    assert message in str(raised.value)


def test_layers_for_speculation_are_left_out() -> None:
    config = written("nemotron_h", num_nextn_predict_layers=1)
    assert config == written("nemotron_h") and any("mtp" in p for p in config.ignored)


def test_spellings() -> None:
    """head_dim under its old name, widths that say "auto" or nothing."""
    raw = load_config("nemotron_h")
    old = {k: v for k, v in raw.items() if k != "head_dim"} | {"attention_head_dim": 16}
    assert ModelConfig.from_hf(old) == written("nemotron_h")
    assert written("bamba", mamba_d_head="auto") == written("bamba")
    assert written("falcon_h1", mamba_d_ssm=None, mamba_d_head="auto") is not None
