"""What tests do with answers: read event streams, join chunks to whole answers, check shapes.

The joins are written from the API's rules alone, so that they can judge the server. Used by the HTTP
tests.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk


def strict(text: str) -> Any:
    """JSON without NaN or Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    return json.loads(text, parse_constant=refuse)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream, whose end must be [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [strict(part.removeprefix("data: ")) for part in parts[:-2]]


def extend(whole: dict[str, Any], part: dict[str, Any], lists: tuple[str, ...]) -> None:
    """Append a chunk's lists to those of the whole."""
    for name in lists:
        if name in part:
            whole[name] = whole.get(name, []) + part[name]


def join_completion(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer that chunks of a completion add up to; its `usage` is the last one told."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            new = {"text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
            whole = choices.setdefault(choice["index"], {"index": choice["index"], **new})
            assert whole["finish_reason"] is None, "a chunk after the last one"
            whole["text"] += choice["text"]
            if choice["logprobs"] is not None:
                whole["logprobs"] = whole["logprobs"] or {}
                extend(whole["logprobs"], choice["logprobs"], tuple(choice["logprobs"]))
            extend(whole, choice, ("token_ids", "prompt_token_ids", "prompt_logprobs"))
            whole["finish_reason"] = choice["finish_reason"]
            whole["stop_reason"] = choice.get("stop_reason")
    ordered = [choices[index] for index in sorted(choices)]
    return {"choices": ordered, "usage": usage}


def join_chat(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer that chunks of a chat add up to."""
    choices: dict[int, dict[str, Any]] = {}
    out: dict[str, Any] = {"usage": None}
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        out["usage"] = chunk.get("usage") or out["usage"]
        extend(out, chunk, ("prompt_logprobs", "prompt_token_ids"))
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"index": choice["index"], "message": {}})
            assert whole.get("finish_reason") is None, "a chunk after the last one"
            add_delta(whole["message"], choice["delta"])
            extend(whole, choice, ("token_ids",))
            if choice["logprobs"] is not None:
                whole.setdefault("logprobs", {"content": []})
                extend(whole["logprobs"], choice["logprobs"], ("content",))
            whole["finish_reason"] = choice["finish_reason"]
            whole["stop_reason"] = choice.get("stop_reason")
            whole |= {k: v for k, v in choice.items() if k == "reasoning_truncated"}
    out["choices"] = [choices[index] for index in sorted(choices)]
    return out


def add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a chat delta to a message."""
    if not message:
        assert delta["role"] == "assistant", "the first chunk has the role"
    else:
        assert "role" not in delta
    message.setdefault("role", "assistant")
    for name in ("content", "reasoning", "reasoning_content"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    for piece in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            calls.append(
                {"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])}
            )
        else:
            assert "id" not in piece and "name" not in piece["function"]
            call = calls[piece["index"]]["function"]
            call["arguments"] += piece["function"]["arguments"]


def without_nones(value: Any) -> Any:
    """The value without members that are null or an empty text: chunks leave them out."""
    if isinstance(value, dict):
        return {k: without_nones(v) for k, v in value.items() if v is not None and v != ""}
    return value


def completion(response: httpx.Response) -> dict[str, Any]:
    """A whole completion, checked by OpenAI's own types."""
    assert response.status_code == 200, response.text
    body, checked = strict(response.text), strict(response.text)
    for choice in checked["choices"]:  # the types forbid the null that OpenAI sends for the first
        for name, empty in (("token_logprobs", 0.0), ("top_logprobs", {})):
            told = (choice["logprobs"] or {}).get(name)
            if told and told[0] is None:
                told[0] = empty
    Completion.model_validate(checked)
    return body


def chat_completion(response: httpx.Response) -> dict[str, Any]:
    """A whole chat completion, checked by OpenAI's own types."""
    assert response.status_code == 200, response.text
    body = strict(response.text)
    ChatCompletion.model_validate(body)
    return body


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a refusal, whose body must have OpenAI's shape."""
    assert response.status_code == status, response.text
    body = strict(response.text)
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    return body["error"]
