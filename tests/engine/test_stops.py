"""Stop strings, stop ids and text end to end, on models that emit a given text (R-TOK, R-STP rules)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.types import CompletionOutput
from tests.checkpoints import EOS, IM_END
from tests.engine.conftest import SMALL

TEXT = "pABCDEFGHIJ"
SPECIAL = [ord("q"), ord("h"), ord("i"), IM_END, ord("x")]
HALF = [ord("r"), *"é".encode()]


@pytest.fixture(scope="module")
def talker(chain: Callable[..., Path]) -> LLM:
    """After "p" comes "ABCDEFGHIJ", one token a letter."""
    return LLM(str(chain([ord(c) for c in TEXT])), **SMALL)


def answer(llm: LLM, prompt: str, **params: Any) -> CompletionOutput:
    params = {"temperature": 0.0, "max_tokens": 20} | params
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0]


def facts(output: CompletionOutput) -> tuple[str, str, str | None, int | str | None]:
    tokens = bytes(t for t in output.token_ids if t < 256).decode(errors="replace")
    return output.text, tokens, output.finish_reason, output.stop_reason


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({}, ("ABCDEFGHIJ", "ABCDEFGHIJ", "stop", None)),
        ({"max_tokens": 4}, ("ABCD", "ABCD", "length", None)),
        ({"stop": "DEF"}, ("ABC", "ABCDEF", "stop", "DEF")),
        ({"stop": ["DEFX", "IZ"]}, ("ABCDEFGHIJ", "ABCDEFGHIJ", "stop", None)),
        ({"stop": ["GH", "C"]}, ("AB", "ABC", "stop", "C")),
        ({"stop": "A"}, ("", "A", "stop", "A")),
        ({"stop": "J"}, ("ABCDEFGHI", "ABCDEFGHIJ", "stop", "J")),
        ({"stop": "DEF", "include_stop_str_in_output": True}, ("ABCDEF", "ABCDEF", "stop", "DEF")),
        ({"stop": "DEF", "max_tokens": 6}, ("ABC", "ABCDEF", "stop", "DEF")),
        ({"stop": "DEF", "max_tokens": 5}, ("ABCDE", "ABCDE", "length", None)),
        ({"stop": "DEF", "min_tokens": 7}, ("ABCDEFGHIJ", "ABCDEFGHIJ", "stop", None)),
        ({"stop_token_ids": [ord("C")]}, ("AB", "ABC", "stop", ord("C"))),
        (
            {"stop_token_ids": [ord("C")], "include_stop_str_in_output": True},
            ("ABC", "ABC", "stop", ord("C")),
        ),
        ({"detokenize": False}, ("", "ABCDEFGHIJ", "stop", None)),
    ],
    ids=str,
)
def test_what_belongs_to_the_output(talker, params, wanted):
    output = answer(talker, "p", **params)
    assert facts(output) == wanted
    ended = wanted[2:] == ("stop", None)
    assert (output.token_ids[-1] == EOS) == ended
    talker.core.check()


def test_logprobs_end_with_the_tokens(talker):
    output = answer(talker, "p", stop="DEF", logprobs=1)
    assert len(output.logprobs or []) == len(output.token_ids) == 6


def test_many_streams_with_stops_of_their_own(talker):
    stops = [None, "B", "CD", "IJ", "DEFX", "EFG", "A", "GHI"]
    params = [SamplingParams(temperature=0.0, max_tokens=20, stop=s) for s in stops]
    outputs = talker.generate(["p"] * 8, params, use_tqdm=False)
    for stop, output in zip(stops, outputs, strict=True):
        wanted = TEXT[1:].split(stop)[0] if stop else TEXT[1:]
        assert output.outputs[0].text == wanted
    talker.core.check()


def test_stop_equal_to_a_special_token(chain):
    """R-STP-04, and R-STP-02: held text comes out when the output is cut."""
    folder = chain(SPECIAL)
    llm = LLM(str(folder), **SMALL)
    for skip in (True, False):
        output = answer(llm, "q", stop="<|im_end|>", ignore_eos=True, skip_special_tokens=skip)
        assert (output.text, output.finish_reason) == ("hi", "stop")
        assert output.stop_reason == "<|im_end|>"
    assert answer(llm, "q").text == "hi", "it is an end-of-text id of the generation config too"
    assert answer(llm, "q", stop="i<|z", max_tokens=2).text == "hi"


def test_a_character_cut_in_two(chain):
    """R-TOK-02: exactly one mark for bytes that never became a character."""
    llm = LLM(str(chain(HALF)), **SMALL)
    assert answer(llm, "r").text == "é"
    cut = answer(llm, "r", max_tokens=1)
    assert (cut.text, cut.finish_reason) == ("\ufffd", "length")
    stopped = answer(llm, "r", max_tokens=1, stop="\ufffd")
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("", "stop", "\ufffd")


@pytest.mark.parametrize(
    ("config", "generation", "last"),
    [(2, [2, 7, 9], 7), (2, 2, EOS)],
    ids=["generation config", "tokenizer"],
)
def test_every_end_of_text_id_counts(chain, tmp_path, config, generation, last):
    """R-STP-03: the union of what config, generation config and tokenizer name."""
    folder = tmp_path / "model"
    shutil.copytree(chain([5, last, 6]), folder)
    for name, ids in (("config.json", config), ("generation_config.json", generation)):
        facts = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(facts | {"eos_token_id": ids}))
    llm = LLM(str(folder), **SMALL)
    output = llm.generate(
        {"prompt_token_ids": [5]}, SamplingParams(temperature=0.0, max_tokens=9), use_tqdm=False
    )
    assert output[0].outputs[0].token_ids == [last]
    assert (output[0].outputs[0].finish_reason, output[0].outputs[0].text) == ("stop", "")
