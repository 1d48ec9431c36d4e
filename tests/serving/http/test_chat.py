"""/v1/chat/completions: streamed equals whole equals the engine; tools and reasoning at every cutting.

Also R-TRP-02, R-TRP-04 and R-TRP-05 on the wire, R-SRV-02, and rendering to tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jaxinfer.types import RequestOutput, SamplingParams
from serving.config import ServerConfig
from serving.http_server import build_app
from serving.service import Service
from tests.checkpoints import IM_START
from tests.serving.http.scripted import saying, scripted
from tests.serving.http.wire import (
    chat_completion,
    completion,
    events,
    join_chat,
    refusal,
    strict,
    without_nones,
)
from tests.serving.live import LiveServer

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "é"]}}\n</tool_call>'
ANSWER = f"<think>\nlet me see\n</think>\n\nI call it.\n{CALL}\n{CALL}"
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "three": {"n": 3, "temperature": 1.5},
    "logprobs": {"logprobs": True},
    "top logprobs": {"logprobs": True, "top_logprobs": 4, "return_token_ids": True},
    "prompt scores": {"prompt_logprobs": 2, "return_token_ids": True},
    "stop": {"stop": ["A"], "logit_bias": {"65": 100}, "min_tokens": 1},
    "newer name": {"max_completion_tokens": 3},
}


@pytest.fixture
def parsing(parsing_server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=parsing_server.url, timeout=60) as client:
        yield client
    parsing_server.settle()


def chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    return chat_completion(http.post("/v1/chat/completions", json={"messages": HI, **body}))


def stream(http: httpx.Client, **body: Any) -> dict[str, Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"messages": HI, **body, **options}
    return join_chat(events(http.post("/v1/chat/completions", json=body)))


def same(whole: dict[str, Any], joined: dict[str, Any]) -> bool:
    """Whether a joined stream tells what the whole answer does, but for ids that are random."""

    def known(answer: dict[str, Any]) -> Any:
        kept: dict[str, Any] = {
            k: answer.get(k) for k in ("choices", "usage", "prompt_logprobs", "prompt_token_ids")
        }
        kept["usage"] = {**kept["usage"], "prompt_tokens_details": None}
        for choice in kept["choices"]:
            for call in choice["message"].get("tool_calls", ()):
                assert call.pop("id")
            if choice.get("logprobs"):
                choice["logprobs"].pop("refusal", None)
        return without_nones(kept | {"choices": [without_nones(c) for c in kept["choices"]]})

    return known(strict(json.dumps(whole))) == known(strict(json.dumps(joined)))


@pytest.mark.parametrize("name", CASES)
def test_streamed_is_whole_is_the_engine(name: str, http: httpx.Client, server: LiveServer):
    body: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "seed": 2} | CASES[name]
    whole = chat(http, **body)
    assert same(whole, stream(http, **body))
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    names = {"n", "temperature", "seed", "stop", "logit_bias", "min_tokens"} & set(body)
    params = SamplingParams(
        **{name: body[name] for name in names},
        max_tokens=body.get("max_completion_tokens", body["max_tokens"]),
        logprobs=body.get("top_logprobs", 0),
    )

    async def last() -> RequestOutput:
        found = None
        ids = server.engine.inputs.prompt(prompt, False)
        async for output in server.engine.generate(ids, params):
            found = output
        assert found is not None
        return found

    expected = server.call(last())
    for choice, output in zip(whole["choices"], expected.outputs, strict=True):
        assert choice["message"]["content"] == output.text
        assert choice["finish_reason"] == output.finish_reason
        assert choice["stop_reason"] == output.stop_reason
        assert choice.get("token_ids", output.token_ids) == output.token_ids
        if body.get("logprobs"):
            assert output.logprobs is not None
            told = choice["logprobs"]["content"]
            chosen = [next(iter(entry.values())).logprob for entry in output.logprobs]
            assert [entry["logprob"] for entry in told] == chosen
            for entry, token in zip(told, output.token_ids, strict=True):
                tokenizer = server.engine.model.tokenizer
                assert tokenizer is not None
                assert bytes(entry["bytes"]) == tokenizer.pieces[token]
                top = [other["logprob"] for other in entry["top_logprobs"]]
                assert top == sorted(top, reverse=True)
                assert len(top) == body.get("top_logprobs", 0)
    assert whole["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


def test_every_cutting_of_reasoning_and_calls(parsing: httpx.Client, parsing_server: LiveServer):
    service = parsing_server.service
    with scripted(service, saying(service, [[ANSWER]])):
        whole = chat(parsing, tools=TOOLS)
    message = whole["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "let me see"
    assert message["content"] == "I call it."
    functions = [call["function"] for call in message["tool_calls"]]
    assert [(f["name"], json.loads(f["arguments"])) for f in functions] == [
        ("f", {"a": [1, "é"]})
    ] * 2
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    reasoning = service.tokenizer.encode("let me see", add_special_tokens=False)
    details = whole["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len(reasoning)}
    cuttings = [[ANSWER[:i], ANSWER[i:]] for i in range(0, len(ANSWER), 2)] + [list(ANSWER)]
    for pieces in cuttings:
        with scripted(service, saying(service, [pieces])):
            joined = stream(parsing, tools=TOOLS)
        joined["usage"], expected = None, {**whole, "usage": None}
        joined["usage"] = expected["usage"] = {}  # tokens depend on how this test cuts the text
        assert same(expected, joined), pieces


def test_outputs_are_parsed_apart(parsing: httpx.Client, parsing_server: LiveServer):
    texts = [["<think>a</think>b"], [CALL], ["plain"]]
    with scripted(parsing_server.service, saying(parsing_server.service, texts)):
        whole = chat(parsing, tools=TOOLS, n=3)
        assert same(whole, stream(parsing, tools=TOOLS, n=3))
    messages = [choice["message"] for choice in whole["choices"]]
    assert [m["content"] for m in messages] == ["b", None, "plain"]
    assert [m["reasoning"] for m in messages] == ["a", None, None]
    assert [c["finish_reason"] for c in whole["choices"]] == ["stop", "tool_calls", "stop"]


@pytest.mark.parametrize(
    "extra", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}], ids=str
)
def test_without_tools_calls_are_text(
    extra: dict[str, Any], parsing: httpx.Client, parsing_server: LiveServer
):
    text = f"see {CALL} and ```json```"
    with scripted(parsing_server.service, saying(parsing_server.service, [[text]])):
        for answer in (chat(parsing, **extra), stream(parsing, **extra)):
            assert answer["choices"][0]["message"]["content"] == text
            assert answer["choices"][0]["finish_reason"] == "stop"


def test_one_call_is_reported_if_asked(parsing: httpx.Client, parsing_server: LiveServer):
    body: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
    with scripted(parsing_server.service, saying(parsing_server.service, [[ANSWER]])):
        for answer in (chat(parsing, **body), stream(parsing, **body)):
            assert len(answer["choices"][0]["message"]["tool_calls"]) == 1


def test_a_cut_call_ends_for_length(parsing: httpx.Client, parsing_server: LiveServer):
    start = saying(parsing_server.service, [[CALL[:40]]], "length")
    with scripted(parsing_server.service, start):
        for answer in (chat(parsing, tools=TOOLS), stream(parsing, tools=TOOLS)):
            assert answer["choices"][0]["finish_reason"] == "length"


def test_reasoning_can_be_left_out_and_switched_off(
    parsing: httpx.Client, parsing_server: LiveServer
):
    text = "<think>\nhm\n</think>\n\nyes"
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    with scripted(parsing_server.service, saying(parsing_server.service, [[text]])):
        for ask in (chat, stream):
            silent = ask(parsing, include_reasoning=False)
            message = silent["choices"][0]["message"]
            assert message["content"] == "yes" and "reasoning" not in message
            assert silent["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
            plain = ask(parsing, **off)["choices"][0]["message"]
            assert plain["content"] == text and not plain.get("reasoning")


def test_reasoning_without_an_end_is_told(parsing: httpx.Client, parsing_server: LiveServer):
    with scripted(parsing_server.service, saying(parsing_server.service, [["<think>never"]])):
        for answer in (chat(parsing), stream(parsing)):
            (choice,) = answer["choices"]
            assert choice["message"]["reasoning"] == "never" and choice["reasoning_truncated"]


def test_continuing_a_message(http: httpx.Client):
    messages = [*HI, {"role": "assistant", "content": "I am"}]
    body = {
        "messages": messages, "continue_final_message": True, "max_tokens": 3, "temperature": 0,
        "return_token_ids": True,
    }  # fmt: skip
    whole = chat(http, **body)
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nI am"
    raw = completion(
        http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3, "temperature": 0})
    )
    text = whole["choices"][0]["message"]["content"]
    assert text == raw["choices"][0]["text"]
    echoed = chat(http, **body, echo=True)
    assert echoed["choices"][0]["message"]["content"] == "I am" + text
    assert same(echoed, stream(http, **body, echo=True))


def test_content_parts_and_truncation(http: httpx.Client):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    split = chat(http, messages=[{"role": "user", "content": parts}], max_tokens=2, temperature=0)
    joined = chat(http, messages=[{"role": "user", "content": "a\nb"}], max_tokens=2, temperature=0)
    assert split["choices"] == joined["choices"]
    short = chat(http, truncate_prompt_tokens=4, max_tokens=1, return_token_ids=True)
    full = chat(http, max_tokens=1, return_token_ids=True)
    assert short["prompt_token_ids"] == full["prompt_token_ids"][-4:]
    long = [{"role": "user", "content": "x" * 2000}]  # longer than the model takes
    cut = chat(http, messages=long, truncate_prompt_tokens=40, max_tokens=1, return_token_ids=True)
    assert len(cut["prompt_token_ids"]) == 40


def test_fields_that_the_template_ignores_are_warned_of(http: httpx.Client):
    body = {"messages": HI, "max_tokens": 1, "reasoning_effort": "low", "store": True}
    response = http.post("/v1/chat/completions", json=body)
    assert response.headers["x-jaxinfer-warning"].endswith("store, reasoning_effort")


def test_rendered_chats_generate_the_same(http: httpx.Client):
    body = {"messages": HI, "max_tokens": 5, "temperature": 0.8, "seed": 4, "stop": ["zzz"]}
    answer = chat(http, **body, return_token_ids=True)
    rendered = strict(http.post("/v1/chat/completions/render", json=body).text)
    assert rendered["token_ids"] == answer["prompt_token_ids"]
    whole = strict(http.post("/inference/v1/generate", json=rendered).text)
    assert whole["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
    streamed = events(
        http.post(
            "/inference/v1/generate",
            json={**rendered, "stream": True, "stream_options": {"include_usage": True}},
        )
    )
    ids = [t for e in streamed for c in e["choices"] for t in c["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]
    assert streamed[-1]["usage"]["completion_tokens"] == len(ids)


def test_token_in_token_out_scores(http: httpx.Client):
    params = {"n": 2, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 4, "seed": 3}
    body = {"token_ids": [104, 101, 33], "sampling_params": params}
    whole = strict(http.post("/inference/v1/generate", json=body).text)
    streamed = events(http.post("/inference/v1/generate", json=body | {"stream": True}))
    for choice in whole["choices"]:
        parts = [c for e in streamed for c in e["choices"] if c["index"] == choice["index"]]
        assert [t for p in parts for t in p["token_ids"]] == choice["token_ids"]
        scores = [s for p in parts for s in p["logprobs"]["content"]]
        assert scores == choice["logprobs"]["content"]
        assert [s["token"] for s in scores] == [f"token_id:{t}" for t in choice["token_ids"]]
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert len(whole["prompt_logprobs"]) == 3
    assert [e["prompt_logprobs"] for e in streamed if "prompt_logprobs" in e] == [
        whole["prompt_logprobs"]
    ]


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_show_in_no_mode_or_in_all(
    skip: bool, http: httpx.Client, parsing: httpx.Client
):
    """R-TRP-05."""
    body = {"allowed_token_ids": [IM_START], "max_tokens": 3, "skip_special_tokens": skip}
    texts = [
        ask(client, **body)["choices"][0]["message"].get("content", "")
        for ask in (chat, stream)
        for client in (http, parsing)
    ]
    assert texts == ["" if skip else "<|im_start|>" * 3] * 4


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", ""),
        ("{{ 'a' * 10**9 }}", ""),
    ],
)
async def test_what_the_template_refuses_is_the_clients_fault(
    source: str, reason: str, server: LiveServer
):
    """R-SRV-02."""
    config = ServerConfig(model="tiny", chat_template=source)
    transport = httpx.ASGITransport(build_app(Service(config, server.engine)))
    async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60) as client:
        error = refusal(await client.post("/v1/chat/completions", json={"messages": HI}))
    assert "template" in error["message"] and reason in error["message"]
    assert " at 0x" not in error["message"] and "Traceback" not in error["message"]


def test_continuous_usage(http: httpx.Client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HI, "max_tokens": 5, "stream": True, "stream_options": options, "n": 2}
    chunks = events(http.post("/v1/chat/completions", json={**body, "ignore_eos": True}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 10 and chunks[-1]["choices"] == []
    assert counts[:2] == [0, 0]  # the roles: a client that counts tokens by chunk sees none in them


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([{"role": "alien", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
         "messages[0].tool_calls[0].function.arguments"),
        ([], "messages"),
        ("hi", "messages"),
        ([1], "messages[0]"),
    ],
)  # fmt: skip
def test_bad_messages_name_their_place(messages: Any, where: str, http: httpx.Client):
    error = refusal(http.post("/v1/chat/completions", json={"messages": messages}))
    assert error["param"] == where and where in error["message"]
