"""Decoders with delta-rule layers: Qwen3-Next, Qwen3.5 and Kimi Linear, and what their mixers need.

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
from jaxinfer.configs.common import qwen_experts, qwen_sparse, with_ffns
from jaxinfer.configs.dense import decoder, text_part
from jaxinfer.errors import ConfigError
from jaxinfer.model_config import FfnConfig, LayerConfig, MixerConfig, ModelConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeltaConfig(MixerConfig):
    """Gated DeltaNet.

    Attributes:
        key_heads, key_dim, heads, value_dim: heads of q and k, and of v (a multiple of key_heads).
        kernel: taps of the convolution.
        layout: how the file joins the projections: "grouped" by key head, or "flat".
    """

    key_heads: int
    key_dim: int
    heads: int
    value_dim: int
    kernel: int
    layout: str

    @property
    def channels(self) -> int:
        """Channels of the convolution: all q, all k, all v."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


@dataclass(frozen=True, slots=True)
class KdaConfig(MixerConfig):
    """Kimi Delta Attention: a decay for each key channel, from projections of rank head_dim.

    Attributes:
        heads, head_dim: of q, k and v alike. kernel: taps of the convolutions.
        lower: 0: the decay is exp(-exp(A) softplus(f + bias)); else exp(lower sigmoid(exp(A) (f + bias))).
    """

    heads: int
    head_dim: int
    kernel: int
    lower: float = 0.0


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
MODEL_TYPES = {name: arch.model_type for name, arch in _ARCHITECTURES.items()}


def read(name: str, raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a class of MODEL_TYPES. Raises ConfigError naming the field and the value."""
    return _qwen(name, raw)


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
    _only(reader, "hidden_act", "silu")
    _only(reader, "attn_output_gate", True)
    _only(reader, "mamba_ssm_dtype", "float32")
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
    names = ("layer_types", "full_attention_interval", "num_hidden_layers")
    reader = Reader({name: raw[name] for name in names if name in raw}, {})
    count = reader.integer("num_hidden_layers")
    every = reader.integer("full_attention_interval", 4)
    types = reader.typed("layer_types", list)
    types = types or [_LINEAR if (i + 1) % every else _FULL for i in range(count)]
    return _checked(types, count), {k: v for k, v in raw.items() if k not in names[:2]}


def _checked(types: list[Any], count: int) -> list[str]:
    """layer_types, one of the two a layer."""
    if len(types) != count or any(t not in (_LINEAR, _FULL) for t in types):
        raise ConfigError(
            f"config.json: layer_types={types!r:.80} must hold {count} of {_LINEAR}, {_FULL}"
        )
    return types


def _only(reader: Reader, field: str, value: Any) -> None:
    """Refuse any value of a field but the one that is implemented."""
    given = reader.get(field, value)
    if given != value:
        raise ConfigError(f"config.json: {field}={given!r:.80} must be {value!r} here")


def _skip_drafts(reader: Reader, *fields: str) -> None:
    """Fields of layers for speculation, which are not loaded."""
    given = {field: value for field in fields if (value := reader.get(field))}
    if given:
        log.info("config.json: layers for speculation are left out: %s", given)
