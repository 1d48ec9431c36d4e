"""The config.json that a GGUF file stands for, derived from its metadata and its rope tensors.

Writes every entry that it read and leaves none to a default that the original may not have had.
Metadata that changes the arithmetic and is not understood is refused by name. Called by source.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxinfer.errors import WeightsError
from jaxinfer.weights.gguf_arch import CONFIG_TENSORS, find_arch
from jaxinfer.weights.gguf_file import GGUFFile

_KEYS = {  # metadata under "{arch}." -> config entry
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_REQUIRED = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
# Read below, or without any influence on the numbers.
_HANDLED = {
    "vocab_size",
    "rope.dimension_count",
    "attention.value_length",
    "attention.causal",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.finetuned",
    "attention.sliding_window_pattern",
    "rope.freq_base_swa",
    "expert_count",
    "expert_used_count",
}


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """config.json entries in the Hugging Face spelling. Raises WeightsError naming the key."""
    arch_name, arch = find_arch(file)
    prefix = f"{arch_name}."
    meta = {k[len(prefix) :]: v for k, v in file.metadata.items() if k.startswith(prefix)}
    _refuse_unknown(file, arch_name, meta)
    config: dict[str, Any] = {"architectures": [arch.hf_class], "model_type": arch.model_type}
    config |= {_KEYS[k]: _uniform(file, k, v) for k, v in meta.items() if k in _KEYS}
    config |= dict([arch.activation]) | dict(arch.extra)
    heads = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", heads)
    config.setdefault("head_dim", config["hidden_size"] // heads)
    config.setdefault("rope_theta", 10000.0)
    if "token_embd.weight" not in file.tensors:
        raise WeightsError(f"GGUF file {file.path} has no tensor 'token_embd.weight'")
    embedding = file.tensors["token_embd.weight"]
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    # Qwen2 has these biases whatever its config says, and no word for them.
    if "blk.0.attn_q.bias" in file.tensors and arch_name != "qwen2":
        config["attention_bias"] = True
    if "blk.0.ffn_up.bias" in file.tensors:
        config["mlp_bias"] = True
    config["torch_dtype"] = {"F32": "float32", "F16": "float16"}.get(
        embedding.kind.name, "bfloat16"
    )
    rotary = meta.get("rope.dimension_count", config["head_dim"])
    if rotary != config["head_dim"]:
        config["partial_rotary_factor"] = rotary / config["head_dim"]
    scaling = _rope_scaling(file, meta, config, rotary)
    if scaling:
        config["rope_scaling"] = scaling
    _token_ids(file, config)
    if arch_name in ("gemma2", "gemma3"):
        _gemma_layers(arch_name, meta, config)
    return config


def _refuse_unknown(file: GGUFFile, arch_name: str, meta: dict[str, Any]) -> None:
    missing = [f"{arch_name}.{key}" for key in _REQUIRED if key not in meta]
    if missing:
        raise WeightsError(f"GGUF file {file.path} lacks the metadata {', '.join(missing)}")
    unknown = [f"{arch_name}.{key}" for key in meta if key not in _KEYS and key not in _HANDLED]
    if unknown:
        raise WeightsError(
            f"GGUF file {file.path} has metadata that is not understood: {', '.join(unknown)}"
        )
    if meta.get("expert_count", 0):
        raise WeightsError(
            f"{arch_name}.expert_count={meta['expert_count']}: experts in a GGUF file"
        )
    if meta.get("attention.causal", True) is not True:
        raise WeightsError(f"{arch_name}.attention.causal=false: only causal models are read")
    if meta.get("attention.value_length", 0) not in (0, meta.get("attention.key_length", 0)):
        raise WeightsError(
            f"{arch_name}.attention.value_length={meta['attention.value_length']} differs from "
            f"key_length={meta.get('attention.key_length')}"
        )
    if arch_name == "olmo2" and meta.get("attention.sliding_window"):
        raise WeightsError(
            f"olmo2.attention.sliding_window={meta['attention.sliding_window']}: "
            "an OLMo-3 model, which is not read from GGUF"
        )


def _uniform(file: GGUFFile, key: str, value: Any) -> Any:
    """The one number of a key that a writer may give per layer."""
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise WeightsError(f"GGUF file {file.path}: {key}={value} differs from layer to layer")
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise WeightsError(f"GGUF file {file.path}: {key}={value!r} must be a number")
    if key in _REQUIRED and value <= 0:
        raise WeightsError(f"GGUF file {file.path}: {key}={value} must be above 0")
    return value


def _token_ids(file: GGUFFile, config: dict[str, Any]) -> None:
    for kind in ("bos", "eos"):
        token = file.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        config[f"{kind}_token_id"] = token
    padding = file.metadata.get("tokenizer.ggml.padding_token_id")
    if padding is not None:
        config["pad_token_id"] = padding


def _gemma_layers(arch_name: str, meta: dict[str, Any], config: dict[str, Any]) -> None:
    """What the format leaves to the reader: the layer pattern and the query scale."""
    pattern = meta.get("attention.sliding_window_pattern", 2 if arch_name == "gemma2" else 6)
    layers = config["num_hidden_layers"]
    sliding = (
        [bool(flag) for flag in pattern]
        if isinstance(pattern, list)
        else [(i + 1) % pattern != 0 for i in range(layers)]
    )
    config["layer_types"] = ["sliding_attention" if s else "full_attention" for s in sliding]
    # Only the 27B models scale by hidden_size / heads; the format knows them by their depth.
    largest = layers == (46 if arch_name == "gemma2" else 62)
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    )
    if arch_name == "gemma3":
        config["rope_local_base_freq"] = meta.get("rope.freq_base_swa", 10000.0)


def _rope_scaling(
    file: GGUFFile, meta: dict[str, Any], config: dict[str, Any], rotary: int
) -> dict[str, Any] | None:
    kind = meta.get("rope.scaling.type", "linear" if "rope.scale_linear" in meta else "none")
    factor = meta.get("rope.scaling.factor", meta.get("rope.scale_linear", 1.0))
    original = meta.get("rope.scaling.original_context_length")
    attn_factor = meta.get("rope.scaling.attn_factor")
    long, short = _floats(file, "rope_factors_long"), _floats(file, "rope_factors_short")
    freqs = _floats(file, "rope_freqs")
    if freqs is not None and kind == "none":
        return _llama3(file, freqs, config["rope_theta"], rotary)
    if long is not None and short is not None and original is not None and freqs is None:
        config["original_max_position_embeddings"] = original
        scaling: dict[str, Any] = {"rope_type": "longrope"}
        scaling |= {"long_factor": long.tolist(), "short_factor": short.tolist()}
        return scaling | ({"attention_factor": attn_factor} if attn_factor else {})
    if long is None and short is None and freqs is None and attn_factor in (None, 1.0):
        if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn" and original:
            scaling = {"rope_type": "yarn", "factor": factor}
            return scaling | {"original_max_position_embeddings": original}
    tensors = sorted(CONFIG_TENSORS & file.tensors.keys())
    raise WeightsError(
        f"GGUF file {file.path}: rope.scaling.type={kind!r} with original_context_length="
        f"{original}, attn_factor={attn_factor}, tensors={tensors} is not understood"
    )


def _floats(file: GGUFFile, name: str) -> np.ndarray | None:
    stored = file.tensors.get(f"{name}.weight")
    return None if stored is None else file.rows(stored, 0, stored.shape[0]).astype(np.float64)


def _llama3(
    file: GGUFFile, factors: np.ndarray, theta: float, rotary: int
) -> dict[str, Any] | None:
    """Llama-3 scaling parameters that give `factors` (what each rope frequency is divided by).

    1 / factor = (1 - s) / F + s with s = clip(a * turns - b, 0, 1), where turns = frequency / 2 pi,
    a = original / (high - low), b = low / (high - low). Only the ratio of low, high and original
    counts, so low is taken as 1, as all such models have it; a and b come from a straight line.
    """
    if np.allclose(factors, 1.0):
        return None
    turns = theta ** (-np.arange(0, rotary, 2) / rotary) / (2 * math.pi)
    largest = float(factors.max())
    middle = (factors > 1.0 + 1e-4) & (factors < largest * (1 - 1e-4))
    if len(turns) == len(factors) and middle.sum() >= 2:
        smooth = (1 / factors[middle] - 1 / largest) / (1 - 1 / largest)
        slope, offset = np.polyfit(turns[middle], smooth, 1)
        high = round(1.0 - 1.0 / offset, 3)
        original = round(slope * (high - 1.0))
        again = np.clip((original * turns - 1.0) / (high - 1.0), 0.0, 1.0)
        if np.allclose((1 - again) / largest + again, 1 / factors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": round(largest, 4),
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise WeightsError(f"GGUF file {file.path}: rope_freqs.weight follows no Llama-3 scaling")
