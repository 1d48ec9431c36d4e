"""Tool calls written as a Python list of calls: `[f(a=1), g(b="x")]` (Llama 3.2, Llama 4).

A call goes out when its closing bracket has come and its arguments are literals. Must never
evaluate anything. Chosen by registry.py.
"""

from __future__ import annotations

import re
from typing import override

from serving.parsers.literals import dumps, parse_keywords
from serving.parsers.output import Output, ToolFormat
from serving.parsers.scanner import NAME, Sink, Wait, markers

_STRUCTURE = frozenset("()[]{}\"'")
_TEXT = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}


class Pythonic(ToolFormat):
    """The list starts the content, or follows `<|python_start|>`.

    As a bare list has no marker, each call must name one of the request's tools; else it is content.
    """

    openers = ("<|python_start|>",)
    closers = ("<|python_end|>",)
    bare = "["

    @override
    def call(self, out: Output, opener: str) -> Wait[None]:
        yield from out.skip_space()
        more = yield from out.expect("[")
        while more:
            yield from out.skip_space()
            name = yield from self._name(out)
            if name is None:
                return
            parts: list[str] = []
            if not (yield from _arguments(out, parts.append)):
                return
            try:
                arguments = dumps(parse_keywords("".join(parts)))
            except ValueError:
                return  # the tape goes out as content
            out.begin_call(name)
            out.arguments(arguments)
            out.mark()
            yield from out.skip_space()
            more = yield from out.expect(",")
        if out.calls and (yield from out.expect("]")):
            out.forget()

    def _name(self, out: Output) -> Wait[str | None]:
        """Take a tool's name and its bracket. None, as soon as no tool can come of it: neither."""
        while True:
            end = _end_of_name(out)
            name = out.text[out.pos : end]
            if end < len(out.text):
                break
            if out.final or not any(tool.startswith(name) for tool in self.parameters):
                return None
            yield
        if name not in self.parameters or out.text[end] != "(":
            return None
        out.take(len(name) + 1)
        return name


def _end_of_name(out: Output) -> int:
    match = NAME.match(out.text, out.pos)
    return match.end() if match else out.pos


def _arguments(out: Output, sink: Sink) -> Wait[bool]:
    """Read up to the bracket that closes the call, which is taken. False: there is none."""
    depth = 1
    structure = markers(_STRUCTURE)
    while (mark := (yield from out.until(structure, sink))) is not None:
        if mark in "\"'":
            yield from _string(out, sink)
            continue
        out.take(1)
        depth += 1 if mark in "([{" else -1
        if not depth:
            return mark == ")"
        sink(mark)
    return False


def _string(out: Output, sink: Sink) -> Wait[None]:
    quote = out.take(1)
    fence = quote * 3 if (yield from out.expect(quote * 2)) else quote
    sink(fence)
    while True:
        yield from out.span(_TEXT[quote], sink)
        if not (yield from out.peek()):
            return
        if (yield from out.expect(fence)):
            sink(fence)
            return
        size = 2 if out.text[out.pos] == "\\" else 1
        while out.pos + size > len(out.text) and not out.final:
            yield
        sink(out.take(size))
