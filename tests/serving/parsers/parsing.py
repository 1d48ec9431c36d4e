"""What the parser tests share: a run of text pieces through a parser, and tools to call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from serving.parsers import Message, make_parser


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    tool(
        "get_weather",
        city={"type": "string"},
        days={"type": "integer"},
        units={"anyOf": [{"type": "string"}, {"type": "null"}]},
        exact={"type": "boolean"},
        factor={"type": "number"},
        where={"type": "object"},
        hours={"type": ["array", "null"]},
    ),
    tool("now"),
    tool("write", path={"type": "string"}, text={"type": "string"}),
]

type Calls = list[tuple[str, str]]
type Parsed = tuple[str | None, str | None, Calls, bool]


def parse(pieces: Iterable[str], format: str | None, reasoning: str | None, **kw: Any) -> Parsed:
    """(reasoning, content, [(name, arguments)], truncated_reasoning); checks ids and names."""
    kw = {"tools": TOOLS, "prompt": "", **kw}
    parser = make_parser(format, reasoning, **kw)
    message = Message()
    begun = 0
    for delta in (*map(parser.push, pieces), parser.finish()):
        for call in delta.tool_calls:
            first = call.index == begun
            begun += first
            assert 0 <= call.index < begun, "a call begins out of order"
            assert (call.id is not None) == (call.name is not None) == first
        message.add(delta)
    assert len({call.id for call in message.tool_calls}) == begun
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return message.reasoning, message.content, calls, message.truncated_reasoning


def cuts(text: str, twice: bool) -> Iterator[list[str]]:
    """Per character, and the text cut at each place or (twice) at each pair of places."""
    yield list(text)
    for i in range(len(text) + 1):
        yield [text[:i], text[i:]]
        for j in range(i, len(text)) if twice else ():
            yield [text[:i], text[i:j], text[j:]]
