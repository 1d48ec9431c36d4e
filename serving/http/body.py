"""Reading a JSON body: bounded while it arrives, bounded in depth before it is parsed, then validated.

Large bodies are scanned, parsed and validated in a thread. Numbers that JSON does not have (NaN,
Infinity) are refused. Called by every POST route.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from jaxinfer.errors import Overloaded
from serving.config import Limits
from serving.errors import BadField, TooLarge
from serving.service import Service

ARRIVAL = "jaxinfer.arrival"  # in the request's scope: when its handler began (time.monotonic)
IN_THREAD = 1 << 20  # bytes past which parsing would delay other streams
MAX_CONTAINERS = 1 << 18  # lists and objects in a body
MAX_VALUES = 1 << 20  # of lists and objects together
_PIECE = 1 << 20
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1
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
    request.scope[ARRIVAL] = time.monotonic()
    raw = await read_body(request, service)
    if len(raw) > IN_THREAD:
        return await service.in_thread(lambda: take(parse_json(raw, limits.json_depth)))
    return take(parse_json(raw, limits.json_depth))


async def read_body(request: Request, service: Service) -> bytes:
    """The body, if it is JSON by its type, and as long as it stays below the limits."""
    limits = service.config.limits
    # Browsers send a body of no or of a simple type to any server unasked; JSON they ask for first.
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise BadField("content-type", f"content-type={kind!r:.100} must be application/json")
    if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise BadField("content-encoding", f"content-encoding={coding!r:.100} must be identity")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > limits.body_bytes:
        raise _too_large(limits)
    chunks, size = [], 0
    try:
        async with asyncio.timeout(limits.idle_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                service.arriving_bytes += len(chunk)
                if size > limits.body_bytes:
                    raise _too_large(limits)
                if service.arriving_bytes > max(limits.arriving_bytes, limits.body_bytes):
                    raise Overloaded("too many bytes of requests are arriving; try again later")
                chunks.append(chunk)
    except TimeoutError:
        raise BadField("body", f"body did not arrive within {limits.idle_seconds:g} s") from None
    finally:
        service.arriving_bytes -= size
    return b"".join(chunks)


def parse_json(raw: bytes, max_depth: int) -> Any:
    """The value of a JSON text. Raises BadField."""
    check_shape(raw, max_depth)
    try:
        return json.loads(raw.decode(), parse_constant=_no_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise BadField("body", f"body is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        text = f"body is not valid JSON: {error.msg.removesuffix(' at')} at character {error.pos}"
        raise BadField("body", text) from None
    except ValueError as error:  # NaN, or an integer of thousands of digits
        reason = str(error).split(";")[0]  # behind it Python says which of its settings to change
        raise BadField("body", f"body is not valid JSON: {reason[:_QUOTED]}") from None


def check_shape(raw: bytes, most: int) -> None:
    """Refuse JSON nested deeper than `most`, or of more values than a request needs. Linear, in numpy.

    Parsing holds Python's lock, and a value takes many times the bytes that it is written with.
    """
    if raw.count(b"[") + raw.count(b"{") <= most and raw.count(b",") <= MAX_CONTAINERS:
        return
    scan = _Scan()
    start = 0
    while start < len(raw):
        end = start + _PIECE
        while raw[end - 1 : end] == b"\\":  # a piece ends behind all of a run of backslashes
            end += 1
        scan.take(np.frombuffer(raw[start:end], np.uint8))
        if scan.deepest > most:
            raise BadField("body", f"body is nested too deeply; at most {most} levels are allowed")
        if scan.containers > MAX_CONTAINERS or scan.commas > MAX_VALUES:
            raise BadField(
                "body",
                f"body holds too much; at most {MAX_CONTAINERS} lists and objects and {MAX_VALUES} "
                "values are allowed",
            )
        start = end


class _Scan:
    """Brackets and commas outside of strings, piece by piece."""

    def __init__(self) -> None:
        self.depth = self.deepest = self.containers = self.commas = 0
        self._quoted = 0  # 1: a string goes on

    def take(self, data: np.ndarray) -> None:
        quotes = np.flatnonzero(data == ord('"'))
        slashes = data == ord("\\")
        if len(quotes) and slashes.any():  # a quote behind an odd run of them is part of the string
            places = np.where(slashes, -1, np.arange(len(data), dtype=np.int32))
            before = np.maximum.accumulate(np.concatenate(([np.int32(-1)], places)))
            quotes = quotes[(quotes - 1 - before[quotes]) % 2 == 0]
        flips = np.zeros(len(data), np.uint8)
        flips[quotes] = 1
        np.cumsum(flips, dtype=np.uint8, out=flips)
        outside = ((flips + self._quoted) & 1) == 0
        steps = _STEP[data] * outside
        levels = np.cumsum(steps, dtype=np.int32)
        self.deepest = max(self.deepest, self.depth + int(levels.max()))
        self.depth += int(levels[-1])
        self.containers += int(np.count_nonzero(steps == 1))
        self.commas += int(np.count_nonzero((data == ord(",")) & outside))
        self._quoted = int(not outside[-1])


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
    if not first["loc"]:  # said of the whole: such texts begin with the field
        raise BadField(text.split("=")[0].split()[0], text)
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


def _finite(text: str) -> float:
    """1e999 is JSON, but no answer could repeat it."""
    if math.isinf(value := float(text)):
        raise ValueError(f"{text:.20} is too large for a number")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _too_large(limits: Limits) -> TooLarge:
    return TooLarge(f"body is larger than {limits.body_bytes} bytes; send less")
