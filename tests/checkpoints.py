"""Writes the small checkpoints that the tests run on: TINY (random) and CHAIN (forced text).

Both are ordinary Hugging Face directories of a Llama model, made with numpy alone, so that a test
depends on no code of the engine to make its input. Called by conftest.py and by single tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# Ids of the BYTE tokenizer: a byte's id is the byte itself, then merges, then special tokens.
MERGES = (("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("l", "l"), ("i", "n"), ("Ġ", "b"), ("Ġ", "x"))
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "</tool_call>")  # added, but part of the text
BOS, EOS, IM_START, IM_END = (256 + len(MERGES) + i for i in range(4))
TOOL_CALL, TOOL_CALL_END = IM_END + 1, IM_END + 2
VOCAB = 288  # a few ids past the tokenizer's last one, as padded checkpoints have

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE, indexed by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [shifted.get(byte, chr(byte)) for byte in range(256)]


def byte_tokenizer() -> Tokenizer:
    """BYTE: 256 byte tokens, a few merges, special and added tokens."""
    alphabet = byte_alphabet()
    pieces = [*alphabet, *("".join(pair) for pair in MERGES)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ADDED])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """A SentencePiece-like tokenizer: "▁" for spaces, byte tokens for what it does not know."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "x", "a", "b", "l", "e", "d", "h", "i", "▁x", "▁l", "ea", "▁lea", "▁lead", "▁a"]
    merges = [("▁", "x"), ("▁", "l"), ("e", "a"), ("▁l", "ea"), ("▁lea", "d"), ("▁", "a")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer | None = None, **settings: Any) -> None:
    """Write tokenizer.json and tokenizer_config.json (`settings` replace single entries)."""
    (tokenizer or byte_tokenizer()).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings))


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    generation: Mapping[str, Any] | None = None,
    **tokenizer_settings: Any,
) -> Path:
    """Write a whole Hugging Face directory and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": BOS, "eos_token_id": [EOS, IM_END]} | dict(generation or {})
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_file(
        {name: np.ascontiguousarray(value) for name, value in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_tokenizer(folder, **tokenizer_settings)
    return folder


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama checkpoint's tensors, `[out, in]` as PyTorch stores them."""
    hidden, ffn, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (q, hidden),
            at + "self_attn.k_proj.weight": (kv, hidden),
            at + "self_attn.v_proj.weight": (kv, hidden),
            at + "self_attn.o_proj.weight": (hidden, q),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "mlp.gate_proj.weight": (ffn, hidden),
            at + "mlp.up_proj.weight": (ffn, hidden),
            at + "mlp.down_proj.weight": (hidden, ffn),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def write_tiny(folder: Path, seed: int = 0, head_scale: float = 12.0, **changes: object) -> Path:
    """TINY: random weights; the head is scaled so that the two best logits lie far apart.

    `changes` replace entries of TINY_CONFIG.
    """
    config = TINY_CONFIG | changes
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in llama_shapes(config).items():
        if len(shape) == 1:
            value = 1.0 + 0.1 * rng.standard_normal(shape)
        elif name == "model.embed_tokens.weight":
            value = rng.standard_normal(shape)
        else:
            scale = head_scale if name == "lm_head.weight" else 1.5
            value = rng.standard_normal(shape) * scale / np.sqrt(shape[1])
        tensors[name] = value.astype(np.float32)
    return write_checkpoint(folder, config, tensors)


def write_chain(folder: Path, chain: Sequence[int], cycle: bool = False) -> Path:
    """CHAIN: after chain[i] comes chain[i + 1], whatever stood before; after the last one EOS.

    One-hot embedding, attention and MLP add nothing, and the head maps each token to its follower
    with logit 20 (all others 0). With `cycle` the last token is followed by the first one. It
    ignores the KV cache: never use it for cache faults.
    """
    if len(set(chain)) != len(chain):
        raise ValueError(f"chain={list(chain)} repeats a token; each token has one follower")
    changes = {"hidden_size": VOCAB, "num_hidden_layers": 1, "intermediate_size": 32}
    config = TINY_CONFIG | changes
    following = dict.fromkeys(range(VOCAB), EOS) | dict(zip(chain, chain[1:], strict=False))
    if cycle:
        following[chain[-1]] = chain[0]
    tensors = {name: np.zeros(shape, np.float32) for name, shape in llama_shapes(config).items()}
    tensors["model.embed_tokens.weight"] = np.eye(VOCAB, dtype=np.float32)
    for value in tensors.values():
        if value.ndim == 1:
            value[:] = 1.0
    # The norm of a one-hot row multiplies it by sqrt(VOCAB); undo that, so that the head sees 1.
    tensors["model.norm.weight"][:] = 1.0 / np.sqrt(VOCAB)
    for token, follower in following.items():
        tensors["lm_head.weight"][follower, token] = 20.0
    return write_checkpoint(folder, config, tensors)
