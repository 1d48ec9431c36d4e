"""Lightning attention (linear attention with one fixed decay a head), and the config.json of the model
that has it, MiniMax-Text-01.

Called by configs/__init__.py; computed by models/lightning.py. Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.architectures import Architecture
from jaxinfer.config_reader import Reader
from jaxinfer.configs.common import read_training
from jaxinfer.configs.dense import decoder
from jaxinfer.configs.fields import inert, layer_kinds, only, renamed, without
from jaxinfer.configs.moe import mixtral_experts
from jaxinfer.model_config import MixerConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class LightningConfig(MixerConfig):
    """S <- e^(-slope) S + k v^T, o = S^T q; the heads are those of ModelConfig, each with its own k and v.

    Attributes:
        depth: multiplies the slopes 2^(-8 (h + 1) / heads); falls from the first layer to the last.
        eps: of the norm of the output over all heads.
    """

    depth: float
    eps: float = 1e-6

    def slopes(self, heads: int) -> tuple[float, ...]:
        """-log of the decay of each head."""
        return tuple(2.0 ** (-8.0 * (h + 1) / heads) * self.depth for h in range(heads))


_MINIMAX = Architecture(
    "minimax",
    {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
    | {"rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
    partial_rope=True,
    # Written by the class from the formula, and not always by whoever saved the file.
    ignored=(r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)",),
)
# The class as transformers has it, and as it was first published, in other words.
MODEL_TYPES = {
    "MiniMaxForCausalLM": _MINIMAX.model_type,
    "MiniMaxText01ForCausalLM": "minimax_text_01",
    "MiniMaxM1ForCausalLM": "minimax_m1",
}
_FACTORS = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
_LINEAR, _FULL = "linear_attention", "full_attention"


def read(name: str, raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a class of MODEL_TYPES. Raises ConfigError naming the field and the value."""
    raw = _in_later_words(raw)
    config, reader = decoder(name, _MINIMAX, without(raw, "layer_types"))
    count = config.num_layers
    usual = [_LINEAR if i % 2 else _FULL for i in range(count)]
    given = raw.get("layer_types") or usual
    types = layer_kinds("layer_types", given, count, {_LINEAR: "linear_attn", _FULL: "full_attn"})
    factors = {
        place: (
            reader.number(f"{place}_alpha_factor", 1.0),
            reader.number(f"{place}_beta_factor", 1.0),
        )
        for place in ("full_attn", "linear_attn", "mlp")
    }
    moe = mixtral_experts(reader, config)
    layers = []
    for i, (layer, kind) in enumerate(zip(config.layers, types, strict=True)):
        layer = replace(layer, ffn=moe, mixer_factors=factors[kind], ffn_factors=factors["mlp"])
        if kind == "linear_attn":
            depth = 1 - i / (count - 1 + 1e-5) + 1e-5
            layer = replace(layer, rope=None, mixer=LightningConfig(depth))
        layers.append(layer)
    only(reader, "postnorm", True)
    only(reader, "shared_intermediate_size", 0)
    inert(reader, "block_size", "rotary_dim", "shared_moe_mode")
    read_training(reader)
    reader.check_unread()
    return replace(config, layers=tuple(layers))


def _in_later_words(raw: Mapping[str, Any]) -> dict[str, Any]:
    """attn_type_list, layernorm_*_alpha and _beta as transformers calls them, rotary_dim as a factor."""
    names = {
        f"{new}_{kind}_factor": f"layernorm_{old}_{kind}"
        for new, old in _FACTORS.items()
        for kind in ("alpha", "beta")
    }
    out = renamed(raw, **names)
    types = out.pop("attn_type_list", None)
    if types is not None:
        count = len(types) if isinstance(types, list) else 0
        out["layer_types"] = layer_kinds("attn_type_list", types, count, {0: _LINEAR, 1: _FULL})
    if out.get("rotary_dim") is not None:
        reader = Reader(out, {})
        heads = reader.integer("num_attention_heads")
        dim = reader.integer("head_dim", reader.integer("hidden_size") // heads)
        out["partial_rotary_factor"] = reader.integer("rotary_dim") / dim
    return out
