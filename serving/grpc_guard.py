"""What stands before every RPC: reads the message, checks the key, turns exceptions into status codes.

Nothing leaves the server as UNKNOWN, and no text that was not written for clients. Called by grpc_server.py.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from jaxinfer.errors import InvalidRequest
from serving.calls import TRACE_HEADERS
from serving.errors import Unauthenticated, Unsupported, message, wire
from serving.http.auth import Keys
from serving.service import Service

log = logging.getLogger("jaxinfer.grpc")

HEALTH = "/grpc.health.v1.Health/"
MAX_DETAILS = 1000  # characters; clients refuse trailers beyond some KiB

Context = grpc.aio.ServicerContext


def status(error: BaseException) -> grpc.StatusCode:
    """The code that clients get for an exception."""
    return grpc.StatusCode[wire(error).grpc]


def trace_headers(context: Context) -> dict[str, str]:
    """The W3C trace headers of an RPC."""
    metadata = dict(context.invocation_metadata() or ())
    return {name: str(metadata[name]) for name in TRACE_HEADERS if name in metadata}


def log_internal(error: Exception) -> None:
    """Write down an exception that clients learn nothing of."""
    if status(error) is grpc.StatusCode.INTERNAL:
        log.error("an RPC failed", exc_info=error)


async def refuse(context: Context, error: Exception) -> None:
    """End an RPC with what the client may know of `error`; its `trailers` go along. Always raises."""
    if isinstance(error, NotImplementedError):  # the stubs' own answer where nothing overrides them
        error = Unsupported("this server does not have this RPC")
    log_internal(error)
    trailers = getattr(error, "trailers", ())
    await context.abort(status(error), message(error)[:MAX_DETAILS], trailers)


class Guard(grpc.aio.ServerInterceptor):
    """The interceptor.

    Args:
        admin: full method names that need an admin key, if there are any.
    """

    def __init__(self, service: Service, admin: Collection[str]) -> None:
        self._service = service
        self._admin_methods = frozenset(admin)
        self._admin = Keys(service.config.admin_api_keys)
        self._any = Keys((*service.config.api_keys, *service.config.admin_api_keys))
        self._open = not service.config.api_keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler  # an unknown method: grpc answers UNIMPLEMENTED
        method = handler_call_details.method
        metadata = handler_call_details.invocation_metadata or ()
        refusal = None
        if not self._allowed(method, metadata):
            refusal = Unauthenticated(
                "no valid key; send the metadata `authorization: Bearer KEY` with one of the server's"
            )
        return _Guarded(self._service, handler, refusal).handler()

    def _allowed(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        if method.startswith(HEALTH):
            return True
        given = [str(value) for key, value in metadata if key == "authorization"]
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        known = scheme.lower() == "bearer"
        if self._admin and method in self._admin_methods:
            return known and key.strip() in self._admin
        return self._open or (known and key.strip() in self._any)


async def _write(context: Context, reply: Any) -> bool:
    """Send a message; False if the client has left, which may be known before the RPC is cancelled."""
    try:
        await context.write(reply)
    except grpc.aio.BaseError as error:
        log.debug("a client left: %s", error)
        return False
    return True


class _Guarded:
    """One RPC behind the guard: takes raw messages, so that bad ones are refused here.

    Args:
        refusal: what every call is answered; None: calls are let through.
    """

    def __init__(
        self, service: Service, handler: grpc.RpcMethodHandler, refusal: Unauthenticated | None
    ) -> None:
        self._service = service
        self._inner: Any = handler  # the stubs of grpc leave its attributes out
        self._refusal = refusal

    def handler(self) -> grpc.RpcMethodHandler:
        inner = self._inner
        if not inner.response_streaming:
            return grpc.unary_unary_rpc_method_handler(self._unary, None, inner.response_serializer)
        kind = (
            grpc.stream_stream_rpc_method_handler
            if inner.request_streaming
            else grpc.unary_stream_rpc_method_handler
        )
        return kind(self._stream, None, inner.response_serializer)

    async def _unary(self, raw: bytes, context: Context) -> Any:
        try:
            return await self._inner.unary_unary(self._read(raw), context)
        except Exception as error:
            await _refuse_unless_ended(context, error)

    async def _stream(self, raw: Any, context: Context) -> None:
        inner = self._inner
        try:
            if inner.request_streaming:
                self._check()
                replies = inner.stream_stream(self._read_all(raw), context)
            else:
                replies = inner.unary_stream(self._read(raw), context)
            async with aclosing(replies):
                async for reply in replies:
                    if not await _write(context, reply):
                        return
        except Exception as error:
            await _refuse_unless_ended(context, error)

    def _check(self) -> None:
        if self._refusal is not None:
            self._service.reject(self._refusal)
            raise self._refusal

    def _read(self, raw: bytes) -> Any:
        """The message. Refusals made here are counted here, those of the handlers by themselves."""
        self._check()
        try:
            return self._inner.request_deserializer(raw)
        except DecodeError:
            error = InvalidRequest("the message is no valid protobuf message of this RPC")
            self._service.reject(error)
            raise error from None

    async def _read_all(self, raws: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for raw in raws:
            yield self._read(raw)


async def _refuse_unless_ended(context: Context, error: Exception) -> None:
    """Answer an exception, if the handler did not answer by itself (context.abort)."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    await refuse(context, error)
