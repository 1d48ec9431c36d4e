"""Load over HTTP against a real server with known delays: times, counts, histories and failures."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from jaxinfer.errors import InvalidRequest
from serving.bench.metrics import summarize
from serving.bench.record import Clock, Record
from serving.bench.session import Session, measure
from serving.bench.settings import DataSettings, TargetSettings, TrafficSettings
from serving.bench.targets import open_target
from tests.serving.bench.fakes import FakeOpenAI, answers, chunk, event, stream, usage

SLACK = 0.35  # seconds that a loaded machine may add
EARLY = 0.002  # timers may fire a little before their time


@pytest.fixture(scope="module")
def running() -> Iterator[FakeOpenAI]:
    with FakeOpenAI().serving() as server:
        yield server


@pytest.fixture
def server(running: FakeOpenAI) -> FakeOpenAI:
    running.reset()
    return running


def load(
    server: FakeOpenAI,
    target: dict[str, Any] | None = None,
    traffic: dict[str, Any] | None = None,
    **data: Any,
) -> Session:
    if "dataset" not in data:
        data = {"num_prompts": 3, "input_len": 4, "output_len": 4} | data
    return asyncio.run(
        measure(
            TargetSettings(**{"base_url": server.url, "timeout": 20} | (target or {})),
            TrafficSettings(**traffic or {}),
            DataSettings(**data),
        )
    )


def only(session: Session) -> Record:
    (record,) = session.run.records
    return record


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
@pytest.mark.parametrize("counted", [True, False], ids=["continuous", "usage at the end"])
def test_times_are_the_servers_delays(server: FakeOpenAI, backend: str, counted: bool) -> None:
    """Five messages of four tokens, the first after 0.2 s, the others after 0.1 s each."""
    server.script = answers(first=0.2, gap=0.1, size=4, cached=6)
    target = {"backend": backend, "continuous_usage_stats": counted}
    record = only(load(server, target, num_prompts=1, output_len=20))
    assert record.error is None and record.finish_reason == "length"
    assert 0.2 - EARLY <= (record.ttft or 0) < 0.2 + SLACK
    span = record.arrivals[-1] - record.arrivals[0]
    assert len(record.itl) == 4 and max(record.itl) < 0.1 + SLACK
    assert record.arrivals[-1] - record.sent >= 0.6 - 5 * EARLY and 0.3 < span < 0.4 + SLACK
    assert record.counts == ([4, 8, 12, 16, 20] if counted else [])
    assert record.tpot == pytest.approx(span / (16 if counted else 19))
    assert span + (record.ttft or 0) <= record.e2e < span + (record.ttft or 0) + SLACK
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (10, 20, 6)
    assert record.text == " w" * 20


def test_what_is_sent(server: FakeOpenAI) -> None:
    target = {
        "model": "mine", "api_key": "k", "header": {"X-Team": "a"}, "temperature": 0.5,
        "ignore_eos": True, "extra_body": {"top_k": 3}, "base_url": server.url + "/v1",
    }  # fmt: skip
    session = load(server, target, num_prompts=1, input_len=5)
    assert (session.server.model, session.server.version) == ("mine", "1.2.3")
    (body,), (headers,) = server.bodies, server.headers
    assert len(body.pop("prompt").split()) == 5
    assert body == {
        "model": "mine", "max_tokens": 4, "temperature": 0.5, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "top_k": 3,
    }  # fmt: skip
    assert headers["authorization"] == "Bearer k" and headers["x-team"] == "a"
    load(server, {"backend": "openai-chat"}, num_prompts=1)
    body = server.bodies[-1]
    assert body["model"] == "fake" and "ignore_eos" not in body
    assert [m["role"] for m in body["messages"]] == ["user"]


def test_ids_are_drawn_from_the_servers_vocabulary(server: FakeOpenAI) -> None:
    load(server, num_prompts=30, prompt_kind="ids", input_len=20)
    tokens = [token for body in server.bodies for token in body["prompt"]]
    assert set(tokens) == set(range(50))
    assert "return_token_ids" not in server.bodies[0]
    load(server, prompt_kind="ids", vocab_size=5)
    assert max(server.bodies[-1]["prompt"]) < 5
    server.models = {"data": [{"id": "fake"}]}
    with pytest.raises(InvalidRequest, match="--vocab-size"):
        load(server, prompt_kind="ids")


def test_turns_send_the_real_answers(server: FakeOpenAI) -> None:
    traffic = {"think_time": 0.1}
    session = load(server, traffic=traffic, num_prompts=2, turns=3)
    assert [len(server.bodies), len(session.run.records)] == [6, 6]
    for number in range(2):
        first, second, third = (r for r in session.run.records if r.conversation == number)
        assert second.sent >= first.end + 0.1 - EARLY and third.sent >= second.end + 0.1 - EARLY
        assert second.sent - second.scheduled < SLACK
    prompts = [body["prompt"] for body in server.bodies]
    for later in (p for p in prompts if len(p.split()) == 12):
        head, tail = later.split(" w w w w")
        assert head in prompts and len(tail.split()) == 4


def test_chat_turns_send_the_real_answers(server: FakeOpenAI) -> None:
    load(server, {"backend": "openai-chat"}, num_prompts=1, turns=2)
    first, second = (body["messages"] for body in server.bodies)
    assert second[:-1] == [*first, {"role": "assistant", "content": " w w w w"}]
    assert second[-1]["role"] == "user"


def test_turns_of_ids_send_the_real_ids(server: FakeOpenAI) -> None:
    load(server, num_prompts=1, turns=2, prompt_kind="ids")
    first, second = (body["prompt"] for body in server.bodies)
    assert second[:8] == [*first, 1000, 1001, 1002, 1003] and len(second) == 12
    assert server.bodies[0]["return_token_ids"] is True
    script = answers()
    server.script = lambda body: script(body | {"return_token_ids": False})
    record = only(load(server, num_prompts=1, turns=2, prompt_kind="ids"))
    assert record.error == "no ids" and "--prompt-kind text" in (record.message or "")


def test_a_trace_is_sent_at_its_times(server: FakeOpenAI, tmp_path: Path) -> None:
    lines = [(1400, 7, 2), (1000, 5, 3), (1200, 6, 1)]
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": t, "input_length": i, "output_length": o, "hash_ids": [0]})
            for t, i, o in lines
        )
    )
    session = load(server, traffic={"time_scale": 0.5}, dataset=path)
    records = sorted(session.run.records, key=lambda r: r.sent)
    assert [r.scheduled for r in records] == pytest.approx([0, 0.1, 0.2])
    assert all(-EARLY <= r.sent - r.scheduled < SLACK for r in records)
    assert [r.completion_tokens for r in records] == [3, 1, 2]
    assert [len(body["prompt"].split()) for body in server.bodies] == [5, 6, 7]
    with pytest.raises(InvalidRequest, match="time_scale"):
        load(server, traffic={"time_scale": 0.5})


def test_a_rate_spreads_the_requests(server: FakeOpenAI) -> None:
    traffic = {"request_rate": 50.0, "burstiness": float("inf")}
    records = load(server, traffic=traffic, num_prompts=20).run.records
    assert [r.scheduled for r in records] == pytest.approx([i / 50 for i in range(20)])
    assert all(-EARLY <= r.sent - r.scheduled < SLACK for r in records)


def test_the_limit_of_requests_in_flight_holds(server: FakeOpenAI) -> None:
    """A closed loop: as one ends the next is sent."""
    server.script = answers(first=0.05)
    session = load(server, traffic={"max_concurrency": 3}, num_prompts=12)
    results = summarize(session.run.records, session.run.duration, {})
    assert server.most_running == 3 and results["max_in_flight"] == 3
    assert 4 * 0.05 - 5 * EARLY <= session.run.duration < 4 * 0.05 + 4 * SLACK
    ends = sorted(r.end for r in session.run.records)
    sent = sorted(r.sent for r in session.run.records)[3:]
    assert all(-EARLY < s - e < SLACK for s, e in zip(sent, ends, strict=False))


def test_without_a_limit_all_are_in_flight_at_once(server: FakeOpenAI) -> None:
    """The server answers none before it has all; it would wait for ever otherwise."""
    good = answers()

    async def after_all(parts: AsyncIterator[Any]) -> AsyncIterator[Any]:
        while server.most_running < 12:
            await asyncio.sleep(0.005)
        async for part in parts:
            yield part

    def script(body: Any) -> Response:
        answer = good(body)
        assert isinstance(answer, StreamingResponse)
        return stream(after_all(aiter(answer.body_iterator)))

    server.script = script
    session = load(server, num_prompts=12)
    assert all(r.error is None for r in session.run.records)


def test_warm_ups_are_other_prompts_and_not_counted(server: FakeOpenAI) -> None:
    session = load(server, traffic={"num_warmups": 4}, turns=2)
    assert len(server.bodies) == 4 + 6 and len(session.run.records) == 6
    prompts = [body["prompt"] for body in server.bodies]
    assert not set(prompts[:4]) & set(prompts[4:])
    server.script = lambda _: PlainTextResponse("no", 500)
    with pytest.raises(InvalidRequest, match="warm-up.*http 500"):
        load(server, traffic={"num_warmups": 1})


# --- what servers do wrong ------------------------------------------------------------------------


def parts_of(*parts: bytes | float | Exception) -> Callable[[Any], Response]:
    async def send() -> AsyncIterator[bytes]:
        for part in parts:
            if isinstance(part, Exception):
                raise part
            if isinstance(part, bytes):
                yield part
            else:
                await asyncio.sleep(part)

    return lambda _: stream(send())


OUT = {"prompt": ""}
WORD = event(chunk(OUT, " w"))
END = event(chunk(OUT, " w", "stop"))
DONE = b"data: [DONE]\n\n"
TOO_MANY = {"error": {"message": "slow down", "type": "rate_limit_error", "code": 429}}


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        (lambda _: JSONResponse(TOO_MANY, 429), "http 429", "slow down"),
        (lambda _: PlainTextResponse("broken\n" * 999, 503), "http 503", "broken"),
        (lambda _: JSONResponse({"choices": []}), "malformed", "application/json"),
        (parts_of(WORD, RuntimeError()), "disconnect", ""),
        (parts_of(WORD), "truncated", "neither"),
        (parts_of(WORD, b"data: {}"), "truncated", "inside an event"),
        (parts_of(), "truncated", "neither"),
        (parts_of(WORD, b"data: {no json}\n\n", END, DONE), "malformed", "JSONDecodeError"),
        (parts_of(b"data: [1]\n\n"), "malformed", "AttributeError"),
        (parts_of(event({"choices": "x"})), "malformed", ""),
        (parts_of(event({"choices": [], "usage": {"completion_tokens": "3"}})), "malformed", "'3'"),
        (parts_of(event({"choices": [], "usage": {"completion_tokens": 3}})), "malformed", ""),
        (parts_of(b"data: \xff\n\n"), "malformed", "UnicodeDecodeError"),
        (parts_of(b"data: " + b"[" * 200_000 + b"\n\n"), "malformed", ""),
        (parts_of(event({"choices": [{"text": 5}]})), "malformed", "no string"),
        (parts_of(event({"choices": [{"text": "a", "token_ids": "12"}]})), "malformed", "no list"),
        (parts_of(WORD, event({"error": {"message": "out of memory"}})), "server error", "memory"),
        (parts_of(WORD, event({"error": "gone"}), DONE), "server error", "gone"),
        (parts_of(event(chunk(OUT, "", "abort")), DONE), "server error", "abort"),
        (parts_of(WORD, 30.0, END, DONE), "timeout", "0.5 s"),
    ],
)  # fmt: skip
def test_failures_are_told_apart(server: FakeOpenAI, script: Any, error: str, message: str) -> None:
    server.script = script
    record = only(load(server, {"timeout": 0.5}, num_prompts=1, turns=3))
    assert record.error == error and message in (record.message or ""), record.message
    assert 0 < record.e2e < 0.5 + 4 * SLACK


def test_streams_that_are_right_though_unusual(server: FakeOpenAI) -> None:
    whole = WORD + END + DONE
    single_bytes = [whole[i : i + 1] for i in range(len(whole))]
    for script in (
        parts_of(WORD, END),  # no [DONE], but a reason
        parts_of(WORD, DONE),  # no reason, but [DONE]
        parts_of(*single_bytes),
        parts_of(whole),
    ):
        server.script = script
        record = only(load(server, num_prompts=1))
        assert record.error is None and record.ttft is not None
        assert record.completion_tokens is None and record.tpot is None


def test_a_token_without_text_still_counts_as_output(server: FakeOpenAI) -> None:
    """Text is held back while a character is incomplete; the count shows that a token came."""
    held = event(chunk(OUT, "") | {"usage": usage(1, 1)})
    shown = event(chunk(OUT, "é", "length") | {"usage": usage(1, 2)})
    server.script = parts_of(0.1, held, 0.3, shown, DONE)
    record = only(load(server, num_prompts=1))
    assert record.error is None and record.counts == [1, 2] and record.text == "é"
    assert 0.1 - EARLY < (record.ttft or 0) < 0.1 + SLACK


@pytest.mark.parametrize("chat", [False, True])
def test_streams_as_llama_cpp_writes_them(server: FakeOpenAI, chat: bool) -> None:
    """Counts come once: with the last choice of a completion, after it in a chat."""
    body: dict[str, Any] = {"messages": []} if chat else OUT
    words = [event(chunk(body, " w")) for _ in range(3)]
    last, counts = chunk(body, "", "length"), {"usage": usage(10, 3, 8)}
    role = event({"choices": [{"delta": {"role": "assistant", "content": None}}]})
    end = [event(last), event({"choices": []} | counts)] if chat else [event(last | counts)]
    server.script = parts_of(*([role] if chat else []), *words, 0.3, *end, DONE)
    target = {"backend": "openai-chat" if chat else "openai", "ignore_eos": True}
    record = only(load(server, target, num_prompts=1, output_len=3))
    assert record.error is None and len(record.arrivals) == 3 and record.counts == []
    assert (record.completion_tokens, record.cached_tokens) == (3, 8)
    assert record.end - record.arrivals[-1] > 0.05  # the end was not taken for output


def test_reasoning_and_tool_calls_are_output_but_not_history(server: FakeOpenAI) -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"content": "hi"},
        {"tool_calls": [{"index": 0}]},
    ]
    events = [event({"choices": [{"index": 0, "delta": d}]}) for d in deltas]
    server.script = parts_of(*events, DONE)
    record = only(load(server, {"backend": "openai-chat"}, num_prompts=1))
    assert record.error is None and len(record.arrivals) == 3 and record.text == "hi"


def test_wrong_numbers_of_tokens_are_errors(server: FakeOpenAI) -> None:
    script = answers()
    server.script = lambda body: script(body | {"max_tokens": 3})
    assert only(load(server, num_prompts=1)).error is None
    record = only(load(server, {"ignore_eos": True}, num_prompts=1))
    assert record.error == "wrong length" and "3 tokens" in (record.message or "")
    server.script = lambda body: script(body | {"max_tokens": 5})
    assert only(load(server, num_prompts=1)).error == "wrong length"


def test_some_may_fail_while_others_go_on(server: FakeOpenAI) -> None:
    good, number = answers(first=0.02), itertools.count()

    def script(body: Any) -> Response:
        return JSONResponse(TOO_MANY, 429) if next(number) % 3 == 0 else good(body)

    server.script = script
    session = load(server, traffic={"max_concurrency": 4}, num_prompts=12)
    results = summarize(session.run.records, session.run.duration, {"e2el": 60_000})
    assert results["errors"] == {"http 429": 4} and results["succeeded"] == 8
    assert results["completion_tokens"] == 32 and results["goodput"]["met"] == 8


async def send_once(settings: TargetSettings, record: Record) -> None:
    async with open_target(settings) as target:
        await target.send("a", record, Clock(), False)


def test_no_server_there() -> None:
    with socket.socket() as free:  # bound, but nobody listens
        free.bind(("127.0.0.1", 0))
        settings = TargetSettings(base_url=f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(InvalidRequest, match="cannot be reached"):
            asyncio.run(measure(settings, TrafficSettings(), DataSettings()))
        record = Record(0, 0, 0.0, 4)
        asyncio.run(send_once(settings, record))
    assert record.error == "connect" and record.end >= record.sent and record.ttft is None


def test_the_server_names_no_model(server: FakeOpenAI) -> None:
    for models in ({}, {"data": None}, {"data": ["x", {"id": 3}]}, [], "x"):
        server.models = models
        with pytest.raises(InvalidRequest, match="--model"):
            load(server)
        assert only(load(server, {"model": "mine"}, num_prompts=1)).error is None


def test_data_and_backend_must_fit(server: FakeOpenAI, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}')
    with pytest.raises(InvalidRequest, match="openai-chat"):
        load(server, dataset=path)
    with pytest.raises(InvalidRequest, match="think_time"):
        load(server, traffic={"think_time": 1.0})
    with pytest.raises(InvalidRequest, match="vocab_size=50 has no effect on text"):
        load(server, vocab_size=50)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"a"')
    with pytest.raises(InvalidRequest, match="prompt_kind='text' has no effect"):
        load(server, dataset=prompts, prompt_kind="text")
    assert not server.bodies
    load(server, {"backend": "openai-chat"}, dataset=path)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "a"}]
