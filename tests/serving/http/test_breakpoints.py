"""Breakpoints over HTTP, on a model with recurrent states: where clients say that prompts will part.

They are token positions in completions and generate, and ends of blocks with cache_control in messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import numpy as np
import pytest

from jaxinfer.engine import Engine
from serving.calls import Record
from serving.config import ServerConfig
from serving.errors import BadField
from serving.http.body import validate
from serving.http.messages_request import MAX_MARKS, MessagesRequest, beginnings
from tests.checkpoints import CHAT_TEMPLATE
from tests.recurrent import SMALL, write_recurrent
from tests.serving.http.dialect_support import post, streamed, whole
from tests.serving.http.wire import refusal
from tests.serving.live import LiveServer

PAGE = 16
MARK = {"cache_control": {"type": "ephemeral"}}
TEMPLATE = (
    "{% for tool in tools or [] %}tool {{ tool.function.name }}: {{ tool.function.description }}\n{% endfor %}"
    + CHAT_TEMPLATE
)
GROUCHY = "{% if not messages[-1].content %}{{ raise_exception('say something') }}{% endif %}"
fresh = count(1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(str(write_recurrent(tmp_path_factory.mktemp("recurrent"))), **SMALL)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def recurrent(engine: Engine) -> Iterator[LiveServer]:
    config = ServerConfig("m", served_model_name=("m",), port=0, chat_template=TEMPLATE)
    live = LiveServer(config, engine)
    yield live
    live.settle()
    live.close()


@pytest.fixture
def records(recurrent: LiveServer) -> Iterator[list[Record]]:
    """The calls of one test, as they have ended."""
    found: list[Record] = []
    observers = recurrent.service.on_finish
    observers.append(found.append)
    yield found
    observers.remove(found.append)


def prompt(length: int) -> list[int]:
    """Tokens that no prompt before begins with."""
    return np.random.default_rng(next(fresh)).integers(5, 250, length).tolist()


def completed(server: LiveServer, tokens: Any, **more: Any) -> int:
    """Cached tokens of a completion."""
    answer = whole(server, "/v1/completions", {"prompt": tokens, "max_tokens": 1, **more})
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def generated(server: LiveServer, tokens: list[int], **more: Any) -> int:
    """Cached tokens of a token-in, token-out request."""
    body = {"token_ids": tokens, "sampling_params": {"max_tokens": 1}, **more}
    answer = whole(server, "/inference/v1/generate", body)
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


# --- positions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("send", [completed, generated])
def test_a_breakpoint_is_where_the_next_prompt_goes_on(recurrent: LiveServer, send: Any) -> None:
    head = prompt(50)
    send(recurrent, head, breakpoints=[34])
    assert send(recurrent, [*head[:40], *prompt(9)]) == 32
    plain = prompt(50)
    send(recurrent, plain, breakpoints=[])
    assert send(recurrent, [*plain[:40], *prompt(9)]) == 0


def test_a_text_has_breakpoints_in_tokens(recurrent: LiveServer, records: list[Record]) -> None:
    completed(recurrent, "xhello bhe", breakpoints=[5, 2])
    assert records[-1].call.prompt.breakpoints == (2, 5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"breakpoints": [4, 11]}, "breakpoints[1]=11 must be an integer in [1, 10]"),
        ({"breakpoints": [0]}, "breakpoints[0]=0"),
        ({"breakpoints": ["3"]}, "breakpoints[0]='3'"),
        ({"breakpoints": 3}, "breakpoints=3"),
        ({"breakpoints": [1] * 65}, "64 items"),
    ],
    ids=str,
)
def test_wrong_positions_are_named(
    recurrent: LiveServer, more: dict[str, Any], message: str
) -> None:
    tokens = list(range(5, 15))
    bodies = {
        "/v1/completions": {"prompt": tokens, **more},
        "/inference/v1/generate": {"token_ids": tokens, "sampling_params": {}, **more},
    }
    for path, body in bodies.items():
        error = refusal(post(recurrent, path, body))
        assert message in error["message"] and error["param"].startswith("breakpoints")


@pytest.mark.parametrize(
    "more", [{"prompt": [[5, 6, 7], [5, 6]]}, {"prompt": [5, 6, 7], "truncate_prompt_tokens": 2}]
)
def test_positions_need_one_whole_prompt(recurrent: LiveServer, more: dict[str, Any]) -> None:
    error = refusal(post(recurrent, "/v1/completions", {"breakpoints": [1], **more}))
    assert error["param"] == "breakpoints"


# --- cache_control ------------------------------------------------------------------------------


def text(words: str, mark: bool = False) -> dict[str, Any]:
    return {"type": "text", "text": words} | (MARK if mark else {})


def ends(server: LiveServer, record: Record) -> list[str]:
    """The prompt's text up to each breakpoint."""
    tokenizer, asked = server.service.tokenizer, record.call.prompt
    return [tokenizer.decode(asked.token_ids[:p], False) for p in asked.breakpoints]


def test_marks_are_breakpoints_at_the_ends_of_their_blocks(
    recurrent: LiveServer, records: list[Record]
) -> None:
    tool = {"input_schema": {"type": "object"}}
    body = {
        "max_tokens": 1,
        "tools": [
            tool | {"name": "f", "description": "first"} | MARK,
            tool | {"name": "g", "description": "second"},
        ],
        "tool_choice": {"type": "none"},
        "system": [text("be brief", mark=True), text("and kind")],
        "messages": [
            {"role": "user", "content": "what is it?"},
            {"role": "assistant", "content": [
                text("let me see"), {"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [text("a"), text("b")]} | MARK,
                text("so what", mark=True), text("is it?")]},
        ],
    }  # fmt: skip
    whole(recurrent, "/v1/messages", body)
    (record,) = records
    full = recurrent.service.tokenizer.decode(record.call.prompt.token_ids, False)
    found = ends(recurrent, record)
    tails = ("first\n", "be brief", "a\nb<|im_end|>\n", "so what")
    assert len(found) == len(tails)
    for begin, tail in zip(found, tails, strict=True):
        # What comes after may be the same whatever it is, such as the start of a user's turn.
        assert full.startswith(begin) and full.index(tail) + len(tail) <= len(begin)
        assert len(begin) <= full.index(tail) + len(tail) + len("<|im_start|>user\n")


def test_the_next_conversation_goes_on_from_the_marked_system_prompt(
    recurrent: LiveServer, records: list[Record]
) -> None:
    def ask(words: str, mark: bool) -> int:
        system = [text(f"{mark} is how this long system prompt begins.", mark)]
        user = [{"role": "user", "content": words}]
        body = {"max_tokens": 1, "system": system, "messages": user}
        return whole(recurrent, "/v1/messages", body)["usage"]["cache_read_input_tokens"]

    assert ask("one question", mark=True) == 0
    (position,) = records[-1].call.prompt.breakpoints
    assert position > 3 * PAGE
    assert ask("another question", mark=True) == position // PAGE * PAGE
    assert ask("one question", mark=False) == 0
    assert ask("another question", mark=False) == 0 and not records[-1].call.prompt.breakpoints


def test_the_requests_own_mark_is_the_end_of_its_messages(
    recurrent: LiveServer, records: list[Record]
) -> None:
    messages = [{"role": "user", "content": "hello"}]
    events = streamed(recurrent, "/v1/messages", {"max_tokens": 1, "messages": messages} | MARK)
    assert events
    (end,) = ends(recurrent, records[-1])
    assert end == "<|im_start|>user\nhello<|im_end|>\n"


def test_a_template_that_takes_no_beginning_has_no_breakpoint_there(
    engine: Engine, records: list[Record]
) -> None:
    config = ServerConfig("m", port=0, chat_template=GROUCHY + TEMPLATE)
    live = LiveServer(config, engine)
    live.service.on_finish.append(records.append)
    try:
        content = [text("hello", mark=True), text("you")]
        body = {"max_tokens": 1, "system": [text("be brief", mark=True)]}
        whole(live, "/v1/messages", body | {"messages": [{"role": "user", "content": content}]})
        (end,) = ends(live, records[-1])
    finally:
        live.close()
    assert end.endswith("user\nhello")


def test_marks_past_the_limit_are_refused(
    recurrent: LiveServer, calling_server: LiveServer
) -> None:
    body = {"max_tokens": 1, "system": [text(str(i), mark=True) for i in range(MAX_MARKS + 1)]}
    body["messages"] = [{"role": "user", "content": "hello"}]
    for server in (recurrent, calling_server):
        response = post(server, "/v1/messages", body)
        assert response.status_code == 400
        assert "cache_control stands in 5 places; at most 4" in response.text


def test_beginnings_are_cut_inside_of_tool_results() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text("a", True), text("b")]}
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": [result, text("y")]}]
    request = validate({"max_tokens": 1, "messages": messages}, MessagesRequest)
    (cut,) = beginnings(request)
    assert cut.messages == [
        messages[0],
        {"role": "user", "content": [result | {"content": [text("a", True)]}]},
    ]
    assert request.messages == messages
    request = validate({"max_tokens": 1, "messages": messages, **MARK}, MessagesRequest)
    assert [part.messages == messages for part in beginnings(request)] == [False, True]
    with pytest.raises(BadField, match="6 places"):
        beginnings(request.model_copy(update={"system": [text("s", True)] * 4}))


def test_plain_models_render_no_beginnings(calling_server: LiveServer) -> None:
    """Their pages can be reused anywhere: a mark costs nothing there."""
    found: list[Record] = []
    observers = calling_server.service.on_finish
    observers.append(found.append)
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [text("hello", True)]}]}
    whole(calling_server, "/v1/messages", body)
    observers.remove(found.append)
    assert [record.call.prompt.breakpoints for record in found] == [()]


# --- what the server tells about states ---------------------------------------------------------


def test_states_are_told_everywhere(recurrent: LiveServer) -> None:
    tokens = prompt(130)
    assert completed(recurrent, tokens) == 0 and completed(recurrent, tokens) == 128
    recurrent.settle()
    get = httpx.Client(base_url=recurrent.url).get
    (load,) = get("/v1/loads").json()["loads"]
    assert (load["max_total_num_tokens"], load["num_used_tokens"]) == (64 * PAGE, 0)
    assert 'num_gpu_blocks="64"' in get("/metrics").text
    assert get("/v1/models").json()["data"][0]["cache_unit_tokens"] == 64
    cache = get("/debug/cache", params={"limit": 10_000}).json()
    (name,) = (kind["name"] for kind in cache["kinds"] if kind["scope"] == "state")
    kind = next(kind for kind in cache["kinds"] if kind["name"] == name)
    assert sum(name in node["states"] for node in cache["tree"]) == kind["cached"] > 2
    page = get("/metrics").text
    labels = f'engine="0",kind="{name}",model_name="m"'
    assert f"jaxinfer:pages_cached{{{labels}}} {kind['cached']}.0" in page
    assert f"jaxinfer:cache_published_total{{{labels}}} {kind['published']}.0" in page
    assert f"jaxinfer:cache_shortened_tokens_total{{{labels}}}" in page
    assert 'jaxinfer:cache_unit_tokens{engine="0",model_name="m"} 64.0' in page
    data = get("/status.json").json()
    states = [run["states"] for space in data["tree"] for run in space["runs"]]
    assert [64, 128] in [[s for s in run if s in (64, 128)] for run in states]
    assert (data["checkpoint_policy"], data["unit_tokens"]) == ("align", 64)


@pytest.mark.clients
def test_a_browser_marks_states(recurrent: LiveServer, browse: Any) -> None:
    completed(recurrent, prompt(130))
    dom = browse(f"{recurrent.url}/status")
    assert 'class="state" x=' in dom and "states at 64, 128" in dom
    assert "state, slots of 16.5 KiB" in dom and "cut hits short by" in dom
    assert '<span id="tree-states"><i class="state">' in dom and "Checkpoint policy" in dom
    assert "prefixes shared in units of 64" in dom
