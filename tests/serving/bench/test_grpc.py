"""Load over gRPC against a real servicer on the published stubs, and the same from the command line."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from jaxinfer.errors import InvalidRequest
from serving.bench.session import Session, measure
from serving.bench.settings import DataSettings, TargetSettings, TrafficSettings
from tests.serving.bench.fakes import FakeEngine, complete, token_chunk

SLACK = 0.35
EARLY = 0.002


async def load(
    engine: FakeEngine, target: dict[str, Any] | None = None, **data: Any
) -> tuple[Session, list[Any]]:
    where: dict[str, Any] = {"backend": "grpc", "timeout": 20} | (target or {})
    what: dict[str, Any] = {"num_prompts": 1, "input_len": 5, "output_len": 12} | data
    async with engine.serving() as url:
        session = await measure(
            TargetSettings(base_url=url, **where), TrafficSettings(), DataSettings(**what)
        )
    return session, session.run.records


async def test_times_are_the_servers_delays() -> None:
    """Three messages of four tokens, the first after 0.2 s, the others after 0.1 s each."""
    engine = FakeEngine(first=0.2, gap=0.1, size=4)
    session, (record,) = await load(engine, {"ignore_eos": True})
    assert (session.server.model, session.server.version) == ("fake", "fake-grpc")
    assert record.error is None and record.ids == list(range(100, 112))
    assert 0.2 - EARLY <= record.ttft < 0.2 + SLACK
    span = record.arrivals[-1] - record.arrivals[0]
    assert record.arrivals[-1] - record.sent >= 0.4 - 3 * EARLY and 0.1 < span < 0.2 + SLACK
    assert record.counts == [4, 8, 12] and record.tpot == pytest.approx(span / 8)
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (5, 12, 4)
    (request,) = engine.requests
    assert request.stream and request.sampling_params.ignore_eos
    assert request.sampling_params.max_tokens == 12 and request.sampling_params.temperature == 0
    assert request.sampling_params.HasField("temperature")
    assert len(request.tokenized.input_ids) == 5 and max(request.tokenized.input_ids) < 60


async def test_turns_text_and_metadata() -> None:
    engine = FakeEngine()
    target = {"api_key": "k", "header": {"X-Team": "a"}, "model": "fake"}
    _, records = await load(engine, target, num_prompts=2, turns=2)
    assert len(records) == 4 and all(r.error is None for r in records)
    ids = [list(r.tokenized.input_ids) for r in engine.requests]
    for later in (i for i in ids if len(i) == 22):
        assert later[:5] in ids and later[5:17] == list(range(100, 112))
    assert len({r.request_id for r in engine.requests}) == 4
    assert engine.metadata[0]["authorization"] == "Bearer k" and engine.metadata[0]["x-team"] == "a"
    _, (record,) = await load(engine, prompt_kind="text")
    assert record.error is None and len(engine.requests[-1].text.split()) == 5


async def abort_with(code: grpc.StatusCode, context: Any) -> None:
    await context.abort(code, "the server says no")


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("busy", "grpc RESOURCE_EXHAUSTED", "says no"),
        ("late failure", "grpc INTERNAL", "says no"),
        ("raises", "grpc UNKNOWN", ""),
        ("slow", "timeout", ""),
        ("no complete", "truncated", "GenerateComplete"),
        ("aborted", "server error", "abort"),
        ("lost a token", "malformed", "3 tokens came"),
    ],
)
async def test_failures_are_told_apart(case: str, error: str, message: str) -> None:
    async def generate(_: Any, context: Any) -> AsyncIterator[Any]:
        if case == "busy":
            await abort_with(grpc.StatusCode.RESOURCE_EXHAUSTED, context)
        yield token_chunk([1, 2, 3], 5, 3)
        if case == "late failure":
            await abort_with(grpc.StatusCode.INTERNAL, context)
        if case == "raises":
            raise RuntimeError
        if case == "slow":
            await asyncio.sleep(30)
        if case == "aborted":
            yield complete([1, 2, 3], 5, "abort")
        if case == "lost a token":
            yield complete([1, 2, 3, 4], 5)

    engine = FakeEngine()
    engine.generate = generate  # type: ignore[method-assign]
    _, (record,) = await load(engine, {"timeout": 0.5})
    assert record.error == error and message in (record.message or ""), record.message
    assert 0 < record.e2e < 0.5 + 4 * SLACK


async def test_an_answer_in_one_message() -> None:
    async def generate(*_: Any) -> AsyncIterator[Any]:
        yield complete([7, 8, 9], 5)

    engine = FakeEngine()
    engine.generate = generate  # type: ignore[method-assign]
    _, (record,) = await load(engine)
    assert record.error is None and record.ids == [7, 8, 9]
    assert record.ttft is not None and record.tpot is None


async def test_no_server_and_another_model() -> None:
    engine = FakeEngine()
    with pytest.raises(InvalidRequest, match="model='other'.*'fake'"):
        await load(engine, {"model": "other"})
    async with engine.serving() as url:
        pass
    target = TargetSettings(base_url=url, backend="grpc")
    with pytest.raises(InvalidRequest, match="GetModelInfo.*UNAVAILABLE"):
        await measure(target, TrafficSettings(), DataSettings())


async def test_from_the_command_line() -> None:
    async with FakeEngine(size=3).serving() as url:
        arguments = ["bench", "serve", "--backend", "grpc", "--base-url", url, "--json"]
        arguments += ["--num-prompts", "5", "--output-len", "6", "--input-len", "8"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "serving.cli", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, err) == (0, b"")
    results = json.loads(out)["results"]
    assert results["succeeded"] == 5 and results["completion_tokens"] == 30
    assert results["prompt_tokens"] == 40 and results["cached_share"] == 0.5
    assert results["tokens_per_message"] == 3
