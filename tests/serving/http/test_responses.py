"""/v1/responses on a live server: the openai package reads it, and it says what chat completions say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from jaxinfer.engine import Engine
from serving.config import ServerConfig
from serving.http.answer import Answer, Step
from serving.http.exchange import Failed
from tests.serving.http.dialect_support import (
    ANSWER,
    CALL,
    FUNCTION,
    HELLO,
    REASONING,
    post,
    streamed,
    whole,
    without_ids,
)
from tests.serving.live import LiveServer

PATH = "/v1/responses"
TOOL = {"type": "function", **FUNCTION}
LOGPROBS = "message.output_text.logprobs"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def checked(server: LiveServer, **body: Any) -> dict[str, Any]:
    """The answer, streamed and whole; both are the same and as the openai package's types are."""
    body = {"input": "hello", "max_output_tokens": 40} | body
    answer = whole(server, PATH, body)
    events = streamed(server, PATH, body)
    for event in events:
        EVENTS.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert without_ids(events[-1]["response"]) == without_ids(answer)
    Response.model_validate(answer)
    return answer


# --- the same as chat completions -------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_chat_responses_and_messages_say_the_same(server: LiveServer, temperature: float) -> None:
    sampling = {"model": "tiny", "temperature": temperature, "top_p": 0.95, "seed": 11}
    limits = {"max_completion_tokens": 20}
    logprobs = {"logprobs": True, "top_logprobs": 2}
    messages = [{"role": "system", "content": "be brief"}, *HELLO]
    chat_body = sampling | limits | logprobs | {"messages": messages}
    chat = whole(server, "/v1/chat/completions", chat_body)
    mine = checked(
        server,
        **sampling,
        instructions="be brief",
        max_output_tokens=20,
        include=[LOGPROBS],
        top_logprobs=2,
    )
    theirs = whole(
        server,
        "/v1/messages",
        sampling | {"system": "be brief", "messages": HELLO, "max_tokens": 20},
    )
    choice = chat["choices"][0]
    part = mine["output"][0]["content"][0]
    assert part["text"] == choice["message"]["content"]
    assert "".join(block["text"] for block in theirs["content"]) == part["text"]
    assert part["logprobs"] == choice["logprobs"]["content"]
    counts = (chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"])
    assert (mine["usage"]["input_tokens"], mine["usage"]["output_tokens"]) == counts
    told = theirs["usage"]
    prompt = told["input_tokens"] + told["cache_read_input_tokens"]
    assert (prompt, told["output_tokens"]) == counts


def test_reasoning_and_calls_are_those_of_chat(calling_server: LiveServer) -> None:
    chat_body = {"messages": HELLO, "tools": [{"type": "function", "function": FUNCTION}]}
    chat = whole(calling_server, "/v1/chat/completions", chat_body | {"temperature": 0})
    message = chat["choices"][0]["message"]
    answer = checked(calling_server, tools=[TOOL], temperature=0)
    reasoning, call = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": REASONING}]
    assert message["reasoning"] == REASONING
    function = message["tool_calls"][0]["function"]
    assert (call["type"], call["name"], call["arguments"]) == (
        "function_call",
        function["name"],
        function["arguments"],
    )
    assert answer["status"] == "completed"
    details = chat["usage"]["completion_tokens_details"]
    assert answer["usage"]["output_tokens_details"] == details


def test_calls_are_text_when_they_are_not_asked_for(calling_server: LiveServer) -> None:
    answer = checked(calling_server, tools=[TOOL], tool_choice="none", temperature=0)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["output"][1]["content"][0]["text"] == CALL


def test_what_is_cut_off_in_reasoning_is_incomplete(calling_server: LiveServer) -> None:
    answer = checked(calling_server, max_output_tokens=1, temperature=0)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = answer["output"]
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")


# --- the openai package -----------------------------------------------------------------------


def test_the_openai_package_streams(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 9}
    answer = client.responses.create(**arguments, temperature=0)
    text, last = "", None
    with client.responses.create(**arguments, temperature=0, stream=True) as stream:
        for last in stream:
            if last.type == "response.output_text.delta":
                text += last.delta
    assert last is not None and last.type == "response.incomplete"
    assert text == last.response.output_text == answer.output_text
    with client.responses.stream(**arguments, temperature=0) as manager:
        kinds = [event.type for event in manager]
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"


def test_the_openai_package_puts_reasoning_and_calls_together(calling_server: LiveServer) -> None:
    tool: Any = TOOL | {"strict": True}
    with (
        openai.OpenAI(base_url=f"{calling_server.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(model="chain", input="hi", tools=[tool], temperature=0) as stream,
    ):
        stream.until_done()
        final = stream.get_final_response()
    reasoning, call = final.output
    assert reasoning.type == "reasoning" and reasoning.content
    assert reasoning.content[0].text == REASONING
    assert call.type == "function_call" and json.loads(call.arguments) == {"x": 1}


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "input": "cached " * 9, "max_output_tokens": 2}
    client.responses.create(**arguments)
    usage = client.responses.create(**arguments).usage
    assert usage is not None and usage.input_tokens_details.cached_tokens >= 16


# --- kept responses ---------------------------------------------------------------------------


def test_a_response_is_kept_until_it_is_deleted(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="hi", max_output_tokens=3)
    assert client.responses.retrieve(answer.id).model_dump() == answer.model_dump()
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    unkept = client.responses.create(model="tiny", input="hi", max_output_tokens=3, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="tiny", input="hi", previous_response_id=unkept.id)


def test_a_previous_response_is_continued(client: openai.OpenAI) -> None:
    common: dict[str, Any] = {"model": "tiny", "max_output_tokens": 5, "temperature": 0}
    first = client.responses.create(**common, input="one", instructions="not carried over")
    second = client.responses.create(**common, input="two", previous_response_id=first.id)
    third = client.responses.create(**common, input="three", previous_response_id=second.id)
    items: list[Any] = [
        {"role": "user", "content": "one"},
        *first.output,
        {"role": "user", "content": "two"},
        *second.output,
        {"role": "user", "content": "three"},
    ]
    by_hand = client.responses.create(**common, input=items)
    assert third.output_text == by_hand.output_text
    assert third.usage is not None and by_hand.usage is not None
    assert third.usage.input_tokens == by_hand.usage.input_tokens


def test_keys_keep_responses_apart(tiny_engine: Engine) -> None:
    config = ServerConfig(model="tiny", port=0, api_keys=("one", "two"))
    live = LiveServer(config, tiny_engine)
    try:
        body = {"input": "hi", "max_output_tokens": 2}
        name = post(live, PATH, body, authorization="Bearer one").json()["id"]
        codes = [
            httpx.get(f"{live.url}{PATH}/{name}", headers=headers).status_code
            for headers in (
                {"authorization": "Bearer one"},
                {"authorization": "Bearer two"},
                {"x-api-key": "two"},
                {},
            )
        ]
        assert codes == [200, 404, 404, 401]
        taken = {**body, "previous_response_id": name}
        assert post(live, PATH, taken, authorization="Bearer two").status_code == 400
    finally:
        live.close()


def test_a_running_response_is_cancelled(calling_server: LiveServer) -> None:
    body = {"input": "hi", "stream": True, "ignore_eos": True, "max_output_tokens": 480}
    with httpx.stream("POST", calling_server.url + PATH, json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        name = next(line for line in lines if line.startswith("data: ")).split('"id":"')[1]
        name = name.split('"')[0]
        running = httpx.get(f"{calling_server.url}{PATH}/{name}").json()
        assert running["status"] == "in_progress"
        Response.model_validate(running)
        cancelled = httpx.post(f"{calling_server.url}{PATH}/{name}/cancel").json()
        assert (cancelled["id"], cancelled["status"]) == (name, "cancelled")
        last = [line for line in lines if line.startswith("data: ")][-1]
    assert '"type":"response.failed"' in last and '"status":"cancelled"' in last
    calling_server.settle()
    assert httpx.get(f"{calling_server.url}{PATH}/{name}").json()["status"] == "cancelled"
    assert httpx.post(f"{calling_server.url}{PATH}/{name}/cancel").status_code == 400


# --- what goes wrong --------------------------------------------------------------------------


def test_a_client_that_leaves_ends_its_request(calling_server: LiveServer) -> None:
    body = {"input": "hi", "stream": True, "ignore_eos": True, "max_output_tokens": 480}
    with httpx.stream("POST", calling_server.url + PATH, json=body, timeout=60) as stream:
        next(stream.iter_lines())
    stats = calling_server.settle(timeout=2)
    assert stats is not None and not calling_server.service.running


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": "x", "model": "nope"}, 404, "model"),
        ({"input": "x", "background": True}, 400, "background"),
        ({"input": "x", "tools": [TOOL]}, 400, "tool_choice"),
        ({"input": "x", "tools": [TOOL], "tool_choice": "required"}, 400, "tool_choice"),
        ({"input": "x" * 600, "stream": True}, 400, "prompt"),
        ({"input": "x", "previous_response_id": "resp_0"}, 400, "previous_response_id"),
        ({"input": "x", "reasoning": {"effort": "huge"}}, 400, "reasoning.effort"),
        ({"input": "x", "chat_template_kwargs": {"tools": []}}, 400, "chat_template_kwargs"),
    ],
)
def test_errors(server: LiveServer, body: dict[str, Any], status: int, param: str) -> None:
    response = post(server, PATH, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}


def test_unknown_fields_are_warned_of(server: LiveServer) -> None:
    body = {"input": "x", "max_output_tokens": 1, "surprise": 1, "safety_identifier": "u"}
    assert post(server, PATH, body).headers["x-jaxinfer-warning"].endswith("ignored: surprise")


def test_a_failure_after_the_first_event_is_an_event(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps(self: Answer, interval: int = 1) -> Any:
        yield Step([("content", "begun")], [])
        raise Failed("secret")

    monkeypatch.setattr(Answer, "steps", steps)
    events = streamed(server, PATH, {"input": "x"})
    for event in events:
        EVENTS.validate_python(event)
    failed = events[-1]
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["output"][0]["content"][0]["text"] == "begun"
    assert "secret" not in failed["response"]["error"]["message"]
    assert post(server, PATH, {"input": "x"}).status_code == 500


def test_the_models_text_is_what_the_tests_say(calling_server: LiveServer) -> None:
    body = {"prompt": "\n", "temperature": 0, "max_tokens": 40}
    assert whole(calling_server, "/v1/completions", body)["choices"][0]["text"] == ANSWER
