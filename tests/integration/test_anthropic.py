"""The `anthropic` package against /v1/messages: its client, and its types read strictly.

The package comes from the environment given with --clients; the model reasons and calls a tool.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.serving.http.dialect_support import (
    FUNCTION,
    HELLO,
    REASONING,
    chain_engine,
    post,
    start_calling,
)
from tests.serving.live import LiveServer

pytestmark = pytest.mark.clients
TOOL = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}
ASKED = {"model": "chain", "max_tokens": 60, "messages": HELLO, "tools": [TOOL]}
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def live(chain: Callable[..., Path]) -> Iterator[LiveServer]:
    engine = chain_engine(chain)
    server = start_calling(engine)
    yield server
    server.close()
    engine.close()


@pytest.fixture(scope="module")
def anthropic(borrow: Callable[[str], Any]) -> Any:
    return borrow("anthropic")


@pytest.fixture
def client(anthropic: Any, live: LiveServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        yield client


def kinds(message: Any) -> list[str]:
    return [block.type for block in message.content]


def test_messages_whole_and_streamed(client: Any):
    whole = client.messages.create(**ASKED, extra_body=GREEDY)
    assert kinds(whole) == ["thinking", "tool_use"] and whole.stop_reason == "tool_use"
    assert whole.content[0].thinking == REASONING and whole.content[1].input == {"x": 1}
    with client.messages.stream(**ASKED, extra_body=GREEDY) as stream:
        events = [event.type for event in stream]
        built = stream.get_final_message()
    assert events[0] == "message_start" and events[-1] == "message_stop"
    assert kinds(built) == kinds(whole) and built.stop_reason == whole.stop_reason
    assert built.content[0].thinking == whole.content[0].thinking
    assert built.content[1].input == whole.content[1].input
    assert built.usage.output_tokens == whole.usage.output_tokens


def test_the_answer_goes_into_the_next_turn(client: Any):
    first = client.messages.create(**ASKED, extra_body=GREEDY)
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "7"}
    turns = [
        *HELLO,
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    asked = ASKED | {"messages": turns}
    longer = client.messages.create(**asked, extra_body=GREEDY)
    assert longer.stop_reason == "tool_use"
    counted = client.messages.count_tokens(model="chain", messages=turns, tools=[TOOL])
    cached = longer.usage.cache_read_input_tokens
    assert counted.input_tokens == longer.usage.input_tokens + cached


def test_every_byte_fits_the_packages_types(anthropic: Any, live: LiveServer):
    """Strictly: no number as text, no field of another type."""
    types = import_module("anthropic.types")
    body = ASKED | GREEDY
    TypeAdapter(types.Message).validate_json(post(live, "/v1/messages", body).text, strict=True)
    event = TypeAdapter(types.RawMessageStreamEvent)
    text = post(live, "/v1/messages", body | {"stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line[:6] == "data: "]
    read = [event.validate_json(line, strict=True) for line in lines if '"ping"' not in line]
    assert {e.type for e in read} == {
        "message_start", "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    }  # fmt: skip
    assert json.loads(lines[-1]) == {"type": "message_stop"}


def test_errors_are_the_packages_errors(anthropic: Any, client: Any):
    with pytest.raises(anthropic.NotFoundError) as error:
        client.messages.create(**(ASKED | {"model": "nope"}))
    assert error.value.status_code == 404 and error.value.body["type"] == "error"
    with pytest.raises(anthropic.BadRequestError, match="container") as error:
        client.messages.create(**ASKED, extra_body={"container": "x"})
    assert error.value.body["error"]["type"] == "invalid_request_error"
