"""Reads the config.json of models that have state spaces and attention: Bamba, GraniteMoeHybrid,
Falcon-H1 and Nemotron-H.

Called by configs/__init__.py. Imports no JAX.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.architectures import Architecture
from jaxinfer.config_reader import Reader
from jaxinfer.configs.common import check_router, read_training
from jaxinfer.configs.dense import decoder
from jaxinfer.configs.ffn import Activation, MlpConfig, MoeConfig, RouterConfig, each_expert
from jaxinfer.configs.fields import (
    bounds,
    factors,
    inert,
    initial_time_steps,
    layer_kinds,
    layer_numbers,
    only,
    renamed,
    without,
)
from jaxinfer.configs.moe import granite_experts
from jaxinfer.configs.ssm import (
    BACKBONE,
    MAMBA,
    MAMBA2,
    MAMBA2_DEFAULTS,
    ParallelConfig,
    SsmConfig,
    ssm,
)
from jaxinfer.errors import ConfigError
from jaxinfer.model_config import FfnConfig, LayerConfig, ModelConfig, Names, NoFfn, NoMixer

log = logging.getLogger(__name__)
_MAMBA_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
_GQA = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
_BIASED: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_NEMOTRON = MAMBA2 | {
    "heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "state": "ssm_state_size",
}
_KINDS = {"mamba": "ssm", "linear_attention": "ssm"}
_KINDS |= {"attention": "attention", "full_attention": "attention"}
_BLOCKS = {"M": "ssm", "*": "attention", "E": "moe", "-": "mlp"}
_FORWARD = Names(
    final_norm="final_layernorm",
    mlp="feed_forward.",
    norms=(("attn_norm", "input_layernorm"), ("mlp_norm", "pre_ff_layernorm")),
)
_ARCHITECTURES = {
    "BambaForCausalLM": Architecture(
        "bamba",
        _MAMBA_DEFAULTS | _GQA | {"max_position_embeddings": 262144},
        **_BIASED,
        mlp_bias="mlp_bias",
        partial_rope=True,
    ),
    "GraniteMoeHybridForCausalLM": Architecture(
        "granitemoehybrid",
        _MAMBA_DEFAULTS
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
        **_BIASED,
        fields=frozenset({"multipliers"}),
    ),
    "FalconH1ForCausalLM": Architecture(
        "falcon_h1",
        _MAMBA_DEFAULTS
        | _GQA
        | {"max_position_embeddings": 8192, "mamba_d_ssm": 1024, "mamba_norm_before_gate": True},
        **_BIASED,
        mlp_bias="mlp_bias",
    ),
    "NemotronHForCausalLM": Architecture(
        "nemotron_h",
        MAMBA2_DEFAULTS
        | _GQA
        | {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "head_dim": 128}
        | {"max_position_embeddings": 4096, "mlp_hidden_act": "relu2", "norm_topk_prob": True}
        | {"time_step_min": 0.001, "n_shared_experts": 1},
        **_BIASED,
        mlp_bias="mlp_bias",
        activation_field="mlp_hidden_act",
        prefix="backbone.",
        ignored=(r"mtp\..*",),
    ),
}
MODEL_TYPES = {name: arch.model_type for name, arch in _ARCHITECTURES.items()}


def read(name: str, raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a class of MODEL_TYPES. Raises ConfigError naming the field and the value."""
    arch = _ARCHITECTURES[name]
    config, reader = _READERS[arch.model_type](name, arch, raw)
    inert(reader, "num_logits_to_keep")
    initial_time_steps(reader)
    read_training(reader)
    reader.check_unread()
    return config


def _mamba(reader: Reader, inner: int) -> SsmConfig:
    """The mixer of the fields mamba_*, whose heads may say "auto" for what makes up the inner width."""
    heads = reader.integer("mamba_n_heads")
    dim = reader.get("mamba_d_head")
    if dim in (None, "auto"):
        dim = inner // heads
    if not isinstance(dim, int) or dim * heads != inner:
        raise ConfigError(
            f"config.json: mamba_n_heads={heads} of mamba_d_head={dim!r} must make up an inner width of "
            f"{inner} (mamba_d_ssm, or else mamba_expand * hidden_size)"
        )
    return ssm(reader, MAMBA, "mamba.", bounds(reader, "time_step_limit"), dim)


def _expanded(reader: Reader, config: ModelConfig) -> int:
    return reader.integer("mamba_expand") * config.hidden_size


def _bamba(name: str, arch: Architecture, raw: Mapping[str, Any]) -> tuple[ModelConfig, Reader]:
    config, reader = decoder(name, arch, {"partial_rotary_factor": 0.5, **raw})
    turned, half = config.ropes[0].dims, config.head_dim // 2
    if not turned == half == reader.integer("attn_rotary_emb", half):
        raise ConfigError(
            f"config.json: attn_rotary_emb={reader.get('attn_rotary_emb')!r} and partial_rotary_factor "
            f"(which gives {turned}) must make {half}, half of a head, turn"
        )
    mixer = _mamba(reader, _expanded(reader, config))
    full = layer_numbers(reader, "attn_layer_indices", config.num_layers) or []
    layers = (
        layer if i in full else replace(layer, rope=None, mixer=mixer)
        for i, layer in enumerate(config.layers)
    )
    return replace(config, layers=tuple(layers), names=_FORWARD), reader


def _granite(name: str, arch: Architecture, raw: Mapping[str, Any]) -> tuple[ModelConfig, Reader]:
    field = "layers_block_type" if "layers_block_type" in raw else "layer_types"
    turns = raw.get("position_embedding_type") == "rope"
    arch = replace(arch, partial_rope=not turns)  # what nothing uses may say anything
    config, reader = decoder(name, arch, without(raw, field))
    usual = ["mamba"] * config.num_layers
    types = layer_kinds(field, raw.get(field) or usual, config.num_layers, _KINDS)
    mixer = _mamba(reader, _expanded(reader, config))
    only(reader, "position_embedding_type", None, "nope", "rope")
    only(reader, "normalization_function", "rmsnorm")
    ffn = _granite_ffn(reader, config)
    layers = []
    for layer, kind in zip(config.layers, types, strict=True):
        rope = layer.rope if turns and kind == "attention" else None
        layers.append(LayerConfig(0, rope, mixer if kind == "ssm" else None, ffn))
    return replace(config, layers=tuple(layers)), reader


def _granite_ffn(reader: Reader, config: ModelConfig) -> FfnConfig:
    """The MLP that all tokens share, and experts where there are any."""
    act = Activation(config.activation)
    width = reader.integer("shared_intermediate_size")
    shared = MlpConfig(width, act, ("shared_mlp.input_linear",), "shared_mlp.output_linear")
    if reader.integer("num_local_experts", low=0):
        return replace(granite_experts(reader, config), shared=shared)
    inert(reader, "num_experts_per_tok")
    return shared


def _falcon(name: str, arch: Architecture, raw: Mapping[str, Any]) -> tuple[ModelConfig, Reader]:
    config, reader = decoder(name, arch, raw)
    inner = reader.integer("mamba_d_ssm", _expanded(reader, config))
    mixer = _mamba(reader, inner)
    first, normed = reader.flag("mamba_norm_before_gate"), reader.flag("mamba_rms_norm")
    mixer = replace(
        mixer,
        norm=("norm_first" if first else "gate_first") if normed else "none",
        parts=factors(reader, "ssm_multipliers", 5),
        out_bias=reader.flag("projectors_bias"),
    )
    scale = {
        place: reader.number(f"{place}_multiplier", 1.0)
        for place in ("ssm_in", "ssm_out", "attention_in", "attention_out", "key")
    }
    parallel = ParallelConfig(
        mixer,
        (scale["ssm_in"], scale["ssm_out"]),
        (scale["attention_in"], scale["attention_out"]),
    )
    gate, down = factors(reader, "mlp_multipliers", 2)
    up = ("feed_forward.gate_proj", "feed_forward.up_proj")
    ffn = MlpConfig(
        config.intermediate_size,
        Activation(config.activation, gate_scale=gate),
        up,
        "feed_forward.down_proj",
        config.mlp_bias,
        scale=down,
    )
    only(reader, "mamba_use_mlp", True)
    inert(reader, "mlp_expansion_factor")
    config = replace(
        config,
        layers=tuple(replace(layer, mixer=parallel, ffn=ffn) for layer in config.layers),
        names=_FORWARD,
        scale=config.scale * scale["key"],  # rope and q.k are linear in the keys
        embed_scale=reader.number("embedding_multiplier", 1.0),
        logits_scale=reader.number("lm_head_multiplier", 1.0),
    )
    return config, reader


def _nemotron(name: str, arch: Architecture, raw: Mapping[str, Any]) -> tuple[ModelConfig, Reader]:
    pattern = Reader(raw, {}).typed("hybrid_override_pattern", str)
    if pattern is not None:
        field, given, known = "hybrid_override_pattern", list(pattern), _BLOCKS
    else:
        field = "layers_block_type" if "layers_block_type" in raw else "layer_types"
        given, known = raw.get(field), _KINDS | {"moe": "moe", "mlp": "mlp"}
    count = len(given) if isinstance(given, list) and given else 1
    types = layer_kinds(field, given, count, known)
    rest = without(raw, "hybrid_override_pattern", "layers_block_type", "layer_types")
    rest = renamed(rest, rms_norm_eps="layer_norm_epsilon", head_dim="attention_head_dim")
    config, reader = decoder(name, arch, rest | {"num_hidden_layers": count})
    # The class clamps dt to (time_step_min, infinity), whatever time_step_limit says.
    inert(reader, "time_step_limit", "expand", "mamba_ssm_cache_dtype")
    inert(reader, "rescale_prenorm_residual", "mamba_proj_bias")
    only(reader, "num_query_groups", config.num_kv_heads)  # some files repeat it so
    only(reader, "mamba_hidden_act", "silu")
    only(reader, "norm_eps", config.norm_eps)  # some files repeat layer_norm_epsilon so
    mixer = ssm(reader, _NEMOTRON, "mixer.", (reader.number("time_step_min", None), math.inf))
    act = Activation(config.activation, gated=False)
    dense = MlpConfig(
        config.intermediate_size, act, ("mixer.up_proj",), "mixer.down_proj", config.mlp_bias
    )
    made = {
        "ssm": LayerConfig(0, None, mixer, NoFfn()),
        "attention": LayerConfig(0, None, None, NoFfn()),
        "mlp": LayerConfig(0, None, NoMixer(), dense),
    }
    moe = _nemotron_moe(reader, act, config.mlp_bias)
    if "moe" in types:
        made["moe"] = LayerConfig(0, None, NoMixer(), moe)
    config = replace(
        config,
        layers=tuple(made[kind] for kind in types),
        names=BACKBONE,
        wide_residual=reader.flag("residual_in_fp32"),
    )
    return config, reader


def _nemotron_moe(reader: Reader, act: Activation, bias: bool) -> MoeConfig:
    """The experts' part, with the class's defaults where the file has no experts."""
    drafts = reader.integer("num_nextn_predict_layers", 0, low=0)
    if drafts:
        log.info("config.json: %d layers for speculation are left out", drafts)
    inert(reader, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    latent = reader.integer("moe_latent_size", 0, low=0)
    if latent and bias:
        raise ConfigError(
            f"config.json: mlp_bias=true is not supported with moe_latent_size={latent}"
        )
    only(reader, "n_shared_experts", 1)
    router = RouterConfig(
        experts=reader.integer("n_routed_experts", 8),
        chosen=reader.integer("num_experts_per_tok", 2),
        score="sigmoid",
        exact=True,
        correction=True,
        groups=reader.integer("n_group", 1),
        kept_groups=reader.integer("topk_group", 1),
        renormalize=reader.flag("norm_topk_prob"),
        epsilon=1e-20,
        scale=reader.number("routed_scaling_factor", 1.0),
    )
    up, down = each_expert("mixer.", "up_proj", "down_proj")
    shared = reader.integer("moe_shared_expert_intermediate_size", 7688)
    return MoeConfig(
        check_router(router),
        reader.integer("moe_intermediate_size", 7688),
        act,
        (up,),
        (down,),
        router_name="mixer.gate",
        correction_name="mixer.gate.e_score_correction_bias",
        latent=latent,
        latent_names=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
        shared=MlpConfig(
            shared, act, ("mixer.shared_experts.up_proj",), "mixer.shared_experts.down_proj", bias
        ),
    )


_READERS = {
    "bamba": _bamba,
    "granitemoehybrid": _granite,
    "falcon_h1": _falcon,
    "nemotron_h": _nemotron,
}
