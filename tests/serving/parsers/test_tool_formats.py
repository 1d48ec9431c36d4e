"""Tool calls of each format against messages written down by hand, for every cutting (R-TRP-01)."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.parsers import TOOL_PARSERS, make_parser
from tests.serving.parsers.parsing import TOOLS, cuts, parse

NESTED = '{"city": "Zürich 東京 🗻", "where": {"at": [47.4, {"e": 8.5}], "n": null}}'
ESCAPED = '{"path": "a.txt", "text": "say \\"{hi}\\" ]\\n\\\\"}'
DS_CALLS, DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DS_CALL, DS_CALL_END, DS_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def deepseek_v3(name: str, arguments: str) -> str:
    return f"{DS_CALL}function{DS_SEP}{name}\n```json\n{arguments}\n```{DS_CALL_END}"


def deepseek_v31(name: str, arguments: str) -> str:
    return f"{DS_CALL}{name}{DS_SEP}{arguments}{DS_CALL_END}"


def coder(name: str, **values: str) -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


CITY = ("get_weather", '{"city": "Oslo", "days": 3}')
NOW = ("now", "{}")
DEEP = ("get_weather", NESTED)
WRITE = ("write", ESCAPED)

# (format, what the model wrote, content, calls)
CASES: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    ("hermes", hermes(*CITY), None, [CITY]),
    ("qwen3", f"\n\n{hermes(*CITY)}\n{hermes(*NOW)}\n", None, [CITY, NOW]),
    ("hermes", f"Let me look.\n\n{hermes(*DEEP)}", "Let me look.", [DEEP]),
    ("hermes", hermes(*WRITE), None, [WRITE]),
    ("hermes", f"a {hermes(*NOW)} b <b>", "a b <b>", [NOW]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}', None, [("now", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', None, [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', None, [NOW]),
    ("hermes", hermes("now", '"{\\"a\\": 1}"'), None, [("now", '{"a": 1}')]),
    ("hermes", hermes("write", '{"text": "</tool_call><tool_call>"}'), None,
     [("write", '{"text": "</tool_call><tool_call>"}')]),
    ("hermes", '<tool_call>{"name": "now", "id": 1.5, "arguments": {"a": [}', None,
     [("now", '{"a": [}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b', None, [("now", '{"a": "b')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1</tool_call> x', "x",
     [("now", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}, "note": "open</tool_call> words',
     ', "note": "open</tool_call> words', [NOW]),
    ("hermes", f"{hermes(*NOW)}\n<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>", [NOW]),
    ("llama3_json", llama(*CITY), None, [CITY]),
    ("llama3_json", f"\n{llama(*DEEP)}; {llama(*NOW)}", None, [DEEP, NOW]),
    ("llama3_json", f"<|python_tag|>{llama(*WRITE)};", None, [WRITE]),
    ("llama3_json", f"Sure.\n<|python_tag|>{llama(*NOW)} done", "Sure. done", [NOW]),
    ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', None, [NOW]),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}]', None, [NOW]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "now", "arguments": {{}}}}, {{"arguments": {NESTED}, '
     '"name": "get_weather"}]', None, [NOW, DEEP]),
    ("mistral", f"ok[TOOL_CALLS]{CITY[0]}{CITY[1]}[TOOL_CALLS]now{{}}", "ok", [CITY, NOW]),
    ("mistral", f"[TOOL_CALLS]write[ARGS]{ESCAPED}", None, [WRITE]),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]abcDEF123[ARGS]{}", None, [NOW]),
    ("mistral", '[TOOL_CALLS]write[ARGS]{"text": "[TOOL_CALLS]x"}', None,
     [("write", '{"text": "[TOOL_CALLS]x"}')]),
    ("deepseek", f"{DS_CALLS}{deepseek_v3(*CITY)}\n{deepseek_v3(*NOW)}{DS_END}", None, [CITY, NOW]),
    ("deepseek", f"Ok.\n{DS_CALLS}{deepseek_v31(*DEEP)}{deepseek_v31(*WRITE)}{DS_END}", "Ok.",
     [DEEP, WRITE]),
    ("mistral", '[TOOL_CALLS][{"name": "now"}, {"nome": 1}]', ', {"nome": 1}]', [NOW]),
    ("deepseek", f"{DS_CALLS}{deepseek_v31('function', '{}')}{DS_END}", None, [("function", "{}")]),
    ("pythonic", '[get_weather(city="Oslo", days=3)]', None, [CITY]),
    ("pythonic", " [now(), get_weather(city='Oslo', days=3,)]\n", None, [NOW, CITY]),
    ("pythonic", "[get_weather(city='Zürich 東京 🗻', where={'at': [47.4, {'e': 8.5}], 'n': None})]",
     None, [DEEP]),
    ("pythonic", '<|python_start|>[write(path="a.txt", text="say \\"{hi}\\" ]\\n\\\\")]<|python_end|>',
     None, [WRITE]),
    ("pythonic", '[write(path="""a"b""", text=\'\\u00fc\\x41)]\')]', None,
     [("write", '{"path": "a\\"b", "text": "üA)]"}')]),
    ("pythonic", "[now(), oops]", ", oops]", [NOW]),
    ("pythonic", "[now(a=True, b=(1, -2.5e3), c=[], d=false)] ok", "ok",
     [("now", '{"a": true, "b": [1, -2500.0], "c": [], "d": false}')]),
    ("qwen3_coder", coder("get_weather", city="Oslo", days="3"), None, [CITY]),
    ("qwen3_coder", f"Hm.\n\n{coder('now')}\n{coder('get_weather', city='Oslo', days='3')}\n", "Hm.",
     [NOW, CITY]),
    ("qwen3_coder", coder("write", path="a.txt", text='say "{hi}" ]\n\\'), None, [WRITE]),
    ("qwen3_coder", coder("write", text="\n<b>\n  </function> </tool_call>\n"), None,
     [("write", '{"text": "\\n<b>\\n  </function> </tool_call>\\n"}')]),
    ("qwen3_coder", "<function=now></function> ok", "ok", [NOW]),
    ("qwen3_coder", "<tool_call><function=write><parameter=path>\na\n<parameter=text>b\n</function>",
     None, [("write", '{"path": "a", "text": "b"}')]),
    ("qwen3_coder", "<tool_call><function=now><parameter=a\nb</tool_call>", "<parameter=a\nb",
     [("now", "{")]),
    ("qwen3_coder", "<tool_call><function=write><parameter=text>\nab", None,
     [("write", '{"text": "ab')]),
    ("qwen3_coder", "<tool_call><function=write>\n<parameter=path>a</parameter>\n", None,
     [("write", '{"path": "a"')]),
]  # fmt: skip

# Texts that look like calls and are none: content, unchanged.
MALFORMED = [
    ("hermes", "<tool_call>\nnot json\n</tool_call> rest"),
    ("hermes", '<tool_call>{"name": "now" "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"nome": "now", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "argument": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "no'),
    ("hermes", "a <tool_ca"),
    ("hermes", "<tool_call>"),
    ("hermes", "no call </tool_call> \n"),
    ("llama3_json", '{"answer": 42, "name": "now"}'),
    ("llama3_json", '{"name": "Bob", "parameters": {}}'),
    ("llama3_json", '{"name": "now"}'),
    ("llama3_json", 'Look: {"name": "now", "parameters": {}}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS]not a call"),
    ("mistral", '[TOOL_CALLS][{"nome": "now"}]'),
    ("deepseek", f"{DS_CALLS}x{DS_END}"),
    ("deepseek", f"{DS_CALLS}{DS_CALL}function{DS_SEP}now\nno fence{DS_CALL_END}"),
    ("pythonic", "[1] a source"),
    ("pythonic", "[unknown(a=1)]"),
    ("pythonic", "[now(a=__import__('os'))]"),
    ("pythonic", "[now(a=1+1)]"),
    ("pythonic", "[now(1)]"),
    ("pythonic", "[now(a=1"),
    ("pythonic", "[now(a='b)]"),
    ("pythonic", "[now(a=1]"),
    ("pythonic", "[now(a=1e999)]"),
    ("qwen3_coder", "<tool_call>\nnow()</tool_call>"),
    ("qwen3_coder", "<tool_call><function=>"),
]


@pytest.mark.parametrize(("format", "text", "content", "calls"), CASES)
def test_message_is_right_for_every_cutting(
    format: str, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    expected = (None, content, calls, False)
    assert parse([text], format, None) == expected
    for pieces in cuts(text, twice=len(text) < 80):
        assert parse(pieces, format, None) == expected, pieces


@pytest.mark.parametrize(("format", "text"), MALFORMED)
def test_malformed_calls_are_content(format: str, text: str) -> None:
    for pieces in ([text], *cuts(text, twice=True)):
        assert parse(pieces, format, None) == (None, text, [], False), pieces


def test_every_format_has_cases() -> None:
    assert {case[0] for case in CASES} == set(TOOL_PARSERS)
    assert {case[0] for case in MALFORMED} | {"qwen3"} == set(TOOL_PARSERS)


FRAGMENTS = sorted(
    {"{", "}", "[", "]", '"', "'", "\\", ":", ",", ";", " ", "\n", "now", "now(", ")", "a=1", "=",
     '{"name": "now"', ', "arguments": ', ', "parameters": ', "<think>", "</think>", "<eos>", "é",
     "<|channel|>analysis", "<|channel|>commentary to=functions.now", "<|message|>", "<|end|>",
     "<|start|>assistant", "<|constrain|>json", "<|call|>", "to=", "<parameter=a>", ">"}
    | {token for kind in TOOL_PARSERS.values() for token in kind([]).tokens}
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_text_gives_the_same_message_for_any_cutting(data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=25)))
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
    special = data.draw(st.sets(st.sampled_from(FRAGMENTS), max_size=4))
    keep = data.draw(st.booleans())
    prompt = data.draw(st.sampled_from(["", "<think>\n", "<|start|>assistant"]))
    for format in (*sorted(TOOL_PARSERS), None):
        reasoning = data.draw(st.sampled_from(["qwen3", None] if format else ["gpt_oss", None]))
        kw: dict[str, Any] = {"special_tokens": special, "keep_special_tokens": keep}
        whole = parse([text], format, reasoning, prompt=prompt, **kw)
        assert parse(pieces, format, reasoning, prompt=prompt, **kw) == whole
        assert parse(list(text), format, reasoning, prompt=prompt, **kw) == whole


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab\"'"), inner),
            max_leaves=8,
        ),
        max_size=4,
    )
)
def test_any_arguments_survive(arguments: dict[str, Any]) -> None:
    text = json.dumps(arguments, ensure_ascii=False)
    for format, wrote in (
        ("hermes", hermes("now", text)),
        ("llama3_json", llama("now", text)),
        ("mistral", f"[TOOL_CALLS]now{text}"),
        ("deepseek", deepseek_v3("now", text)),
    ):
        assert parse([wrote], format, None) == (None, None, [("now", text)], False)
    as_python = f"[now({', '.join(f'k{i}={v!r}' for i, v in enumerate(arguments.values()))})]"
    calls = parse([as_python], "pythonic", None)[2]
    assert list(json.loads(calls[0][1]).values()) == list(arguments.values())


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("days", "3", 3),
        ("days", "three", "three"),
        ("days", "null", None),
        ("factor", "2", 2),
        ("factor", "-1.5e3", -1500.0),
        ("factor", "NaN", "NaN"),
        ("exact", "True", True),
        ("exact", "yes", "yes"),
        ("city", "5", "5"),
        ("city", "null", "null"),
        ("units", "null", None),
        ("units", "true", "true"),
        ("where", '{"a": [1, "é"]}', {"a": [1, "é"]}),
        ("where", "{'a': True}", {"a": True}),
        ("where", "{a}", "{a}"),
        ("hours", "[1, 2]", [1, 2]),
        ("unknown", "7", "7"),
    ],
)
def test_qwen3_coder_takes_types_from_the_schema(key: str, value: str, expected: object) -> None:
    calls = parse([coder("get_weather", **{key: value})], "qwen3_coder", None)[2]
    assert json.loads(calls[0][1]) == {key: expected}


def test_arguments_stream_as_they_come() -> None:
    parser = make_parser("hermes", None, tools=TOOLS, prompt="")
    head = '<tool_call>{"name": "write", "arguments": '
    assert not parser.push(head)
    seen = [parser.push(char).tool_calls for char in '{"text": "abc']
    assert all(len(calls) == 1 and len(calls[0].arguments) == 1 for calls in seen)
    assert seen[0][0].name == "write" and seen[1][0].name is None


def test_content_streams_as_it_comes() -> None:
    parser = make_parser("hermes", None, tools=TOOLS, prompt="")
    assert [parser.push(piece).content for piece in ("Hi", " <", "b> <tool", "_x", " \n")] == [
        "Hi", "", " <b>", " <tool_x", "",
    ]  # fmt: skip
    assert parser.finish().content == " \n"


def test_ids_are_as_clients_expect_them() -> None:
    for format, pattern in (("hermes", r"call_[0-9a-f]{24}"), ("mistral", r"[a-zA-Z0-9]{9}")):
        parser = make_parser(format, None, tools=TOOLS, prompt="")
        wrote = hermes("now", "{}") if format == "hermes" else "[TOOL_CALLS]now{}"
        assert re.fullmatch(pattern, parser.push(wrote).tool_calls[0].id or "")


def test_only_the_first_call_without_parallel_calls() -> None:
    text = hermes(*CITY) + hermes(*NOW)
    for pieces in ([text], list(text)):
        parsed = parse(pieces, "hermes", None, parallel_tool_calls=False)
        assert parsed == (None, None, [CITY], False)
