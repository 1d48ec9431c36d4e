"""Python literals, as models write them into tool calls, turned into plain values.

A hand-written reader: strings, numbers, True/False/None (and JSON's spellings), lists, tuples,
dicts. Must never evaluate anything, nor take more than linear time or unbounded stack. Called by
tools_pythonic.py and tools_qwen3_coder.py.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_DEPTH = 64
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[^\W\d]\w*")
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_TEXT = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a",
            "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": ""}  # fmt: skip


def parse_literal(text: str) -> Any:
    """The value that `text` spells. Raises ValueError if it is anything but a literal."""
    reader = _Reader(text)
    value = reader.value(0)
    reader.end()
    return value


def parse_keywords(text: str) -> dict[str, Any]:
    """The arguments of a call, `a=1, b="x"`. Raises ValueError if they are anything else."""
    reader = _Reader(text)
    found: dict[str, Any] = {}
    while not reader.at_end():
        name = reader.match(_WORD)
        reader.expect("=")
        if name in found:
            raise ValueError(f"argument {name} is given twice")
        found[name] = reader.value(0)
        if not reader.accept(","):
            break
    reader.end()
    return found


def dumps(value: Any) -> str:
    """JSON text; characters stay as they are unless UTF-8 cannot say them."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value, allow_nan=False)
    return text


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._pos = 0

    def _skip(self) -> str:
        """The next character that is no white space; "" at the end."""
        found = _SPACE.match(self._text, self._pos)
        self._pos = found.end() if found else self._pos
        return self._text[self._pos : self._pos + 1]

    def at_end(self) -> bool:
        return not self._skip()

    def end(self) -> None:
        if not self.at_end():
            raise ValueError(f"unexpected {self._skip()!r} at {self._pos}")

    def accept(self, literal: str) -> bool:
        self._skip()
        found = self._text.startswith(literal, self._pos)
        self._pos += len(literal) * found
        return found

    def expect(self, literal: str) -> None:
        if not self.accept(literal):
            raise ValueError(f"{literal!r} expected at {self._pos}")

    def match(self, pattern: re.Pattern[str]) -> str:
        self._skip()
        found = pattern.match(self._text, self._pos)
        if not found:
            raise ValueError(f"no literal at {self._pos}")
        self._pos = found.end()
        return found.group()

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} brackets deep")
        first = self._skip()
        if first in ('"', "'"):
            return self._string(first)
        if first in ("[", "("):
            return self._items("]" if first == "[" else ")", depth)
        if first == "{":
            return self._dict(depth)
        if first.isalpha():
            word = self.match(_WORD)
            if word not in _WORDS:
                raise ValueError(f"{word!r} is no literal")
            return _WORDS[word]
        return _number(self.match(_NUMBER))

    def _items(self, closer: str, depth: int) -> list[Any]:
        self._pos += 1
        found: list[Any] = []
        while not self.accept(closer):
            found.append(self.value(depth + 1))
            if not self.accept(","):
                self.expect(closer)
                break
        return found

    def _dict(self, depth: int) -> dict[str, Any]:
        self._pos += 1
        found: dict[str, Any] = {}
        while not self.accept("}"):
            key = self.value(depth + 1)
            self.expect(":")
            found[key if isinstance(key, str) else dumps(key)] = self.value(depth + 1)
            if not self.accept(","):
                self.expect("}")
                break
        return found

    def _string(self, quote: str) -> str:
        fence = quote * 3 if self._text.startswith(quote * 3, self._pos) else quote
        start = at = self._pos + len(fence)
        while True:
            found = _TEXT[quote].match(self._text, at)
            at = found.end() if found else at
            if at >= len(self._text):
                raise ValueError(f"the string at {self._pos} has no end")
            if self._text.startswith(fence, at):
                self._pos = at + len(fence)
                return _ESCAPE.sub(_unescape, self._text[start:at])
            at += 2 if self._text[at] == "\\" else 1


def _unescape(match: re.Match[str]) -> str:
    code = match.group(1)
    if code in _ESCAPES:
        return _ESCAPES[code]
    if len(code) > 1 and code[0] in "xuU":
        return chr(int(code[1:], 16))
    return chr(int(code, 8)) if code[0] in "01234567" else match.group()


def _number(text: str) -> int | float:
    if text.lstrip("+-").isdigit():
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value
