"""uvicorn's HTTP parser with bounds on the head of a request: its size, and the time it may take.

httptools itself buffers a header of any length, and takes a request that offers an upgrade (Java's
client offers h2c with each) to have no body. Chosen by http_server.UVICORN_OPTIONS.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 << 10  # bytes, plus at most what one read brings
HEAD_SECONDS = 30.0
_LENGTH = (b"content-length", b"transfer-encoding")
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: text/plain\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


class BoundedHttp(HttpToolsProtocol):
    """Closes a connection whose request head is too long, or does not come to its end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head = 0  # bytes since the last complete head
        self._in_head = True
        self._resuming = False  # a new parser reads the head that it needs to know
        self._data = b""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head += len(data)
        self._data = data
        super().data_received(data)
        if not self._in_head:
            self._head = 0
        elif self._head > MAX_HEAD and not self.transport.is_closing():
            self.transport.write(_REFUSAL)
            self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore the offer, as a server may: read the body behind this head with a new parser.

        data_received calls this while it handles HttpParserUpgrade.
        """
        upgrade = sys.exception()
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        rest = self._data[upgrade.args[0] :]
        length = b"".join(b"%s: %s\r\n" % h for h in self.headers if h[0] in _LENGTH)
        self.headers = []  # not those of the request that has begun
        self.parser = httptools.HttpRequestParser(self)
        self._resuming = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + length + b"\r\n")
        self._resuming = False
        self._data = rest
        super().data_received(rest)

    def on_message_begin(self) -> None:
        if self._resuming:
            return
        self._in_head = True
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._too_late)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._resuming:
            return
        self._in_head = False
        self._stop_clock()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # else the body is still to come
            super().on_message_complete()

    def _too_late(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
