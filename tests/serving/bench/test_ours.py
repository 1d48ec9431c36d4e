"""`bench serve` against this project's own server: every backend, and the tokens are the engine's."""

from __future__ import annotations

import asyncio
import json

import pytest

from jaxinfer.engine import Engine
from jaxinfer.types import SamplingParams
from serving.bench.dataset import conversations
from serving.bench.session import Session, measure
from serving.bench.settings import DataSettings, TargetSettings, TrafficSettings
from serving.cli import main
from tests.checkpoints import VOCAB
from tests.serving.live import LiveServer

COUNT, TURNS, TOKENS = 6, 2, 8


def data_of(kind: str, input_len: int) -> DataSettings:
    return DataSettings(
        num_prompts=COUNT, input_len=input_len, output_len=TOKENS, turns=TURNS, prompt_kind=kind,
        vocab_size=VOCAB if kind == "ids" else None,
    )  # fmt: skip


def load(server: LiveServer, backend: str, kind: str, input_len: int) -> Session:
    url = f"grpc://{server.target}" if backend == "grpc" else server.url
    data = data_of(kind, input_len)
    target = TargetSettings(base_url=url, backend=backend, ignore_eos=True, timeout=120)
    session = asyncio.run(measure(target, TrafficSettings(max_concurrency=4), data))
    server.settle()
    return session


@pytest.mark.parametrize(
    ("backend", "kind", "input_len"),
    [("openai", "text", 3), ("openai", "ids", 20), ("openai-chat", "text", 3), ("grpc", "ids", 20)],
)
def test_conversations(server: LiveServer, backend: str, kind: str, input_len: int) -> None:
    session = load(server, backend, kind, input_len)
    records = session.run.records
    assert session.server.model == "tiny" and len(records) == COUNT * TURNS
    for record in records:
        assert record.error is None, record.message
        assert record.completion_tokens == TOKENS == record.counts[-1]
        assert record.finish_reason == "length"
        assert len(record.counts) == len(record.arrivals) and 0 < (record.ttft or 0) < record.e2e
        assert record.prompt_tokens is not None and record.cached_tokens is not None
        if kind == "ids":
            turns = record.turn + 1
            assert record.prompt_tokens == turns * input_len + record.turn * TOKENS
            assert len(record.ids) == TOKENS
    if kind == "ids":  # a page of 16 tokens of the first turn is found again
        assert all((r.cached_tokens or 0) >= 16 for r in records if r.turn)


async def directly(engine: Engine, prompt: list[int]) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    ids: list[int] = []
    async for output in engine.generate(prompt, params):
        ids = list(output.outputs[0].token_ids)
    return ids


@pytest.mark.parametrize("backend", ["openai", "grpc"])
def test_the_tokens_are_the_engines(server: LiveServer, backend: str) -> None:
    session = load(server, backend, "ids", 20)
    prompts = [c.turns[0].content for c in conversations(data_of("ids", 20), VOCAB)]
    for record in session.run.records:
        prompt = prompts[record.conversation]
        if record.turn == 0:
            assert isinstance(prompt, list)
            assert record.ids == asyncio.run(directly(server.engine, prompt))  # type: ignore[arg-type]


def test_from_the_command_line(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--base-url", server.url, "--num-prompts", "5", "--input-len", "3"]
    arguments += ["--output-len", "4", "--ignore-eos", "--request-rate", "50", "--json"]
    assert main(["bench", "serve", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["check"] == "ok" and report["server"]["model"] == "tiny"
    assert report["results"]["completion_tokens"] == 20
    server.settle()
