"""Server-sent events from bytes that may be cut anywhere, also inside a character or a line end.

Holds at most one unfinished event, up to MAX_EVENT bytes. Called by client.py and bench/http_target.py.
"""

from __future__ import annotations

import re

MAX_EVENT = 1 << 24
_LINE_END = re.compile(rb"\r\n|\n|\r")


class SSEParser:
    """Feed bytes, get the data of each finished event; comments and other fields are left out."""

    def __init__(self) -> None:
        self._rest, self._data, self._size = b"", [], 0
        self._first, self._after_cr = True, False

    def feed(self, chunk: bytes) -> list[str]:
        """Data of the events that this chunk finishes. ValueError for bad UTF-8 or a huge event."""
        if not chunk:
            return []
        if self._after_cr:  # the rest of a \r\n that was cut in two
            chunk = chunk.removeprefix(b"\n")
        text = self._rest + chunk
        self._after_cr = text.endswith(b"\r")
        events: list[str] = []
        start = 0
        for match in _LINE_END.finditer(text):
            self._line(text[start : match.start()], events)
            start = match.end()
        self._rest = text[start:]
        if self._size + len(self._rest) > MAX_EVENT:
            raise ValueError(f"an event has more than {MAX_EVENT} bytes")
        return events

    @property
    def pending(self) -> bool:
        """Whether the stream, if it ends now, ends inside an event."""
        return bool(self._data or self._rest)

    def _line(self, line: bytes, events: list[str]) -> None:
        if self._first:
            line, self._first = line.removeprefix(b"\xef\xbb\xbf"), False
        if not line:
            if self._data:
                events.append("\n".join(self._data))
            self._data, self._size = [], 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._size += len(value)
            self._data.append(value.removeprefix(b" ").decode("utf-8"))
