"""Builds a `tokenizers.Tokenizer` from the metadata of a GGUF file, and lists its special tokens.

Two models: "gpt2" (byte-level BPE with merges, split by the pre-tokenizer that the file names) and
"llama" (SentencePiece BPE with byte fallback, where merges follow from the scores). An unknown
model or pre-tokenizer is refused by name: a near miss would give other tokens without an error.
Called by source.py.
"""

from __future__ import annotations

from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from jaxinfer.errors import WeightsError
from jaxinfer.weights.gguf_file import GGUFFile

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = (
    _CASELESS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT = r"\p{N}"
# tokenizer.ggml.pre -> patterns that split the text one after the other, before the byte alphabet.
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "olmo": (_GPT2,),
    "mpt": (_GPT2,),
    "phi-2": (_GPT2,),
    "smollm": (_DIGIT, _GPT2),
    "starcoder": (_DIGIT, _GPT2),
    "refact": (_DIGIT, _GPT2),
    "command-r": (_DIGIT, _GPT2),
    "llama-bpe": (_WORDS % r"\p{N}{1,3}",),
    "smaug-bpe": (_WORDS % r"\p{N}{1,3}",),
    "dbrx": (_WORDS % r"\p{N}{1,3}",),
    "qwen2": (_WORDS % _DIGIT,),
    "tekken": (_CASED % ("", "", _DIGIT),),
    "gpt-4o": (_CASED % (_CASELESS + "?", _CASELESS + "?", r"\p{N}{1,3}"),),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
# Whole words that are in the vocabulary skip the merges, as their original tokenizers have it.
_IGNORE_MERGES = {"llama-bpe", "tekken", "gpt-4o"}
_NFC = {"qwen2"}
# Ends of a turn that chat models emit although the file's eos_token_id is another token.
_TURN_ENDS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"}


def tokenizer_facts(file: GGUFFile) -> dict[str, Any]:
    """bos_token, eos_token, pad_token, unk_token, add_bos_token, add_eos_token, eot_token_ids."""
    tokens, types = _vocabulary(file)
    facts: dict[str, Any] = {}
    for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = _get(file, f"{key}_token_id")
        if index is not None and not 0 <= index < len(tokens):
            raise WeightsError(
                f"GGUF file {file.path}: {key}_token_id={index} is outside [0, {len(tokens)})"
            )
        facts[f"{kind}_token"] = None if index is None else tokens[index]
    facts["add_bos_token"] = _adds(file, "bos")
    facts["add_eos_token"] = _adds(file, "eos")
    ends = {_get(file, "eot_token_id"), _get(file, "eom_token_id")} - {None}
    special = (_CONTROL, _USER_DEFINED)
    ends |= {i for i, t in enumerate(types) if t in special and tokens[i] in _TURN_ENDS}
    facts["eot_token_ids"] = sorted(ends)
    return facts


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer of a GGUF file, with its added tokens and its BOS/EOS rule."""
    model = _get(file, "model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        raise WeightsError(
            f"GGUF file {file.path} has the tokenizer.ggml.model {model!r}; "
            f"known are {', '.join(builders)}"
        )
    tokens, types = _vocabulary(file)
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = builders[model](file, vocab)
    added = [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED) or (kind == _UNKNOWN and model == "llama")
    ]
    tokenizer.add_tokens([token for token in added if token.content])
    _add_template(file, tokenizer, tokens)
    return tokenizer


def _byte_level(file: GGUFFile, vocab: dict[str, int]) -> Tokenizer:
    pre = _get(file, "pre") or "default"
    if pre not in _SPLITS:
        raise WeightsError(
            f"GGUF file {file.path} has the pre-tokenizer tokenizer.ggml.pre={pre!r}; "
            f"known are {', '.join(_SPLITS)}"
        )
    merges = [tuple(merge.split(" ")) for merge in _get(file, "merges") or ()]
    if any(len(merge) != 2 for merge in merges):
        raise WeightsError(f"GGUF file {file.path}: tokenizer.ggml.merges are not pairs")
    tokenizer = Tokenizer(_bpe(file, vocab, merges, ignore_merges=pre in _IGNORE_MERGES))
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in _SPLITS[pre]]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, vocab: dict[str, int]) -> Tokenizer:
    tokens, types = _vocabulary(file)
    scores = _get(file, "scores")
    if scores is None or len(scores) != len(tokens):
        raise WeightsError(f"GGUF file {file.path}: tokenizer.ggml.scores do not fit the tokens")
    unknown = _get(file, "unknown_token_id")
    merges = _merges(tokens, types, scores, vocab)
    unk = None if unknown is None else tokens[unknown]
    model = _bpe(file, vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefix = _get(file, "add_space_prefix")
    prefix = True if prefix is None else prefix
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(undo + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return tokenizer


def _bpe(file: GGUFFile, vocab: dict[str, int], merges: list[Any], **options: Any) -> BPE:
    try:
        return BPE(vocab, merges, **options)
    except Exception as error:  # the library raises bare Exception, as for unknown tokens
        raise WeightsError(f"GGUF file {file.path}: {error}") from error


def _merges(
    tokens: list[str], types: list[int], scores: list[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, in the order SentencePiece would: by its score.

    User-defined tokens come first: SentencePiece takes them whole before it looks at scores.
    """
    skipped = (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
    ranked = [i for i, kind in enumerate(types) if kind not in skipped and len(tokens[i]) > 1]
    ranked.sort(key=lambda i: (types[i] != _USER_DEFINED, -scores[i], i))
    out: list[tuple[str, str]] = []
    for i in ranked:
        token = tokens[i]
        pairs = [(token[:k], token[k:]) for k in range(1, len(token))]
        out += [(left, right) for left, right in pairs if left in vocab and right in vocab]
    return out


def _add_template(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Let `encode` add BOS and EOS where the file asks for them."""
    ids = {k: _get(file, f"{k}_token_id") for k in ("bos", "eos") if _adds(file, k)}
    if not ids:
        return
    if None in ids.values():
        raise WeightsError(f"GGUF file {file.path} adds {', '.join(ids)} tokens but names none")
    pieces = [tokens[ids["bos"]]] if "bos" in ids else []
    end = [tokens[ids["eos"]]] if "eos" in ids else []
    first = [*pieces, "$A", *end]
    second = [*(f"{p}:1" for p in pieces), "$B:1", *(f"{p}:1" for p in end)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=first, pair=[*first, *second], special_tokens=[(tokens[i], i) for i in ids.values()]
    )


def _adds(file: GGUFFile, kind: str) -> bool:
    """Whether BOS or EOS is added; where the file is silent, SentencePiece models add BOS."""
    value = _get(file, f"add_{kind}_token")
    if value is None:
        default = _get(file, "model") == "llama" or _get(file, "pre") in ("llama-bpe", "tekken")
        return kind == "bos" and default
    return bool(value)


def _vocabulary(file: GGUFFile) -> tuple[list[str], list[int]]:
    tokens = _get(file, "tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise WeightsError(f"GGUF file {file.path} has no vocabulary (tokenizer.ggml.tokens)")
    types = _get(file, "token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise WeightsError(
            f"GGUF file {file.path}: {len(types)} token types for {len(tokens)} tokens"
        )
    return tokens, types


def _get(file: GGUFFile, key: str) -> Any:
    return file.metadata.get(f"tokenizer.ggml.{key}")
