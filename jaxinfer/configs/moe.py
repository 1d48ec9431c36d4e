"""Reads the config.json of decoders of plain attention with experts.

What is common with dense decoders is read by dense.py, and what several families of experts share by
common.py. Called by configs/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.architectures import Architecture
from jaxinfer.config_reader import Reader
from jaxinfer.configs.common import (
    check_router,
    deepseek_experts,
    ignore_mtp,
    qwen_experts,
    qwen_sparse,
    read_experts,
    read_training,
    sparse_layers,
    with_ffns,
)
from jaxinfer.configs.dense import decoder
from jaxinfer.configs.ffn import Activation, MoeConfig, RouterConfig, Stored, each_expert
from jaxinfer.configs.fields import inert, only
from jaxinfer.model_config import ModelConfig

_BIASED: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}


def read(name: str, raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a decoder with experts of class `name`."""
    arch, finish = _CLASSES[name]
    if finish is _minimax_m2:
        raw = _partial_rope(raw)
    config, reader = decoder(name, arch, raw)
    config = finish(config, reader)
    reader.check_unread()
    return config


def _mixtral(c: ModelConfig, reader: Reader) -> ModelConfig:
    return with_ffns(c, [mixtral_experts(reader, c)] * c.num_layers)


def mixtral_experts(reader: Reader, c: ModelConfig) -> MoeConfig:
    """Experts in Mixtral's words, of the width of the dense MLP."""
    router = RouterConfig(
        read_experts(reader, "num_local_experts", default=8),
        reader.integer("num_experts_per_tok", 2),
        "softmax",
        renormalize=True,
    )
    block = "block_sparse_moe."
    up, down = each_expert(block, "w1", "w3", "w2")
    act = Activation(c.activation)
    read_training(reader)
    return MoeConfig(
        check_router(router), c.intermediate_size, act, (up,), (down,), router_name=f"{block}gate"
    )


def _qwen(c: ModelConfig, reader: Reader) -> ModelConfig:
    moe = qwen_experts(reader, c.activation)
    return with_ffns(c, [moe if sparse else None for sparse in qwen_sparse(reader, c.num_layers)])


def _gpt_oss(c: ModelConfig, reader: Reader) -> ModelConfig:
    router = RouterConfig(
        read_experts(reader, "num_local_experts", default=128),
        read_experts(reader, "num_experts_per_tok", "experts_per_token", default=4),
        "chosen",
        bias=True,
    )
    limit, alpha = reader.number("swiglu_limit", 7.0), reader.number("swiglu_alpha", 1.702)
    experts = "mlp.experts."
    moe = MoeConfig(
        check_router(router),
        c.intermediate_size,
        Activation(c.activation, limit=limit, alpha=alpha),
        (Stored((f"{experts}gate_up_proj",), turned=True),),
        (Stored((f"{experts}down_proj",), turned=True),),
        bias=(f"{experts}gate_up_proj_bias", f"{experts}down_proj_bias"),
        interleaved=True,
        router_name="mlp.router",
    )
    read_training(reader)
    inert(reader, "initial_context_length")  # of training; rope has its own
    return replace(with_ffns(c, [moe] * c.num_layers), sinks=True)


def _glm4(c: ModelConfig, reader: Reader) -> ModelConfig:
    moe = deepseek_experts(reader, c.activation)
    sparse = sparse_layers(reader, c.num_layers, first=1)
    c = replace(c, qk_norm="head" if reader.flag("use_qk_norm") else "none")
    return ignore_mtp(reader, with_ffns(c, [moe if on else None for on in sparse]))


def _olmoe(c: ModelConfig, reader: Reader) -> ModelConfig:
    moe = qwen_experts(reader, c.activation, width=c.intermediate_size)
    return with_ffns(c, [moe] * c.num_layers)


def _dots1(c: ModelConfig, reader: Reader) -> ModelConfig:
    moe = deepseek_experts(reader, c.activation)
    return with_ffns(c, [moe if on else None for on in sparse_layers(reader, c.num_layers)])


def _minimax_m2(c: ModelConfig, reader: Reader) -> ModelConfig:
    router = RouterConfig(
        read_experts(reader, "num_local_experts", "num_experts", default=256),
        reader.integer("num_experts_per_tok", 8),
        "sigmoid",
        exact=True,
        correction=True,
        renormalize=True,
    )
    _check_minimax_m2(reader, c.num_layers)
    block = "block_sparse_moe."
    up, down = each_expert(block, "w1", "w3", "w2")
    moe = MoeConfig(
        check_router(router),
        c.intermediate_size,
        Activation(c.activation),
        (up,),
        (down,),
        router_name=f"{block}gate",
        correction_name=f"{block}e_score_correction_bias",
    )
    read_training(reader)
    return with_ffns(c, [moe] * c.num_layers)


def _partial_rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """MiniMax says in dims of a head what others say as a part of it."""
    reader = Reader(raw, {"head_dim": 128})
    if reader.get("rotary_dim") is None:
        return raw
    rest = {key: value for key, value in raw.items() if key != "rotary_dim"}
    return {
        "partial_rotary_factor": reader.integer("rotary_dim") / reader.integer("head_dim")
    } | rest


def _check_minimax_m2(reader: Reader, layers: int) -> None:
    """Options of the class of which its models use one value."""
    fixed = {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid"}
    fixed |= {"use_routing_bias": True, "attn_type_list": [1] * layers}
    fixed |= {f"layernorm_{kind}_beta": 1.0 for kind in ("full_attention", "mlp")}
    fixed |= {"shared_intermediate_size": 0}
    for name, value in fixed.items():
        only(reader, name, value)
    # Speculation; linear attention, dense layers and shared experts, which no layer has.
    inert(reader, "use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    inert(reader, "layernorm_linear_attention_beta", "mlp_intermediate_size", "shared_moe_mode")


def _granite(c: ModelConfig, reader: Reader) -> ModelConfig:
    moe = granite_experts(reader, c)
    return with_ffns(c, [moe] * c.num_layers)


def granite_experts(reader: Reader, c: ModelConfig) -> MoeConfig:
    """Experts of Granite's classes: one tensor holds those of a layer, and the chosen alone are weighed."""
    router = RouterConfig(
        read_experts(reader, "num_local_experts", default=8),
        reader.integer("num_experts_per_tok", 2),
        "chosen",
    )
    block = "block_sparse_moe."
    read_training(reader)
    return MoeConfig(
        check_router(router),
        c.intermediate_size,
        Activation(c.activation),
        (Stored((f"{block}input_linear.weight",)),),
        (Stored((f"{block}output_linear.weight",)),),
        router_name=f"{block}router.layer",
    )


_CLASSES: dict[str, tuple[Architecture, Callable[[ModelConfig, Reader], ModelConfig]]] = {
    "MixtralForCausalLM": (
        Architecture(
            "mixtral",
            {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 1e6}
            | {"rms_norm_eps": 1e-5},
            windows="all",
        ),
        _mixtral,
    ),
    "Qwen2MoeForCausalLM": (
        Architecture(
            "qwen2_moe",
            {"num_key_value_heads": 16, "max_position_embeddings": 32768, "qkv_bias": True}
            | {"num_experts_per_tok": 4, "moe_intermediate_size": 1408}
            | {"sliding_window": 4096, "shared_expert_intermediate_size": 5632},
            qkv_bias="qkv_bias",
            windows="qwen",
        ),
        _qwen,
    ),
    "Qwen3MoeForCausalLM": (
        Architecture(
            "qwen3_moe",
            {"num_key_value_heads": 4, "max_position_embeddings": 32768, "sliding_window": 4096}
            | {"num_experts_per_tok": 8, "moe_intermediate_size": 768},
            **_BIASED,
            qk_norm="head",
            windows="qwen",
        ),
        _qwen,
    ),
    "GptOssForCausalLM": (
        Architecture(
            "gpt_oss",
            {"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072}
            | {"attention_bias": True, "sliding_window": 128, "rms_norm_eps": 1e-5}
            | {"rope_theta": 150000.0},
            **_BIASED,
            norm="B",
            windows="pattern2",
        ),
        _gpt_oss,
    ),
    "Glm4MoeForCausalLM": (
        Architecture(
            "glm4_moe",
            {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072}
            | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
            qkv_bias="attention_bias",
            partial_rope=True,
        ),
        _glm4,
    ),
    "OlmoeForCausalLM": (
        Architecture(
            "olmoe",
            {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8},
            **_BIASED,
            qk_norm="full",
        ),
        _olmoe,
    ),
    "Dots1ForCausalLM": (
        Architecture(
            "dots1",
            # A window applies wherever it is given.
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 62}
            | {"norm_topk_prob": False},
            **_BIASED,
            qk_norm="head",
            windows="qwen",
        ),
        _dots1,
    ),
    "MiniMaxM2ForCausalLM": (
        Architecture(
            "minimax_m2",
            {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608}
            | {"rope_theta": 5e6},
            qk_norm="full",
            partial_rope=True,
        ),
        _minimax_m2,
    ),
    "GraniteMoeForCausalLM": (
        Architecture("granitemoe", **_BIASED, fields=frozenset({"multipliers"})),
        _granite,
    ),
}
MODEL_TYPES = {name: arch.model_type for name, (arch, _) in _CLASSES.items()}
