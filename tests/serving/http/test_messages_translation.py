"""/v1/messages without a server: requests become chat bodies, deltas become events and a message.

What a client builds from the events alone is compared with the message that others get whole.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.errors import JaxinferError
from serving.errors import BadField
from serving.http.body import validate
from serving.http.dialects import Event
from serving.http.messages_events import MessageWriter, tool_input, usage
from serving.http.messages_request import MessagesRequest, to_chat
from serving.http.schemas import ChatRequest
from serving.parsers import ToolCallDelta

USER = {"role": "user", "content": "hi"}
WEATHER = {
    "name": "weather",
    "description": "now",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def chat(**body: Any) -> dict[str, Any]:
    given = {"messages": [USER], "max_tokens": 5, "model": "m"} | body
    request = validate(given, MessagesRequest)
    request.warnings()
    translated = to_chat(request)
    assert validate(translated, ChatRequest).warnings() == []  # chat knows all that is handed on
    return translated


# --- requests ---------------------------------------------------------------------------------


def test_fields_have_their_chat_names() -> None:
    body = chat(
        system=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        stop_sequences=["x", "y"],
        metadata={"user_id": "u"},
        tools=[WEATHER | {"cache_control": {"type": "ephemeral"}}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low"},
        cache_control={"type": "ephemeral"},
        service_tier="auto",
        stream=True,
    )
    parameters = WEATHER["input_schema"]
    function = {"name": "weather", "description": "now", "parameters": parameters}
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "a"}, USER],
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "stop": ["x", "y"],
        "user": "u",
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": True},
    }


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tool_choices(choice: dict[str, Any], expected: object) -> None:
    assert chat(tools=[WEATHER], tool_choice=choice)["tool_choice"] == expected


def test_blocks_become_messages_in_their_order() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "c"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "é"}},
            {"type": "tool_use", "id": "2", "name": "g", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": "one"},
            {"type": "tool_result", "tool_use_id": "2", "is_error": True,
             "content": [{"type": "text", "text": "two"}]},
            {"type": "text", "text": "d"},
        ]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "3", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "3"}]},
    ]  # fmt: skip

    def call(id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert chat(messages=messages)["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "reasoning": "t",
            "reasoning_content": "t",
            "content": "c",
            "tool_calls": [call("1", "f", json.dumps({"x": "é"})), call("2", "g", "{}")],
        },
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "tool_calls": [call("3", "f", "{}")]},
        {"role": "tool", "tool_call_id": "3", "content": ""},
    ]


def test_turns_of_one_role_are_one_turn() -> None:
    turns = [
        USER,
        USER,
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "hi"}]
    first, second = chat(messages=turns)["messages"]
    assert first == {"role": "user", "content": parts}
    assert [part["text"] for part in second["content"]] == ["a", "b"]


def test_a_final_assistant_text_is_continued() -> None:
    body = chat(messages=[USER, {"role": "assistant", "content": "Sure:"}])
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    assert "continue_final_message" not in chat()


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (assistant({"type": "text", "text": "ends "}), "messages"),
        (assistant({"type": "tool_use", "id": "1", "name": "f", "input": {}}), "messages"),
        (assistant({"type": "tool_use", "id": "1", "name": "f", "input": []}), "messages[1].content[0].input"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"stop": ["x"], "stop_sequences": ["y"]}, "stop"),
        ({"metadata": {"user_id": 1}}, "metadata.user_id"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER], "tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"tools": [WEATHER | {"strict": True}]}, "tools[0].strict"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(BadField) as caught:
        chat(**body)
    assert caught.value.field == field
    assert field.split("[")[0].split(".")[0] in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
KINDS = st.sampled_from(["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "x"])
FIELDS = st.sampled_from(["text", "id", "name", "input", "tool_use_id", "content", "thinking"])
blocks = st.builds(
    lambda kind, rest: {**rest, "type": kind},
    KINDS,
    st.dictionaries(FIELDS, st.text(max_size=3) | json_values, max_size=5),
)
turns = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "x"]),
        "content": st.text(max_size=3) | st.lists(blocks, max_size=3) | json_values,
    }
)


@settings(max_examples=80, deadline=None)
@given(st.lists(turns, min_size=1, max_size=3))
def test_any_messages_are_translated_or_refused(messages: list[dict[str, Any]]) -> None:
    try:
        body = chat(messages=messages)
    except JaxinferError as error:
        assert isinstance(error, BadField) and error.field.startswith("messages")
    else:
        assert body["messages"]


# --- events -----------------------------------------------------------------------------------

texts = st.text(min_size=1, max_size=4)
steps = st.lists(
    st.tuples(st.sampled_from(["reasoning", "content", "call", "arguments"]), texts), max_size=12
)


def written(plan: list[tuple[str, str]], reason: str = "stop", stop: object = None) -> Any:
    writer = MessageWriter("m")
    events = writer.open(usage(9, 4, 1))
    calls, open_call = 0, False
    for kind, text in plan:
        if kind == "reasoning":
            events += writer.add([("reasoning", text)])
        elif kind == "content":
            events += writer.add([("content", text)])
        elif kind == "call" or not open_call:
            events += writer.add([ToolCallDelta(calls, f"call_{calls}", "f", "")])
            calls += 1
        else:
            events += writer.add([ToolCallDelta(calls - 1, None, None, text)])
        open_call = kind in ("call", "arguments")
    events += writer.close(reason, stop, usage(9, 4, 7))
    return events, writer.message


def replayed(events: list[Event]) -> dict[str, Any]:
    """The message that a client builds from the events alone; what it needs must be in order."""
    message: dict[str, Any] = {}
    parts: list[str] = []
    opened = False
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = json.loads(json.dumps(event["message"]))
        elif kind == "content_block_start":
            assert not opened and event["index"] == len(message["content"])
            opened, parts = True, []
            message["content"].append(json.loads(json.dumps(event["content_block"])))
        elif kind == "content_block_delta":
            assert opened and event["index"] == len(message["content"]) - 1
            delta = event["delta"]
            field = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"])
            if field:
                message["content"][-1][field] += delta[field]
            else:
                assert delta["type"] == "input_json_delta"
                parts.append(delta["partial_json"])
        elif kind == "content_block_stop":
            block = message["content"][-1]
            assert opened and event["index"] == len(message["content"]) - 1
            opened = False
            if block["type"] == "tool_use":
                block["input"] = tool_input("".join(parts))
        elif kind == "message_delta":
            assert not opened
            message |= event["delta"]
            message["usage"] |= event["usage"]
        else:
            assert kind in ("ping", "message_stop")
    return message


@settings(max_examples=60, deadline=None)
@given(steps, st.sampled_from(["stop", "length"]))
def test_events_add_up_to_the_message(plan: list[tuple[str, str]], reason: str) -> None:
    events, message = written(plan, reason)
    json.dumps(events, allow_nan=False)
    assert events[0]["type"] == "message_start" and events[-1] == {"type": "message_stop"}
    assert replayed(events) == message
    text = "".join(block.get("text", "") for block in message["content"])
    assert text == "".join(text for kind, text in plan if kind == "content")


@pytest.mark.parametrize(
    ("plan", "reason", "stop", "expected"),
    [
        ([("content", "a")], "stop", None, ("end_turn", None)),
        ([("content", "a")], "stop", 7, ("end_turn", None)),
        ([("content", "a")], "stop", "x", ("stop_sequence", "x")),
        ([("content", "a")], "length", None, ("max_tokens", None)),
        ([("call", "")], "stop", None, ("tool_use", None)),
        ([("call", "")], "length", None, ("max_tokens", None)),
    ],
)
def test_stop_reasons(
    plan: list[tuple[str, str]], reason: str, stop: object, expected: tuple[str, str | None]
) -> None:
    _, message = written(plan, reason, stop)
    assert (message["stop_reason"], message["stop_sequence"]) == expected
    assert message["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 7,
    }


@pytest.mark.parametrize(
    "arguments", ["{", "[1]", "1", "NaN", '{"x": 1e999}', '{"x": NaN}', "[" * 5000, "9" * 5000]
)
def test_arguments_that_are_no_object_are_kept_as_text(arguments: str) -> None:
    assert tool_input(arguments) == {"INVALID_JSON": arguments}


def test_arguments() -> None:
    assert tool_input("") == {}
    assert tool_input('{"a": [1]}') == {"a": [1]}
