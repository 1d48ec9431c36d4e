"""Every refusal names its field and keeps OpenAI's shape; nothing of it reaches the engine (R-SRV-09).

Neutral values of fields that are not supported pass.
"""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from serving.http.fields import NEUTRAL
from tests.serving.http.wire import refusal
from tests.serving.live import LiveServer

HUGE = 10**18
WRONG: list[tuple[str, Any]] = [
    ("n", 0), ("n", 129), ("n", 100_000), ("n", -1), ("n", "2"), ("n", 1.5), ("n", True),
    ("temperature", -0.1), ("temperature", "hot"), ("temperature", 10_001),
    ("top_p", 1.1), ("top_p", -1), ("top_k", -2), ("top_k", HUGE), ("min_p", 2),
    ("repetition_penalty", 0), ("presence_penalty", 3), ("frequency_penalty", -3),
    ("max_tokens", -1), ("max_tokens", HUGE), ("max_tokens", 257), ("max_tokens", 1.0),
    ("max_completion_tokens", -1),
    ("min_tokens", -1), ("min_tokens", HUGE), ("seed", -2), ("seed", 2**63), ("seed", 0.5),
    ("stop", ""), ("stop", ["x"] * 17), ("stop", ["x"] * 10_000), ("stop", "x" * 1_000_000),
    ("stop", [1]), ("stop", {"a": 1}), ("stop", ["x" * 1025]),
    ("stop_token_ids", [-1]), ("stop_token_ids", [288]), ("stop_token_ids", "a"),
    ("allowed_token_ids", []), ("allowed_token_ids", [9999]), ("allowed_token_ids", [0] * 100_000),
    ("logit_bias", {"1": 101}), ("logit_bias", {"x": 1}), ("logit_bias", {"999": 1}),
    ("logit_bias", {str(i): 1 for i in range(100_000)}), ("logit_bias", []),
    ("prompt_logprobs", 21), ("prompt_logprobs", -1), ("ignore_eos", "yes"), ("stream", "yes"),
    ("stream_options", {"include_usage": True}), ("echo", 1),
    ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", 0), ("priority", HUGE),
    ("priority", "high"), ("cache_salt", ""), ("cache_salt", 5), ("cache_salt", "x" * 2000),
    ("request_id", ""), ("request_id", "a b"), ("request_id", "x\r\ny"), ("request_id", "x" * 300),
    ("user", 7), ("model", 3), ("skip_special_tokens", None.__class__.__name__),
]  # fmt: skip
COMPLETIONS: list[tuple[str, Any]] = [
    ("prompt", None), ("prompt", ""), ("prompt", []), ("prompt", [[]]), ("prompt", {}), ("prompt", 5),
    ("prompt", [1, "a"]), ("prompt", ["a", [1]]), ("prompt", [1.5]), ("prompt", [True]),
    ("prompt", [-1]), ("prompt", [288]), ("prompt", [2**70]), ("prompt", [0] * 257),
    ("prompt", "x" * 400), ("prompt", "x" * 20_000_000), ("prompt", ["a"] * 1025),
    ("prompt", [[1]] * 50_000), ("prompt", ["a", ""]),
    ("logprobs", -1), ("logprobs", 21), ("logprobs", True),
]  # fmt: skip
CHAT: list[tuple[str, Any]] = [
    ("logprobs", 1), ("top_logprobs", 3), ("top_logprobs", -1), ("top_logprobs", 21),
    ("messages", [{"role": "user", "content": "x" * 20_000_000}]),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "x" * 200_000}]}]),
    ("max_tokens", 0), ("tools", {}), ("tools", "x"), ("tools", [1]),
    ("tool_choice", "required"), ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("tool_choice", 7), ("echo", True), ("chat_template_kwargs", {"tokenize": True}),
    ("chat_template_kwargs", {"messages": []}), ("chat_template_kwargs", {"chat_template": "x"}),
    ("chat_template_kwargs", {"bos_token": "x"}), ("chat_template_kwargs", "x"),
    ("reasoning_effort", "extreme"), ("documents", "x"), ("add_generation_prompt", "x"),
    ("continue_final_message", 1), ("parallel_tool_calls", "x"),
]  # fmt: skip
UNSUPPORTED: list[tuple[str, Any]] = [
    ("best_of", 2), ("suffix", "x"), ("bad_words", ["x"]), ("response_format", {"type": "json_object"}),
    ("structured_outputs", {"regex": "a"}), ("guided_json", {}), ("logits_processors", ["x"]),
    ("thinking_token_budget", 5), ("kv_transfer_params", {"a": 1}), ("chat_template", "{{ 1 }}"),
    ("spaces_between_special_tokens", False), ("use_beam_search", True), ("length_penalty", 0.5),
    ("modalities", ["audio"]), ("audio", {}), ("functions", [{}]), ("prompt_embeds", "AAAA"),
]  # fmt: skip


def short(value: Any) -> str:
    return f"{value!r:.40}"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("field", "value"), WRONG, ids=short)
def test_bounds_of_shared_fields(path: str, field: str, value: Any, http: httpx.Client):
    check(http, path, field, value)


@pytest.mark.parametrize(("field", "value"), COMPLETIONS, ids=short)
def test_bounds_of_completions(field: str, value: Any, http: httpx.Client):
    check(http, "/v1/completions", field, value)


@pytest.mark.parametrize(("field", "value"), CHAT, ids=short)
def test_bounds_of_chat(field: str, value: Any, http: httpx.Client):
    check(http, "/v1/chat/completions", field, value)


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED, ids=short)
def test_what_the_engine_cannot_do_is_said(field: str, value: Any, http: httpx.Client):
    for path in ("/v1/completions", "/v1/chat/completions"):
        error = check(http, path, field, value)
        assert error["code"] == "unsupported" and error["param"] == field


def check(http: httpx.Client, path: str, field: str, value: Any) -> dict[str, Any]:
    chat = path.endswith("chat/completions")
    body = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
    start = time.monotonic()
    error = refusal(http.post(path, json=body | {field: value}))
    assert time.monotonic() - start < 5
    assert field in error["message"] and len(error["message"]) < 600
    assert field in (error["param"] or "body")
    return error


def test_tools_need_a_parser(http: httpx.Client):
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "max_tokens": 1}
    for choice in (None, "auto"):
        error = refusal(http.post("/v1/chat/completions", json=body | {"tool_choice": choice}))
        assert error["param"] == "tool_choice" and "--tool-call-parser" in error["message"]
    answer = http.post("/v1/chat/completions", json=body | {"tool_choice": "none"})
    assert answer.status_code == 200
    for wrong in ({}, {"type": "web_search"}, {"type": "function", "function": {}}):
        bad = body | {"tool_choice": "none", "tools": [wrong]}
        assert refusal(http.post("/v1/chat/completions", json=bad))["param"].startswith("tools[0]")


def test_neutral_values_pass(http: httpx.Client):
    for name, values in NEUTRAL.items():
        for value in values:
            body = {"prompt": "a", "max_tokens": 1, name: value}
            response = http.post("/v1/completions", json=body)
            assert response.status_code == 200, (name, value, response.text)
            assert "x-jaxinfer-warning" not in response.headers


def test_text_that_is_no_unicode(http: httpx.Client):
    for path, body in (
        ("/v1/completions", b'{"prompt": "\\ud800"}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
        ("/tokenize", b'{"prompt": "\\ud800"}'),
    ):
        response = http.post(path, content=body, headers={"content-type": "application/json"})
        assert "surrogate" in refusal(response)["message"]
    stop = b'{"prompt": "a", "max_tokens": 1, "stop": ["\\ud800"]}'  # no text ever has it
    kind = {"content-type": "application/json"}
    assert http.post("/v1/completions", content=stop, headers=kind).status_code == 200
    name = b'{"prompt": "a", "\\ud800": 1}'
    assert refusal(http.post("/v1/completions", content=name, headers=kind))["message"]


def test_too_many_outputs(http: httpx.Client):
    error = refusal(http.post("/v1/completions", json={"prompt": ["a"] * 100, "n": 11}))
    assert error["param"] == "n" and "1024" in error["message"]


def test_models_and_routes(http: httpx.Client):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "model": "other"}
        error = refusal(http.post(path, json=body), 404)
        assert error["param"] == "model" and "tiny" in error["message"]
    assert refusal(http.get("/v1/models/other"), 404)["code"] == "not_found"
    assert refusal(http.get("/nowhere"), 404)["code"] == "not_found"
    response = http.get("/v1/completions")
    assert refusal(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_a_running_id_is_refused_and_a_header_is_not(http: httpx.Client, server: LiveServer):
    server.service.running["taken"] = server.service.running.get("taken")  # type: ignore[assignment]
    try:
        body = {"prompt": "a", "max_tokens": 1}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.service, "waiting", lambda: (0, 0))
            error = refusal(http.post("/v1/completions", json=body | {"request_id": "taken"}))
            assert error["param"] == "request_id"
            retry = http.post("/v1/completions", json=body, headers={"x-request-id": "taken"})
        assert retry.status_code == 200 and retry.headers["x-request-id"].startswith("taken-")
    finally:
        del server.service.running["taken"]


def test_a_header_of_a_running_request_of_several_prompts(
    http: httpx.Client, server: LiveServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server.service, "waiting", lambda: (0, 0))
    monkeypatch.setitem(server.service.running, "taken-1", None)  # type: ignore[arg-type]
    body = {"prompt": ["a", "b"], "max_tokens": 1}
    retry = http.post("/v1/completions", json=body, headers={"x-request-id": "taken"})
    assert retry.status_code == 200 and retry.headers["x-request-id"].startswith("taken-")


def test_refusals_are_counted_once(http: httpx.Client, server: LiveServer):
    seen: list[int] = []
    observe = lambda wire: seen.append(wire.status)  # noqa: E731
    server.service.on_reject.append(observe)
    try:
        http.post("/v1/completions", json={"prompt": 5})  # by the face
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 500})  # by the engine
        http.post(
            "/v1/completions", json={"prompt": "a", "request_id": "x" * 300}
        )  # by the service
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        http.get("/nowhere")
    finally:
        server.service.on_reject.remove(observe)
    assert seen == [400, 400, 400]
