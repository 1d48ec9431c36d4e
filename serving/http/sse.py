"""Server-sent events: the response that streams them, and work that ends when the client leaves.

The first event is awaited before the status is sent, so what is refused gets its own status. A
client that stops reading is dropped after Limits.idle_seconds. Called by every streaming route.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxinfer.errors import JaxinferError
from serving.http.errors import error_body, log

DONE = b"data: [DONE]\n\n"


def event(payload: Any, name: str | None = None) -> bytes:
    """One event; `name` as in Anthropic's and OpenAI's responses streams."""
    head = f"event: {name}\n" if name else ""
    data = json.dumps(payload, allow_nan=False, separators=(",", ":"))
    return f"{head}data: {data}\n\n".encode()


def _openai_error(error: BaseException) -> bytes:
    return event(error_body(error))


async def with_errors(
    events: AsyncGenerator[bytes],
    told: Callable[[Exception], bytes] = _openai_error,
    end: bytes = DONE,
) -> AsyncGenerator[bytes]:
    """The events, then `end`; an error after the first one becomes what `told` makes of it."""
    begun = False
    async with aclosing(events):
        try:
            async for item in events:
                yield item
                begun = True
        except Exception as error:
            if not begun:
                raise
            if not isinstance(error, JaxinferError):
                log.exception("a stream failed")
            yield told(error)
    if end:
        yield end


class EventStream(Response):
    """Sends what `events` yields. Closes it when it is done, or when the client has gone.

    Args:
        events: each item is one or more whole events. idle_seconds: longest wait for the client to read.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        idle_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.media_type = "text/event-stream"
        self.init_headers(
            {"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})}
        )
        del self.headers["content-length"]
        self._events = events
        self._idle = idle_seconds
        self._since: float | None = None  # the write that is under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        with suppress(ClientDisconnect):  # nobody is left to be told
            await while_connected(receive, self._send(send), self._unread())

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events):
            first = await anext(self._events)
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await self._write(send, first)
            async for item in self._events:
                await self._write(send, item)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, body: bytes) -> None:
        self._since = time.monotonic()
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._since = None

    async def _unread(self) -> None:
        """Returns when a write has waited too long: one look now and then, as timers cost."""
        while self._since is None or time.monotonic() - self._since < self._idle:
            await asyncio.sleep(self._idle / 2)
        log.warning("a client has not read its stream for %g s; it is dropped", self._idle)


async def while_connected[T](
    receive: Receive, work: Coroutine[Any, Any, T], *signs: Coroutine[Any, Any, None]
) -> T:
    """Run `work`, unless the client goes away: then it is cancelled and ClientDisconnect raised.

    The request's body must have been read. A sign that returns also means that the client is gone.
    """
    task = asyncio.ensure_future(work)
    watches = [asyncio.ensure_future(sign) for sign in (_gone(receive), *signs)]
    try:
        await asyncio.wait((task, *watches), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, *watches):
            each.cancel()
        await asyncio.gather(task, *watches, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
