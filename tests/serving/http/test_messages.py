"""/v1/messages on a live server: whole and streamed say the same, in the words of Anthropic's API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from jaxinfer.engine import Engine
from serving.config import ServerConfig
from serving.http.answer import Answer, Step
from serving.http.exchange import Failed
from tests.serving.http.dialect_support import (
    CALL,
    FUNCTION,
    HELLO,
    REASONING,
    post,
    streamed,
    whole,
    without_ids,
)
from tests.serving.http.test_messages_translation import replayed
from tests.serving.live import LiveServer

PATH = "/v1/messages"
TOOL = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}


def checked(server: LiveServer, **body: Any) -> dict[str, Any]:
    """The message, streamed and whole; both are the same."""
    body = {"messages": HELLO, "max_tokens": 40, "temperature": 0} | body
    message = whole(server, PATH, body)
    built = replayed(streamed(server, PATH, body))
    for answer in (message, built):
        usage = answer["usage"]
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    assert without_ids(built) == without_ids(message)
    return message


def test_reasoning_and_calls_are_blocks(calling_server: LiveServer) -> None:
    message = checked(calling_server, tools=[TOOL])
    thinking, call = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", REASONING)
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"x": 1})
    assert message["stop_reason"] == "tool_use" and call["id"]


def test_calls_are_text_when_they_are_not_asked_for(calling_server: LiveServer) -> None:
    message = checked(calling_server, tools=[TOOL], tool_choice={"type": "none"})
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["content"][1]["text"] == CALL
    assert message["stop_reason"] == "end_turn"


def test_stop_reasons(calling_server: LiveServer) -> None:
    stopped = checked(calling_server, stop_sequences=["zz", "(x"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "(x")
    assert stopped["content"][-1]["text"] == "[f"
    cut = checked(calling_server, max_tokens=1)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    assert [block["type"] for block in cut["content"]] == ["thinking"]


def test_a_turn_with_calls_can_be_sent_back(calling_server: LiveServer) -> None:
    message = checked(calling_server, tools=[TOOL])
    result = {"type": "tool_result", "tool_use_id": message["content"][1]["id"], "content": "7"}
    turns = [
        *HELLO,
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result]},
    ]
    assert whole(calling_server, PATH, {"messages": turns, "tools": [TOOL], "max_tokens": 3})["id"]


def test_tokens_are_counted_as_they_are_used(server: LiveServer) -> None:
    prompt = {"messages": HELLO, "system": "be brief", "tools": [TOOL]}
    quiet = prompt | {"tool_choice": {"type": "none"}}
    used = whole(server, PATH, quiet | {"max_tokens": 1})["usage"]
    counted = whole(server, f"{PATH}/count_tokens", prompt)
    assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}
    long = {"messages": [{"role": "user", "content": "a" * 500}]}
    refused = post(server, f"{PATH}/count_tokens", long)
    assert refused.status_code == 400 and "519 tokens" in refused.json()["error"]["message"]


def test_a_final_assistant_text_is_continued(server: LiveServer) -> None:
    turns = [*HELLO, {"role": "assistant", "content": "Sure:"}]
    chat_body = {"messages": turns, "add_generation_prompt": False, "continue_final_message": True}
    limits = {"temperature": 0, "max_tokens": 8}
    chat = whole(server, "/v1/chat/completions", chat_body | limits)
    message = checked(server, messages=turns, max_tokens=8)
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_a_client_that_leaves_ends_its_request(calling_server: LiveServer) -> None:
    body = {"messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 480}
    with httpx.stream("POST", calling_server.url + PATH, json=body, timeout=60) as stream:
        next(stream.iter_lines())
    calling_server.settle(timeout=2)
    assert not calling_server.service.running


def test_an_aborted_stream_ends_with_an_error(calling_server: LiveServer) -> None:
    body = {"messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 480}
    with httpx.stream("POST", calling_server.url + PATH, json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        service = calling_server.service
        assert calling_server.call(service.abort(stream.headers["request-id"]))
        kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert kinds[-1] == "error" and "message_stop" not in kinds
    calling_server.settle()


@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "nope"}, 404, "not_found_error", "model"),
        ({"tools": [TOOL]}, 400, "invalid_request_error", "tool_choice"),
        ({"container": "c"}, 400, "invalid_request_error", "container"),
        ({"messages": [{"role": "user", "content": "x" * 600}], "stream": True},
         400, "invalid_request_error", "prompt"),
    ],
)  # fmt: skip
def test_errors(
    server: LiveServer, body: dict[str, Any], status: int, kind: str, param: str
) -> None:
    response = post(server, PATH, {"messages": HELLO, "max_tokens": 5} | body)
    answer = response.json()
    assert (response.status_code, answer["type"]) == (status, "error"), answer
    assert (answer["error"]["type"], answer["error"]["param"]) == (kind, param)
    assert param in answer["error"]["message"]


def test_other_methods_are_refused_in_the_same_words(server: LiveServer) -> None:
    response = httpx.get(server.url + PATH)
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_anthropics_headers(tiny_engine: Engine) -> None:
    live = LiveServer(ServerConfig(model="tiny", port=0, api_keys=("key",)), tiny_engine)
    try:
        body = {"messages": HELLO, "max_tokens": 1}
        version = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
        answer = post(live, PATH, body, **version, **{"x-api-key": "key"})
        assert answer.status_code == 200 and answer.headers["request-id"]
        for path in (PATH, f"{PATH}/count_tokens"):
            refused = post(live, path, body, **version, **{"x-api-key": "other"})
            assert refused.status_code == 401
            assert refused.json()["error"]["type"] == "authentication_error"
    finally:
        live.close()


def test_a_failure_after_the_first_event_is_an_event(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps(self: Answer, interval: int = 1) -> Any:
        yield Step([("content", "begun")], [])
        raise Failed("secret")

    monkeypatch.setattr(Answer, "steps", steps)
    body = {"messages": HELLO, "max_tokens": 5}
    *events, last = streamed(server, PATH, body)
    assert replayed(events)["content"] == [{"type": "text", "text": "begun"}]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "secret" not in last["error"]["message"]
    assert post(server, PATH, body).json()["error"]["type"] == "api_error"
