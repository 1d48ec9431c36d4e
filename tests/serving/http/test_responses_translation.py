"""/v1/responses without a server: requests become chat bodies, deltas become events and a response.

The openai package's types are the independent truth for every event and for the response.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from jaxinfer.errors import JaxinferError
from serving.errors import BadField
from serving.http.answer import Segment
from serving.http.body import validate
from serving.http.dialects import Event
from serving.http.responses_events import ResponseWriter, new_response, usage
from serving.http.responses_request import LOGPROBS, ResponsesRequest, to_chat
from serving.http.schemas import ChatRequest
from serving.parsers import ToolCallDelta

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "now",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}


def chat(**body: Any) -> dict[str, Any]:
    request = validate({"input": "hi"} | body, ResponsesRequest)
    request.warnings()
    translated = to_chat(request)
    assert validate(translated, ChatRequest).warnings() == []  # chat knows all that is handed on
    return translated


def strictly(model: type[BaseModel] | TypeAdapter[Any], value: Any) -> Any:
    """Validated as JSON against the types (the package itself parses without checking)."""
    text = json.dumps(value, allow_nan=False)
    if isinstance(model, TypeAdapter):
        return model.validate_json(text, strict=True)
    return model.model_validate_json(text, strict=True)


# --- requests ---------------------------------------------------------------------------------


def test_a_string_is_a_user_message() -> None:
    assert chat()["messages"] == [{"role": "user", "content": "hi"}]


def test_fields_have_their_chat_names() -> None:
    body = chat(
        model="m",
        instructions="be kind",
        max_output_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=4,
        stop=["x"],
        ignore_eos=True,
        user="u",
        cache_salt="s",
        priority=2,
        parallel_tool_calls=False,
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "text"}},
        truncation="disabled",
        background=False,
        metadata={"a": "b"},
        stream=True,
        store=False,
    )
    function = {k: v for k, v in WEATHER.items() if k not in ("type", "strict")}
    assert body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "hi"},
        ],
        "max_completion_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "seed": 4,
        "stop": ["x"],
        "ignore_eos": True,
        "user": "u",
        "cache_salt": "s",
        "priority": 2,
        "parallel_tool_calls": False,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "reasoning_effort": "low",
    }


def test_logprobs_are_included() -> None:
    body = chat(include=[LOGPROBS], top_logprobs=2)
    assert body["logprobs"] is True and body["top_logprobs"] == 2
    assert chat(include=[LOGPROBS])["top_logprobs"] == 0


def test_an_assistants_items_become_one_message() -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"x":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "?"},
    ]  # fmt: skip
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    other = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": '{"x":1}'}}
    assert chat(input=items)["messages"] == [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "reasoning": "r",
            "reasoning_content": "r",
            "content": "a",
            "tool_calls": [call, other],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
    ]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"n": 2}, "n"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": [LOGPROBS], "tools": [WEATHER]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": True}, "max_output_tokens"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"role": "cook", "content": ""}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": ""}]}, "input[0].call_id"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(BadField) as caught:
        chat(**body)
    assert caught.value.field.startswith(field)
    assert field.split("[")[0].split(".")[0] in str(caught.value)


def test_unknown_fields_are_named() -> None:
    request = validate({"input": "hi", "surprise": 1, "background": False}, ResponsesRequest)
    assert request.warnings() == ["surprise"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
KEYS = st.sampled_from(
    [
        "type",
        "role",
        "content",
        "text",
        "output",
        "call_id",
        "name",
        "arguments",
        "summary",
        "refusal",
    ]
)
WORDS = st.sampled_from(
    ["message", "user", "assistant", "function_call", "function_call_output", "reasoning",
     "input_text", "output_text", "refusal", "x"]
)  # fmt: skip
likely = st.recursive(
    WORDS | json_values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.dictionaries(KEYS, likely, max_size=5), max_size=3))
def test_any_input_is_translated_or_refused(items: list[dict[str, Any]]) -> None:
    try:
        body = chat(input=items)
    except JaxinferError as error:
        assert isinstance(error, BadField) and error.field.startswith("input")
    else:
        assert body["messages"]


# --- events -----------------------------------------------------------------------------------

LOGPROB = {"token": "t", "bytes": [116], "logprob": -0.5, "top_logprobs": []}


def written(
    plan: list[tuple[str, str]], reason: str = "stop", **body: Any
) -> tuple[list[Event], dict[str, Any]]:
    """The events and the response of what a model wrote."""
    request = validate({"input": "hi"} | body, ResponsesRequest)
    writer = ResponseWriter(new_response(request, "m"))
    events = writer.open()
    for segments, logprobs in steps_of(plan):
        events += writer.add(segments, logprobs)
    events += writer.close(reason, usage(5, 2, 7, 1), "broken" if reason == "error" else None)
    return events, writer.response


texts = st.text(min_size=1, max_size=4)
plans = st.lists(
    st.tuples(st.sampled_from(["reasoning", "content", "call", "arguments", "logprob"]), texts),
    max_size=12,
)


def steps_of(plan: list[tuple[str, str]]) -> Iterator[tuple[list[Segment], list[Any]]]:
    calls, in_call = 0, False
    for kind, text in plan:
        if kind == "reasoning":
            yield [("reasoning", text)], []
        elif kind == "content":
            yield [("content", text)], [LOGPROB]
        elif kind == "logprob":
            yield [], [LOGPROB]
        elif kind == "call" or not in_call:
            yield [ToolCallDelta(calls, f"call_{calls}", "f", "")], []
            calls += 1
        else:
            yield [ToolCallDelta(calls - 1, None, None, text)], []
        in_call = kind in ("call", "arguments") or (in_call and kind == "logprob")


def replayed(events: list[Event]) -> list[dict[str, Any]]:
    """The output that a client builds from the deltas alone."""
    output: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(output)
            output.append(json.loads(json.dumps(event["item"])))
        elif kind == "response.content_part.added":
            output[event["output_index"]]["content"].append(json.loads(json.dumps(event["part"])))
        elif kind.endswith("_text.delta"):
            part = output[event["output_index"]]["content"][event["content_index"]]
            part["text"] += event["delta"]
            if "logprobs" in event:
                part["logprobs"] += event["logprobs"]
        elif kind == "response.function_call_arguments.delta":
            output[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "response.output_item.done":
            output[event["output_index"]]["status"] = event["item"]["status"]
    return output


@settings(max_examples=40, deadline=None)
@given(plans, st.sampled_from(["stop", "length", "abort", "error"]))
def test_events_are_valid_and_add_up(plan: list[tuple[str, str]], reason: str) -> None:
    events, response = written(plan, reason, tools=[WEATHER], metadata={"a": "b"})
    for event in events:
        strictly(EVENTS, event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress" and not events[0]["response"]["output"]
    assert events[-1]["response"] == response
    assert replayed(events) == response["output"]
    strictly(Response, response)
    text = "".join(t for kind, t in plan if kind == "content")
    assert Response.model_validate(response).output_text == text
    terminal = {"stop": "completed", "length": "incomplete"}.get(reason, "failed")
    assert events[-1]["type"] == f"response.{terminal}"
    assert sum(e["type"].endswith("output_item.added") for e in events) == len(response["output"])


def test_items_stand_in_the_order_of_the_text() -> None:
    plan = [("content", "a"), ("call", ""), ("arguments", "{}"), ("content", "b")]
    _, response = written(plan)
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["message", "function_call", "message"]
    assert response["output"][1]["arguments"] == "{}"


def test_an_empty_answer_is_an_empty_message() -> None:
    _, response = written([])
    assert Response.model_validate(response).output_text == ""
    assert [item["type"] for item in response["output"]] == ["message"]


def test_what_was_cut_off_is_incomplete() -> None:
    _, response = written([("reasoning", "r"), ("content", "a")], "length")
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_an_output_can_be_sent_back() -> None:
    plan = [("reasoning", "r"), ("content", "a"), ("call", ""), ("arguments", "{}")]
    _, response = written(plan)
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert chat(input=response["output"])["messages"] == [
        {
            "role": "assistant",
            "reasoning": "r",
            "reasoning_content": "r",
            "content": "a",
            "tool_calls": [call],
        }
    ]
