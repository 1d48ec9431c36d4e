"""What /v1/responses and /v1/messages share: both are dialects of chat completions.

A dialect refuses what it cannot honour and translates a request to a chat body. Pure: knows no
engine. Called by responses_request.py and messages_request.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from serving.errors import BadField
from serving.http.errors import UnsupportedField

type Event = dict[str, Any]

REASONING = ("reasoning", "reasoning_content")  # the names that chat messages give it


def given_fields(request: BaseModel) -> dict[str, Any]:
    """The fields that a client set to something, those outside of the model included. Not a deep copy."""
    return {name: value for name, value in request if value is not None}


def refuse(given: Mapping[str, Any], neutral: Mapping[str, Sequence[Any]], where: str = "") -> None:
    """Refuse the fields in `neutral` unless they are null or have a value that asks for nothing."""
    for name, allowed in neutral.items():
        value = given.get(name)
        if value is None or any(type(value) is type(a) and value == a for a in allowed):
            continue
        hint = f"; allowed: {allowed[0]!r}" if allowed else "; leave it out"
        text = f"{where}{name}={value!r:.100} is not supported by this server{hint}"
        raise UnsupportedField(f"{where}{name}", text)


def string(where: str, value: object) -> str:
    """`value`, if it is a string. Raises BadField."""
    if not isinstance(value, str):
        raise BadField(where, f"{where} must be a string")
    return value


def objects(where: str, value: object) -> list[Mapping[str, Any]]:
    """`value`, if it is a list of objects. Raises BadField."""
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise BadField(where, f"{where} must be a string or a list of objects")
    return value


def chat_content(texts: Sequence[str]) -> Any:
    """Content as chat completions have it: text parts; one part alone is its text."""
    if len(texts) <= 1:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def unknown_type(where: str, value: object, allowed: str) -> UnsupportedField:
    """The error for an item, part or block of a kind that this server does not take."""
    text = f"{where}.type={value!r:.100} is not supported by this server; allowed: {allowed}"
    return UnsupportedField(f"{where}.type", text)
