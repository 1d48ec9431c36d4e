"""What an Anthropic message consists of and the events that tell its making: one state machine.

Streams send the events, others send `message` when it is closed: the same object. Pure: knows
neither the engine nor the wire. Must never reorder what the model wrote. Made by messages.py.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from serving.http.answer import Segment
from serving.http.dialects import Event
from serving.parsers import ToolCallDelta

INVALID_JSON = "INVALID_JSON"  # Anthropic's name for arguments that are no JSON object


def usage(prompt: int, cached: int, output: int, thinking: int | None = None) -> dict[str, Any]:
    """Token counts as /v1/messages reports them: input_tokens are those that no cache had."""
    told: dict[str, Any] = {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }
    return (
        told
        if thinking is None
        else {**told, "output_tokens_details": {"thinking_tokens": thinking}}
    )


class MessageWriter:
    """Grows a message. Each method returns the events that tell what it did, in order."""

    def __init__(self, model: str) -> None:
        self.message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(0, 0, 0),
        }
        self._block: dict[str, Any] | None = None
        self._parts: list[str] = []  # of the open block
        self._call = -1  # index of the open block among the tool calls

    def open(self, usage: Mapping[str, Any]) -> list[Event]:
        """The message has begun."""
        self.message["usage"] = dict(usage)
        start = {"type": "message_start", "message": {**self.message, "content": []}}
        return [start, {"type": "ping"}]

    def add(self, segments: Iterable[Segment]) -> list[Event]:
        """More of the output."""
        events: list[Event] = []
        for piece in segments:
            if isinstance(piece, ToolCallDelta):
                events += self._add_call(piece)
            elif piece[0] == "reasoning":
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                events += self._add_text(empty, "thinking", piece[1])
            else:
                events += self._add_text({"type": "text", "text": ""}, "text", piece[1])
        return events

    def close(self, reason: str, stop: object, usage: Mapping[str, Any]) -> list[Event]:
        """The output has ended. `reason`: "stop" or "length"; `stop`: the stop string that ended it."""
        events = self._close_block()
        message = self.message
        calls = any(block["type"] == "tool_use" for block in message["content"])
        if reason == "length":
            message["stop_reason"] = "max_tokens"
        elif isinstance(stop, str):
            message |= {"stop_reason": "stop_sequence", "stop_sequence": stop}
        else:
            message["stop_reason"] = "tool_use" if calls else "end_turn"
        message["usage"] = dict(usage)
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        events.append({"type": "message_delta", "delta": delta, "usage": dict(usage)})
        return [*events, {"type": "message_stop"}]

    # --- blocks ---------------------------------------------------------------------------------

    def _add_text(self, empty: dict[str, Any], kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if self._block is None or self._block["type"] != kind:
            events += self._open_block(empty)
        self._parts.append(text)
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _add_call(self, piece: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if piece.index != self._call:
            block = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            events += self._open_block(block)
            self._call = piece.index
        if piece.arguments:
            self._parts.append(piece.arguments)
            delta = {"type": "input_json_delta", "partial_json": piece.arguments}
            events.append(self._delta(delta))
        return events

    def _open_block(self, block: dict[str, Any]) -> list[Event]:
        events = self._close_block()
        self._block = block
        start = {"type": "content_block_start", "index": self._index(), "content_block": {**block}}
        return [*events, start]

    def _close_block(self) -> list[Event]:
        block, text = self._block, "".join(self._parts)
        if block is None:
            return []
        if block["type"] == "tool_use":
            block["input"] = tool_input(text)
        else:
            block[block["type"]] = text
        stop = {"type": "content_block_stop", "index": self._index()}
        self.message["content"].append(block)
        self._block, self._parts, self._call = None, [], -1
        return [stop]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index(), "delta": delta}

    def _index(self) -> int:
        return len(self.message["content"])


def tool_input(arguments: str) -> dict[str, Any]:
    """The object of a call's arguments; what is no JSON object is wrapped, as Anthropic advises."""
    try:
        value = json.loads(arguments or "{}")
        json.dumps(value, allow_nan=False)  # NaN, Infinity and 1e999 are no JSON
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}
