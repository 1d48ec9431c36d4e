"""Tool calls whose arguments are JSON text: hermes, llama3_json, mistral, deepseek.

The arguments go out as the model writes them, as soon as the name is known; they are delimited by
strings and brackets, never parsed, so nothing here depends on their depth. Must never decode more
than names and doubly encoded arguments. Chosen by registry.py.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection
from typing import override

from serving.parsers.output import Output, ToolFormat
from serving.parsers.scanner import NAME, Markers, Sink, Wait, markers

BRACKETS = ("{", "}", "[", "]", '"')
ARGUMENTS = ("arguments", "parameters")
KNOWN_KEYS = frozenset(("name", "type", "id", *ARGUMENTS))
_PLAIN = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[\w.+\-]*")
_LINE = re.compile(r"[^\n<]*")


def json_value(out: Output, structure: Markers, sink: Sink) -> Wait[bool]:
    """Pass one JSON value on to `sink`. False: it is cut off, or no value.

    `structure`: BRACKETS and the markers that end a container even if brackets are open.
    """
    first = yield from out.peek()
    if first == '"':
        return (yield from _string(out, sink))
    if first and first in "{[":
        return (yield from _container(out, structure, sink))
    scalar = yield from out.word(_SCALAR)
    sink(scalar)
    return bool(scalar)


def _string(out: Output, sink: Sink) -> Wait[bool]:
    sink(out.take(1))
    while True:
        yield from out.span(_PLAIN, sink)
        char = yield from out.peek()
        if char != "\\":
            break
        while out.pos + 2 > len(out.text) and not out.final:
            yield
        sink(out.take(2))
    if char:
        sink(out.take(1))
    return bool(char)


def _container(out: Output, structure: Markers, sink: Sink) -> Wait[bool]:
    depth = 0
    while True:
        mark = yield from out.until(structure, sink)
        if mark is None or mark not in BRACKETS:
            return False
        if mark == '"':
            if not (yield from _string(out, sink)):
                return False
            continue
        sink(out.take(1))
        depth += 1 if mark in "{[" else -1
        if depth <= 0:
            return True


def _quoted(out: Output) -> Wait[str | None]:
    """A JSON string, decoded; None if the next thing is no good string."""
    parts: list[str] = []
    if (yield from out.peek()) != '"' or not (yield from _string(out, parts.append)):
        return None
    return _decode("".join(parts))


def _decode(text: str) -> str | None:
    try:
        value = json.loads(text, strict=False)
        value.encode()  # half of a surrogate pair cannot be sent on
    except ValueError:
        return None
    return value


class CallObject:
    """Reads `{"name": ..., "arguments": {...}}`, keys in any order.

    Args:
        ends: markers that end the object even if brackets are open.
        names: the only names that make a call; None: any.
        strict: without arguments, or with keys that no call has, it is not a call.
    """

    def __init__(
        self, ends: Collection[str], names: Collection[str] | None = None, strict: bool = False
    ) -> None:
        self._structure = markers(frozenset((*BRACKETS, *ends)))
        self._names, self._strict = names, strict

    def read(self, out: Output) -> Wait[bool]:
        """True if a call was read to its closing brace."""
        before = out.calls
        name: str | None = None
        held: list[str] | None = None
        odd = False
        more = yield from out.expect("{")
        while more:
            key = yield from self._key(out)
            odd = odd or key not in KNOWN_KEYS
            if key is None or (self._strict and odd):
                return False
            value: list[str] = []
            sink = value.append
            first = yield from out.peek()
            streamed = key in ARGUMENTS and bool(name) and held is None and first == "{"
            if streamed:
                out.begin_call(name or "")
                sink = out.arguments
            if not (yield from json_value(out, self._structure, sink)):
                return False
            if streamed:
                out.mark()  # what spoils the rest of the object is content
            if key == "name" and name is None:
                name = _decode("".join(value)) if value and value[0] == '"' else None
                if not name or (self._names is not None and name not in self._names):
                    return False
            elif key in ARGUMENTS and held is None:
                held = value
            yield from out.skip_space()
            more = yield from out.expect(",")
        if not (yield from out.expect("}")):
            return False
        if out.calls > before:
            out.forget()
            return True
        if held is None and (odd or self._strict):
            return False  # the arguments may be under a wrong key: no call without them
        return self._late(out, name, held)

    def _key(self, out: Output) -> Wait[str | None]:
        yield from out.skip_space()
        key = yield from _quoted(out)
        yield from out.skip_space()
        if key is None or not (yield from out.expect(":")):
            return None
        yield from out.skip_space()
        return key

    def _late(self, out: Output, name: str | None, held: list[str] | None) -> bool:
        """The call of an object whose arguments came before its name, in a string, or not at all."""
        if not name:
            return False
        text = "".join(held or ())
        if text.startswith('"'):
            text = (_decode(text) or "?").strip()
        if text == "null":
            text = ""
        if text and not (text.startswith("{") and text.endswith("}")):
            return False
        out.begin_call(name)
        out.arguments(text or "{}")
        return True


class Hermes(ToolFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3, SmolLM."""

    openers = ("<tool_call>",)
    closers = ("</tool_call>",)

    @override
    def call(self, out: Output, opener: str) -> Wait[None]:
        yield from out.skip_space()
        yield from CallObject(self.tokens).read(out)


class Llama3Json(ToolFormat):
    """`{"name": ..., "parameters": {...}}` alone or after `<|python_tag|>`, several joined by `;`.

    As a call has no marker, it must name one of the request's tools; other JSON is content.
    """

    openers = ("<|python_tag|>",)
    bare = "{"

    @override
    def call(self, out: Output, opener: str) -> Wait[None]:
        reader = CallObject(self.tokens, self.parameters, strict=True)
        yield from out.skip_space()
        while (yield from reader.read(out)):
            out.mark()
            yield from out.skip_space()
            joined = yield from out.expect(";")
            yield from out.skip_space()
            following = yield from out.peek()
            if joined and not following:
                out.forget()
            if following != "{":
                return


class Mistral(ToolFormat):
    """`[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]`, or since v11 `[TOOL_CALLS]name{...}`,
    `[TOOL_CALLS]name[ARGS]{...}` and `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`, one for each call.
    """

    openers = ("[TOOL_CALLS]",)
    inner = ("[ARGS]", "[CALL_ID]")

    @override
    def new_id(self) -> str:
        """Mistral's templates accept no other ids than nine letters and digits."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    @override
    def call(self, out: Output, opener: str) -> Wait[None]:
        yield from out.skip_space()
        if (yield from out.expect("[")):
            yield from self._list(out)
            return
        name = yield from out.word(NAME)
        if (yield from out.expect("[CALL_ID]")):
            yield from out.word(NAME)  # nothing says that it is used once: calls get ids of ours
        yield from out.expect("[ARGS]")
        yield from out.skip_space()
        if name and (yield from out.peek()) == "{":
            out.begin_call(name)
            structure = markers(frozenset((*BRACKETS, *self.tokens)))
            yield from json_value(out, structure, out.arguments)

    def _list(self, out: Output) -> Wait[None]:
        reader = CallObject(self.tokens)
        yield from out.skip_space()
        while (yield from reader.read(out)):
            out.mark()
            yield from out.skip_space()
            if (yield from out.expect("]")) or not (yield from out.peek()):
                out.forget()
                return
            yield from out.expect(",")
            yield from out.skip_space()


class DeepSeek(ToolFormat):
    """DeepSeek V3 and R1: `function<sep>name`, a fenced block of JSON; V3.1: `name<sep>{...}`."""

    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    list_begin, list_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    separator = "<｜tool▁sep｜>"
    openers = (list_begin, begin)
    closers = (end, list_end)
    inner = (separator,)

    @override
    def call(self, out: Output, opener: str) -> Wait[None]:
        yield from out.skip_space()
        if opener == self.list_begin and not (yield from out.expect(self.begin)):
            return
        name = (yield from out.word(NAME)).strip()
        if not (yield from out.expect(self.separator)):
            return
        fenced = name == "function" and (yield from out.peek()) != "{"
        if fenced:
            name = (yield from out.word(_LINE)).strip()
            yield from out.skip_space()
            yield from out.expect("```json")
        yield from out.skip_space()
        if name and (yield from out.peek()) == "{":
            out.begin_call(name)
            structure = markers(frozenset((*BRACKETS, *self.tokens)))
            yield from json_value(out, structure, out.arguments)
            yield from out.skip_space()
            if fenced:
                yield from out.expect("```")
