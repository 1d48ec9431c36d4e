"""What the clients return and raise: plain values, the same over HTTP and gRPC, streamed or not.

Imports no HTTP or gRPC library. Made by client.py and client_grpc.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from jaxinfer.errors import JaxinferError


class ApiError(JaxinferError):
    """The server refused, failed, or could not be reached.

    Attributes:
        status: HTTP status, or the gRPC status name; None if there was none.
        type, param, code: of OpenAI's error body; "connection_error" and "protocol_error" are ours.
        retry_after: seconds after which the server asks to try again.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | str | None = None,
        type: str | None = None,
        param: str | None = None,
        code: str | int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.type, self.param, self.code = status, type, param, code
        self.retry_after = retry_after

    @classmethod
    def parse(cls, error: Any, status: int | None, retry_after: str | None = None) -> Self:
        """From the `error` object of a body; anything else becomes the message."""
        wait = float(retry_after) if retry_after and retry_after.isdigit() else None
        if not isinstance(error, Mapping):
            return cls(f"{status}: {error}", status=status, retry_after=wait)
        facts = {name: error.get(name) for name in ("type", "param", "code")}
        message = str(error.get("message") or dict(error))
        return cls(message, status=status, retry_after=wait, **facts)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; cached_tokens of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Self:
        details = value.get("prompt_tokens_details") or {}
        return cls(
            value["prompt_tokens"],
            value.get("completion_tokens") or 0,
            details.get("cached_tokens") or 0,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """One output, or what is new of it.

    Attributes:
        token_ids: over HTTP only with return_token_ids.
        logprobs: as the protocol has it; over gRPC a {token id: logprob} for each token, the
            chosen one first.
    """

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Any = None
    reasoning: str = ""
    tool_calls: tuple[Any, ...] = ()

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Self:
        """A choice of a completion, a chat completion, or a chunk of either."""
        message = value.get("message") or value.get("delta") or {}
        text = message.get("content") or value.get("text") or ""
        reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
        if not isinstance(text, str) or not isinstance(reasoning, str):
            raise TypeError("the text of a choice is no text")
        return cls(
            value["index"],
            text,
            tuple(value.get("token_ids") or ()),
            value.get("finish_reason"),
            value.get("stop_reason"),
            value.get("logprobs"),
            reasoning,
            tuple(message.get("tool_calls") or ()),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, or one chunk of a stream, which holds only what is new.

    Attributes:
        usage: None where the server does not tell it (chunks: see stream_options).
        raw: the JSON object, or the protobuf message, that it was made of.
    """

    id: str = ""
    model: str = ""
    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    raw: Any = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.choices[0].text if self.choices else ""

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Self:
        usage = value.get("usage")
        return cls(
            value.get("id") or "",
            value.get("model") or "",
            tuple(Choice.parse(choice) for choice in value["choices"]),
            Usage.parse(usage) if usage else None,
            value,
        )


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenized prompt."""

    token_ids: tuple[int, ...]
    max_model_len: int | None = None

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Self:
        return cls(tuple(value["tokens"]), value.get("max_model_len"))
