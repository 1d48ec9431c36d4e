"""`/v1/responses` requests: the schema, and their translation to a chat completions body.

Pure: knows neither the engine nor the wire. Must never accept a field that it does not honour.
Called by responses.py; the chat pipeline gets what to_chat returns, as if a client had sent it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.errors import BadField
from serving.http.dialects import (
    REASONING,
    chat_content,
    given_fields,
    objects,
    refuse,
    string,
    unknown_type,
)
from serving.http.errors import UnsupportedField
from serving.http.fields import MAX_INT, SamplingFields
from serving.http.schemas import Name, Priority

LOGPROBS = "message.output_text.logprobs"
# Reasoning is returned as plain text, which serves the same end as the encrypted one.
INCLUDES = frozenset({LOGPROBS, "reasoning.encrypted_content"})
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
# Handed on to chat completions as they are, with those of SamplingFields.
SHARED = (
    "model", "parallel_tool_calls", "user", "priority", "cache_salt", "chat_template_kwargs",
)  # fmt: skip
# Fields of the API that cannot be honoured -> values that ask for nothing, besides null.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "moderation": (),
    "n": (1,),
    "previous_input_messages": (),
    "prompt": (),
    "prompt_logprobs": (),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "truncation": ("disabled",),
}


TEXT = {"format": ({"type": "text"},), "verbosity": ("medium",)}


class Reasoning(BaseModel):
    """How to reason. There is no summary of it to ask for: the reasoning itself is told."""

    model_config = ConfigDict(extra="ignore", strict=True)
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponsesRequest(SamplingFields):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    model: Name | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: Name | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None  # of built-in tools only
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    reasoning: Reasoning | None = None
    text: dict[str, Any] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None  # the prefix cache needs no hint
    prompt_cache_retention: Name | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Priority | None = None

    def warnings(self) -> list[str]:
        return [name for name in super().warnings() if name not in NEUTRAL]

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


def to_chat(request: ResponsesRequest, history: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The chat completions body that asks for the same. Raises BadField for what can't be honoured.

    Args:
        history: input items of the earlier turns, their outputs among them (previous_response_id).
    """
    _refuse(request)
    given = given_fields(request)
    body: dict[str, Any] = {
        name: given[name] for name in (*SHARED, *SamplingFields.model_fields) if name in given
    }
    messages = input_messages(history, "previous_response_id")
    if request.instructions is not None:
        messages.insert(0, {"role": "system", "content": request.instructions})
    body["messages"] = messages + input_messages(input_items(request.input), "input")
    if not body["messages"]:
        raise BadField("input", "input has no messages; give at least one")
    if request.max_output_tokens is not None:
        body["max_completion_tokens"] = request.max_output_tokens
    if request.tools:
        body["tools"] = [_tool(i, tool) for i, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        body["tool_choice"] = _tool_choice(request.tool_choice)
    if request.with_logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.reasoning is not None and request.reasoning.effort is not None:
        body["reasoning_effort"] = request.reasoning.effort
    return body


def input_items(value: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`input` as a list of items: a string is one user message."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else list(value)


# --- what is refused --------------------------------------------------------------------------


def _refuse(request: ResponsesRequest) -> None:
    refuse(given_fields(request), NEUTRAL)
    refuse(request.text or {}, TEXT, "text.")
    for name in request.include or ():
        if name not in INCLUDES:
            raise UnsupportedField(
                "include", f"include has {name!r:.100}; this server can include {sorted(INCLUDES)}"
            )
    if request.top_logprobs and not request.with_logprobs:
        raise BadField("top_logprobs", f"top_logprobs needs {LOGPROBS!r} in include")
    if request.with_logprobs and request.tools and request.tool_choice != "none":
        text = f"include={LOGPROBS!r} is not supported with tools; leave one of them out"
        raise UnsupportedField("include", text)
    for key, value in (request.metadata or {}).items():
        if len(key) > 64 or len(value) > 512:
            raise BadField(
                "metadata", "metadata may have keys of 64 and values of 512 characters at most"
            )


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    where = f"tools[{index}]"
    if tool.get("type") != "function":
        raise unknown_type(where, tool.get("type"), "'function'")
    string(f"{where}.name", tool.get("name"))
    function = {k: v for k, v in tool.items() if k != "type" and v is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | Mapping[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise UnsupportedField(
            "tool_choice",
            f"tool_choice={dict(choice)!r:.100} is not supported; use 'auto' or 'none'",
        )
    return {"type": "function", "function": {"name": choice["name"]}}


# --- items to messages ------------------------------------------------------------------------


def input_messages(items: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """Chat messages of input items. `where` is the field that errors name.

    An assistant's reasoning, text and calls that follow each other become one message, as they were
    when the model wrote them.
    """
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's message that may still grow
    for i, item in enumerate(items):
        at = f"{where}[{i}]"
        kind = item.get("type", "message")
        role = item.get("role") if kind == "message" else None
        if kind == "function_call_output":
            turn = None
            messages.append(_call_output(at, item))
        elif role is not None and role != "assistant":
            turn = None
            messages.append(
                {"role": _role(at, role), "content": _content(f"{at}.content", item.get("content"))}
            )
        elif kind in ("reasoning", "function_call") or role == "assistant":
            if turn is None or _closed(turn, kind):
                turn = {"role": "assistant"}
                messages.append(turn)
            _grow(turn, at, kind, item)
        else:
            allowed = "message with a role, function_call, function_call_output, reasoning"
            raise unknown_type(at, kind, allowed)
    return [m for m in messages if m["role"] != "assistant" or "content" in m or "tool_calls" in m]


def _closed(turn: Mapping[str, Any], kind: str) -> bool:
    """Whether an item of `kind` begins another message."""
    if kind == "function_call":
        return False
    return "content" in turn or "tool_calls" in turn


def _grow(turn: dict[str, Any], at: str, kind: str, item: Mapping[str, Any]) -> None:
    if kind == "reasoning":
        parts = objects(f"{at}.content", item.get("content") or item.get("summary") or [])
        texts = [string(f"{at}.content[{i}].text", p.get("text")) for i, p in enumerate(parts)]
        if texts:
            text = turn.get("reasoning", "") + "".join(texts)
            turn |= dict.fromkeys(REASONING, text)
    elif kind == "function_call":
        fields = {n: string(f"{at}.{n}", item.get(n)) for n in ("call_id", "name", "arguments")}
        function = {"name": fields["name"], "arguments": fields["arguments"]}
        call = {"id": fields["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    else:
        turn["content"] = _content(f"{at}.content", item.get("content"))


def _call_output(at: str, item: Mapping[str, Any]) -> dict[str, Any]:
    content = _content(f"{at}.output", item.get("output"))
    call = string(f"{at}.call_id", item.get("call_id"))
    return {"role": "tool", "tool_call_id": call, "content": content}


def _role(at: str, role: object) -> str:
    if role not in ROLES:
        raise BadField(f"{at}.role", f"{at}.role={role!r:.100} is unknown; allowed are {ROLES}")
    return str(role)


def _content(where: str, content: object) -> Any:
    """A string, or text parts as chat completions have them; one part alone is its text."""
    if isinstance(content, str):
        return content
    parts = objects(where, content)
    return chat_content([_part(f"{where}[{i}]", part) for i, part in enumerate(parts)])


def _part(where: str, part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if kind == "refusal":
        return string(f"{where}.refusal", part.get("refusal"))
    if kind not in TEXT_PARTS:
        raise unknown_type(where, kind, ", ".join(TEXT_PARTS))
    return string(f"{where}.text", part.get("text"))
