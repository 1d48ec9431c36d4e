"""LFM2: the recorded case in every cut, both vocabularies of config.json, a layer at the published width,
what is refused, and the variant with experts.
"""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.configs.ffn import MoeConfig
from jaxinfer.configs.shortconv import ShortConvConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import get_family
from tests.models import truth
from tests.models.cuts import check_every_cut, published, written
from tests.models.paged import Driver, Sequence

# LFM2 8B A1B, in the words of its file.
LFM2_MOE = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 7,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 7168,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "max_position_embeddings": 128000,
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "tie_embedding": True,
    "use_cache": True,
    "use_expert_bias": True,
    "vocab_size": 65536,
}


def test_logits() -> None:
    check_every_cut("lfm2", 1e-4)


def test_published_config_is_the_same_model() -> None:
    assert published("lfm2") == written("lfm2")
    assert written("lfm2").intermediate_size == 64  # 2/3 of 96, a multiple of 32
    listed = written("lfm2", full_attn_idxs=None)
    assert listed == written("lfm2") == written("lfm2", layer_types=None)
    assert written("lfm2", block_auto_adjust_ff_dim=False).intermediate_size == 96
    assert written("lfm2", block_ffn_dim_multiplier=1.6).intermediate_size == 128
    published_sizes = {"intermediate_size": 12288, "block_multiple_of": 256}  # LFM2 1.2B
    assert written("lfm2", **published_sizes).intermediate_size == 8192


def test_slots_hold_inputs_alone() -> None:
    _, state = get_family(written("lfm2")).cache_specs(written("lfm2"), "bfloat16")
    assert state.layers == (0, 2) and state.bytes_per_slot() == 2 * 2 * 64 * 2


@pytest.mark.parametrize("bias", [False, True])
def test_wide_layer(bias: bool) -> None:
    """LFM2 1.2B's: 2048 channels, 3 taps."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 1, "layer_types": ["conv"]}
    sizes |= {"full_attn_idxs": [], "vocab_size": 16, "num_attention_heads": 32, "conv_bias": bias}
    config = written("lfm2", **sizes)
    params = truth.random_params(config)
    h, out = truth.run_layer(config, params, 12)
    expected = truth.short_conv(h, params["layers"][0])
    assert np.abs(out - expected).max() < 2e-5 * np.abs(expected).max()


def test_experts() -> None:
    """The published file is read; a small model of the class runs."""
    config = ModelConfig.from_hf(LFM2_MOE)
    first, _, third, last = config.layers
    assert first.ffn is None and first.mixer == ShortConvConfig(3, False)
    assert third.mixer is None and isinstance(last.ffn, MoeConfig)
    router = last.ffn.router
    assert (router.experts, router.chosen, router.score, router.epsilon) == (32, 4, "sigmoid", 1e-6)
    rules = get_family(config).weight_rules(config)
    assert rules["layers"][3]["expert_down"].sources[31].endswith("experts.31.w2.weight")
    small = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32,
    }
    small |= {
        "routed_scaling_factor": 1.5,
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "intermediate_size": 96,
    }
    config = ModelConfig.from_hf(LFM2_MOE | small)
    params = truth.random_params(config)
    driver = Driver(config, params, 1, 2, sequences=2)
    whole, single = (Sequence(i, list(range(3, 20)), 0) for i in range(2))
    driver.step([], [(whole, 17)])
    x = driver.taps["layers.2.out"] + driver.taps["layers.3.attn_out"].astype(np.float64)
    weights = params["layers"][3]
    h = truth.rms(x, config.norm_eps) * np.asarray(weights["mlp_norm"], np.float64)
    assert isinstance(config.layers[3].ffn, MoeConfig)
    expected = truth.experts(h[1:18], weights, config.layers[3].ffn)
    np.testing.assert_allclose(driver.taps["layers.3.mlp_out"][1:18], expected, atol=2e-5)
    while single.done < 17:
        driver.step([single], [])
    np.testing.assert_array_equal(np.stack(single.logits), np.stack(whole.logits))


REFUSED = [
    ({"layer_types": ["conv", "window"]}, "layer_types"),
    ({"full_attn_idxs": [True]}, "full_attn_idxs holds True"),
    ({"conv_L_cache": 1}, "conv_L_cache=1"),
    ({"block_dim": 32}, "block_dim=32 must be 64"),
    ({"block_use_swiglu": False}, "block_use_swiglu=False"),
    ({"num_heads": 8}, "num_heads=8 must be 4"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_refusals_name_the_field(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        written("lfm2", **fields)
    assert message in str(raised.value)
