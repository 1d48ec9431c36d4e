"""What a response consists of and the events that tell its making: one state machine for both.

Streams send the events, others send `response` when it is closed: the same object. Pure: knows
neither the engine nor the wire. Must never reorder what the model wrote. Made by responses.py.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from serving.http.answer import Segment
from serving.http.dialects import Event
from serving.http.responses_request import ResponsesRequest
from serving.parsers import ToolCallDelta

ABORTED = {"code": "server_error", "message": "the request was aborted before it was finished"}


def new_response(request: ResponsesRequest, model: str) -> dict[str, Any]:
    """The response to `request` before anything is generated, with what the request asked echoed."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": [_echo(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }


def usage(prompt: int, cached: int, output: int, reasoning: int) -> dict[str, Any]:
    """Token counts as /v1/responses reports them."""
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + output,
    }


class ResponseWriter:
    """Grows a response. Each method returns the events that tell what it did, in order.

    Args:
        response: from new_response; changed in place.
    """

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self._numbers = itertools.count()
        self._item: dict[str, Any] | None = None
        self._parts: list[str] = []  # of the open item's text
        self._logprobs: list[dict[str, Any]] = []  # of the open item
        self._waiting: list[dict[str, Any]] = []  # told with the next text
        self._call = -1  # index of the open item among the tool calls

    def open(self) -> list[Event]:
        """The response has begun."""
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self.snapshot()) for name in names]

    def snapshot(self) -> dict[str, Any]:
        """The response as it is now; later events do not change it."""
        return {**self.response, "output": list(self.response["output"])}

    def add(
        self, segments: Iterable[Segment], logprobs: Iterable[dict[str, Any]] = ()
    ) -> list[Event]:
        """More of the output.

        Args:
            logprobs: chat's entries of the tokens. They go out with text: those of tokens that gave
                none, such as reasoning, with the text that comes next or, at the end, on their own.
        """
        events: list[Event] = []
        self._waiting += logprobs
        for piece in segments:
            if isinstance(piece, ToolCallDelta):
                events += self._add_call(piece)
            elif piece[0] == "reasoning":
                events += self._add_reasoning(piece[1])
            else:
                events += self._add_text(piece[1])
        return events

    def close(self, reason: str, usage: Mapping[str, Any], error: str | None = None) -> list[Event]:
        """The output has ended. `reason`: "stop", "length", "abort" or "error"."""
        events: list[Event] = []
        if not self.response["output"] and self._item is None and reason in ("stop", "length"):
            events += self._open_message()
        if self._waiting and self._kind() == "message":
            events += self._add_text("")
        events += self._close_item("completed" if reason == "stop" else "incomplete")
        response = self.response
        response["usage"] = dict(usage)
        if reason == "stop":
            response |= {"status": "completed", "completed_at": int(time.time())}
            name = "response.completed"
        elif reason == "length":
            response["status"] = "incomplete"
            response["incomplete_details"] = {"reason": "max_output_tokens"}
            name = "response.incomplete"
        elif reason == "abort":
            response |= {"status": "cancelled", "error": ABORTED}
            name = "response.failed"
        else:
            response["status"] = "failed"
            response["error"] = {"code": "server_error", "message": error}
            name = "response.failed"
        return [*events, self._event(name, response=self.snapshot())]

    # --- items ----------------------------------------------------------------------------------

    def _add_reasoning(self, text: str) -> list[Event]:
        events: list[Event] = []
        if self._kind() != "reasoning":
            item = {"type": "reasoning", "summary": [], "content": []}
            events += self._open_item("rs", item)
            events.append(self._on_part("response.content_part.added", _reasoning("")))
        self._parts.append(text)
        return [*events, self._on_part("response.reasoning_text.delta", delta=text)]

    def _add_text(self, text: str) -> list[Event]:
        logprobs, self._waiting = self._waiting, []
        events = [] if self._kind() == "message" else self._open_message()
        self._parts.append(text)
        self._logprobs += logprobs
        events.append(self._on_part("response.output_text.delta", delta=text, logprobs=logprobs))
        return events

    def _open_message(self) -> list[Event]:
        item = {"type": "message", "role": "assistant", "content": []}
        events = self._open_item("msg", item)
        return [*events, self._on_part("response.content_part.added", _text("", []))]

    def _add_call(self, piece: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if piece.index != self._call:
            item = {
                "type": "function_call",
                "call_id": piece.id,
                "name": piece.name,
                "arguments": "",
            }
            events += self._open_item("fc", item)
            self._call = piece.index
        if piece.arguments:
            self._parts.append(piece.arguments)
            events.append(
                self._on_item("response.function_call_arguments.delta", delta=piece.arguments)
            )
        return events

    def _kind(self) -> str | None:
        return None if self._item is None else self._item["type"]

    def _open_item(self, prefix: str, item: dict[str, Any]) -> list[Event]:
        events = self._close_item("completed")
        self._item = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item}
        added = self._event(
            "response.output_item.added", output_index=self._index(), item=dict(self._item)
        )
        return [*events, added]

    def _close_item(self, status: str) -> list[Event]:
        item = self._item
        if item is None:
            return []
        text = "".join(self._parts)
        events: list[Event] = []
        if item["type"] == "function_call":
            item["arguments"] = text
            done = "response.function_call_arguments.done"
            events.append(self._on_item(done, name=item["name"], arguments=text))
        elif item["type"] == "reasoning":
            events.append(self._on_part("response.reasoning_text.done", text=text))
            events += self._close_part(item, _reasoning(text))
        else:
            logprobs = list(self._logprobs)
            done = "response.output_text.done"
            events.append(self._on_part(done, text=text, logprobs=logprobs))
            events += self._close_part(item, _text(text, logprobs))
        item["status"] = status
        events.append(
            self._event("response.output_item.done", output_index=self._index(), item=item)
        )
        self.response["output"].append(item)
        self._item, self._call = None, -1
        self._parts, self._logprobs = [], []
        return events

    def _close_part(self, item: dict[str, Any], part: dict[str, Any]) -> list[Event]:
        item["content"] = [part]
        return [self._on_part("response.content_part.done", part)]

    # --- events ---------------------------------------------------------------------------------

    def _index(self) -> int:
        return len(self.response["output"])

    def _on_part(self, name: str, part: dict[str, Any] | None = None, **fields: Any) -> Event:
        more = fields if part is None else {"part": part, **fields}
        return self._on_item(name, content_index=0, **more)

    def _on_item(self, event: str, /, **fields: Any) -> Event:
        assert self._item is not None
        return self._event(event, item_id=self._item["id"], output_index=self._index(), **fields)

    def _event(self, event: str, /, **fields: Any) -> Event:
        return {"type": event, "sequence_number": next(self._numbers), **fields}


def _text(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _echo(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"strict": False, "parameters": None, "description": None, **tool}
