"""JSON of answers: whole ones, and the frame of a stream's chunks.

What stays the same in chunks is encoded once, usage is added where asked for. A chunk is
`begin(index)`, the choice's own members, and `end()`. Called by completions and chat.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from jaxinfer.types import RequestOutput
from serving.calls import Call
from serving.http.exchange import usage_of
from serving.http.schemas import StreamOptions
from serving.http.sse import event


class Frame:
    """Writes the outside of chunks.

    Args:
        fixed: id, object, created and model. options: include_usage ends the stream with a chunk of
            usage; with it, continuous_usage_stats puts the usage so far into every chunk.
    """

    def __init__(
        self, fixed: dict[str, Any], options: StreamOptions | None, calls: Sequence[Call]
    ) -> None:
        self.include_usage = bool(options and options.include_usage)
        self.continuous = bool(self.include_usage and options and options.continuous_usage_stats)
        self.usage = usage_of(calls)
        self._fixed = fixed
        self._head = f'data: {dumps(fixed)[:-1]},"choices":[{{"index":'
        self._tail = '}],"usage":null}\n\n' if self.include_usage else "}]}\n\n"
        self._tell()

    def take(self, call: int, item: RequestOutput) -> None:
        """Count an item before its chunks are written."""
        self.usage.take(call, item)
        self._tell()

    def _tell(self) -> None:
        if self.continuous:
            self._tail = f'}}],"usage":{dumps(self.usage.json())}}}\n\n'

    def begin(self, index: int) -> str:
        return f"{self._head}{index}"

    def end(self) -> str:
        return self._tail

    def chunk(self, choice: dict[str, Any], **more: Any) -> str:
        """A whole chunk, for what is written once; `more` are members of the chunk itself."""
        if more:
            usage = {"usage": self.usage.json() if self.continuous else None}
            body = {**self._fixed, "choices": [choice], **more}
            return event(body | (usage if self.include_usage else {})).decode()
        members = dumps({k: v for k, v in choice.items() if k != "index"})[1:-1]
        return f"{self.begin(choice['index'])},{members}{self._tail}"

    def usage_event(self) -> bytes:
        """The last chunk, for include_usage."""
        return event({**self._fixed, "choices": [], "usage": self.usage.json()})


def whole(fixed: dict[str, Any], choices: Iterable[dict[str, Any]], more: dict[str, Any]) -> bytes:
    """The body of a whole answer: `fixed`, the choices, then `more`.

    For a thread: encoding holds Python's lock, so it is done choice by choice.
    """
    parts = ",".join(dumps(choice) for choice in choices)
    return f'{dumps(fixed)[:-1]},"choices":[{parts}],{dumps(more)[1:]}'.encode()


def dumps(value: Any) -> str:
    """Strict, compact JSON."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def ending(finish_reason: str | None, stop_reason: int | str | None) -> str:
    """The members that tell why an output has ended."""
    if finish_reason is None:
        return ',"finish_reason":null'
    return f',"finish_reason":{dumps(finish_reason)},"stop_reason":{dumps(stop_reason)}'
