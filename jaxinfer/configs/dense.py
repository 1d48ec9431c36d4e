"""Reads the config.json of dense decoders, and of what other families have in common with them.

An architecture, a value or an option that the code does not implement is refused here with its name.
Called by configs/__init__.py; the readers of other families start from `decoder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.architectures import ARCHITECTURES, Architecture
from jaxinfer.config_reader import Reader
from jaxinfer.errors import ConfigError
from jaxinfer.model_config import LayerConfig, ModelConfig
from jaxinfer.rope_config import LAYER_TYPES, RopeConfig, rope_for

MODEL_TYPES = {name: arch.model_type for name, arch in ARCHITECTURES.items()}
_ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
_ACTIVATION_NAMES |= {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_DTYPES = ("float32", "bfloat16", "float16")


def read(name: str, raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a dense decoder of class `name`."""
    config, reader = decoder(name, ARCHITECTURES[name], raw)
    reader.check_unread()
    return config


def decoder(name: str, arch: Architecture, raw: Mapping[str, Any]) -> tuple[ModelConfig, Reader]:
    """A decoder of plain attention and dense MLPs with the traits of `arch`, and the reader for what else
    the class has; whoever calls it ends with `reader.check_unread()`."""
    if arch.nested:
        raw = text_part(raw)
    reader = Reader(raw, arch.defaults)
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"config.json: num_key_value_heads={kv_heads} must divide {heads} heads")
    head_dim = _head_dim(reader, hidden, heads)
    position = reader.integer("max_position_embeddings", 2048)
    num_layers = reader.integer("num_hidden_layers")
    windows, types = _windows(reader, arch, num_layers)
    ropes = _ropes(reader, arch, head_dim, position)
    use_rope = _use_rope(reader, arch, num_layers)
    config = ModelConfig(
        architecture=name,
        dtype=_dtype(reader),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(
            LayerConfig(w, ropes[t] if on else None)
            for w, t, on in zip(windows, types, use_rope, strict=True)
        ),
        max_length=_max_length(arch, ropes["full_attention"], position),
        norm=arch.norm,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        placement=arch.placement,
        qk_norm=arch.qk_norm,
        qkv_bias=_bias(reader, arch.qkv_bias),
        o_bias=_bias(reader, arch.o_bias),
        mlp_bias=_bias(reader, arch.mlp_bias),
        activation=_activation(reader, arch),
        tied=reader.flag("tie_word_embeddings"),
        fused=arch.fused,
        prefix=arch.prefix,
        ignored=arch.ignored,
        **_scales(reader, arch, hidden, head_dim),
    )
    return config, reader


def text_part(raw: Mapping[str, Any]) -> dict[str, Any]:
    """text_config of a composite model; its dtype and its quantization may stand outside."""
    text = dict(Reader(raw, {}).typed("text_config", dict) or {})
    inner = text.pop("dtype", None) or text.pop("torch_dtype", None)
    text["quantization_config"] = raw.get("quantization_config") or text.get("quantization_config")
    return text | {"dtype": inner or raw.get("dtype") or raw.get("torch_dtype")}


def _head_dim(reader: Reader, hidden: int, heads: int) -> int:
    if reader.get("head_dim") is None and hidden % heads:
        raise ConfigError(
            f"config.json: hidden_size={hidden} must be a multiple of num_attention_heads={heads} "
            "where head_dim is not given"
        )
    return reader.integer("head_dim", hidden // heads)


def _dtype(reader: Reader) -> str:
    value = reader.get("dtype") or reader.get("torch_dtype") or "float32"
    value = str(value).removeprefix("torch.")
    if value not in _DTYPES:
        raise ConfigError(f"config.json: dtype={value!r} is not one of {', '.join(_DTYPES)}")
    return value


def _windows(reader: Reader, arch: Architecture, layers: int) -> tuple[list[int], list[str]]:
    """Window and layer type of every layer.

    arch.windows: "none" has no sliding layers; "all" makes every layer slide if sliding_window is
    given; "types" lets layer_types decide; "patternN" makes all but every N-th layer slide; "qwen" and
    "nope" need use_sliding_window and choose by max_window_layers or by missing rope.
    """
    how = arch.windows
    size = reader.get("sliding_window") if how != "none" else None
    if how in ("qwen", "nope") and not reader.flag("use_sliding_window"):
        size = None
    if size is not None:
        size = reader.integer("sliding_window")
    sliding = _sliding(reader, how, layers, size is not None)
    usual = ["sliding_attention" if s else "full_attention" for s in sliding]
    types = reader.typed("layer_types", list) or usual
    if len(types) != layers or any(t not in LAYER_TYPES for t in types):
        raise ConfigError(
            f"config.json: layer_types={types!r:.80} must hold {layers} of {', '.join(LAYER_TYPES)}"
        )
    if how in ("none", "all") and types != usual:
        raise ConfigError(
            f"config.json: layer_types={types!r:.80} must be all {usual[0]!r} for this architecture"
        )
    if size is None and "sliding_attention" in types:
        raise ConfigError(
            "config.json: layer_types has sliding_attention but no sliding_window is set"
        )
    return [size or 0 if t == "sliding_attention" else 0 for t in types], list(types)


def _sliding(reader: Reader, how: str, layers: int, given: bool) -> list[bool]:
    if how.startswith("pattern"):
        every = int(how.removeprefix("pattern"))
        if every == 6:  # gemma3 alone reads the field
            every = reader.integer("sliding_window_pattern", 6)
        return [bool((i + 1) % every) for i in range(layers)]
    if how == "qwen":
        first = reader.integer("max_window_layers", 28, low=0)
        return [given and i >= first for i in range(layers)]
    if how == "nope":
        return [given and not rope for rope in _no_rope_layers(reader, layers)]
    return [given] * layers  # "all", "types"; "none" is never given


def _no_rope_layers(reader: Reader, layers: int) -> list[bool]:
    """SmolLM3's list holds 1 for layers *with* rope."""
    values = reader.typed("no_rope_layers", list)
    if values is None:
        every = reader.integer("no_rope_layer_interval", 4)
        return [bool((i + 1) % every) for i in range(layers)]
    if len(values) < layers or any(v not in (0, 1) for v in values):
        raise ConfigError(f"config.json: no_rope_layers={values!r:.80} must hold {layers} of 0, 1")
    return [bool(v) for v in values[:layers]]


def _use_rope(reader: Reader, arch: Architecture, layers: int) -> list[bool]:
    if "no_rope_layers" in arch.fields:
        return _no_rope_layers(reader, layers)
    return [True] * layers


def _ropes(
    reader: Reader, arch: Architecture, head_dim: int, position: int
) -> dict[str, RopeConfig]:
    """The rope of each layer type, from either spelling."""
    old, new = (reader.typed(name, dict) for name in ("rope_scaling", "rope_parameters"))
    name = "rope_scaling" if old else "rope_parameters"
    given = {key: value for key, value in (old or new or {}).items() if value is not None}
    common = {"rope_theta": reader.number("rope_theta", 10000.0)}
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        if reader.get(key) is not None:
            common[key] = reader.get(key)
    if arch.rope_by_type:
        dicts = _by_type(reader, arch, name, given, common)
    else:
        # Nested entries beside flat ones are leftovers of other classes; this one reads the flat ones.
        flat = {key: value for key, value in given.items() if key not in LAYER_TYPES}
        if given and not flat:
            raise ConfigError(
                f"config.json: {name}={given!r:.80} must not be nested by layer type "
                "for this architecture"
            )
        dicts = dict.fromkeys(LAYER_TYPES, common | flat)
    ropes = {}
    for kind, values in dicts.items():
        if arch.model_type == "phi3":
            values = _phi3_rope(reader, values)
        ropes[kind] = rope_for(
            name,
            {k: v for k, v in values.items() if k not in arch.fields},
            head_dim=head_dim,
            max_position=position,
            allow_partial=arch.partial_rope,
        )
    return ropes


def _by_type(
    reader: Reader, arch: Architecture, name: str, given: dict[str, Any], common: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Nested rope_parameters, or the old spelling: scaling for full layers, none for sliding ones."""
    local = dict(common)
    if "rope_local_base_freq" in arch.fields:
        local["rope_theta"] = reader.number("rope_local_base_freq", 10000.0)
    if name == "rope_scaling":
        return {"full_attention": common | given, "sliding_attention": local}
    if given and not any(kind in given for kind in LAYER_TYPES):
        raise ConfigError(
            f"config.json: rope_parameters={given!r:.80} must be nested by {', '.join(LAYER_TYPES)} "
            "for this architecture"
        )
    nested = {kind: given.get(kind) or {} for kind in LAYER_TYPES}
    for kind, values in nested.items():
        if not isinstance(values, dict):
            raise ConfigError(f"config.json: {name}.{kind}={values!r:.80} must be a JSON object")
    return {
        "full_attention": common | nested["full_attention"],
        "sliding_attention": local | nested["sliding_attention"],
    }


def _phi3_rope(reader: Reader, values: dict[str, Any]) -> dict[str, Any]:
    """Phi-3 called longrope "su" and "yarn" once, and its top-level original length goes first."""
    kind = values.get("rope_type", values.get("type", "default"))
    kind = "longrope" if kind in ("su", "yarn") else kind
    original = reader.integer("original_max_position_embeddings")
    return values | {"rope_type": kind, "original_max_position_embeddings": original}


def _max_length(arch: Architecture, rope: RopeConfig, position: int) -> int:
    """max_position_embeddings, times the factor of those scalings that leave it as it was.

    yarn says by original_max_position_embeddings whether the factor is already included; llama3 and
    longrope always include it.
    """
    if arch.scaled_length or rope.type not in ("linear", "dynamic", "yarn"):
        return position
    return max(position, int((rope.original or position) * rope.factor))


def _bias(reader: Reader, source: bool | str) -> bool:
    return reader.flag(source) if isinstance(source, str) else source


def _activation(reader: Reader, arch: Architecture) -> str:
    field = arch.activation_field
    value = reader.typed(field, str) or "silu"
    if arch.norm == "C":  # early Gemma files say "gelu" (or carry the other field) and mean tanh
        for other in ("hidden_act", "hidden_activation"):
            reader.get(other)
        value = "gelu_pytorch_tanh" if value == "gelu" else value
    if value not in _ACTIVATION_NAMES:
        raise ConfigError(
            f"config.json: {field}={value!r} is not one of {', '.join(_ACTIVATION_NAMES)}"
        )
    return _ACTIVATION_NAMES[value]


def _scales(reader: Reader, arch: Architecture, hidden: int, head_dim: int) -> dict[str, Any]:
    """The multipliers that some classes have."""
    out: dict[str, Any] = {"scale": head_dim**-0.5}
    if arch.embed_sqrt:
        out["embed_scale"] = hidden**0.5
    if "query_pre_attn_scalar" in arch.fields:
        out["scale"] = reader.number("query_pre_attn_scalar", 256) ** -0.5
    if "attn_logit_softcapping" in arch.fields and reader.get("attn_logit_softcapping") is not None:
        out["attention_softcap"] = reader.number("attn_logit_softcapping", None)
    if (
        "final_logit_softcapping" in arch.fields
        and reader.get("final_logit_softcapping") is not None
    ):
        out["final_softcap"] = reader.number("final_logit_softcapping", None)
    if "multipliers" in arch.fields:
        out["scale"] = reader.number("attention_multiplier", 1.0)
        out["embed_scale"] = reader.number("embedding_multiplier", 1.0)
        out["residual_scale"] = reader.number("residual_multiplier", 1.0)
        out["logits_scale"] = 1.0 / reader.number("logits_scaling", 1.0)
    if "llama_4_scaling_beta" in arch.fields:
        rope = Reader(reader.get("rope_parameters") or {}, {})
        if rope.get("llama_4_scaling_beta") != 0:  # 0: queries don't grow
            beta = rope.number("llama_4_scaling_beta", None)
            out["query_growth"] = (beta, rope.integer("original_max_position_embeddings"))
    return out
