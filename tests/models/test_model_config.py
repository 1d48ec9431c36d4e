"""Reading config.json: both spellings, lengths, windows, and what is refused by name."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from jaxinfer.architectures import ARCHITECTURES
from jaxinfer.errors import ConfigError
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import get_family
from tests.reference.cases import CASES

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read(case: str = "llama", drop: tuple[str, ...] = (), **fields: Any) -> ModelConfig:
    raw = {k: v for k, v in (CASES[case] | fields).items() if k not in drop}
    return ModelConfig.from_hf(raw)


def test_every_architecture_has_cases() -> None:
    recorded = {raw["architectures"][0] for raw in CASES.values()}
    # The composite class differs from Gemma3ForCausalLM in tensor names alone, see below.
    assert recorded == set(ARCHITECTURES) - {"Gemma3ForConditionalGeneration"}


def test_is_a_value() -> None:
    assert hash(read()) == hash(read()) and read() == read()
    assert read() != read(hidden_act="gelu")


def test_spellings_agree() -> None:
    for scaling in (
        {"type": "linear", "factor": 2.0},
        {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 64},
        {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
    ):
        old = read(rope_theta=500.0, rope_scaling=scaling)
        new = {"rope_type": scaling.get("type"), **scaling, "rope_theta": 500.0}
        assert old == read(drop=("rope_theta",), rope_parameters=new), scaling
    assert read(torch_dtype="bfloat16") == read(drop=("torch_dtype",), dtype="bfloat16")
    nested = read("gemma3")
    old = {"rope_theta": 100000.0, "rope_local_base_freq": 1000.0}
    old |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    beside = {"rope_type": "default", "rope_theta": 9.0, "full_attention": {"rope_theta": 7.0}}
    assert read(rope_theta=9.0) == read(drop=("rope_theta",), rope_parameters=beside)
    assert nested == read("gemma3", drop=("rope_parameters",), **old)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_structures_match(name: str) -> None:
    import jax

    case = next((c for c, raw in CASES.items() if raw["architectures"][0] == name), "gemma3")
    config, family = read(case), get_family(read(case))
    specs, rules = family.param_specs(config), family.weight_rules(config)
    assert jax.tree.structure(specs) == jax.tree.structure(rules)
    sources = [s for rule in jax.tree.leaves(rules) for s in rule.sources]
    assert len(sources) == len(set(sources))
    kinds = family.cache_specs(config, "bfloat16")
    assert sorted(i for kind in kinds for i in kind.layers) == list(range(config.num_layers))
    assert all(config.layers[i].window == kind.window for kind in kinds for i in kind.layers)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 512),
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"type": "dynamic", "factor": 2.0}, 1024),
        ({"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 64}, 512),
        ({"type": "yarn", "factor": 4.0}, 2048),  # no original length: it is the maximum
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
    ],
)
def test_max_length(scaling: dict[str, Any] | None, expected: int) -> None:
    """R-WLD-05: what the length is derived to be, where a scaling is given."""
    assert read(rope_scaling=scaling).max_length == expected


def test_max_length_that_includes_the_factor() -> None:
    assert read("phi3_longrope").max_length == 128
    assert read("gemma3").max_length == 512


def test_length_dependent_rope() -> None:
    """R-WLD-04: the rule is fixed by a request's prompt length; pages of other rules are not shared."""
    dynamic, longrope = read("llama_dynamic"), read("llama_longrope")
    assert dynamic.length_dependent_rope and longrope.length_dependent_rope
    assert not read().length_dependent_rope and read().rope_key(10**6) == 0
    assert [dynamic.rope_key(n) for n in (1, 32, 33, 50)] == [0, 0, 33, 50]
    assert [longrope.rope_key(n) for n in (1, 32, 33, 50)] == [0, 0, 33, 33]


def test_windows() -> None:
    windows = lambda config: [layer.window for layer in config.layers]  # noqa: E731
    assert windows(read("mistral")) == [8, 8]
    assert windows(read("mistral_full")) == [0, 0]
    assert windows(read("qwen2")) == [0, 0]
    assert windows(read("qwen2_window")) == [0, 8]
    assert windows(read("gemma2")) == [8, 0]
    assert windows(read("gemma3_old")) == [8, 8, 0]
    assert windows(read("olmo3")) == [8, 8, 8, 0]
    assert windows(read("smollm3_window")) == [0, 8, 0]
    assert [bool(layer.rope) for layer in read("smollm3").layers] == [True] * 3 + [False]
    kinds = get_family(read("olmo3")).cache_specs(read("olmo3"), "float32")
    assert [(k.name, k.scope, k.window, k.layers) for k in kinds] == [
        ("full", "token", 0, (3,)),
        ("window8", "window", 8, (0, 1, 2)),
    ]


def test_explicit_head_dim_is_used_everywhere() -> None:
    """R-WLD-03: projections, rope, pages and the softmax scale."""
    config = read(head_dim=32)
    family = get_family(config)
    specs = family.param_specs(config)
    assert specs["layers"][0]["qkv"].shape == (32, (4 + 2 * 2) * 32)
    assert specs["layers"][0]["o"].shape == (4 * 32, 32)
    assert family.cache_specs(config, "float32")[0].fields[0].shape == (2, 32)
    assert config.layers[0].rope is not None and config.layers[0].rope.dims == 32
    assert config.scale == 32**-0.5


def test_tied_head_has_no_leaf() -> None:
    """R-WLD-02: the head is the embedding, so there is no second parameter left to chance."""
    tied, free = read("llama_tied"), read()
    assert "lm_head" not in get_family(tied).param_specs(tied)
    assert "lm_head" in get_family(free).param_specs(free)
    skipped = get_family(tied).ignored_tensors(tied)
    assert any(p.fullmatch("lm_head.weight") for p in skipped)
    assert not any(p.fullmatch("lm_head.weight") for p in get_family(free).ignored_tensors(free))


def test_composite_reads_the_text_part() -> None:
    text = CASES["gemma3"] | {"architectures": None, "dtype": None}
    config = ModelConfig.from_hf(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": text,
            "vision_config": {"hidden_size": 8},
            "mm_tokens_per_image": 256,
            "torch_dtype": "bfloat16",
        }
    )
    assert config.dtype == "bfloat16"
    family = get_family(config)
    rules = family.weight_rules(config)
    assert rules["final_norm"].sources == ("language_model.model.norm.weight",)
    assert any(p.fullmatch("vision_tower.a.weight") for p in family.ignored_tensors(config))
    same = {"architecture": "Gemma3ForCausalLM", "dtype": "float32", "prefix": "model."}
    assert replace(config, **same, ignored=()) == read("gemma3")


def test_unknown_fields_without_meaning_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(favourite_colour="green", num_experts=0, alibi=False) == read()
    assert "favourite_colour" in caplog.text and "alibi" not in caplog.text


def test_published_leftovers_are_accepted() -> None:
    """Fields of well-known checkpoints that say nothing about the maths."""
    read(rope_interleaved=False, is_llama_config=True, pretraining_tp=1, rope_scaling=None)
    read("qwen2", use_mrope=False, max_window_layers=21, attention_dropout=0.0)
    read(
        "phi3", auto_map={"AutoConfig": "x"}, embd_pdrop=0.0, full_attn_mod=1, attention_bias=False
    )
    read("gemma2", cache_implementation="hybrid", hidden_act="gelu_pytorch_tanh")
    read("smollm3", pretraining_tp=2, max_window_layers=28, use_sliding_window=False)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"architectures": ["RwkvForCausalLM"]}, "RwkvForCausalLM"),
    ("llama", {"architectures": None, "model_type": "mamba"}, "mamba"),
    ("llama", {"hidden_act": "mish"}, "hidden_act='mish'"),
    ("llama", {"torch_dtype": "int8"}, "dtype='int8'"),
    ("llama", {"hidden_size": None}, "hidden_size=None"),
    ("llama", {"hidden_size": 33}, "hidden_size=33"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers=True"),
    ("llama", {"num_hidden_layers": -1}, "num_hidden_layers=-1"),
    ("llama", {"vocab_size": "40"}, "vocab_size='40'"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps=0"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
    ("llama", {"attention_chunk_size": 128}, "attention_chunk_size=128"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ("llama", {"alibi": True}, "alibi=True"),
    ("llama", {"use_parallel_residual": True}, "use_parallel_residual"),
    ("llama", {"num_experts": 8}, "num_experts=8"),
    ("llama", {"num_local_experts": 8}, "num_local_experts=8"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved"),
    ("llama", {"sliding_window": 8}, "sliding_window=8"),
    ("llama", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("llama", {"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type='su'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "factor=None"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": -2}}, "factor=-2"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 3}}, "alpha=3"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor=None"),
    ("llama", {"rope_scaling": {"full_attention": {"type": "linear"}}}, "nested"),
    ("llama", {"rope_theta": 0}, "rope_theta=0"),
    ("mistral", {"attention_bias": True}, "attention_bias=True"),
    ("mistral", {"sliding_window": 0}, "sliding_window=0"),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("ministral", {"sliding_window": None}, "sliding_window"),
    ("ministral", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
    ("ministral3", {"rope_parameters": None}, "llama_4_scaling_beta"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3", {"rope_parameters": {"rope_theta": 5.0}}, "must be nested"),
    (
        "gemma3",
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": 5},
        "text_config=5 must be a JSON object",
    ),
    (
        "phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "short_factor",
    ),
]


@pytest.mark.parametrize(("case", "fields", "message"), REFUSED, ids=[r[2] for r in REFUSED])
def test_refused_by_name(case: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(case, **fields)
    assert message in str(caught.value)


WILD = [10**400, 5, "x", [], {}, [5], {"a": 1}, None, -1, 0, 1e308, float("inf"), True, [[1]]]
WILD += [{"full_attention": 5}, {"rope_type": "yarn", "factor": 1e308}, {"rope_type": [1]}]


@pytest.mark.parametrize("case", ["llama", "smollm3", "gemma3", "phi3"])
def test_values_of_any_type_are_read_or_refused(case: str) -> None:
    """A config.json is input from outside: whatever it holds, nothing but a ConfigError comes out."""
    others = ("rope_scaling", "rope_parameters", "layer_types", "no_rope_layers", "head_dim")
    refused = 0
    for name in dict.fromkeys([*CASES[case], *others]):
        for value in WILD:
            try:
                read(case, **{name: value})
            except ConfigError as error:
                assert len(str(error)) < 2000
                refused += 1
    assert refused > 100
