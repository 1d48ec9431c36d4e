"""Short convolutions as mixers, and the config.json of the models that have them: LFM2 and its variant
with experts.

Called by configs/__init__.py; computed by models/shortconv.py. Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.architectures import Architecture
from jaxinfer.config_reader import Reader
from jaxinfer.configs.common import check_router, read_experts, read_training
from jaxinfer.configs.dense import decoder
from jaxinfer.configs.ffn import Activation, MoeConfig, RouterConfig, each_expert
from jaxinfer.configs.fields import inert, layer_kinds, layer_numbers, only, renamed, without
from jaxinfer.errors import ConfigError
from jaxinfer.model_config import FfnConfig, LayerConfig, MixerConfig, ModelConfig, Names


@dataclass(frozen=True, slots=True)
class ShortConvConfig(MixerConfig):
    """out_proj(C * conv(B * x)), where B, C and x come from one projection, and nothing is activated.

    Attributes:
        kernel: taps of the convolution. bias: it and both projections have one.
    """

    kernel: int
    bias: bool


_NAMES = Names(
    final_norm="embedding_norm",
    mlp="feed_forward.",
    o="out_proj",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    gate="w1",
    up="w3",
    down="w2",
    norms=(("attn_norm", "operator_norm"), ("mlp_norm", "ffn_norm")),
)
_LFM2 = Architecture(
    "lfm2",
    {"num_key_value_heads": 8, "max_position_embeddings": 128000, "rms_norm_eps": 1e-5}
    | {"rope_theta": 1e6, "tie_word_embeddings": True, "block_auto_adjust_ff_dim": True},
    qk_norm="head",
)
_ARCHITECTURES = {
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": replace(
        _LFM2,
        model_type="lfm2_moe",
        defaults={**_LFM2.defaults, "norm_topk_prob": True, "use_expert_bias": True},
    ),
}
MODEL_TYPES = {name: arch.model_type for name, arch in _ARCHITECTURES.items()}
_KINDS = {"conv": "conv", "full_attention": "attention"}


def read(name: str, raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a class of MODEL_TYPES. Raises ConfigError naming the field and the value."""
    experts = _ARCHITECTURES[name].model_type == "lfm2_moe"
    rest = renamed(
        without(raw, "layer_types", "block_norm_eps", "num_heads"),
        rms_norm_eps="norm_eps",
        intermediate_size="block_ff_dim",
        tie_word_embeddings="tie_embedding",
    )
    config, reader = decoder(name, _ARCHITECTURES[name], rest)
    kinds = _kinds(raw, reader, config.num_layers)
    mixer = ShortConvConfig(reader.integer("conv_L_cache", 3, low=2), reader.flag("conv_bias"))
    ffns: list[FfnConfig | None] = [None] * config.num_layers
    if experts:
        moe, dense = _experts(reader), reader.integer("num_dense_layers", 2, low=0)
        ffns = [None if i < dense else moe for i in range(config.num_layers)]
    else:
        config = replace(config, intermediate_size=_width(reader, config.intermediate_size))
    _check_widths(reader, raw, config)
    layers = (
        replace(layer, ffn=ffn) if kind == "attention" else LayerConfig(0, None, mixer, ffn)
        for layer, kind, ffn in zip(config.layers, kinds, ffns, strict=True)
    )
    config = replace(config, layers=tuple(layers), names=_NAMES)
    reader.check_unread()
    return config


def _kinds(raw: Mapping[str, Any], reader: Reader, count: int) -> list[str]:
    full = layer_numbers(reader, "full_attn_idxs", count)
    if raw.get("layer_types") is not None:
        return layer_kinds("layer_types", raw["layer_types"], count, _KINDS)
    return ["attention" if full is None or i in full else "conv" for i in range(count)]


def _width(reader: Reader, given: int) -> int:
    """Of the MLP: two thirds of what the file says, times a factor, rounded up, unless it says otherwise."""
    factor = reader.get("block_ffn_dim_multiplier", 1.0)
    multiple = reader.integer("block_multiple_of", 256)
    if not reader.flag("block_auto_adjust_ff_dim"):
        return given
    width = 2 * given // 3
    if factor is None:
        return width
    width = int(reader.number("block_ffn_dim_multiplier", 1.0) * width)
    return -(-width // multiple) * multiple


def _check_widths(reader: Reader, raw: Mapping[str, Any], config: ModelConfig) -> None:
    """Old files repeat the width of the blocks, the heads and the epsilon under other names."""
    same = {"block_dim": config.hidden_size, "conv_dim": config.hidden_size}
    same |= {"conv_dim_out": config.hidden_size, "block_use_swiglu": True, "use_pos_enc": True}
    for field, value in same.items():
        only(reader, field, value)
    for field, value in (("num_heads", config.num_heads), ("block_norm_eps", config.norm_eps)):
        if raw.get(field) not in (None, value):
            raise ConfigError(f"config.json: {field}={raw[field]!r:.80} must be {value!r} here")
    inert(reader, "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init")
    inert(reader, "conv_use_xavier_init")


def _experts(reader: Reader) -> MoeConfig:
    correction = reader.flag("use_expert_bias")
    renormalize = reader.flag("norm_topk_prob")
    router = RouterConfig(
        experts=read_experts(reader, "num_experts", "num_local_experts", default=32),
        chosen=reader.integer("num_experts_per_tok", 4),
        score="sigmoid",
        correction=correction,
        renormalize=renormalize,
        epsilon=1e-6,
        scale=reader.number("routed_scaling_factor", 1.0),
    )
    block = "feed_forward."
    up, down = each_expert(block, "w1", "w3", "w2")
    read_training(reader)
    return MoeConfig(
        check_router(router),
        reader.integer("moe_intermediate_size", 1792),
        Activation("silu"),
        (up,),
        (down,),
        router_name=f"{block}gate",
        correction_name=f"{block}expert_bias",
    )
