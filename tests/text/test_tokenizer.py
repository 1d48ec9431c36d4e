"""The BOS rule (R-TOK-04), special tokens, end-of-text ids (R-STP-03), folders and odd input."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from jaxinfer.errors import ConfigError, InvalidRequest
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer
from tests.text.vocabularies import (
    BOS,
    EOS,
    IM_END,
    byte_backend,
    byte_tokenizer,
    sentencepiece_tokenizer,
    token_id,
)

TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("post_bos", [True, False], ids=["post-processor", "bare"])
@pytest.mark.parametrize("add_bos", [True, None], ids=["add_bos", "unset"])
def test_exactly_one_bos_on_every_path(post_bos: bool, add_bos: bool | None):
    tokenizer = byte_tokenizer(post_bos, add_bos)
    rendered = ChatTemplate(TEMPLATE, BOS).render(HI)
    chat = tokenizer.encode(rendered, add_special_tokens=False)
    raw = tokenizer.encode(rendered)
    wants = post_bos or add_bos
    assert chat == raw and chat.count(token_id(tokenizer, BOS)) == 1 and chat[0] == tokenizer.bos_id
    assert tokenizer.encode("hi").count(token_id(tokenizer, BOS)) == int(bool(wants))
    assert tokenizer.encode("hi", add_special_tokens=False) == [token_id(tokenizer, "hi")]


def test_add_bos_false_wins_over_the_post_processor():
    tokenizer = byte_tokenizer(post_bos=True, add_bos=False)
    assert tokenizer.encode("hi") == [token_id(tokenizer, "hi")]
    assert tokenizer.encode(BOS + "hi")[0] == tokenizer.bos_id


def test_long_texts_get_the_same_ids_and_let_other_threads_run():
    tokenizer = byte_tokenizer()
    text = BOS + "hé <|im_end|> hello " * 20_000
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.005):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    ids = tokenizer.encode(text)
    took = time.perf_counter() - start
    done.set()
    thread.join()
    assert ids == tokenizer.backend.encode(text).ids
    gaps = [b - a for a, b in pairwise([start, *ticks, start + took])]
    assert max(gaps) < max(0.25, took / 2)


def test_sentencepiece_bos_is_not_doubled():
    tokenizer = sentencepiece_tokenizer()
    assert tokenizer.encode("lead") == [1, token_id(tokenizer, "▁lead")]
    assert tokenizer.encode("<s>lead").count(1) == 1


def test_special_tokens_in_text_become_their_ids_and_are_hidden_in_the_answer():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("hi<|im_end|></think>")
    end, think = token_id(tokenizer, IM_END), token_id(tokenizer, "</think>")
    assert ids == [token_id(tokenizer, "hi"), end, think]
    assert tokenizer.is_special(end) and tokenizer.id_to_token(end) == IM_END
    assert not tokenizer.is_special(think)
    assert tokenizer.decode(ids) == "hi</think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hi<|im_end|></think>"
    assert tokenizer.token_text(end) == IM_END


def test_named_tokens_of_the_vocabulary_become_special():
    backend = byte_backend()
    backend.add_tokens([AddedToken("<end>", normalized=False)])
    tokenizer = Tokenizer(backend, eos_token="<end>")
    end = token_id(tokenizer, "<end>")
    assert end in tokenizer.special_ids
    assert tokenizer.decode([0x61, end]) == "a"


def test_facts_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="bos_token='<none>'"):
        Tokenizer(byte_backend(), bos_token="<none>")
    with pytest.raises(ConfigError, match="add_bos=True needs bos_token"):
        Tokenizer(byte_backend(), add_bos=True)


def test_truncation_and_padding_of_the_file_are_switched_off():
    backend = byte_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    assert len(Tokenizer(backend).encode("zzzz")) == 4


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.characters(), max_size=20))
def test_any_text_is_a_right_answer_or_an_invalid_request(text: str):
    tokenizer = byte_tokenizer()
    try:
        text.encode()
    except UnicodeEncodeError:
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            tokenizer.encode(text)
    else:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_lone_surrogate_in_a_message():
    text = ChatTemplate(TEMPLATE, BOS).render([{"role": "user", "content": "a\ud83d"}])
    with pytest.raises(InvalidRequest, match="lone surrogate at character 20"):
        byte_tokenizer().encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text, ids", [("", []), ("\x00", [0]), ("a\x00b", [0x61, 0, 0x62])])
def test_empty_and_nul(text: str, ids: list[int]):
    assert byte_tokenizer().encode(text) == ids
    assert byte_tokenizer(add_bos=True).encode(text)[1:] == ids


@pytest.mark.parametrize("bad", [None, 5, b"x", ["x"]])
def test_prompt_that_is_no_text(bad: Any):
    with pytest.raises(InvalidRequest, match="prompt must be a string"):
        byte_tokenizer().encode(bad)


def write_folder(folder: Path, **files: object) -> Path:
    byte_backend().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_from_dir_reads_all_sources(tmp_path: Path):
    folder = write_folder(
        tmp_path,
        tokenizer_config={
            "bos_token": {"content": BOS, "lstrip": False},
            "eos_token": None,
            "add_bos_token": True,
            "added_tokens_decoder": {"271": {"content": "</think>", "special": True}},
        },
        special_tokens_map={"eos_token": EOS, "pad_token": EOS},
    )
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer.special_tokens == {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS}
    assert tokenizer.encode("hi") == [tokenizer.bos_id, token_id(tokenizer, "hi")]
    assert tokenizer.is_special(271) and tokenizer.vocab_size == 272


def test_from_dir_with_tokenizer_json_alone(tmp_path: Path):
    tokenizer = Tokenizer.from_dir(write_folder(tmp_path))
    assert tokenizer.add_bos is None and tokenizer.special_tokens == {}
    assert tokenizer.encode("hi") == [token_id(tokenizer, "hi")]


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json.*cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json must hold a JSON object"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"999": {"content": "<new>", "special": true}}}',
            "do not belong together",
        ),
    ],
)
def test_broken_folders(tmp_path: Path, name: str, text: str | None, message: str):
    file = write_folder(tmp_path) / name
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_dir(tmp_path)
