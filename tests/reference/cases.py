"""Tiny models that stand for every supported architecture and option, as config.json dictionaries.

Shared by record.py (PyTorch interpreter) and by the tests (JAX interpreter): both draw the same
weights from the raw stream of a bit generator, which numpy keeps stable. Needs numpy alone.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

PAGE = 16
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 37)
VOCAB = 40

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "use_cache": True,
}
_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",
    "Ministral3ForCausalLM": "ministral3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "GraniteForCausalLM": "granite",
    "SeedOssForCausalLM": "seed_oss",
}
CASES: dict[str, dict[str, Any]] = {}
CASE_LENGTHS: dict[str, tuple[int, ...]] = {}


def _add(case: str, architecture: str, lengths: tuple[int, ...] = LENGTHS, **fields: Any) -> None:
    fields = {"architectures": [architecture], "model_type": _TYPES[architecture]} | _SIZES | fields
    if case.startswith("llama_") or case.endswith(
        "_linear"
    ):  # one option each: one layer is enough
        fields["num_hidden_layers"] = 1
    CASES[case] = {k: v for k, v in fields.items() if v != "absent"}
    CASE_LENGTHS[case] = lengths


_SLIDE, _FULL = "sliding_attention", "full_attention"
_OLD = {"rope_theta": 10000.0, "torch_dtype": "float32"}
_NEW = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "dtype": "float32"}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 64}
_SHORT, _LONG = [1.0, 1.1, 1.3, 1.7], [1.2, 2.0, 4.0, 7.5]
_BY_LENGTH = (20, 32, 33, 50)

# Llama: both spellings, sharing of heads, biases, and every rope type.
_add("llama", "LlamaForCausalLM", **_OLD, hidden_act="silu", tie_word_embeddings=False)
_add("llama_new", "LlamaForCausalLM", **_NEW, head_dim=8)
_add("llama_mha", "LlamaForCausalLM", **_OLD, num_key_value_heads="absent")
_add("llama_mqa", "LlamaForCausalLM", **_OLD, num_key_value_heads=1, head_dim=16)
_add("llama_bias", "LlamaForCausalLM", **_OLD, attention_bias=True, mlp_bias=True)
_add("llama_gelu", "LlamaForCausalLM", **_OLD, hidden_act="gelu", rms_norm_eps=1e-3)
_add("llama_relu2", "LlamaForCausalLM", **_OLD, hidden_act="relu2")
_add("llama_tied", "LlamaForCausalLM", **_OLD, tie_word_embeddings=True)
_add("llama_linear", "LlamaForCausalLM", **_OLD, rope_scaling={"type": "linear", "factor": 4.0})
_add(
    "llama_llama3",
    "LlamaForCausalLM",
    rope_theta=500000.0,
    rope_scaling={"rope_type": "llama3", **_LLAMA3},
    head_dim=16,
)
_add(
    "llama_dynamic",
    "LlamaForCausalLM",
    _BY_LENGTH,
    **_OLD,
    max_position_embeddings=32,
    rope_scaling={"type": "dynamic", "factor": 2.0},
)
_add("llama_yarn", "LlamaForCausalLM", **_OLD, rope_scaling=_YARN)
_add(
    "llama_yarn_new",
    "LlamaForCausalLM",
    head_dim=16,
    rope_parameters={
        **_YARN,
        "rope_theta": 500.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
)
_add(
    "llama_longrope",
    "LlamaForCausalLM",
    _BY_LENGTH,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": _SHORT,
        "long_factor": _LONG,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
)

# Mistral and its successors.
_add("mistral", "MistralForCausalLM", **_OLD, sliding_window=8)
_add("mistral_wide", "MistralForCausalLM", **_OLD, sliding_window=24)
_add("mistral_full", "MistralForCausalLM", **_OLD, sliding_window=None, head_dim=16)
_add(
    "ministral",
    "MinistralForCausalLM",
    **_NEW,
    head_dim=8,
    sliding_window=8,
    layer_types=[_SLIDE, _FULL],
)
_add(
    "ministral3",
    "Ministral3ForCausalLM",
    head_dim=16,
    rope_parameters={
        **_YARN,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
)

# Qwen.
_add("qwen2", "Qwen2ForCausalLM", **_OLD, use_sliding_window=False, sliding_window=8)
_add(
    "qwen2_window",
    "Qwen2ForCausalLM",
    **_OLD,
    use_sliding_window=True,
    sliding_window=8,
    max_window_layers=1,
    tie_word_embeddings=True,
)
_add("qwen3", "Qwen3ForCausalLM", **_OLD, head_dim=16, sliding_window=None, max_window_layers=2)
_add(
    "qwen3_window",
    "Qwen3ForCausalLM",
    **_NEW,
    head_dim=16,
    attention_bias=True,
    use_sliding_window=True,
    sliding_window=8,
    layer_types=[_SLIDE, _FULL],
)

# SmolLM3: every fourth layer without rope.
_add("smollm3", "SmolLM3ForCausalLM", **_OLD, num_hidden_layers=4, no_rope_layer_interval=4)
_add(
    "smollm3_window",
    "SmolLM3ForCausalLM",
    **_NEW,
    num_hidden_layers=3,
    no_rope_layers=[1, 0, 1],
    use_sliding_window=True,
    sliding_window=8,
    tie_word_embeddings=False,
    attention_bias=True,
    mlp_bias=True,
)

# Gemma.
_add("gemma", "GemmaForCausalLM", **_OLD, head_dim=16, num_key_value_heads=1, hidden_act="gelu")
_add(
    "gemma2",
    "Gemma2ForCausalLM",
    **_OLD,
    head_dim=16,
    query_pre_attn_scalar=24,
    sliding_window=8,
    attn_logit_softcapping=4.0,
    final_logit_softcapping=6.0,
    hidden_activation="gelu_pytorch_tanh",
)
_add(
    "gemma3",
    "Gemma3ForCausalLM",
    head_dim=16,
    query_pre_attn_scalar=24,
    sliding_window=8,
    num_hidden_layers=3,
    layer_types=[_SLIDE, _FULL, _SLIDE],
    rope_parameters={
        _SLIDE: {"rope_type": "default", "rope_theta": 1000.0},
        _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
    },
)
_add(
    "gemma3_old",
    "Gemma3ForCausalLM",
    head_dim=16,
    query_pre_attn_scalar=16,
    sliding_window=8,
    num_hidden_layers=3,
    sliding_window_pattern=3,
    rope_theta=100000.0,
    rope_local_base_freq=1000.0,
    rope_scaling={"rope_type": "linear", "factor": 8.0},
    final_logit_softcapping=9.0,
)

# Phi-3: fused tensors, longrope, partial rope.
_add("phi3", "Phi3ForCausalLM", **_OLD, sliding_window=None)
_add(
    "phi3_window", "Phi3ForCausalLM", **_OLD, sliding_window=8, original_max_position_embeddings=512
)
_add("phi3_partial", "Phi3ForCausalLM", **_OLD, partial_rotary_factor=0.5)
_add(
    "phi3_longrope",
    "Phi3ForCausalLM",
    _BY_LENGTH,
    **_OLD,
    max_position_embeddings=128,
    original_max_position_embeddings=32,
    rope_scaling={"type": "longrope", "short_factor": _SHORT, "long_factor": _LONG},
)

# OLMo: norms after the branches, q/k norm over the full width.
_add("olmo2", "Olmo2ForCausalLM", **_OLD)
_add("olmo2_bias", "Olmo2ForCausalLM", **_NEW, attention_bias=True, tie_word_embeddings=True)
_add(
    "olmo3",
    "Olmo3ForCausalLM",
    sliding_window=8,
    num_hidden_layers=4,
    rope_parameters={
        _SLIDE: {"rope_type": "default", "rope_theta": 10000.0},
        _FULL: {**_YARN, "rope_theta": 10000.0},
    },
)
_add(
    "olmo3_old",
    "Olmo3ForCausalLM",
    sliding_window=8,
    layer_types=[_FULL, _SLIDE],
    rope_theta=500000.0,
    rope_scaling={**_YARN, "attention_factor": 1.2, "beta_fast": 32, "beta_slow": 1},
)

# Granite and Seed-OSS.
_add(
    "granite",
    "GraniteForCausalLM",
    **_OLD,
    embedding_multiplier=6.0,
    attention_multiplier=0.2,
    residual_multiplier=0.22,
    logits_scaling=4.0,
    tie_word_embeddings=True,
)
_add("seed_oss", "SeedOssForCausalLM", **_OLD, head_dim=16, attention_out_bias=True)

# A linear rope scaling must reach every architecture (those of Phi-3 are default and longrope).
for _name, _type in _TYPES.items():
    if _type not in ("llama", "gemma3_text", "olmo3", "phi3", "ministral3"):
        _extra: dict[str, Any] = {"num_key_value_heads": 1} if _type == "gemma" else {}
        _scaling = {"type": "linear", "factor": 4.0}
        _add(f"{_type}_linear", _name, **_OLD, rope_scaling=_scaling, head_dim=8, **_extra)


def prompt(case: str, length: int) -> list[int]:
    """The first `length` tokens of the case's prompt."""
    return [int(v % VOCAB) for v in _raw(f"{case}/prompt", 64)[:length]]


def tensor(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One float32 checkpoint tensor, drawn so that no part of the model is near an identity."""
    uniform = _raw(f"{case}/{name}", int(np.prod(shape))) >> np.uint64(11)
    values = (uniform.astype(np.float64) * 2.0**-52 - 1.0).reshape(shape)
    if "norm" in name:
        values = values * 0.5 + (0.0 if "gemma" in CASES[case]["model_type"] else 1.0)
    elif name.endswith(".bias"):
        values = values * 0.5
    elif "embed_tokens" not in name:
        gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.2
        values = values * gain * (3.0 / shape[-1]) ** 0.5
    return values.astype(np.float32)


def _raw(name: str, count: int) -> np.ndarray:
    return np.random.PCG64(zlib.crc32(name.encode())).random_raw(count)
