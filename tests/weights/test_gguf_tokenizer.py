"""Tokenizers built from GGUF metadata: splits against hand-written expectations, SentencePiece
merges against a brute-force SentencePiece encoder, special tokens and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jaxinfer.errors import WeightsError
from jaxinfer.weights.gguf_file import GGUFFile
from jaxinfer.weights.gguf_tokenizer import build_tokenizer, tokenizer_facts
from tests.checkpoints import byte_alphabet
from tests.weights.gguf_files import tokenizer_metadata, write_gguf


def file_with(tmp_path: Path, **changes: Any) -> GGUFFile:
    meta = tokenizer_metadata() | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}
    meta = {key: value for key, value in meta.items() if value not in (None, [])}
    return GGUFFile(write_gguf(tmp_path / "t.gguf", "llama", meta, {}))


def byte_level(tmp_path: Path, pre: str, merges: list[str] | None = None) -> Tokenizer:
    """A tokenizer whose vocabulary is the 256 bytes and the results of `merges`."""
    tokens = byte_alphabet() + [merge.replace(" ", "") for merge in merges or []]
    types = [1] * len(tokens)
    facts = {"tokens": tokens, "token_type": types, "merges": merges or [], "pre": pre}
    return build_tokenizer(file_with(tmp_path, add_bos_token=False, **facts))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """The parts that the pre-tokenizer makes."""
    assert tokenizer.pre_tokenizer is not None
    split = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:stop] for _, (start, stop) in split]


TEXT = "I'LL pay 12345€  now\n\nOK"


@pytest.mark.parametrize(
    ("pre", "want"),
    [
        ("gpt-2", ["I", "'", "LL", " pay", " 12345", "€", " ", " now", "\n", "\n", "OK"]),
        (
            "smollm",
            ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", "€", " ", " now", "\n", "\n"]
            + ["OK"],
        ),
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "45", "€", " ", " now", "\n\n", "OK"]),
        (
            "qwen2",
            ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", "€", " ", " now", "\n\n", "OK"],
        ),
        ("gpt-4o", ["I'LL", " pay", " ", "123", "45", "€", " ", " now", "\n\n", "OK"]),
        (
            "tekken",
            ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", "€", " ", " now", "\n\n", "OK"],
        ),
        (
            "default",
            ["I", "'", "LL", " pay", " ", "123", "45", "€", " ", " now", "\n", "\n", "OK"],
        ),
    ],
)
def test_pre_tokenizers(pre: str, want: list[str], tmp_path: Path) -> None:
    assert pieces(byte_level(tmp_path, pre), TEXT) == want


@given(text=st.text(max_size=40), pre=st.sampled_from(["smollm", "llama-bpe", "gpt-4o"]))
@settings(max_examples=30, deadline=None)
def test_byte_level_text_survives(
    text: str, pre: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = byte_level(tmp_path_factory.mktemp("t"), pre, ["a b", "Ġ t", "Ġt h"])
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_merges_follow_their_order(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "gpt-2", ["b c", "a b", "a bc"])
    assert tokenizer.encode("abc ab").tokens == ["abc", "Ġ", "ab"]


SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
SPM_PIECES = {"▁": -9.0, "a": -8.0, "b": -8.5, "▁a": -1.0, "ab": -0.5, "▁ab": -3.0, "aba": -2.0}
SPM_TYPES = [2, 3, 3] + [6] * 256 + [1] * len(SPM_PIECES)


def sentencepiece(tmp_path: Path, **changes: Any) -> Tokenizer:
    tokens = SPM_TOKENS + list(SPM_PIECES)
    scores = [0.0] * len(SPM_TOKENS) + list(SPM_PIECES.values())
    settings = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": SPM_TYPES}
    settings |= {"unknown_token_id": 0, "merges": None, "pre": None}
    return build_tokenizer(file_with(tmp_path, **settings | changes))


def spm_encode(text: str) -> list[str]:
    """SentencePiece BPE by brute force: join the adjacent pair whose result scores best."""
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [a + b for a, b in zip(symbols, symbols[1:], strict=False)]
        known = [(SPM_PIECES[t], -i) for i, t in enumerate(joined) if t in SPM_PIECES]
        if not known:
            break
        at = -max(known)[1]
        symbols[at : at + 2] = [joined[at]]
    out = []
    for symbol in symbols:
        raw = [f"<0x{byte:02X}>" for byte in symbol.encode()]
        out += [symbol] if symbol in SPM_PIECES else raw
    return out


@given(text=st.text("ab é中", max_size=12))
@settings(max_examples=100, deadline=None)
def test_sentencepiece_merges(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = sentencepiece(tmp_path_factory.mktemp("t"), add_bos_token=False)
    encoded = tokenizer.encode(text)
    assert encoded.tokens == spm_encode(text)
    assert tokenizer.decode(encoded.ids) == text


def test_bos_and_eos_are_added_where_the_file_asks(tmp_path: Path) -> None:
    assert sentencepiece(tmp_path).encode("a").tokens == ["<s>", "▁a"]
    both = sentencepiece(tmp_path, add_eos_token=True, add_space_prefix=False)
    assert both.encode("a").tokens == ["<s>", "a", "</s>"]
    assert both.encode("a", "b").tokens == ["<s>", "a", "</s>", "<s>", "b", "</s>"]
    assert both.encode("a", add_special_tokens=False).tokens == ["a"]


def test_special_and_user_defined_tokens(tmp_path: Path) -> None:
    tokens = [*byte_alphabet(), "<|im_end|>", "<tool>", "<s>"]
    types = [1] * 256 + [3, 4, 3]
    file = file_with(
        tmp_path,
        tokens=tokens,
        token_type=types,
        merges=None,
        bos_token_id=258,
        eos_token_id=258,
        padding_token_id=256,
    )
    tokenizer = build_tokenizer(file)
    assert tokenizer.encode("x<tool>y<|im_end|>").tokens == ["x", "<tool>", "y", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("x<tool>y<|im_end|>").ids) == "x<tool>y"
    facts = tokenizer_facts(file)
    assert facts["eot_token_ids"] == [256], "a turn's end that the file does not list as EOS"
    named = [facts[f"{kind}_token"] for kind in ("bos", "eos", "pad", "unk")]
    assert named == ["<s>", "<s>", "<|im_end|>", None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model 'bert'"),
        ({"pre": "strange"}, "pre='strange'"),
        ({"merges": ["a b c"]}, "merges"),
        ({"merges": ["a x"]}, "out of vocabulary"),
        ({"token_type": [1]}, "token types"),
        ({"tokens": None, "token_type": None}, "no vocabulary"),
        ({"tokens": 5}, "no vocabulary"),
        ({"model": "llama"}, "scores"),
        ({"bos_token_id": None, "add_bos_token": True}, "names none"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=message):
        build_tokenizer(file_with(tmp_path, **changes))


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="eos_token_id=99"):
        tokenizer_facts(file_with(tmp_path, eos_token_id=99))
