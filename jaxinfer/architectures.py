"""What each supported architecture does whatever its config.json says: traits and default values.

One entry a class name; configs/ reads the rest from the file. Adding a dense decoder means
adding an entry here and a recording under tests/reference. Pure data; imports no JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Architecture:
    """Traits of one model class.

    Attributes:
        model_type: config.json's model_type. defaults: values of fields that the file may omit.
        norm: "A" weight x cast(normed), "B" cast(weight x normed), "C" cast((1 + weight) x normed).
        placement: "pre" norms branch inputs, "post" branch outputs, "sandwich" both.
        qk_norm: "none", "head" (over head_dim, shared by the heads) or "full" (over all heads).
        qkv_bias, o_bias, mlp_bias: True, False, or the field that decides.
        windows: how sliding layers are chosen, see configs.dense._windows.
        fused: the checkpoint holds qkv_proj and gate_up_proj. partial_rope: rope may be partial.
        rope_by_type: full and sliding layers have different rope (nested rope_parameters).
        scaled_length: max_position_embeddings already contains the rope factor.
        embed_sqrt: embeddings are multiplied by sqrt(hidden_size).
        activation_field: field that names the activation.
        nested: the decoder's fields stand in text_config.
        prefix: where the decoder's tensors are. ignored: patterns of tensors to skip on purpose.
        fields: extra fields that the class reads, see configs/dense.py.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norm: str = "A"
    placement: str = "pre"
    qk_norm: str = "none"
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    windows: str = "none"
    fused: bool = False
    partial_rope: bool = False
    rope_by_type: bool = False
    scaled_length: bool = False
    embed_sqrt: bool = False
    activation_field: str = "hidden_act"
    nested: bool = False
    prefix: str = "model."
    ignored: tuple[str, ...] = ()
    fields: frozenset[str] = frozenset()


_BIASED: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_GEMMA: dict[str, Any] = {**_BIASED, "norm": "C", "embed_sqrt": True}
_GEMMA_DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA3 = Architecture(
    "gemma3_text",
    {**_GEMMA_DEFAULTS, "max_position_embeddings": 131072, "rope_theta": 1e6}
    | {"vocab_size": 262208, "num_attention_heads": 8},
    **_GEMMA,
    placement="sandwich",
    qk_norm="head",
    windows="pattern6",
    rope_by_type=True,
    scaled_length=True,
    activation_field="hidden_activation",
    fields=frozenset({"query_pre_attn_scalar", "final_logit_softcapping", "rope_local_base_freq"}),
)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama", **_BIASED, mlp_bias="mlp_bias"),
    "MistralForCausalLM": Architecture(
        "mistral",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        windows="all",
    ),
    "MinistralForCausalLM": Architecture(
        "ministral",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        windows="types",
    ),
    "Ministral3ForCausalLM": Architecture(
        "ministral3",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
        },
        windows="all",
        fields=frozenset({"llama_4_scaling_beta"}),
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2",
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
        qkv_bias=True,
        windows="qwen",
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "head_dim": 128,
            "sliding_window": 4096,
        },
        **_BIASED,
        qk_norm="head",
        windows="qwen",
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
        },
        **_BIASED,
        mlp_bias="mlp_bias",
        windows="nope",
        fields=frozenset({"no_rope_layers"}),
    ),
    "GemmaForCausalLM": Architecture(
        "gemma",
        {**_GEMMA_DEFAULTS, "num_key_value_heads": 16, "max_position_embeddings": 8192}
        | {"hidden_act": "gelu_pytorch_tanh"},
        **_GEMMA,
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2",
        {
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        **_GEMMA,
        placement="sandwich",
        windows="pattern2",
        activation_field="hidden_activation",
        fields=frozenset(
            {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}
        ),
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3,
        model_type="gemma3",
        nested=True,
        prefix="language_model.model.",
        ignored=(r"vision_tower\..*", r"multi_modal_projector\..*"),
    ),
    "Phi3ForCausalLM": Architecture(
        "phi3",
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        windows="all",
        fused=True,
        partial_rope=True,
    ),
    "Olmo2ForCausalLM": Architecture(
        "olmo2", {"rms_norm_eps": 1e-5}, **_BIASED, norm="B", placement="post", qk_norm="full"
    ),
    "Olmo3ForCausalLM": Architecture(
        "olmo3",
        {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
        **_BIASED,
        norm="B",
        placement="post",
        qk_norm="full",
        windows="pattern4",
        rope_by_type=True,
    ),
    "GraniteForCausalLM": Architecture(
        "granite", **_BIASED, mlp_bias="mlp_bias", fields=frozenset({"multipliers"})
    ),
    "SeedOssForCausalLM": Architecture(
        "seed_oss",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "max_position_embeddings": 524288,
        },
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
}
