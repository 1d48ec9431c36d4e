"""One output sequence from text to message deltas: the loop that all formats share.

Text goes through a filter of special tokens, then through a grammar (a generator that reads with
the Scanner and calls reason, content, begin_call and arguments). Streaming and not streaming are
the same code. Must never raise on what a model wrote, nor lose text: a call that turns out
malformed before its name is known goes out as content, from the marker on. Made by registry.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any

from serving.parsers.messages import MessageDelta, ToolCallDelta
from serving.parsers.scanner import Scanner, Wait, markers

WHITE = " \t\r\n"
type Grammar = Callable[[Output], Wait[None]]


class Edge:
    """Drops `lead` characters at the start of a text and holds `hold` characters at its end.

    What is held is dropped if a marker follows, or if nothing but it came after a marker.
    """

    def __init__(self, emit: Callable[[str], object], lead: str = "", hold: str = "") -> None:
        self._emit, self._lead, self._hold = emit, lead, hold
        self._held: list[str] = []
        self.said = False  # something but white space was emitted
        self._bare = False  # nothing was emitted since the last marker

    def feed(self, text: str) -> None:
        if self._lead:
            text = text.lstrip(self._lead)
        if not text:
            return
        self._lead = ""
        body = text.rstrip(self._hold) if self._hold else text
        if body:
            self._emit("".join((*self._held, body)))
            self._held.clear()
            self.said = self.said or not body.isspace()
            self._bare = False
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def marker(self, lead: str) -> None:
        """A marker is here: a text that starts after it loses its `lead` characters."""
        self._held.clear()
        self._lead = "" if self.said else lead
        self._bare = True

    def end(self) -> None:
        """The output is over."""
        if self._held and not self._bare:
            self._emit("".join(self._held))
        self._held.clear()


class Output(Scanner):
    """The scanner that grammars read with, and where they put what they found.

    Args:
        special: markers of the grammar that are special tokens: never part of a text.
        parallel: False: only the first tool call is reported, later ones are dropped.
        trim: hold white space at the end of content: it is dropped next to tool calls.
    """

    def __init__(self, special: frozenset[str], parallel: bool, trim: bool) -> None:
        super().__init__()
        self.special = special
        self.in_reasoning = False
        self.new_id: Callable[[], str] = call_id
        self.calls = 0
        self._parallel = parallel
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._pieces: dict[int, tuple[str | None, str | None, list[str]]] = {}
        self.reason_edge = Edge(self._reasoning.append, lead="\r\n", hold="\r\n")
        self.content_edge = Edge(self._content.append, hold=WHITE if trim else "")

    def reason(self, text: str) -> None:
        self.reason_edge.feed(text)

    def content(self, text: str) -> None:
        self.content_edge.feed(text)

    def settle(self) -> None:
        """End the tape; what is on it led to nothing and is content, less its special tokens."""
        if self.tape is not None:
            raw, self.tape = "".join(self.tape), None
            self.content(markers(self.special).remove(raw))

    def forget(self) -> None:
        """End the tape; what is on it was structure."""
        self.tape = None

    def begin_call(self, name: str) -> None:
        """From here on it is a tool call, whatever follows."""
        self.tape = None
        self.content_edge.marker(WHITE)
        self.calls += 1
        if self._reported():
            self._pieces[self.calls - 1] = (self.new_id(), name, [])

    def arguments(self, text: str) -> None:
        if self._reported():
            self._pieces.setdefault(self.calls - 1, (None, None, []))[2].append(text)

    def _reported(self) -> bool:
        return self._parallel or self.calls == 1

    def collect(self) -> MessageDelta:
        """All that came since the last collect."""
        calls = [
            ToolCallDelta(index, id, name, "".join(parts))
            for index, (id, name, parts) in self._pieces.items()
        ]
        delta = MessageDelta("".join(self._reasoning), "".join(self._content), calls)
        self._reasoning.clear()
        self._content.clear()
        self._pieces.clear()
        return delta


class OutputParser:
    """Turns the text of one output sequence into message deltas. One object for each sequence.

    Args:
        out: a fresh Output.
        grammar: reads `out` to its end.
        hidden: special tokens that are no markers of the grammar; they are taken out of the text.
        needs_special_tokens: the engine must be asked for skip_special_tokens=False, for markers of
            the grammar are special tokens.
    """

    def __init__(
        self,
        out: Output,
        grammar: Grammar,
        hidden: Iterable[str] = (),
        needs_special_tokens: bool = False,
    ) -> None:
        self.needs_special_tokens = needs_special_tokens
        self._out = out
        self._filter = Scanner()
        self._hidden = markers(frozenset(hidden))
        self._run = grammar(out)
        next(self._run, None)  # up to where it needs text

    @property
    def in_reasoning(self) -> bool:
        """Whether text that comes next is reasoning, as far as is known; counts reasoning tokens."""
        return self._out.in_reasoning

    def push(self, text: str) -> MessageDelta:
        """What the next piece of text makes certain. Raises RuntimeError after finish()."""
        if self._out.final:
            raise RuntimeError("push() after finish(): make a parser for each output sequence")
        self._filter.feed(text)
        self._advance()
        return self._out.collect()

    def finish(self) -> MessageDelta:
        """All that is still held; the output has ended. A second call gives an empty delta."""
        if self._out.final:
            return MessageDelta()
        self._filter.final = True
        self._advance()
        self._out.final = True
        next(self._run, None)
        self._out.settle()
        self._out.reason_edge.end()
        self._out.content_edge.end()
        delta = self._out.collect()
        answered = self._out.content_edge.said or self._out.calls
        delta.truncated_reasoning = self._out.reason_edge.said and not answered
        return delta

    def _advance(self) -> None:
        source = self._filter
        parts: list[str] = []
        while True:
            end, marker = self._hidden.find(source.text, source.pos, source.final)
            parts.append(source.take(end - source.pos))
            if marker is None:
                break
            source.take(len(marker))
        self._out.feed("".join(parts))
        next(self._run, None)


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolFormat:
    """How a model family writes tool calls. Subclasses say where a call begins and read it.

    `call` reads one call (or one list of calls) after its opener. Up to begin_call() what it reads
    is on the tape and becomes content if it returns without; afterwards the call stands: text that
    spoils its arguments stays in its arguments.
    """

    openers: tuple[str, ...] = ()  # a call may follow
    closers: tuple[str, ...] = ()  # dropped after a call, text anywhere else
    inner: tuple[str, ...] = ()  # further markers inside of a call
    bare: str = ""  # a call may also stand, without an opener, where content starts with this

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self.parameters = _parameters(tools)

    @property
    def tokens(self) -> frozenset[str]:
        return frozenset((*self.openers, *self.closers, *self.inner))

    def new_id(self) -> str:
        return call_id()

    def call(self, out: Output, opener: str) -> Wait[None]:
        raise NotImplementedError

    def read(self, out: Output) -> Wait[None]:
        """The grammar of content with tool calls, to the end of the output."""
        out.new_id = self.new_id
        wanted = markers(frozenset((*self.openers, *self.closers, *out.special)))
        if self.bare:
            yield from self._at_start(out)
        due = set(self.closers) if out.calls else set()
        while (marker := (yield from out.until(wanted, out.content))) is not None:
            out.take(len(marker))
            if marker in self.openers:
                before = out.calls
                out.mark(marker)
                yield from self.call(out, marker)
                out.settle()
                if out.calls > before:
                    due = set(self.closers)
            elif marker in due:
                due.discard(marker)
                out.content_edge.marker(WHITE)
            elif marker not in out.special:
                out.content(marker)

    def _at_start(self, out: Output) -> Wait[None]:
        out.mark()
        yield from out.skip_space()
        if (yield from out.peek()) == self.bare:
            yield from self.call(out, "")
        out.settle()


def plain(out: Output) -> Wait[None]:
    """The grammar of content without tool calls."""
    wanted = markers(out.special)
    while (marker := (yield from out.until(wanted, out.content))) is not None:
        out.take(len(marker))


def _parameters(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tool name -> parameter name -> its JSON schema. Tools that say nothing give {}."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = _dict(tool.get("function")) or tool  # chat completions nests it, responses not
        schema = _dict(function.get("parameters")) or _dict(function.get("input_schema"))
        found[str(function.get("name"))] = _dict(schema.get("properties"))
    return found


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
