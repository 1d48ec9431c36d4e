"""The harmony format of gpt-oss: messages in channels, calls as messages to `functions.NAME`.

analysis is reasoning, final and commentary are content; a message to a function is a tool call if
the request has tools (else it is content like its channel), its text the arguments. Messages of a
kind are joined by a line break. The channels alone decide: there is no way to switch thinking off.
Text outside of any message is content, also what a header without a message holds beyond a header's
words. Must never let a whole header into the text. Chosen by registry.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from serving.parsers.output import Grammar, Output
from serving.parsers.scanner import Sink, Wait, markers

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN = "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
TOKENS = frozenset((START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS))
FUNCTIONS = "functions."
_HEADER = re.compile(r"[^<]*")
_WORD = re.compile(r"[^\s<]*")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")


@dataclass(slots=True)
class Header:
    channel: str = "final"
    recipient: str = ""
    rest: str = ""  # words that belong in no header

    def read(self, marker: str, text: str) -> None:
        """Take in what follows <|start|>, <|channel|> or <|constrain|>."""
        if marker == START:
            self.channel, self.recipient, self.rest = "final", "", ""
        elif marker == CHANNEL:
            self.channel, *rest = text.split(maxsplit=1) or ["final"]
            self.rest = "".join(rest)
        if found := _RECIPIENT.search(text):
            self.recipient, self.rest = found.group(1), ""


class _Reader:
    def __init__(self, out: Output, tools: bool) -> None:
        self._out, self._tools = out, tools
        self._said: set[str] = set()
        self._wanted = markers(TOKENS)

    def read(self, prompt: str) -> Wait[None]:
        """The grammar; `prompt` may end within a message that the output goes on with."""
        out = self._out
        header, within = _header_of(prompt)
        if within:
            yield from self._body(header)
            header = Header()
        elif not header.recipient:
            yield from self._recipient(header)

        def stray(text: str) -> None:
            out.content(header.rest + text)
            header.rest = ""

        while (marker := (yield from out.until(self._wanted, stray))) is not None:
            out.take(len(marker))
            if marker in (START, *ENDS):
                stray("")
            if marker == MESSAGE:
                yield from self._body(header)
            if marker == MESSAGE or marker in ENDS:
                header = Header()
            else:
                header.read(marker, (yield from out.word(_HEADER)))
        stray("")

    def _recipient(self, header: Header) -> Wait[None]:
        """After the prompt's `<|start|>assistant` the model may go on with ` to=NAME`."""
        out = self._out
        out.mark()
        yield from out.skip_space()
        if (yield from out.expect("to=")):
            recipient = yield from out.word(_WORD)
            yield from out.skip_space()
            if (yield from out.peek()) == "<":
                header.recipient = recipient
                out.forget()
        out.settle()

    def _body(self, header: Header) -> Wait[None]:
        out = self._out
        name = header.recipient.removeprefix(FUNCTIONS) if self._tools else ""
        called = bool(name) and header.recipient.startswith(FUNCTIONS)
        out.in_reasoning = header.channel == "analysis" and not called
        sink: Sink = out.reason if out.in_reasoning else out.content
        empty = True
        if called:
            out.begin_call(name)
            sink = out.arguments

        def pass_on(text: str) -> None:
            nonlocal empty
            if empty and not called:
                self._separate(sink)
            empty = False
            sink(text)

        while (marker := (yield from out.until(self._wanted, pass_on))) is not None:
            if marker not in (MESSAGE, CONSTRAIN):
                break
            out.take(len(marker))  # out of place: it says nothing
        if called and empty and marker is not None:
            out.arguments("{}")
        if marker in ENDS:
            out.take(len(marker or ""))
            yield from out.skip_space()
        out.in_reasoning = False

    def _separate(self, sink: Sink) -> None:
        kind = "reasoning" if self._out.in_reasoning else "content"
        if kind in self._said:
            sink("\n")
        self._said.add(kind)


def harmony(prompt: str, tools: bool) -> Grammar:
    """The grammar of what follows `prompt`; `tools`: messages to functions are tool calls."""
    return lambda out: _Reader(out, tools).read(prompt)


def _header_of(prompt: str) -> tuple[Header, bool]:
    """The header that the prompt ends in, and whether its message has begun."""
    header = Header()
    _, started, last = prompt.rpartition(START)
    if not started or any(end in last for end in ENDS):
        return header, False
    head, within, _ = last.partition(MESSAGE)
    role, _, channel = head.partition(CHANNEL)
    header.read(START, role)
    if channel:
        header.read(CHANNEL, channel)
    return header, bool(within)
