"""Hostile texts of 100,000 characters: linear time and no exception, in one piece or in many.

The bound is processor time, far above what linear work takes and far below quadratic work.
"""

from __future__ import annotations

import time

import pytest

from serving.parsers import TOOL_PARSERS
from tests.serving.parsers.parsing import parse

SIZE = 100_000
LIMIT = 4.0  # seconds; linear work takes 0.02 to 0.4

CALL = '<tool_call>{"name": "now", "arguments": '
DS_CALL = "<｜tool▁call▁begin｜>now<｜tool▁sep｜>"
# (head, what repeats after it); each is tried with the formats that it may trouble
HOSTILE: dict[str, list[tuple[str, str]]] = {
    "hermes": [("", "<tool_call>"), ("", CALL), ("", CALL + "{}}"), (CALL, "["), (CALL, '{"a":'),
               (CALL + '{"', "\\"), ("<tool_call>{", '"name":"a",'), (CALL + '"', '\\"'),
               ("<tool_call>", '{"name": "'), ("", "\n"), ("", "<"), ("x", "</tool_call>\n")],
    "llama3_json": [("", '{"name": "'), ("", '{"name": "now", "parameters": {}};'), ("{", '"'),
                    ('{"name": "now', "x"), ("", " "), ("", "<|python_tag|>{"), ("", ";")],
    "mistral": [("", "[TOOL_CALLS]"), ("[TOOL_CALLS][", '{"name": "now"},'), ("[TOOL_CALLS]", "a"),
                ("[TOOL_CALLS]now{", "["), ("", "[TOOL_CALLS]now[ARGS]{"), ("[TOOL_CALLS]", "[")],
    "deepseek": [("", DS_CALL), ("", DS_CALL + "{"), ("", "<｜tool▁calls▁begin｜>"),
                 ("", DS_CALL + "{}"), (DS_CALL + "{", '"'), ("", "<｜")],
    "pythonic": [("[now(", "("), ("[now(a=", "["), ("[now(a=", "-"), ("[now(a=", "'"),
                 ("[now(a='", "\\"), ('[now(a="""', 'x"'), ("[", "now(),"), ("[now(", "a=1,"),
                 ("[now(a=", "1"), ("[now(a=", "1+"), ("[", "now"), ("[now(a=[", "[],"),
                 ("", "[now("), ("[now(a=", "{1:")],
    "qwen3_coder": [("", "<function="), ("", "<function=now>"), ("<function=now>", "<parameter="),
                    ("<function=now>", "<parameter=a>"), ("<function=now><parameter=a>", "\n"),
                    ("<function=now>", "<parameter=a></parameter>"), ("", "<tool_call>"),
                    ("<function=get_weather><parameter=where>", "["),
                    ("<function=get_weather><parameter=where>", '{"a":'),
                    ("<function=get_weather><parameter=days>", "9")],
    "qwen3": [("", "a")],
}  # fmt: skip
ENDS = {"pythonic": ")]", "qwen3_coder": "</parameter></function>"}
THINK = [("", "<think>"), ("", "\n"), ("<think>", "\n"), ("<think>", "</think>"), ("<think>", "<")]
HARMONY = [("", "<|channel|>"), ("", "<|message|>"), ("", " to=functions.now"), ("", "<|start|>"),
           ("", "<|start|> to=functions.now<|message|>"), ("", "<|end|>a"), ("<|channel|>", "<"),
           ("<|channel|>analysis<|message|>", "\n"), ("to=", "a")]  # fmt: skip


def check(format: str | None, reasoning: str | None, text: str, prompt: str = "") -> None:
    begin = time.process_time()
    special = ("<eos>", "<|channel|>", "[TOOL_CALLS]")
    size = 16
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    whole = parse([text], format, reasoning, prompt=prompt, special_tokens=special)
    assert parse(pieces, format, reasoning, prompt=prompt, special_tokens=special) == whole
    assert time.process_time() - begin < LIMIT


@pytest.mark.parametrize(
    ("format", "head", "again"), [(f, *case) for f, cases in HOSTILE.items() for case in cases]
)
def test_hostile_calls_take_linear_time(format: str, head: str, again: str) -> None:
    text = head + again * (SIZE // len(again))
    check(format, "qwen3", text + ENDS.get(format, ""))


@pytest.mark.parametrize(("head", "again"), THINK)
def test_hostile_reasoning_takes_linear_time(head: str, again: str) -> None:
    check("hermes", "qwen3", head + again * (SIZE // len(again)))


@pytest.mark.parametrize(("head", "again"), HARMONY)
def test_hostile_harmony_takes_linear_time(head: str, again: str) -> None:
    check(None, "gpt_oss", head + again * (SIZE // len(again)), prompt="<|start|>assistant")


def test_every_format_is_tried() -> None:
    assert set(HOSTILE) == set(TOOL_PARSERS)
