"""Reading a JSON body: bounded while it arrives, bounded in depth before it is parsed, then validated.

Large bodies are scanned, parsed and validated in a thread. Numbers that JSON does not have (NaN,
Infinity) are refused. Called by every POST route.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from serving.config import Limits
from serving.errors import BadField, TooLarge
from serving.service import Service

IN_THREAD = 1 << 20  # bytes past which parsing would delay other streams
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # an unclosed one, too: linear
_QUOTED = 100  # characters of a client's value in a message


async def read_model[M: BaseModel](request: Request, model: type[M]) -> M:
    """The request's JSON body as a `model`. Raises BadField or TooLarge."""
    return await _read(request, lambda value: validate(value, model))


async def read_body_json(request: Request) -> Any:
    """The request's JSON body, for routes that take one of several models."""
    return await _read(request, lambda value: value)


async def _read[T](request: Request, take: Callable[[Any], T]) -> T:
    service: Service = request.app.state.service
    limits = service.config.limits
    raw = await read_body(request, limits)
    if len(raw) > IN_THREAD:
        return await service.in_thread(lambda: take(parse_json(raw, limits.json_depth)))
    return take(parse_json(raw, limits.json_depth))


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body, if it is JSON by its type, and as long as it stays below the limit."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise BadField("content-type", f"content-type={kind!r:.100} must be application/json")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > limits.body_bytes:
        raise _too_large(limits)
    chunks, size = [], 0
    try:
        async with asyncio.timeout(limits.idle_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.body_bytes:
                    raise _too_large(limits)
                chunks.append(chunk)
    except TimeoutError:
        raise BadField("body", f"body did not arrive within {limits.idle_seconds:g} s") from None
    return b"".join(chunks)


def parse_json(raw: bytes, max_depth: int) -> Any:
    """The value of a JSON text. Raises BadField."""
    check_depth(raw, max_depth)
    try:
        return json.loads(raw.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise BadField("body", f"body is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        text = f"body is not valid JSON: {error.msg} at character {error.pos}"
        raise BadField("body", text) from None
    except ValueError as error:  # NaN, or an integer of thousands of digits
        raise BadField("body", f"body is not valid JSON: {str(error)[:_QUOTED]}") from None


def check_depth(raw: bytes, most: int) -> None:
    """Refuse JSON nested deeper than `most`, in time linear in its length."""
    if raw.count(b"[") + raw.count(b"{") <= most:
        return
    marks = np.frombuffer(_STRING.sub(b"", raw), np.uint8)
    marks = marks[np.isin(marks, list(b"[]{}"))]
    steps = np.where(np.isin(marks, list(b"[{")), 1, -1)
    if len(steps) and int(np.cumsum(steps).max()) > most:
        raise BadField("body", f"body is nested too deeply; at most {most} levels are allowed")


def validate[M: BaseModel](value: Any, model: type[M]) -> M:
    """A parsed body as a `model`. Raises BadField with the path of the first field that is wrong."""
    if not isinstance(value, dict):
        raise BadField("body", f"body must be a JSON object, not {type(value).__name__}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    path = field_path(first["loc"])
    if first["type"] == "missing":
        raise BadField(path, f"{path} is missing; it is required")
    text = first["msg"].removeprefix("Value error, ")
    shown = f"={first['input']!r}"[:_QUOTED] if _short(first["input"]) else ""
    raise BadField(path, f"{path}{shown}: {text}")


def field_path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") -> "messages[0].role"."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{str(part)[:_QUOTED]}"
    return path.lstrip(".") or "body"


def _short(value: object) -> bool:
    """Whether writing the value out is cheap."""
    return isinstance(value, (bool, int, float, type(None))) or (
        isinstance(value, (str, list, dict)) and len(value) <= _QUOTED
    )


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _too_large(limits: Limits) -> TooLarge:
    return TooLarge(f"body is larger than {limits.body_bytes} bytes; send less")
