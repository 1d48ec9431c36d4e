"""Reasoning splitters: the written rule as tables, for every cutting (R-TRP-02..05, R-STP-02)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.text.stops import StopChecker
from serving.parsers import REASONING_PARSERS, TOOL_PARSERS, make_parser
from tests.serving.parsers.parsing import TOOLS, Calls, cuts, parse

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
OPEN = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
NONE = "<|im_start|>assistant\n"

# (end of the prompt, what the model wrote, reasoning, content, truncated)
THINK: list[tuple[str, str, str | None, str, bool]] = [
    (OPEN, "answer", "answer", "", True),
    (OPEN, "r</think>a", "r", "a", False),
    (OPEN, "</think>a", None, "a", False),
    (OPEN, "", None, "", False),
    (OPEN, "\n", None, "", False),
    (OPEN, "\n\n</think>\n\n", None, "", False),
    (OPEN, "r\n\nq\n</think>\n\na\n\nb\n", "r\n\nq", "a\n\nb\n", False),
    (OPEN, "<think>\nr\n</think>\n    code", "r", "    code", False),
    (OPEN, "r</think>", "r", "", True),
    (OPEN, "r</think> \n", "r", " \n", True),
    (OPEN, "r\n", "r\n", "", True),
    (OPEN, "r </thin", "r </thin", "", True),
    (OPEN, "  x < y</think>a</think>b", "  x < y", "a</think>b", False),
    (CLOSED, "answer", None, "answer", False),
    (CLOSED, "<think>r</think>a", None, "<think>r</think>a", False),
    (NONE, "answer", None, "answer", False),
    (NONE, "<think>\nr\n</think>\n\na", "r", "a", False),
    (NONE, "\n<think>r", "r", "", True),
    (NONE, "<think>\n\n</think>\n\na", None, "a", False),
    (NONE, "</think>a", None, "a", False),
    (NONE, " <thi", None, " <thi", False),
    (NONE, "I write <think>x</think>", None, "I write <think>x</think>", False),
    ("", "", None, "", False),
]


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(("prompt", "text", "reasoning", "content", "truncated"), THINK)
def test_think_blocks(
    name: str, prompt: str, text: str, reasoning: str | None, content: str, truncated: bool
) -> None:
    for pieces in ([text], *cuts(text, twice=True)):
        parsed = parse(pieces, None, name, prompt=prompt, tools=None)
        assert parsed == (reasoning, content, [], truncated), pieces


@pytest.mark.parametrize("prompt", [OPEN, CLOSED, NONE])
@pytest.mark.parametrize("text", ["answer", "\n<think>r</think>a", "</think>a", ""])
def test_thinking_switched_off_gives_content_alone(prompt: str, text: str) -> None:
    for pieces in ([text], list(text)):
        parsed = parse(pieces, None, "qwen3", prompt=prompt, thinking=False, tools=None)
        assert parsed == (None, text, [], False)


def test_tool_calls_are_looked_for_after_the_reasoning_only() -> None:
    text = f"a {CALL} b\n</think>\n\n{CALL}"
    for pieces in ([text], *cuts(text, twice=False)):
        parsed = parse(pieces, "hermes", "qwen3", prompt=OPEN)
        assert parsed == (f"a {CALL} b", None, [("now", "{}")], False)
    assert parse([CALL], "hermes", "qwen3", prompt=OPEN) == (CALL, "", [], True)


@pytest.mark.parametrize("format", [*TOOL_PARSERS, None])
@pytest.mark.parametrize(
    "asked", [{"tools": None}, {"tools": []}, {"tool_choice": "none"}], ids=lambda a: next(iter(a))
)
def test_without_tools_the_text_is_untouched(format: str | None, asked: dict[str, Any]) -> None:
    samples = [CALL, '\n{"name": "now", "parameters": {}}', "[now()]", "```\n[TOOL_CALLS]now{}\n```",
               "<tool_call><function=now></function>", "<｜tool▁calls▁begin｜>", " \n"]  # fmt: skip
    for text in samples:
        for pieces in ([text], list(text)):
            assert parse(pieces, format, None, **asked) == (None, text, [], False)


def harmony(*messages: str) -> str:
    return "<|start|>assistant".join(messages)


ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
TO_NOW = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
TO_WRITE = " to=functions.write<|channel|>commentary json<|message|>"

# (what the model wrote after `<|start|>assistant`, reasoning, content, calls, truncated)
HARMONY: list[tuple[str, str | None, str | None, Calls, bool]] = [
    (f"{ANALYSIS}Hm, 5 < 6.<|end|><|start|>assistant{FINAL}Hi <b>\n<|return|>", "Hm, 5 < 6.",
     "Hi <b>\n", [], False),
    (f"{FINAL}Hi", None, "Hi", [], False),
    (f"{ANALYSIS}only", "only", "", [], True),
    (f"{ANALYSIS}only<|end|>", "only", "", [], True),
    ("<|channel|>final It is 5 < 6<|return|>", None, "It is 5 < 6", [], False),
    (harmony(f"{ANALYSIS}r<|end|>", f'{TO_NOW}{{"a": {{}}}}<|call|>'), "r", None,
     [("now", '{"a": {}}')], False),
    (f'{TO_WRITE}{{"text": "é \\"x\\""}}<|call|>', None, None,
     [("write", '{"text": "é \\"x\\""}')], False),
    (harmony(f"{TO_NOW}<|call|>", f"{TO_NOW}{{}}<|call|>"), None, None,
     [("now", "{}"), ("now", "{}")], False),
    (f'{TO_NOW}{{"a": "b', None, None, [("now", '{"a": "b')], False),
    (harmony("<|channel|>commentary<|message|>I look.<|end|>", f"{TO_NOW}{{}}<|call|>"), None,
     "I look.", [("now", "{}")], False),
    (harmony(f"{ANALYSIS}a<|end|>", f"{ANALYSIS}b<|end|>", f"{FINAL}c<|end|>", f"{FINAL}d"), "a\nb",
     "c\nd", [], False),
    (f"{ANALYSIS}r{FINAL}a", "r", "a", [], False),
    (f"{ANALYSIS}r<|end|><|start|>assistant<|channel|>fin", "r", "", [], True),
    ("no channel at all", None, "no channel at all", [], False),
    ("to=him or her", None, "to=him or her", [], False),
    ("<|channel|>analysis to=browser.search<|message|>q<|call|>", "q", "", [], True),
    ("", None, "", [], False),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reasoning", "content", "calls", "truncated"), HARMONY)
def test_harmony(
    text: str, reasoning: str | None, content: str | None, calls: Calls, truncated: bool
) -> None:
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    for pieces in ([text], *cuts(text, twice=len(text) < 70)):
        for special in ((), ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>")):
            parsed = parse(pieces, None, "gpt_oss", prompt=prompt, special_tokens=special)
            assert parsed == (reasoning, content, calls, truncated), pieces


def test_harmony_goes_on_within_the_prompts_message() -> None:
    start = "<|start|>assistant"
    for prompt, text, parsed in (
        (start + FINAL, "Hi<|return|>", (None, "Hi", [], False)),
        (start + FINAL + "Hel", "lo", (None, "lo", [], False)),
        (start + ANALYSIS, f"r<|end|>{start}{FINAL}a", ("r", "a", [], False)),
        (start + TO_NOW, "{}", (None, None, [("now", "{}")], False)),
        (start + TO_NOW, f"{{}}<|call|>{FINAL}a", (None, "a", [("now", "{}")], False)),
        (start + "<|channel|>analysis", "<|message|>r", ("r", "", [], True)),
    ):
        for pieces in ([text], list(text)):
            assert parse(pieces, None, "gpt_oss", prompt=prompt) == parsed
    assert parse(["{}"], None, "gpt_oss", prompt=start + TO_NOW, tools=None)[1] == "{}"


SPECIAL = ("<eos>", "<|im_end|>", "<think>", "</think>", "[TOOL_CALLS]", "<|channel|>",
           "<|message|>", "<|end|>", "<|start|>", "<|return|>")  # fmt: skip


@pytest.mark.parametrize(
    ("format", "reasoning", "text", "expected"),
    [
        (None, None, "a<|im_end|>", (None, "a", [], False)),
        (None, "qwen3", "<think>r<eos></think>a</think><eos>", ("r", "a", [], False)),
        ("mistral", None, 'a[TOOL_CALLS]now{"a": 1<eos>}<eos>', (None, "a", [("now", '{"a": 1}')], False)),
        ("mistral", "qwen3", "[TOOL_CALLS]bad<|im_end|>", (None, "bad", [], False)),
        ("hermes", None, f"{CALL}<|im_end|>\n", (None, None, [("now", "{}")], False)),
        (None, "gpt_oss", f"{FINAL}a<|im_end|><|return|>", (None, "a", [], False)),
    ],
)  # fmt: skip
def test_special_tokens_are_in_no_part(
    format: str | None, reasoning: str | None, text: str, expected: object
) -> None:
    for pieces in ([text], *cuts(text, twice=True)):
        assert parse(pieces, format, reasoning, special_tokens=SPECIAL) == expected, pieces


def test_kept_special_tokens_are_text_the_same_in_all_modes() -> None:
    text = f"r<eos></think>{CALL} a</think><|im_end|>"
    for pieces in ([text], *cuts(text, twice=False)):
        kw: dict[str, Any] = {"special_tokens": SPECIAL, "keep_special_tokens": True}
        parsed = parse(pieces, "hermes", "qwen3", prompt=OPEN, **kw)
        assert parsed == ("r<eos>", "a</think><|im_end|>", [("now", "{}")], False)
        plain = parse(pieces, "hermes", None, tools=None, **kw)
        assert plain == (None, text, [], False)


@pytest.mark.parametrize(
    ("format", "reasoning", "kw", "needs"),
    [
        ("hermes", None, {}, False),
        ("mistral", None, {}, True),
        ("mistral", None, {"tools": None}, False),
        (None, "qwen3", {}, True),
        (None, "qwen3", {"thinking": False}, False),
        (None, "qwen3", {"prompt": CLOSED}, False),
        (None, "gpt_oss", {}, True),
        (None, "gpt_oss", {"keep_special_tokens": True}, True),
        (None, None, {}, False),
    ],
)
def test_special_tokens_are_asked_for_where_they_are_markers(
    format: str | None, reasoning: str | None, kw: dict[str, Any], needs: bool
) -> None:
    asked = {"tools": TOOLS, "prompt": "", "special_tokens": SPECIAL, **kw}
    assert make_parser(format, reasoning, **asked).needs_special_tokens is needs


def test_in_reasoning_follows_the_text() -> None:
    parser = make_parser(None, "qwen3", tools=None, prompt=OPEN)
    assert parser.in_reasoning
    seen = [bool(parser.push(piece)) and parser.in_reasoning for piece in ("a", "b</thi", "nk>c")]
    assert seen == [True, True, False]


def stopped(pieces: Iterable[str], stops: list[str]) -> list[str]:
    """What an engine with these stop strings lets through of `pieces`, which end by length."""
    checker = StopChecker(stops)
    return [*(checker.push(piece)[0] for piece in pieces), checker.flush()]


@pytest.mark.parametrize("stops", [["b,c"], ["</s>", "thinker"], ["k>a,bc"]])
def test_stop_strings_do_not_disturb_the_markers(stops: list[str]) -> None:
    text = "r</think>a,b"
    for pieces in ([text], *cuts(text, twice=True)):
        parsed = parse(stopped(pieces, stops), None, "qwen3", prompt=OPEN, tools=None)
        assert parsed == ("r", "a,b", [], False)


def test_names_are_checked() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser='json' is unknown; choose one of deep"):
        make_parser("json", None, tools=None, prompt="")
    with pytest.raises(ConfigError, match="reasoning_parser='r1' is unknown.*qwen3"):
        make_parser(None, "r1", tools=None, prompt="")
    with pytest.raises(ConfigError, match="cannot go with reasoning_parser='gpt_oss'"):
        make_parser("hermes", "gpt_oss", tools=None, prompt="")
    parser = make_parser(None, None, tools=None, prompt="")
    parser.finish()
    assert not parser.finish()
    with pytest.raises(RuntimeError, match="after finish"):
        parser.push("a")


@pytest.mark.parametrize(
    "tools",
    [[{}], [{"function": 5}], [{"function": {"name": "now", "parameters": {"properties": [1]}}}],
     [{"name": "now", "input_schema": {"properties": {"a": {"anyOf": 3, "type": [None, "integer"]}}}}]],
)  # fmt: skip
def test_odd_tools_do_no_harm(tools: list[dict[str, Any]]) -> None:
    text = "<tool_call><function=now><parameter=a>1</parameter></function></tool_call>"
    calls = parse([text], "qwen3_coder", None, tools=tools)[2]
    assert json.loads(calls[0][1])["a"] in (1, "1")
    assert set(REASONING_PARSERS) == {"qwen3", "deepseek_r1", "gpt_oss"}
