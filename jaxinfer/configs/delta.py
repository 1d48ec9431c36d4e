"""Decoders with delta-rule layers: Qwen3-Next, Qwen3.5, Kimi Linear, Olmo Hybrid; and their mixers.

Built from config.json in both vocabularies (layer_types, or intervals and lists of layers). Imports no
JAX. Called by configs/__init__.py; models/delta.py computes the mixers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.architectures import Architecture
from jaxinfer.config_reader import Reader
from jaxinfer.configs.common import (
    deepseek_experts,
    ignore_mtp,
    qwen_experts,
    qwen_sparse,
    sparse_layers,
    with_ffns,
)
from jaxinfer.configs.dense import decoder, text_part
from jaxinfer.configs.ffn import MoeConfig, each_expert
from jaxinfer.configs.fields import inert, layer_kinds, only, renamed, without
from jaxinfer.configs.latent import dense_mixer
from jaxinfer.errors import ConfigError
from jaxinfer.model_config import FfnConfig, LayerConfig, MixerConfig, ModelConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeltaConfig(MixerConfig):
    """Gated DeltaNet.

    Attributes:
        key_heads, key_dim, heads, value_dim: heads of q and k, and of v (a multiple of key_heads).
        kernel: taps of the convolution.
        layout: how the file keeps the projections: joined and "grouped" by key head, joined in "flat" order,
            or "single" tensors, in the words of plain attention.
        span: beta is so much times a sigmoid. norm_eps: of the output norm; 0: the model's own.
    """

    key_heads: int
    key_dim: int
    heads: int
    value_dim: int
    kernel: int
    layout: str
    span: float = 1.0
    norm_eps: float = 0.0

    @property
    def channels(self) -> int:
        """Channels of the convolution: all q, all k, all v."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


@dataclass(frozen=True, slots=True)
class KdaConfig(MixerConfig):
    """Kimi Delta Attention: a decay for each key channel, from projections of rank head_dim.

    Attributes:
        heads, head_dim: of q, k and v alike. kernel: taps of the convolutions.
    """

    heads: int
    head_dim: int
    kernel: int


_LINEAR, _FULL = "linear_attention", "full_attention"
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN = Architecture(
    "qwen3_next",
    _DEFAULTS,
    norm="C",
    qk_norm="head",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    partial_rope=True,
    ignored=(r"mtp\..*",),
    # Text alone has three equal positions, so that it does not matter how they share the angles.
    fields=frozenset({"mrope_section", "mrope_interleaved"}),
)
_QWEN35 = replace(_QWEN, model_type="qwen3_5_text")
_EXPERTS = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
_EXPERTS |= {"shared_expert_intermediate_size": 512}
_NEXT = replace(_QWEN, defaults=_DEFAULTS | _EXPERTS | {"norm_topk_prob": True})
# Every layer has experts: the width of a dense MLP is not in the file.
_EXPERTS35 = _EXPERTS | {"num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 512}
_MOE35 = replace(_QWEN, model_type="qwen3_5_moe_text", defaults=_DEFAULTS | _EXPERTS35)
_EYES: dict[str, Any] = {
    "nested": True,
    "prefix": "model.language_model.",
    "ignored": (r"mtp\..*", r"model\.visual\..*"),
}
_ARCHITECTURES = {
    "Qwen3NextForCausalLM": _NEXT,
    "Qwen3_5ForCausalLM": _QWEN35,
    "Qwen3_5ForConditionalGeneration": replace(_QWEN35, model_type="qwen3_5", **_EYES),
    "Qwen3_5MoeForCausalLM": _MOE35,
    "Qwen3_5MoeForConditionalGeneration": replace(_MOE35, model_type="qwen3_5_moe", **_EYES),
}
_KIMI = Architecture(
    "kimi_linear",
    {
        "rms_norm_eps": 1e-5,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "n_shared_experts": 1,
    },
)
_ARCHITECTURES["KimiLinearForCausalLM"] = _KIMI
_OLMO = Architecture(
    "olmo_hybrid",
    {
        "max_position_embeddings": 65536,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    },
    norm="B",
    placement="post",
    qk_norm="full",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
)
_ARCHITECTURES["OlmoHybridForCausalLM"] = _OLMO
# Its delta layers norm what goes in, the others what comes out; tools that rewrite files swap names.
_OLMO_NORMS = (
    ("attn_norm", "attention_layer_norm", "input_layernorm"),
    ("mlp_norm", "feedforward_layer_norm", "post_attention_layernorm"),
)
_OLMO_POST_NORMS = (
    ("attn_post_norm", "post_attention_layernorm", "feedforward_layer_norm"),
    ("mlp_post_norm", "post_feedforward_layernorm"),
)
# Kimi's words for what other classes of experts have too.
_KIMI_WORDS = {
    "max_position_embeddings": "model_max_length",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "n_shared_experts": "num_shared_experts",
    "scoring_func": "moe_router_activation_func",
}
MODEL_TYPES = {name: arch.model_type for name, arch in _ARCHITECTURES.items()}


def read(name: str, raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a class of MODEL_TYPES. Raises ConfigError naming the field and the value."""
    if name.startswith("Olmo"):
        return _olmo(name, raw)
    return _kimi(name, raw) if name.startswith("Kimi") else _qwen(name, raw)


def _qwen(name: str, raw: Mapping[str, Any]) -> ModelConfig:
    arch = _ARCHITECTURES[name]
    if arch.nested:
        raw = {"tie_word_embeddings": raw.get("tie_word_embeddings")} | text_part(raw)
        arch = replace(arch, nested=False)
    types, raw = _qwen_types(raw)
    config, reader = decoder(name, arch, raw)
    mixer = _delta_net(reader, "grouped" if arch.model_type == "qwen3_next" else "flat")
    config = replace(config, gated=True, layers=_mixed(config, types, mixer, None))
    if "num_experts" in arch.defaults:
        config = with_ffns(config, _qwen_ffns(config, reader, arch))
    only(reader, "hidden_act", "silu")
    only(reader, "attn_output_gate", True)
    only(reader, "mamba_ssm_dtype", "float32")
    _skip_drafts(reader, "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    reader.check_unread()
    return config


def _delta_net(reader: Reader, layout: str) -> DeltaConfig:
    mixer = DeltaConfig(
        key_heads=reader.integer("linear_num_key_heads"),
        key_dim=reader.integer("linear_key_head_dim"),
        heads=reader.integer("linear_num_value_heads"),
        value_dim=reader.integer("linear_value_head_dim"),
        kernel=reader.integer("linear_conv_kernel_dim", low=2),
        layout=layout,
    )
    return _checked_heads(mixer)


def _checked_heads(mixer: DeltaConfig) -> DeltaConfig:
    if mixer.heads % mixer.key_heads:
        raise ConfigError(
            f"config.json: linear_num_key_heads={mixer.key_heads} must divide "
            f"linear_num_value_heads={mixer.heads}"
        )
    return mixer


def _qwen_ffns(config: ModelConfig, reader: Reader, arch: Architecture) -> list[FfnConfig | None]:
    """Qwen3-Next says which layers have experts, and whether weights are renormalised; 3.5 does not."""
    if arch.model_type == "qwen3_next":
        moe = qwen_experts(reader, config.activation)
        return [moe if on else None for on in qwen_sparse(reader, config.num_layers)]
    return [qwen_experts(reader, config.activation, renormalize=True)] * config.num_layers


def _mixed(
    config: ModelConfig, types: list[str], linear: MixerConfig, full: MixerConfig | None
) -> tuple[LayerConfig, ...]:
    """The layers of `config` with the mixers of their types."""
    layers = zip(config.layers, types, strict=True)
    return tuple(
        replace(layer, mixer=linear, rope=None) if kind == _LINEAR else replace(layer, mixer=full)
        for layer, kind in layers
    )


def _qwen_types(raw: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Layer types of layer_types or full_attention_interval, and the other fields."""
    reader = Reader(raw, {})
    count = reader.integer("num_hidden_layers")
    every = reader.integer("full_attention_interval", 4)
    types = reader.typed("layer_types", list)
    types = types or [_LINEAR if (i + 1) % every else _FULL for i in range(count)]
    return _checked(types, count), without(raw, "layer_types", "full_attention_interval")


def _checked(types: Any, count: int) -> list[str]:
    return layer_kinds("layer_types", types, count, {_LINEAR: _LINEAR, _FULL: _FULL})


def _olmo(name: str, raw: Mapping[str, Any]) -> ModelConfig:
    types, raw = _qwen_types(raw)
    rope = Reader(raw, {}).typed("rope_parameters", dict) or {}
    turned = rope.get("rope_theta", raw.get("rope_theta", 1e4)) is not None
    if not turned:
        raw = without(raw, "rope_parameters", "rope_theta")
    config, reader = decoder(name, _OLMO, raw)
    heads = config.num_heads
    keys = reader.integer("linear_num_key_heads", heads)
    dim = reader.integer("linear_key_head_dim", int(0.75 * config.hidden_size / keys))
    mixer = DeltaConfig(
        key_heads=keys,
        key_dim=dim,
        heads=reader.integer("linear_num_value_heads", heads),
        value_dim=reader.integer("linear_value_head_dim", 2 * dim),
        kernel=reader.integer("linear_conv_kernel_dim", low=2),
        layout="single",
        span=2.0 if reader.flag("linear_allow_neg_eigval") else 1.0,
        norm_eps=1e-5,
    )
    only(reader, "hidden_act", "silu")
    inert(reader, "linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max")
    inert(reader, "linear_dt_init_floor")
    reader.check_unread()
    layers = (
        replace(
            layer,
            rope=layer.rope if turned else None,
            norms=_OLMO_NORMS if layer.mixer else _OLMO_POST_NORMS,
        )
        for layer in _mixed(config, types, _checked_heads(mixer), None)
    )
    return replace(config, layers=tuple(layers))


def _kimi(name: str, raw: Mapping[str, Any]) -> ModelConfig:
    raw = renamed(raw, **_KIMI_WORDS)
    types, raw = _kimi_types(raw)
    # head_dim of the file means nothing here.
    config, reader = decoder(name, _KIMI, without(raw, "head_dim"))
    linear = KdaConfig(
        heads=reader.integer("linear_num_heads"),
        head_dim=reader.integer("linear_head_dim"),
        kernel=reader.integer("linear_conv_kernel_dim", low=2),
    )
    full = dense_mixer(reader, interleaved=False)
    head_dim = full.nope + full.rope
    only(reader, "hidden_act", "silu")
    only(reader, "mla_use_nope", True)
    only(reader, "use_grouped_topk", True)
    moe = _kimi_experts(reader, config.activation)
    sparse = sparse_layers(reader, config.num_layers, first=1)
    layers = tuple(replace(layer, rope=None) for layer in _mixed(config, types, linear, full))
    config = replace(config, layers=layers, head_dim=head_dim, scale=head_dim**-0.5)
    config = ignore_mtp(reader, with_ffns(config, [moe if on else None for on in sparse]))
    reader.check_unread()
    return config


def _kimi_experts(reader: Reader, activation: str) -> MoeConfig:
    block = "block_sparse_moe."
    up, down = each_expert(block, "w1", "w3", "w2")
    return replace(deepseek_experts(reader, activation, block=block), up=(up,), down=(down,))


def _kimi_types(raw: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Layer types of layer_types or linear_attn_config, whose sizes join the other fields."""
    reader = Reader(raw, {})
    count, given = reader.integer("num_hidden_layers"), reader.typed("linear_attn_config", dict)
    if given is None:
        return _checked(reader.get("layer_types"), count), without(raw, "layer_types")
    inner = Reader(given, {})
    sizes = {
        "linear_num_heads": inner.integer("num_heads"),
        "linear_head_dim": inner.integer("head_dim"),
        "linear_conv_kernel_dim": inner.integer("short_conv_kernel_size", 4),
    }
    lists = {_LINEAR: "kda_layers", _FULL: "full_attn_layers"}
    numbers = {kind: inner.typed(field, list) or [] for kind, field in lists.items()}
    inner.check_unread()
    named = [n for part in numbers.values() for n in part]
    whole = all(isinstance(n, int) for n in named)
    if not whole or sorted(named) != list(range(1, count + 1)):
        raise ConfigError(
            f"config.json: linear_attn_config.kda_layers={numbers[_LINEAR]!r:.80} and "
            f"full_attn_layers={numbers[_FULL]!r:.80} must name each layer from 1 to {count} once"
        )
    types = [_LINEAR if n in numbers[_LINEAR] else _FULL for n in range(1, count + 1)]
    return types, without(raw, "linear_attn_config", "layer_types") | sizes


def _skip_drafts(reader: Reader, *fields: str) -> None:
    """Fields of layers for speculation, which are not loaded."""
    given = {field: value for field in fields if (value := reader.get(field))}
    if given:
        log.info("config.json: layers for speculation are left out: %s", given)
