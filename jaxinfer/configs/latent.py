"""Decoders with latent attention: DeepSeek-V2, V3 and V3.2, Kimi-K2, GLM-4-MoE-Lite, GLM-5 and Mistral-4.

Reads config.json in both vocabularies, and the text part of composite files; what the code does not
compute is refused by name. Imports no JAX. Called by configs/__init__.py; models/latent.py computes
the mixer, also for other families.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.architectures import Architecture
from jaxinfer.config_reader import Reader
from jaxinfer.configs.common import deepseek_experts, ignore_mtp, sparse_layers, with_ffns
from jaxinfer.configs.dense import decoder, text_part
from jaxinfer.configs.ffn import MoeConfig, Stored
from jaxinfer.configs.fields import inert, only
from jaxinfer.errors import ConfigError
from jaxinfer.model_config import MixerConfig, ModelConfig, Names


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """What scores the tokens that a query may attend to.

    Attributes:
        heads, dim: heads of the index queries; index keys have one.
        interleaved: its rope turns pairs of neighbours, else of halves; always the first dims.
    """

    heads: int
    dim: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class LatentConfig(MixerConfig):
    """Multi-head latent attention; heads and the factor on q.k are ModelConfig's.

    Attributes:
        q_rank: queries come from a latent of so many dims; 0: straight from the layer's input.
        rank: dims of the latent of keys and values. nope, rope: dims of a head's key without and with rope
            (LayerConfig.rope None: these are not turned either). value: dims of a head's value.
        interleaved: rope turns pairs of neighbours, else of halves.
        topk: a query attends to so many tokens at most; 0: to all.
        index: what chooses them; None: the choice is that of the last layer before that has one.
    """

    q_rank: int
    rank: int
    nope: int
    rope: int
    value: int
    interleaved: bool
    topk: int = 0
    index: IndexConfig | None = None


_V3 = {"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
_V3 |= {"first_k_dense_replace": 3, "max_position_embeddings": 4096}
_GLM = _V3 | {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}
_LITE = _GLM | {"routed_scaling_factor": 1.8, "first_k_dense_replace": 1}
_ARCHITECTURES = {
    "DeepseekV2ForCausalLM": Architecture("deepseek_v2"),
    "DeepseekV3ForCausalLM": Architecture("deepseek_v3", _V3),
    "DeepseekV32ForCausalLM": Architecture("deepseek_v32", _V3),
    "Glm4MoeLiteForCausalLM": Architecture("glm4_moe_lite", _LITE),
    "GlmMoeDsaForCausalLM": Architecture("glm_moe_dsa", _GLM),
    "Mistral4ForCausalLM": Architecture(
        "mistral4",
        fields=frozenset({"llama_4_scaling_beta"}),
    ),
}
_KIMI = Architecture(
    "kimi_k25",
    _V3,
    nested=True,
    prefix="language_model.model.",
    # The library's own files leave a part of the projector inside the model.
    ignored=(r"vision_tower\..*", r"(model\.)?mm_projector\..*", r"multi_modal_projector\..*"),
)
_ARCHITECTURES |= dict.fromkeys(
    ("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"), _KIMI
)
MODEL_TYPES = {name: arch.model_type for name, arch in _ARCHITECTURES.items()}
_SPARSE = ("deepseek_v32", "glm_moe_dsa")


def read(name: str, raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a decoder of class `name`."""
    arch = _ARCHITECTURES[name]
    raw = text_part(raw) if arch.nested else dict(raw)
    config, reader = decoder(name, replace(arch, nested=False), _plain(raw, arch))
    mixers = _mixers(reader, arch.model_type, config.num_layers)
    moe = _experts(reader, arch.model_type, config)
    sparse = sparse_layers(reader, config.num_layers)
    config = with_ffns(config, [moe if on else None for on in sparse])
    pairs = zip(config.layers, mixers, strict=True)
    head_dim = mixers[0].nope + mixers[0].rope
    config = replace(
        config,
        layers=tuple(replace(layer, mixer=mixer) for layer, mixer in pairs),
        head_dim=head_dim,
        scale=head_dim**-0.5 * _yarn_scale(reader, config) ** 2,
        names=Names(lm_head="language_model.lm_head") if arch.nested else config.names,
    )
    config = ignore_mtp(reader, config)
    reader.check_unread()
    return config


def _plain(raw: dict[str, Any], arch: Architecture) -> dict[str, Any]:
    """The file without what latent attention says otherwise than plain attention does."""
    reader = Reader(raw, {})
    rope_dim, types = reader.integer("qk_rope_head_dim"), reader.typed("layer_types", list)
    raw.pop("layer_types", None)
    if types is not None and any(kind != "indexed_attention" for kind in types):
        raise ConfigError(f"config.json: layer_types={types!r:.80} must all be indexed_attention")
    # head_dim is that of rope here, whatever the file means by it.
    raw["head_dim"] = rope_dim
    if arch.model_type == "mistral4" and isinstance(raw.get("rope_parameters"), dict):
        # The part of a head that has rope, which qk_rope_head_dim says too.
        skip = ("partial_rotary_factor",)
        raw["rope_parameters"] = {k: v for k, v in raw["rope_parameters"].items() if k not in skip}
    return raw


def _mixers(reader: Reader, kind: str, layers: int) -> list[LatentConfig]:
    mixer = dense_mixer(reader, interleaved=reader.flag("rope_interleave", True))
    if kind in (*_SPARSE, "deepseek_v2"):
        only(reader, "rope_interleave", True)
    if kind not in _SPARSE:
        return [mixer] * layers
    if not mixer.q_rank:
        raise ConfigError("config.json: q_lora_rank=None: an indexer needs the latent of queries")
    index = IndexConfig(
        reader.integer("index_n_heads"),
        reader.integer("index_head_dim"),
        reader.flag("indexer_rope_interleave", kind == "glm_moe_dsa"),
    )
    if index.dim < mixer.rope:
        raise ConfigError(
            f"config.json: index_head_dim={index.dim} must be qk_rope_head_dim={mixer.rope} or more"
        )
    inert(reader, "index_share_for_mtp_iteration")
    mixer = replace(mixer, topk=reader.integer("index_topk"))
    full = _full_layers(reader, layers) if kind == "glm_moe_dsa" else [True] * layers
    return [replace(mixer, index=index if own else None) for own in full]


def dense_mixer(reader: Reader, *, interleaved: bool) -> LatentConfig:
    """Latent attention without an indexer, of the sizes that the file has in DeepSeek's words."""
    mixer = LatentConfig(
        q_rank=0 if reader.get("q_lora_rank") is None else reader.integer("q_lora_rank"),
        rank=reader.integer("kv_lora_rank"),
        nope=reader.integer("qk_nope_head_dim"),
        rope=reader.integer("qk_rope_head_dim"),
        value=reader.integer("v_head_dim"),
        interleaved=interleaved,
    )
    only(reader, "qk_head_dim", mixer.nope + mixer.rope)
    return mixer


def _full_layers(reader: Reader, layers: int) -> list[bool]:
    """Whether each layer has an indexer of its own, from a list, a pattern ("FSSF") or a period."""
    every = max(1, reader.integer("index_topk_freq", 1, low=0))
    offset = reader.integer("index_skip_topk_offset", 2, low=0)
    types = reader.typed("indexer_types", list)
    pattern = reader.get("index_topk_pattern")
    if not isinstance(pattern, (str, list, type(None))):
        raise ConfigError(
            f"config.json: index_topk_pattern={pattern!r:.80} must be a string or list"
        )
    types = pattern if types is None else types
    if types is None:
        full = [max(i - offset + 1, 0) % every == 0 for i in range(layers)]
    else:
        words = {"F": True, "full": True, "S": False, "shared": False}
        if len(types) != layers or any(not isinstance(t, str) or t not in words for t in types):
            raise ConfigError(
                f"config.json: indexer_types / index_topk_pattern={types!r:.80} must hold {layers} of "
                f"{', '.join(words)}"
            )
        full = [words[t] for t in types]
    if not full[0]:
        raise ConfigError(
            "config.json: the first layer must have an indexer, it has nothing to share "
            f"(indexer_types / index_topk_pattern={types!r:.80})"
        )
    return full


def _experts(reader: Reader, kind: str, config: ModelConfig) -> MoeConfig:
    moe = deepseek_experts(reader, config.activation, softmax=kind == "deepseek_v2")
    if kind == "mistral4":  # a softmax, but groups and weights as with the sigmoid
        router = replace(moe.router, score="softmax", exact=False, correction=False)
        up, down = (Stored((f"mlp.experts.{name}",)) for name in ("gate_up_proj", "down_proj"))
        moe = replace(moe, router=router, up=(up, *moe.up), down=(down, *moe.down))
    return moe


def _yarn_scale(reader: Reader, config: ModelConfig) -> float:
    """What yarn multiplies q and k by beyond cos and sin, where the file says mscale_all_dim."""
    rope = config.layers[0].rope
    given = reader.get("rope_scaling") or reader.get("rope_parameters") or {}
    if rope is None or rope.type == "default" or rope.factor <= 1:
        return 1.0
    return 0.1 * (given.get("mscale_all_dim") or 0.0) * math.log(rope.factor) + 1.0
