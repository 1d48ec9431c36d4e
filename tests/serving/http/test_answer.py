"""Segments do not depend on how the text was cut, and say what the parser's deltas say in sum."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.http.answer import Segment, Segmenter, joined
from serving.parsers import TOOL_PARSERS, Message, OutputParser, ToolCallDelta, make_parser

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
OBJECT = '{"name": "f", "arguments": {"x": 1}}'
PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", OBJECT, '{"name": "f"', "[f(x=1)]", "[f(",
    "<function=f>", "</function>", "<parameter=x>", "</parameter>", "[TOOL_CALLS]", f"[{OBJECT}]",
    "f{}", "[ARGS]", "<|python_tag|>", '{"name": "f", "parameters": {}}', "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "f<｜tool▁sep｜>{}", "function<｜tool▁sep｜>f\n```json\n{}\n```",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|channel|>", "analysis", "final", "commentary",
    " to=functions.f", "<|message|>", "<|end|>", "<|call|>", "<|start|>", "assistant", "\n", " ",
    "some text", "<", "é",
]  # fmt: skip
NAMES = [(name, "qwen3") for name in sorted(TOOL_PARSERS)] + [(None, "gpt_oss")]


def parser(tools: str | None = "hermes", reasoning: str = "qwen3") -> OutputParser:
    return make_parser(tools, reasoning, tools=TOOLS, prompt="")


def anonymous(segments: list[Segment]) -> list[object]:
    """The segments without the calls' ids, which are random."""
    return [
        (s.index, s.name, s.arguments) if isinstance(s, ToolCallDelta) else s
        for s in joined(segments)
    ]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.lists(st.sampled_from(PIECES), max_size=10),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_segments_do_not_depend_on_the_cuts(
    names: tuple[str | None, str], pieces: list[str], cuts: list[int]
) -> None:
    text = "".join(pieces)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    segmenter, parts = Segmenter(parser(*names)), []
    for start, end in zip(places, places[1:], strict=False):
        parts += segmenter.push(text[start:end], ended=False)
    parts += segmenter.push("", ended=True)
    assert anonymous(parts) == anonymous(Segmenter(parser(*names)).push(text, ended=True))

    whole, message = parser(*names), Message()
    message.add(whole.push(text))
    message.add(whole.finish())
    texts = [s for s in parts if isinstance(s, tuple)]
    for kind, expected in (("reasoning", message.reasoning), ("content", message.content)):
        assert "".join(text for k, text in texts if k == kind) == (expected or "")
    calls = [s for s in joined(parts) if isinstance(s, ToolCallDelta)]
    assert [c.arguments for c in calls] == [c.arguments for c in message.tool_calls]


def parts_of(text: str) -> list[Segment]:
    return Segmenter(parser()).push(text, ended=True)


def test_calls_and_text_stand_in_order() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"<think>r</think>one {call} two {call}"
    kinds = [s[1].strip() if isinstance(s, tuple) else s.index for s in parts_of(text)]
    assert kinds == ["r", "one", 0, "two", 1]
