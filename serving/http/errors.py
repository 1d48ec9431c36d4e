"""Error bodies, OpenAI's and Anthropic's, for everything that can go wrong on an HTTP route.

Statuses and texts come from serving.errors, the one table of all faces. A text of ours never shows
more than 100 characters of what a client sent. Called by the app's exception handlers and the streams.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jaxinfer.errors import JaxinferError
from jaxinfer.types import SamplingParams
from serving.errors import RETRY_AFTER, BadField, Unsupported, message, wire
from serving.service import Service

log = logging.getLogger(__name__)

CLIENT_GONE = 499  # nobody reads it; access logs show it
_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams)) | {
    "cache_salt", "chat_template_kwargs", "messages", "model", "priority", "prompt",
    "prompt_token_ids", "request_id", "tools",
}  # fmt: skip
ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
    405: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error",
}  # fmt: skip
_PATH = re.compile(r"([a-z_]+)(?:\[\d+\]|\.[a-z_]+)*")


class UnsupportedField(Unsupported, BadField):
    """A field of the API that this server cannot honour, with a value that asks for it."""


class JsonResponse(Response):
    """Strict JSON: ASCII, no NaN or Infinity."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def error_body(error: BaseException) -> dict[str, Any]:
    """{"error": {"message", "type", "param", "code"}}."""
    kind = wire(error)
    return {
        "error": {
            "message": message(error),
            "type": kind.type,
            "param": _param(error),
            "code": kind.code,
        }
    }


def anthropic_error_body(error: BaseException) -> dict[str, Any]:
    """The same as /v1/messages says it: {"type": "error", "error": {"type", "message", ...}}."""
    return _anthropic(error_body(error), wire(error).status)


def _anthropic(body: dict[str, Any], status: int) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(status, "api_error")
    return {"type": "error", "error": {**body["error"], "type": kind}}


def _speaks_anthropic(request: Request) -> bool:
    return request.scope["path"].startswith("/v1/messages")


def error_response(
    error: BaseException,
    headers: Mapping[str, str] | None = None,
    body: dict[str, Any] | None = None,
) -> Response:
    """The response for an error, with the headers that belong to its status; body: OpenAI's."""
    status = wire(error).status
    more = dict(headers or {})
    if status in (429, 503):
        more["retry-after"] = str(RETRY_AFTER)
    if status == 401:
        more["www-authenticate"] = "Bearer"
    if status >= 500 and not isinstance(error, JaxinferError):
        log.error("a request failed", exc_info=error)
    return JsonResponse(error_body(error) if body is None else body, status, more)


@contextmanager
def counted(service: Service) -> Iterator[None]:
    """Tell the service of a refusal made by the face itself, before any call was started."""
    try:
        yield
    except JaxinferError as error:
        service.reject(error)
        raise


def _param(error: BaseException) -> str | None:
    """The field that the error is about; texts of the engine begin with it."""
    if isinstance(error, BadField):
        return error.field
    found = _PATH.match(str(error)) if isinstance(error, JaxinferError) else None
    return found[0] if found and found[1] in _FIELDS else None


# --- handlers of the app ----------------------------------------------------------------------------


async def on_error(request: Request, error: Exception) -> Response:
    """Any exception: ours by the table, others with a fixed text and a traceback in the log."""
    body = anthropic_error_body(error) if _speaks_anthropic(request) else None
    return error_response(error, body=body)


async def on_http_error(request: Request, error: Exception) -> Response:
    """What the router says: 404 and 405."""
    assert isinstance(error, HTTPException)
    known = {404: "not_found", 405: "method_not_allowed"}
    text = f"{request.method} {request.url.path!r:.100}: {error.detail}"
    told = {
        "message": text,
        "type": "invalid_request_error",
        "param": None,
        "code": known.get(error.status_code),
    }
    body: dict[str, Any] = {"error": told}
    if _speaks_anthropic(request):
        body = _anthropic(body, error.status_code)
    return JsonResponse(body, error.status_code, error.headers)


async def on_disconnect(request: Request, error: Exception) -> Response:
    """The client left before the answer."""
    del request, error
    return Response(status_code=CLIENT_GONE)


HANDLERS: dict[Any, Any] = {
    HTTPException: on_http_error,
    ClientDisconnect: on_disconnect,
    Exception: on_error,
}
