"""Writes small GGUF files for tests, with the changes that published converters make.

Written against the format, not against the reader: the permutation and the norm offset are spelled
out here once more, in the other direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

TOKENS = ["<unk>", "<s>", "</s>", *"abcdefgh", "Ġ", "ab", "cd"]
F32 = GGMLQuantizationType.F32


def add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def write_gguf(
    path: Path,
    arch: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, GGMLQuantizationType]],
) -> Path:
    """A file with `metadata` (full keys) and tensors: float32 arrays, or (raw bytes, block type)."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        add_metadata(writer, key, value)
    for name, value in tensors.items():
        data, kind = value if isinstance(value, tuple) else (value, F32)
        writer.add_tensor(name, data, raw_dtype=None if kind == F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_metadata(model: str = "gpt2", pre: str = "gpt-2", size: int = 0) -> dict[str, Any]:
    """Vocabulary of a byte-level tokenizer without much in it, padded to `size` tokens."""
    tokens = TOKENS + [f"<pad{i}>" for i in range(size - len(TOKENS))]
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * 11 + [5] * (len(tokens) - len(TOKENS)),
        "tokenizer.ggml.merges": ["a b", "c d"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the two rope halves of every head's rows, as converters do for llama."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


LAYER_NAMES = {
    "llama": {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.qkv_proj": "attn_qkv",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
}
_SANDWICH = LAYER_NAMES["llama"] | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
LAYER_NAMES |= dict.fromkeys(("gemma2", "gemma3", "olmo2"), _SANDWICH)
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PERMUTED = ("llama", "smollm3", "granite")
OFFSET = ("gemma", "gemma2", "gemma3")


def from_hf(
    arch: str, tensors: Mapping[str, np.ndarray], heads: int, kv_heads: int
) -> dict[str, np.ndarray]:
    """The tensors of a Hugging Face checkpoint as a converter stores them."""
    out: dict[str, np.ndarray] = {}
    names = LAYER_NAMES.get(arch, LAYER_NAMES["llama"])
    for name, value in tensors.items():
        stem, suffix = name.rsplit(".", 1)
        if arch in PERMUTED and stem.endswith(("q_proj", "k_proj")):
            value = permute(value, heads if stem.endswith("q_proj") else kv_heads)
        if arch in OFFSET and name.endswith("norm.weight"):
            value = value + np.float32(1)
        if stem in TOP:
            out[f"{TOP[stem]}.{suffix}"] = value
        else:
            _, _, layer, inner = stem.split(".", 3)
            out[f"blk.{layer}.{names[inner]}.{suffix}"] = value
    return out
