"""MiniMax-Text-01: the recorded case in every cut, slopes from the formula, a layer at the published width,
both vocabularies of config.json, what is refused.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxinfer.configs.lightning import LightningConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import get_family
from tests.models import truth
from tests.models.cuts import check_every_cut, check_exact_replay, model, published, written
from tests.models.families import load_case, load_config


def test_logits() -> None:
    check_every_cut("minimax", 1e-4)


def test_exact_replay_is_bitwise() -> None:
    check_exact_replay("minimax", 1e-4)


def test_published_config_is_the_same_model() -> None:
    assert published("minimax") == written("minimax")
    assert written("minimax", layer_types=None) == written("minimax")  # every second one


def test_first_published_words() -> None:
    """MiniMax-Text-01's file before transformers had the class: other names, half of a head turns."""
    raw = load_config("minimax")
    old = {
        k: v
        for k, v in raw.items()
        if "factor" not in k and k not in ("layer_types", "rope_parameters")
    }
    old |= {"architectures": ["MiniMaxText01ForCausalLM"], "model_type": "minimax_text_01"}
    old |= {
        "attn_type_list": [1, 0, 1, 0],
        "rope_theta": 10000.0,
        "rotary_dim": 8,
        "postnorm": True,
    }
    old |= {"shared_intermediate_size": 0, "shared_moe_mode": "sigmoid"}
    for place, (alpha, beta) in {
        "full_attention": (1.3, 0.9),
        "linear_attention": (1.2, 0.8),
    }.items():
        old |= {f"layernorm_{place}_alpha": alpha, f"layernorm_{place}_beta": beta}
    old |= {"layernorm_mlp_alpha": 1.1, "layernorm_mlp_beta": 0.7}
    config, known = ModelConfig.from_hf(old), written("minimax")
    assert [rope.dims for rope in config.ropes] == [8] and known.ropes[0].dims == 16
    layers = [replace(layer, rope=layer.rope and known.ropes[0]) for layer in config.layers]
    same = replace(config, layers=tuple(layers), architecture=known.architecture)
    assert same == known
    m1 = ModelConfig.from_hf(old | {"architectures": ["MiniMaxM1ForCausalLM"]})
    assert m1.layers == config.layers


def test_slopes_come_from_the_formula() -> None:
    """2^(-8 (h + 1) / H), less with depth; the file's buffers, drawn at random here, are passed over."""
    config, _, _ = model("minimax")
    patterns = get_family(config).ignored_tensors(config)
    for buffer in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"):
        name = f"model.layers.1.self_attn.{buffer}"
        assert name in load_case("minimax")[1] and any(p.fullmatch(name) for p in patterns)
    mixers = [layer.mixer for layer in config.layers if layer.mixer]
    slopes = [mixer.slopes(4) for mixer in mixers if isinstance(mixer, LightningConfig)]
    powers = np.array([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    np.testing.assert_allclose(slopes[0], powers * (2 / 3), rtol=1e-4)
    np.testing.assert_allclose(slopes[1], powers * (1e-5 + 1e-5 / 3), rtol=1e-4)


def test_residual_is_the_normed_input() -> None:
    config, _, _ = model("minimax")
    full, linear, *_ = config.layers
    assert full.mixer_factors == (1.3, 0.9) and linear.mixer_factors == (1.2, 0.8)
    assert full.ffn_factors == linear.ffn_factors == (1.1, 0.7)


def test_wide_layer() -> None:
    """64 heads of 128."""
    sizes = {"hidden_size": 512, "num_attention_heads": 64, "head_dim": 128, "vocab_size": 16}
    sizes |= {"num_hidden_layers": 1, "num_key_value_heads": 8, "intermediate_size": 16}
    config = written("minimax", layer_types=["linear_attention"], **sizes)
    params = truth.random_params(config)
    h, out = truth.run_layer(config, params, 12)
    expected = truth.lightning(h, params["layers"][0], config, 0)
    assert np.abs(out - expected).max() < 2e-5 * np.abs(expected).max()


REFUSED = [
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"rotary_dim": 5}, "partial_rotary_factor=0.3125"),
    ({"attn_type_list": [1, 0, 1, 2]}, "attn_type_list"),
    ({"postnorm": False}, "postnorm=False"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok=5"),
    ({"mlp_alpha_factor": "1"}, "mlp_alpha_factor"),
    ({"shared_intermediate_size": 64}, "shared_intermediate_size"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_refusals_name_the_field(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        written("minimax", **fields)
    assert message in str(raised.value)
