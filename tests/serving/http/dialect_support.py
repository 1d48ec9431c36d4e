"""What the tests of /v1/responses and /v1/messages share: streams as events, a model that calls tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from jaxinfer.engine import Engine
from serving.config import ServerConfig
from tests.checkpoints import CHAT_TEMPLATE
from tests.serving.live import LiveServer

# What the CHAIN model answers: each character once. Reasoning as deepseek_r1 ends it, a pythonic call.
REASONING, CALL = "ab", "[f(x=1)]"
ANSWER = f"{REASONING}</think>{CALL}"
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
HELLO = [{"role": "user", "content": "hello"}]


def chain_engine(chain: Callable[..., Path]) -> Engine:
    """An Engine that answers ANSWER to any chat (the template's prompt ends with a newline)."""
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 16}
    return Engine(str(chain([ord(c) for c in "\n" + ANSWER])), progress=False, **small)


def start_calling(engine: Engine) -> LiveServer:
    """A server that tells reasoning and tool calls apart."""
    config = ServerConfig(
        model="chain",
        served_model_name=("chain",),
        port=0,
        tool_call_parser="pythonic",
        reasoning_parser="deepseek_r1",
        chat_template=CHAT_TEMPLATE.replace("assistant\n", "assistant\n<think>\n"),
        enable_auto_tool_choice=True,
    )
    return LiveServer(config, engine)


def post(server: LiveServer, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=headers, timeout=60)


def whole(server: LiveServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = post(server, path, body)
    assert response.status_code == 200, response.text
    return strict_json(response.text)


def streamed(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; each one's name is its type."""
    response = post(server, path, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    assert response.text.endswith("\n\n")
    for block in response.text[:-2].split("\n\n"):
        name, data = block.split("\n")
        event = strict_json(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def without_ids(value: Any) -> Any:
    """A copy without what differs from one answer to the next: ids and times."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    changing = {"id", "item_id", "call_id", "created_at", "completed_at", "cached_tokens"}
    return {k: without_ids(v) for k, v in value.items() if k not in changing}
