"""Reads text that arrives in pieces: every method waits (yields) while more text could change it.

Because no decision is taken before it is certain, the result never depends on where the text was
cut. Each character is looked at a bounded number of times; a reader never goes back. Must never
know a format. Used by output.py and the formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache

type Wait[T] = Generator[None, None, T]  # yields when it needs more text, returns a T
type Sink = Callable[[str], object]

SPACE = re.compile(r"[ \t\r\n]*")
NAME = re.compile(r"[\w.\-]*")
_NEVER = re.compile(r"(?!)")


class Markers:
    """Literal strings to look for: the one that starts first, of those the longest."""

    def __init__(self, texts: Iterable[str]) -> None:
        found = sorted({t for t in texts if t}, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, found))) if found else _NEVER
        self._prefixes = frozenset(t[:i] for t in found for i in range(1, len(t)))
        self._reach = max(map(len, found), default=1) - 1

    def find(self, text: str, start: int, final: bool) -> tuple[int, str | None]:
        """(where the certain text from `start` ends, the marker that is there if one is)."""
        match = self.pattern.search(text, start)
        hold = len(text) if final else self._held_from(text, start)
        if match and match.start() < hold:
            return match.start(), match.group()
        return hold, None

    def remove(self, text: str) -> str:
        return self.pattern.sub("", text)

    def _held_from(self, text: str, start: int) -> int:
        """Where the first marker may begin that the text's end leaves unfinished."""
        size = len(text)
        for at in range(max(start, size - self._reach), size):
            if text[at:] in self._prefixes:
                return at
        return size


@lru_cache(maxsize=256)
def markers(texts: frozenset[str]) -> Markers:
    """The shared Markers of `texts`: a tokenizer can have a thousand special tokens."""
    return Markers(texts)


class Scanner:
    """A cursor over the text so far. What was read since mark() is on the tape."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.final = False
        self.tape: list[str] | None = None

    def feed(self, text: str) -> None:
        self.text = self.text[self.pos :] + text
        self.pos = 0

    def mark(self, already: str = "") -> None:
        """Start a tape that begins with `already`."""
        self.tape = [already]

    def take(self, size: int) -> str:
        piece = self.text[self.pos : self.pos + size]
        self.pos += size
        if self.tape is not None:
            self.tape.append(piece)
        return piece

    def peek(self) -> Wait[str]:
        """The next character, not taken; "" at the end of the output."""
        while self.pos >= len(self.text) and not self.final:
            yield
        return self.text[self.pos : self.pos + 1]

    def expect(self, literal: str) -> Wait[bool]:
        """Take `literal` if it comes next, else nothing."""
        while True:
            have = self.text[self.pos : self.pos + len(literal)]
            if have == literal:
                self.take(len(literal))
                return True
            if self.final or not literal.startswith(have):
                return False
            yield

    def span(self, pattern: re.Pattern[str], sink: Sink) -> Wait[None]:
        """Take what `pattern` matches: a run of one class of characters, `[...]*`."""
        while True:
            match = pattern.match(self.text, self.pos)
            if match and match.end() > self.pos:
                sink(self.take(match.end() - self.pos))
            if self.pos < len(self.text) or self.final:
                return
            yield

    def word(self, pattern: re.Pattern[str]) -> Wait[str]:
        """The run that `pattern` matches, whole."""
        parts: list[str] = []
        yield from self.span(pattern, parts.append)
        return "".join(parts)

    def skip_space(self) -> Wait[None]:
        yield from self.span(SPACE, len)

    def until(self, wanted: Markers, sink: Sink) -> Wait[str | None]:
        """Give the text before the next marker to `sink`; the marker is not taken. None: the end."""
        while True:
            end, marker = wanted.find(self.text, self.pos, self.final)
            if end > self.pos:
                sink(self.take(end - self.pos))
            if marker is not None or self.final:
                return marker
            yield
