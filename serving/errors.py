"""Errors of the servers, and what each error is on the wire. One table for HTTP and gRPC.

Messages of JaxinferErrors are written for clients and go out as they are; of anything else only a
fixed text does, because it may hold paths or addresses. Called by the faces.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxinfer.errors import (
    CapacityError,
    InvalidRequest,
    JaxinferError,
    Overloaded,
    Unavailable,
)

INTERNAL = "internal error; the request was not completed"
RETRY_AFTER = 1  # seconds, for 429 and 503


class NotFound(InvalidRequest):
    """An unknown model, or an unknown route."""


class Unauthenticated(JaxinferError):
    """No credentials, or wrong ones."""


class Forbidden(InvalidRequest):
    """A request that this server takes from nobody."""


class Unsupported(InvalidRequest):
    """A feature that this server, or this configuration of it, does not have."""


class Precondition(JaxinferError):
    """The model lacks what the call needs, such as a tokenizer."""


class TooLarge(InvalidRequest):
    """A body beyond the limit."""


class BadField(InvalidRequest):
    """InvalidRequest that knows its field (the `param` of OpenAI's error body)."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Wire(NamedTuple):
    """HTTP status, OpenAI error type and code, gRPC status name."""

    status: int
    type: str
    code: str | None
    grpc: str


_TABLE: tuple[tuple[type[BaseException], Wire], ...] = (  # the first that fits
    (NotFound, Wire(404, "invalid_request_error", "not_found", "NOT_FOUND")),
    (Unauthenticated, Wire(401, "authentication_error", "invalid_api_key", "UNAUTHENTICATED")),
    (Forbidden, Wire(403, "permission_error", "forbidden", "PERMISSION_DENIED")),
    (Unsupported, Wire(400, "invalid_request_error", "unsupported", "UNIMPLEMENTED")),
    (TooLarge, Wire(413, "invalid_request_error", "too_large", "INVALID_ARGUMENT")),
    (Precondition, Wire(400, "invalid_request_error", None, "FAILED_PRECONDITION")),
    (InvalidRequest, Wire(400, "invalid_request_error", None, "INVALID_ARGUMENT")),
    (CapacityError, Wire(400, "invalid_request_error", "too_long", "INVALID_ARGUMENT")),
    (Overloaded, Wire(429, "rate_limit_error", "overloaded", "RESOURCE_EXHAUSTED")),
    (Unavailable, Wire(503, "service_unavailable", "unavailable", "UNAVAILABLE")),
)
_INTERNAL = Wire(500, "server_error", "internal", "INTERNAL")


def wire(error: BaseException) -> Wire:
    """What `error` is for a client."""
    return next((w for kind, w in _TABLE if isinstance(error, kind)), _INTERNAL)


def message(error: BaseException) -> str:
    """The text that a client may see."""
    return INTERNAL if wire(error) is _INTERNAL else str(error)
