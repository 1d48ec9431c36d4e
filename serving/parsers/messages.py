"""What an output parser says: deltas of a chat message, and the message that they join to.

Plain values, the same for every format and every face. Must never hold engine objects or ids of
tokens. Made by output.py, read by whoever answers chat requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ToolCallDelta:
    """A piece of one tool call; `id` and `name` come once, with the first piece of the call."""

    index: int  # 0, 1, ... in the order of the message's calls
    id: str | None
    name: str | None
    arguments: str  # the next piece of the JSON text


@dataclass(slots=True)
class MessageDelta:
    """What one push made certain; at most one ToolCallDelta for each call."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    truncated_reasoning: bool = False  # only from finish(): reasoning, and no answer after it

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls or self.truncated_reasoning)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole call. `arguments` is JSON text as the model meant it: it may be cut off or wrong."""

    id: str
    name: str
    arguments: str


class Message:
    """The deltas of one output, joined: the answer of a request that does not stream."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []
        self.truncated_reasoning = False

    def add(self, delta: MessageDelta) -> None:
        """Append a delta. Raises ValueError if a call's first piece lacks its id or name."""
        self._reasoning.append(delta.reasoning)
        self._content.append(delta.content)
        self.truncated_reasoning |= delta.truncated_reasoning
        for piece in delta.tool_calls:
            if piece.index == len(self._calls):
                if piece.id is None or piece.name is None:
                    raise ValueError(f"tool call {piece.index} begins without an id and a name")
                self._calls.append((piece.id, piece.name, []))
            self._calls[piece.index][2].append(piece.arguments)

    @property
    def reasoning(self) -> str | None:
        """None if the model did not reason."""
        return "".join(self._reasoning) or None

    @property
    def content(self) -> str | None:
        """None only for a message that consists of tool calls."""
        text = "".join(self._content)
        return None if self._calls and not text else text

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [ToolCall(id, name, "".join(parts)) for id, name, parts in self._calls]
