"""Streams against the library's one-shot decode: R-TOK-01, R-TOK-02, R-TOK-03."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from jaxinfer.errors import ConfigError, InvalidRequest
from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.tokenizer import Tokenizer
from tests.text.vocabularies import (
    byte_tokenizer,
    count_decoding,
    sentencepiece_tokenizer,
    token_id,
)

BYTES = byte_tokenizer()
PIECES = sentencepiece_tokenizer()
GEMMA = sentencepiece_tokenizer(strip=False)
METASPACE = sentencepiece_tokenizer(metaspace=True)
MARK = "\ufffd"


def deltas(tokenizer: Tokenizer, ids: list[int], prompt: Sequence[int] = (), skip: bool = True):
    stream = Detokenizer(tokenizer, skip, prompt)
    return [*(stream.push([token]) for token in ids), stream.finish()]


def whole_bytes(ids: list[int]) -> str:
    """Byte-level truth without any tokenizer: ids 0-255 are bytes."""
    return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("char", ["é", "中", "😀"])
@pytest.mark.parametrize("tokenizer, base", [(BYTES, 0), (PIECES, 3)])
def test_character_of_several_tokens_is_never_a_mark(char: str, tokenizer: Tokenizer, base: int):
    ids = [base + b for b in (char + "a").encode()]
    got = deltas(tokenizer, ids)
    assert got == [""] * (len(char.encode()) - 1) + [char, "a", ""]
    assert tokenizer.decode(ids) == char + "a" == tokenizer.backend.decode(ids)


def test_broken_character_is_marked_when_proven_and_not_before():
    space_b = token_id(BYTES, "Ġb")
    assert deltas(BYTES, [0xC3, space_b]) == ["", MARK + " b", ""]
    assert deltas(BYTES, [0xC3]) == ["", MARK]
    assert BYTES.decode([0xC3]) == MARK == BYTES.backend.decode([0xC3])


@pytest.mark.parametrize("skip", [True, False])
def test_random_bytes_equal_the_one_shot_decode(skip: bool):
    rng = random.Random(7)
    top = BYTES.vocab_size
    for _ in range(2000):
        ids = [rng.randrange(rng.choice((256, top))) for _ in range(rng.randrange(1, 40))]
        want = BYTES.backend.decode(ids, skip_special_tokens=skip)
        assert "".join(deltas(BYTES, ids, skip=skip)) == want
        assert BYTES.decode(ids, skip) == want
        if max(ids) < 256:
            assert want == whole_bytes(ids)


@pytest.mark.parametrize(
    "tokenizer", [PIECES, GEMMA, METASPACE], ids=["llama", "gemma", "metaspace"]
)
def test_random_pieces_equal_the_one_shot_decode(tokenizer: Tokenizer):
    rng = random.Random(8)
    chars = [[3 + b for b in c.encode()] for c in "aé中😀 "]
    pieces = [[i] for i in range(259, tokenizer.vocab_size)] + [[1], [2]]
    if tokenizer is METASPACE:
        chars = []  # this decoder has no byte fallback: "<0x41>" is its text
    for _ in range(2000):
        ids = [t for _ in range(rng.randrange(1, 20)) for t in rng.choice(chars + pieces)]
        skip = rng.random() < 0.5
        want = tokenizer.backend.decode(ids, skip_special_tokens=skip)
        assert "".join(deltas(tokenizer, ids, skip=skip)) == want


def test_byte_fallback_marks_each_bad_byte_and_keeps_good_characters():
    ids = [3 + b for b in (0xE4, 0xB8, 0x61, 0xC3, 0xA9, 0xFF)]
    assert PIECES.decode(ids) == f"{MARK}{MARK}aé{MARK}" == "".join(deltas(PIECES, ids))
    assert PIECES.backend.decode(ids[:2]) == MARK * 2 == PIECES.decode(ids[:2])


def test_leading_space_of_the_first_token():
    lead, x, space = (token_id(PIECES, t) for t in ("▁lead", "▁x", "▁"))
    assert "".join(deltas(PIECES, [space, lead, x])) == " lead x"
    assert deltas(PIECES, [lead, x])[:2] == ["lead", " x"]
    assert deltas(PIECES, [lead], prompt=[1])[0] == "lead"
    assert deltas(PIECES, [lead], prompt=[1, x])[0] == " lead"
    assert deltas(PIECES, [lead], prompt=[1], skip=False)[0] == " lead"
    ids = BYTES.encode(" lead x")
    assert len(ids) == 2 and deltas(BYTES, ids) == [" lead", " x", ""]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_output_is_the_whole_without_the_prompt(data: st.DataObject):
    tokenizer = data.draw(st.sampled_from([BYTES, PIECES, GEMMA]))
    first = 0 if tokenizer is BYTES else 259  # runs of broken fallback bytes: see the test above
    ids = st.lists(st.integers(first, tokenizer.vocab_size - 1), max_size=12)
    prompt, output, skip = data.draw(ids), data.draw(ids), data.draw(st.booleans())
    whole = tokenizer.backend.decode(prompt + output, skip_special_tokens=skip)
    start = tokenizer.backend.decode(prompt, skip_special_tokens=skip)
    got = "".join(deltas(tokenizer, output, prompt, skip))
    if whole.startswith(start):
        assert got == whole[len(start) :]
    else:  # the output completes the prompt's last character
        assert start.endswith(MARK) and got == whole[len(start) - 1 :]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_chunking_does_not_change_the_text(data: st.DataObject):
    tokenizer = data.draw(st.sampled_from([BYTES, PIECES, METASPACE]))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    stream = Detokenizer(tokenizer)
    text, rest = "", ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        text, rest = text + stream.push(rest[:size]), rest[size:]
    assert text + stream.finish() == "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


def test_prompt_that_ends_within_a_character():
    emoji = list("😀".encode())
    assert "".join(deltas(BYTES, emoji[2:], prompt=[0x61, *emoji[:2]])) == "😀"
    assert "".join(deltas(BYTES, [0x61], prompt=emoji[:2])) == "a"
    assert "".join(deltas(BYTES, [], prompt=emoji[:2])) == ""


def test_cost_of_a_token_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch):
    decoded = count_decoding(monkeypatch)
    stream = Detokenizer(BYTES)
    for _ in range(5000):
        stream.push((0x80,))  # a lone continuation byte: quadratic for windows that wait
    assert sum(decoded) == 5000 and max(decoded) == 1


def test_word_level_and_wordpiece_vocabularies():
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert "".join(deltas(Tokenizer(words), [0, 1, 0])) == "a b a" == words.decode([0, 1, 0])
    vocab = {"[UNK]": 0, "un": 1, "##able": 2, "it": 3}
    wordpiece = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    assert "".join(deltas(Tokenizer(wordpiece), [1, 2, 3])) == "unable it"


def test_ids_without_a_token():
    padded = BYTES.vocab_size + 100
    assert deltas(BYTES, [0x61, padded, 0x62]) == ["a", "", "b", ""]
    for bad in (-1, 2**40):
        with pytest.raises(InvalidRequest, match="token id"):
            BYTES.decode([bad])


def test_decoder_that_needs_its_neighbours_is_refused():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.CTC()
    with pytest.raises(ConfigError, match="CTC"):
        Tokenizer(backend)
