"""One output's text: detokenizer and stops together (R-TOK-01, R-STP-01 to R-STP-04)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.text.output import OutputText
from jaxinfer.types import SamplingParams
from tests.text.vocabularies import EOS, IM_END, byte_tokenizer, count_decoding, token_id

BYTES = byte_tokenizer()
END, EOS_ID = token_id(BYTES, IM_END), token_id(BYTES, EOS)


def ids_of(text: str) -> list[int]:
    """One token a byte."""
    return list(text.encode())


def run(chunks: list[list[int]], **params) -> tuple[str, str | None]:
    output = OutputText(BYTES, SamplingParams(**params))
    text = "".join(output.push(chunk).text for chunk in chunks)
    last = output.finish()
    return text + last.text, last.stop


def test_text_is_held_until_no_stop_can_begin_in_it():
    output = OutputText(BYTES, SamplingParams(stop="DEF"))
    assert output.push(ids_of("AB")) == ("AB", None)
    assert output.push(ids_of("CDE")) == ("C", None)
    assert output.push(ids_of("FGH")) == ("", "DEF")
    assert output.push(ids_of("I")) == ("", "DEF")
    assert output.finish() == ("", "DEF")


def test_text_after_the_stop_within_its_token_is_dropped():
    lead = token_id(BYTES, "Ġlead")
    assert run([[0x61, lead, 0x62]], stop="le") == ("a ", "le")
    kept = run([[0x61, lead, 0x62]], stop="le", include_stop_str_in_output=True)
    assert kept == ("a le", "le")


@pytest.mark.parametrize("one_push", [True, False])
def test_stop_equal_to_a_hidden_special_token(one_push: bool):
    ids = [*ids_of("hi"), END, *ids_of("x")]
    chunks = [ids] if one_push else [[i] for i in ids]
    assert run(chunks, stop=[IM_END]) == ("hi", IM_END)
    assert run(chunks, stop=["i" + IM_END]) == ("h", "i" + IM_END)
    assert run(chunks, stop=[IM_END], skip_special_tokens=False) == ("hi", IM_END)
    kept = run(chunks, stop=[IM_END], include_stop_str_in_output=True)
    assert kept == ("hi" + IM_END, IM_END)
    assert run(chunks, stop=["zz"]) == ("hix", None)


def test_held_text_and_unfinished_bytes_come_out_at_the_end():
    assert run([ids_of("a"), ids_of(",b")], stop=["b,c"]) == ("a,b", None)
    assert run([ids_of("a,b"), [0xC3]], stop=["b,c"]) == ("a,b\ufffd", None)
    think = token_id(BYTES, "</think>")
    ids = [*ids_of("b,"), think, *ids_of("b")]
    assert run([ids], stop=["b,c", "</thinker>"]) == run([ids]) == ("b,</think>b", None)


@pytest.mark.parametrize("stops", [[], ["zz"]])
def test_text_of_the_final_stop_token(stops: list[str]):
    for last, shown in ((EOS_ID, ""), (0x21, "!")):
        output = OutputText(BYTES, SamplingParams(stop=stops))
        assert output.push([0x61, last], final_stop_token=True) == ("a", None)
        assert output.finish() == ("", None)
        params = SamplingParams(stop=stops, include_stop_str_in_output=True)
        output = OutputText(BYTES, params)
        delta = output.push([0x61, last], final_stop_token=True)
        assert delta == ("a" + shown, None)


def test_final_stop_token_completes_a_stop_string():
    for stop, text in ((IM_END, "hi"), ("i" + IM_END, "h")):
        output = OutputText(BYTES, SamplingParams(stop=stop))
        first = output.push(ids_of("hi"))
        last = output.push([END], final_stop_token=True)
        assert (first.text + last.text, last.stop) == (text, stop)


def test_without_detokenization_nothing_is_decoded():
    output = OutputText(BYTES, SamplingParams(detokenize=False), prompt_ids=[-1])
    assert output.push([1, 2, 3]) == ("", None)
    assert output.finish() == ("", None)


def test_stop_strings_wait_for_min_tokens():
    ids = ids_of("ababab")
    assert run([ids], stop="ab", min_tokens=3) == ("abab", "ab")
    assert run([[i] for i in ids], stop="ab", min_tokens=2) == ("ab", "ab")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_stream_and_single_push_agree(data: st.DataObject):
    ids = data.draw(st.lists(st.sampled_from([*b"ab,\xc3\xa9", END, EOS_ID]), max_size=15))
    params = {
        "stop": data.draw(st.lists(st.sampled_from(["ab", "b,a", "é", IM_END, ",é,"]), max_size=3)),
        "include_stop_str_in_output": data.draw(st.booleans()),
        "skip_special_tokens": data.draw(st.booleans()),
        "min_tokens": data.draw(st.integers(0, 3)),
    }
    assert run([[i] for i in ids], **params) == run([ids], **params)
    text, stop = run([ids], **params)
    if stop is None:
        assert text == BYTES.decode(ids, params["skip_special_tokens"])


@pytest.mark.parametrize("stops", [[], ["\n\nUser:", "###", IM_END]], ids=["bare", "stops"])
def test_a_token_is_decoded_once(stops: list[str], monkeypatch: pytest.MonkeyPatch):
    decoded = count_decoding(monkeypatch)
    output = OutputText(BYTES, SamplingParams(stop=stops))
    text = "It was a dark and stormy night. " * 300
    assert "".join(output.push((token,)).text for token in ids_of(text)) == text
    # Two calls more, of no bytes: for the prompt's last character, and after the first token.
    assert len(text) <= len(decoded) <= len(text) + 2 and sum(decoded) == len(text)
