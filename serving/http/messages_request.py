"""`/v1/messages` requests: the schema, and their translation to a chat completions body.

Pure: knows neither the engine nor the wire. Must never accept a field that it does not honour.
Called by messages.py; the chat pipeline gets what to_chat returns, as if a client had sent it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any

from pydantic import Field

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
from serving.http.fields import MAX_INT, Fields, SamplingFields
from serving.http.schemas import Name, Priority, Turns

# Handed on to chat completions as they are, with those of SamplingFields.
SHARED = ("model", "priority", "cache_salt", "chat_template_kwargs")
KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}  # agents send it always
# Fields of the API that cannot be honoured -> values that ask for nothing, besides null.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": ({}, KEEP_ALL),
    "inference_geo": (),
    "mcp_servers": ([],),
    "n": (1,),
    "output_format": (),
    "prompt_logprobs": (),
    "service_tier": ("auto", "standard_only"),
}
# The same, inside of objects.
OUTPUT_CONFIG = {"format": (), "task_budget": ()}
THINKING = {"display": ("summarized",)}
TOOL = {"strict": (False,), "defer_loading": (False,), "allowed_callers": (["direct"],)}
EFFORTS = ("low", "medium", "high", "xhigh", "max")
MAX_MARKS = 4  # places of cache_control in one request
TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


type Block = tuple[str, Mapping[str, Any]]  # where it stands in the request, and the block


class CountTokensRequest(Fields):
    """POST /v1/messages/count_tokens: all that decides about the prompt."""

    messages: Turns
    model: Name | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None  # see beginnings
    chat_template_kwargs: dict[str, Any] | None = None

    def warnings(self) -> list[str]:
        return [name for name in super().warnings() if name not in NEUTRAL]


class MessagesRequest(CountTokensRequest, SamplingFields):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Priority | None = None


def beginnings(request: CountTokensRequest) -> list[CountTokensRequest]:
    """The request cut off after each block with cache_control, in order.

    As far as its prompt is that of the whole request, it ends where the block does. Of tools and system
    no message is left but an empty one, which templates need. The request's own cache_control stands for
    the end of its messages. Raises BadField for more than MAX_MARKS.
    """
    cuts: list[dict[str, Any]] = []
    for name in ("tools", "system"):
        value = getattr(request, name)
        found = _cut(value) if isinstance(value, list) else ()
        cuts += [{name: part, "messages": [{"role": "user", "content": ""}]} for part in found]
    for i, message in enumerate(request.messages):
        content = message.get("content")
        for part in _cut(content) if isinstance(content, list) else ():
            cuts.append({"messages": [*request.messages[:i], {**message, "content": part}]})
    if request.cache_control is not None:
        cuts.append({})
    if len(cuts) > MAX_MARKS:
        text = f"cache_control stands in {len(cuts)} places; at most {MAX_MARKS} are allowed"
        raise BadField("cache_control", text)
    return [request.model_copy(update=cut) for cut in cuts]


def _cut(blocks: Sequence[Any]) -> Iterator[list[Any]]:
    """The blocks up to each one that has cache_control, those of tool results included."""
    for i, block in enumerate(blocks):
        if isinstance(block, Mapping):
            inner = block.get("content")
            for part in _cut(inner) if isinstance(inner, list) else ():
                yield [*blocks[:i], {**block, "content": part}]
            if block.get("cache_control") is not None:
                yield list(blocks[: i + 1])


def to_chat(request: CountTokensRequest, begins: bool = False) -> dict[str, Any]:
    """The chat completions body that asks for the same. Raises BadField for what can't be honoured.

    Args:
        begins: it is the beginning of a request: no answer follows.
    """
    given = given_fields(request)
    refuse(given, NEUTRAL)
    refuse(request.output_config or {}, OUTPUT_CONFIG, "output_config.")
    body: dict[str, Any] = {
        name: given[name] for name in (*SHARED, *SamplingFields.model_fields) if name in given
    }
    body["messages"] = _system(request.system) + chat_messages(request.messages)
    if begins:
        body["add_generation_prompt"] = False
    elif _prefilled(body["messages"]):
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    if isinstance(request, MessagesRequest):
        body["max_completion_tokens"] = request.max_tokens
        if request.stop_sequences:
            if "stop" in body:
                raise BadField("stop", "stop and stop_sequences are the same; give one of them")
            body["stop"] = request.stop_sequences
        if (user := (request.metadata or {}).get("user_id")) is not None:
            if not isinstance(user, str):
                raise BadField("metadata.user_id", "metadata.user_id must be a string")
            body["user"] = user
    if request.tools:
        body["tools"] = [_tool(i, tool) for i, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        body |= _tool_choice(request.tool_choice)
    if (effort := (request.output_config or {}).get("effort")) is not None:
        if effort not in EFFORTS:
            text = f"output_config.effort={effort!r:.100} is unknown; allowed are {EFFORTS}"
            raise BadField("output_config.effort", text)
        body["reasoning_effort"] = effort
    if request.thinking is not None:
        thinks = _thinking(request.thinking)
        body["chat_template_kwargs"] = {
            "enable_thinking": thinks, **body.get("chat_template_kwargs", {})
        }  # fmt: skip
    return body


# --- fields -----------------------------------------------------------------------------------


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    where = f"tools[{index}]"
    if tool.get("type") not in (None, "custom"):
        raise unknown_type(where, tool["type"], "'custom', with an input_schema")
    refuse(tool, TOOL, f"{where}.")
    if not isinstance(tool.get("input_schema"), Mapping):
        raise BadField(f"{where}.input_schema", f"{where}.input_schema must be a JSON schema")
    function = {"name": string(f"{where}.name", tool.get("name"))}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    body: dict[str, Any] = {}
    if kind == "tool" and isinstance(choice.get("name"), str):
        body["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif isinstance(kind, str) and kind in TOOL_CHOICES:
        body["tool_choice"] = TOOL_CHOICES[kind]
    else:
        raise BadField(
            "tool_choice",
            f"tool_choice={dict(choice)!r:.100} is unknown; its type is auto, none, any or tool",
        )
    alone = choice.get("disable_parallel_tool_use")
    if alone is not None and not isinstance(alone, bool):
        raise BadField(
            "tool_choice.disable_parallel_tool_use",
            "tool_choice.disable_parallel_tool_use must be true or false",
        )
    return body | ({"parallel_tool_calls": False} if alone else {})


def _thinking(thinking: Mapping[str, Any]) -> bool:
    """Whether to think. budget_tokens is a target by its definition: max_tokens is the limit."""
    refuse(thinking, THINKING, "thinking.")
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise BadField(
            "thinking.type",
            f"thinking.type={kind!r:.100} is unknown; allowed are enabled, adaptive and disabled",
        )
    if kind == "enabled" and (type(budget) is not int or budget < 1):
        raise BadField(
            "thinking.budget_tokens",
            f"thinking.budget_tokens={budget!r:.100} must be an integer above 0",
        )
    return kind != "disabled"


# --- messages ---------------------------------------------------------------------------------


def _system(system: str | Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    if not system:
        return []
    return [{"role": "system", "content": _content("system", system)}]


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages of `messages`. A tool result becomes a message of its own, in its place.

    Turns of the same role that follow each other are one turn.
    """
    out: list[dict[str, Any]] = []
    turns = [_turn(f"messages[{i}]", message) for i, message in enumerate(messages)]
    for role, group in groupby(turns, key=lambda turn: turn[0]):
        blocks = [block for _, found in group for block in found]
        out += _user(blocks) if role == "user" else [_assistant(blocks)]
    return out


def _turn(at: str, message: Mapping[str, Any]) -> tuple[str, list[Block]]:
    """The role and the blocks of a message; a string is a block of text."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise BadField(
            f"{at}.role",
            f"{at}.role={role!r:.100} is unknown; allowed are 'user' and 'assistant' "
            "(the system prompt is the field system)",
        )
    where = f"{at}.content"
    if isinstance(content, str):
        return role, [(where, {"type": "text", "text": content})]
    blocks = objects(where, content)
    if not blocks:
        return role, [(where, {"type": "text", "text": ""})]
    return role, [(f"{where}[{i}]", block) for i, block in enumerate(blocks)]


def _user(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    texts: list[str] = []
    for at, block in blocks:
        if block.get("type") == "tool_result":
            if texts:
                out.append({"role": "user", "content": chat_content(texts)})
                texts = []
            out.append(_tool_result(at, block))
        else:
            texts.append(_text(at, block, "text or tool_result"))
    if texts:
        out.append({"role": "user", "content": chat_content(texts)})
    return out


def _tool_result(at: str, block: Mapping[str, Any]) -> dict[str, Any]:
    call = string(f"{at}.tool_use_id", block.get("tool_use_id"))
    content = block.get("content")
    text = "" if content is None else _content(f"{at}.content", content)
    return {"role": "tool", "tool_call_id": call, "content": text}


def _assistant(blocks: Sequence[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(string(f"{at}.thinking", block.get("thinking")))
        elif kind == "tool_use":
            calls.append(_tool_use(at, block))
        elif kind != "redacted_thinking":  # which says nothing
            texts.append(_text(at, block, "text, tool_use or thinking"))
    if thoughts:
        message |= dict.fromkeys(REASONING, "".join(thoughts))
    if calls:
        message["tool_calls"] = calls
    return message | ({"content": chat_content(texts)} if texts or not calls else {})


def _tool_use(at: str, block: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(block.get("input"), Mapping):
        raise BadField(f"{at}.input", f"{at}.input must be an object")
    function = {
        "name": string(f"{at}.name", block.get("name")),
        "arguments": json.dumps(block["input"]),
    }
    return {"id": string(f"{at}.id", block.get("id")), "type": "function", "function": function}


def _prefilled(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is an assistant's text, which the model shall continue."""
    last = messages[-1]
    if last["role"] != "assistant":
        return False
    if "tool_calls" in last:
        raise BadField(
            "messages", "messages ends with a tool_use block; its tool_result must follow"
        )
    content = last["content"]
    text = content if isinstance(content, str) else content[-1]["text"]
    if not text or text != text.rstrip():
        raise BadField(
            "messages",
            "messages: the last assistant text must not be empty or end with white space",
        )
    return True


def _content(where: str, content: object) -> Any:
    """A string, or text parts as chat completions have them; one part alone is its text."""
    if isinstance(content, str):
        return content
    return chat_content(
        [_text(f"{where}[{i}]", b, "text") for i, b in enumerate(objects(where, content))]
    )


def _text(at: str, block: Mapping[str, Any], allowed: str) -> str:
    if block.get("type") != "text":
        raise unknown_type(at, block.get("type"), allowed)
    return string(f"{at}.text", block.get("text"))
