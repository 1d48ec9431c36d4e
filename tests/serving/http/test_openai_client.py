"""The `openai` package drives the server, unmodified: whole and streamed, sync and async, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from jaxinfer.engine import Engine
from serving.config import ServerConfig
from tests.serving.http.scripted import saying, scripted
from tests.serving.live import LiveServer

TOOL = "<tool_call>\n" + '{"name": "weather", "arguments": {"city": "Rome"}}' + "\n</tool_call>"


@pytest.fixture(scope="module")
def keyed(tiny_engine: Engine) -> Iterator[LiveServer]:
    config = ServerConfig(
        model="tiny",
        served_model_name=("tiny",),
        port=0,
        api_keys=("sk-right",),
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        enable_auto_tool_choice=True,
    )
    live = LiveServer(config, tiny_engine)
    yield live
    live.close()


@pytest.fixture
def client(keyed: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{keyed.url}/v1", api_key="sk-right", max_retries=0) as found:
        yield found
    keyed.settle()


def test_models(client: OpenAI):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


def test_completions(client: OpenAI):
    whole = client.completions.create(
        model="tiny", prompt="hello", max_tokens=5, temperature=0, logprobs=2
    )
    text = ""
    for chunk in client.completions.create(
        model="tiny", prompt="hello", max_tokens=5, temperature=0, stream=True
    ):
        text += chunk.choices[0].text
    assert text == whole.choices[0].text
    assert whole.usage is not None and whole.usage.completion_tokens == 5
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or []) == 5


def test_chat(client: OpenAI):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    arguments: dict[str, Any] = {
        "model": "tiny", "messages": messages, "n": 2, "stop": ["AAAAA"],
        "extra_body": {"allowed_token_ids": [65]},
    }  # fmt: skip
    whole = client.chat.completions.create(**arguments, logprobs=True, top_logprobs=1)
    with client.chat.completions.stream(
        **arguments, stream_options={"include_usage": True}
    ) as stream:
        final = stream.get_final_completion()
    assert [c.message.content for c in final.choices] == [c.message.content for c in whole.choices]
    assert final.usage is not None and whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens == 10
    assert whole.choices[0].logprobs is not None


def test_tools(client: OpenAI, keyed: LiveServer):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    arguments: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": tools,
    }
    with scripted(keyed.service, saying(keyed.service, [list(TOOL)])):
        whole = client.chat.completions.create(**arguments)
        with client.chat.completions.stream(**arguments) as stream:
            final = stream.get_final_completion()
    for answer in (whole, final):
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function" and call.function.name == "weather"
        assert call.function.arguments == '{"city": "Rome"}'
        assert answer.choices[0].finish_reason == "tool_calls"


async def test_async_streams(keyed: LiveServer):
    async with AsyncOpenAI(base_url=f"{keyed.url}/v1", api_key="sk-right", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=4, stream=True
        )
        reasons = [c.finish_reason async for chunk in stream for c in chunk.choices]
    assert reasons[-1] in ("length", "stop") and set(reasons[:-1]) == {None}


def test_errors_become_the_right_exceptions(client: OpenAI, keyed: LiveServer):
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="a", n=500)
    assert bad.value.param == "n" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-7", prompt="a")
    assert missing.value.code == "not_found"
    wrong = client.with_options(api_key="sk-wrong")
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    with (
        scripted(keyed.service, saying(keyed.service, [["a"]], "error", "x")),
        pytest.raises(openai.APIError) as failed,
    ):
        list(client.completions.create(model="tiny", prompt="a", stream=True))
    assert "internal error" in failed.value.message
