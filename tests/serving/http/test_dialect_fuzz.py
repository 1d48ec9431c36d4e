"""Damaged bodies of /v1/responses and /v1/messages: an answer or a refusal, never a fault of ours."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.http.dialect_support import FUNCTION, HELLO
from tests.serving.http.wire import strict
from tests.serving.live import LiveServer

TOOL = {"type": "function", **FUNCTION, "strict": True}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "7"}
RESPONSES: dict[str, Any] = {
    "input": [
        *HELLO,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        CALL,
        RESULT,
    ],
    "max_output_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 3,
    "stop": ["x"],
    "logit_bias": {"5": 1},
    "tools": [TOOL],
    "tool_choice": "none",
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "metadata": {"a": "b"},
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
    "store": True,
    "stream": False,
    "chat_template_kwargs": {"a": 1},
}
MESSAGES: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "7"}]},
    ],
    "max_tokens": 2,
    "system": [{"type": "text", "text": "s"}],
    "stop_sequences": ["x"],
    "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
    "tool_choice": {"type": "none"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low"},
    "metadata": {"user_id": "u"},
    "stream": True,
    "top_k": 4,
}  # fmt: skip
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4),
    st.sampled_from(["\ud800", "\x00", "auto", "user", "text", "<|im_end|>", "a" * 999]),
    st.lists(st.none() | st.integers() | st.text(max_size=2), max_size=3),
    st.dictionaries(st.text(max_size=4), st.none() | st.integers() | st.text(max_size=2), max_size=3),
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside of a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in inner:
        found.append((*path, key))
        if isinstance(item, (dict, list)):
            found += places(item, (*path, key))
    return found


def damaged(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy in which one place has another value."""
    out = copy.deepcopy(body)
    where: Any = out
    for key in path[:-1]:
        where = where[key]
    where[path[-1]] = value
    return out


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)],
    ids=["responses", "messages"],
)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_damaged_bodies(
    server: LiveServer, path: str, body: dict[str, Any], data: st.DataObject
) -> None:
    logging.getLogger("httpx").setLevel(logging.WARNING)
    where = data.draw(st.sampled_from(places(body)))
    sent = json.dumps(damaged(body, where, data.draw(VALUES)))
    headers = {"content-type": "application/json"}
    answer = httpx.post(server.url + path, content=sent, headers=headers, timeout=60)
    assert answer.status_code in (200, 400, 404), (sent, answer.text)
    if answer.headers["content-type"] == "application/json":
        assert strict(answer.text)


def test_the_bodies_are_taken_as_they_are(server: LiveServer) -> None:
    for path, body in (("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)):
        answer = httpx.post(server.url + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
    server.settle()
