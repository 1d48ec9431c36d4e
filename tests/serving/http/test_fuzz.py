"""Any body gets an answer with the right shape: never a 5xx, never a lost health, never a leak.

A body that is right gets up to four fields of the API's own names with values of all kinds, right and
wrong; a longer run is marked slow.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.http.fields import NEUTRAL
from serving.http.openapi import BODIES
from tests.serving.http.wire import events, strict
from tests.serving.live import LiveServer

HI = [{"role": "user", "content": "hi"}]
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/chat/completions/render": {"messages": HI},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"model": "tiny", "messages": HI, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": HI},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}
FIELDS = {path: sorted({n for m in BODIES[path] for n in m.model_fields}) for path in RIGHT}
FLAGS = ("stream", "echo", "logprobs", "n", "return_token_ids", "stream_options", "top_logprobs")
ODD_TEXTS = [
    "",
    "a",
    "user",
    "hello \U0001f600",
    "\ud800",
    "auto",
    "none",
    "text",
    "x" * 300,
    "\x00",
]
texts = st.sampled_from(ODD_TEXTS)
numbers = st.sampled_from([-1, 0, 1, 2, 5, 300, 2**31, 2**63, 2**70, -0.5, 0.5, 1e300, 1e-300])
scalars = st.none() | st.booleans() | numbers | texts
keys = st.sampled_from(
    ["role", "content", "type", "text", "name", "1", "include_usage", "function"]
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
token_ids = st.lists(st.integers(-1, 290), max_size=5)
likely = (
    st.sampled_from([True, False, None, 0, 1, 2, 0.5, "a", "tiny", {"include_usage": True}, {}, []])
    | token_ids
    | st.lists(texts, max_size=3)
    | st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system", "tool"])},
            optional={"content": texts | values, "tool_calls": values},
        ),
        max_size=3,
    )
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path and a body for it."""
    path = draw(st.sampled_from(sorted(RIGHT)))
    body = dict(RIGHT[path])
    names = FIELDS[path] + [name for name in FLAGS if name in FIELDS[path]] * 4
    for name in draw(st.lists(st.sampled_from(names), max_size=4)):
        body[name] = draw(likely | values)
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.sampled_from([*sorted(NEUTRAL), "odd \r\n"]))] = draw(values)
    if draw(st.integers(0, 9)) == 0:
        del body[draw(st.sampled_from(sorted(body)))]
    return path, body


def check(client: httpx.Client, path: str, body: Any) -> int:
    raw = json.dumps(body).encode()  # escapes, so that lone surrogates can be sent
    response = client.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404, 413), response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        if path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"):
            assert all("error" not in chunk for chunk in events(response))
    elif response.status_code == 200:
        strict(response.text)
    else:
        assert strict(response.text)["error"]["message"]
    return response.status_code


def run(server: LiveServer, examples: int) -> None:
    seen: Counter[int] = Counter()
    with httpx.Client(base_url=server.url, timeout=60) as client:

        @settings(
            max_examples=examples,
            deadline=None,
            suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
        )
        @given(requests())
        def fuzz(request: tuple[str, dict[str, Any]]) -> None:
            seen[check(client, *request)] += 1

        fuzz()
        assert client.get("/health").status_code == 200
    server.settle()
    assert min(seen[200], seen[400]) > examples / 10, seen


def test_fuzzed_bodies(server: LiveServer):
    run(server, 300)


@pytest.mark.slow
def test_many_fuzzed_bodies(parsing_server: LiveServer):
    run(parsing_server, 2_000)
