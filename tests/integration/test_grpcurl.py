"""`grpcurl`, which knows our services only by reflection: it lists, describes and calls them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.processes import Served

pytestmark = pytest.mark.clients
ENGINE = "vllm.grpc.engine.VllmEngine"
HEALTH = "grpc.health.v1.Health"
RPCS = {
    "Generate", "Embed", "HealthCheck", "Abort", "GetModelInfo", "GetServerInfo", "GetLoads",
    "GetTokenizer", "SubscribeKvEvents", "FlushCache", "StartProfile", "StopProfile",
}  # fmt: skip
REQUEST = {
    "request_id": "by-hand",
    "text": "hello",
    "sampling_params": {"max_tokens": 8, "temperature": 0, "ignore_eos": True},
}

Ask = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def ask(clients: Path, tiny_server: Served) -> Ask:
    """`ask(method, data=None)` calls a method, or lists and describes."""

    def run(*words: str, data: Any = None) -> subprocess.CompletedProcess[str]:
        body = () if data is None else ("-d", json.dumps(data))
        return subprocess.run(
            [clients / "grpcurl", "-plaintext", *body, tiny_server.target, *words],
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def messages(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The JSON messages of a call that went well, one after the other."""
    assert done.returncode == 0, done.stderr
    decoder, text, found = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        message, end = decoder.raw_decode(text)
        found.append(message)
        text = text[end:].strip()
    return found


def test_it_lists_and_describes(ask: Ask):
    assert {ENGINE, HEALTH} <= set(ask("list").stdout.split())
    assert {name.removeprefix(f"{ENGINE}.") for name in ask("list", ENGINE).stdout.split()} == RPCS
    described = ask("describe", ENGINE).stdout
    assert "returns ( stream .vllm.grpc.engine.GenerateResponse )" in described
    assert "max_tokens" in ask("describe", "vllm.grpc.engine.SamplingParams").stdout


def test_it_checks_health(ask: Ask):
    for service in ("", ENGINE):
        assert messages(ask(f"{HEALTH}/Check", data={"service": service})) == [
            {"status": "SERVING"}
        ]
    unknown = ask(f"{HEALTH}/Check", data={"service": "unknown"})
    assert unknown.returncode != 0 and "Code: NotFound" in unknown.stderr


@pytest.mark.parametrize("stream", [False, True])
def test_it_generates_what_http_gives(ask: Ask, tiny_server: Served, stream: bool):
    body = {"model": "tiny", "prompt": "hello", "return_token_ids": True, "max_tokens": 8,
            "temperature": 0, "ignore_eos": True}  # fmt: skip
    choice = httpx.post(f"{tiny_server.url}/v1/completions", json=body).json()["choices"][0]
    found = messages(ask(f"{ENGINE}/Generate", data=REQUEST | {"stream": stream}))
    *chunks, last = found
    if stream:
        tokens = [token for m in chunks for token in m["chunk"]["token_ids"]]
        assert tokens == choice["token_ids"]
    assert bool(chunks) == stream
    assert last["complete"]["output_ids"] == choice["token_ids"]
    assert last["complete"]["finish_reason"] == choice["finish_reason"] == "length"
    assert last["complete"]["completion_tokens"] == 8


def test_it_is_told_what_is_wrong(ask: Ask):
    wrong = REQUEST | {"sampling_params": {"max_tokens": 100_000}}
    done = ask(f"{ENGINE}/Generate", data=wrong)
    assert done.returncode != 0
    assert "Code: InvalidArgument" in done.stderr and "max_tokens" in done.stderr
    done = ask(f"{ENGINE}/Embed", data={"request_id": "e", "tokenized": {"input_ids": [5]}})
    assert "Code: Unimplemented" in done.stderr


def test_it_reads_models_and_loads(ask: Ask):
    (model,) = messages(ask(f"{ENGINE}/GetModelInfo", data={}))
    assert model["served_model_name"] == "tiny" and model["is_generation"]
    (loads,) = messages(ask(f"{ENGINE}/GetLoads", data={}))
    assert loads["loads"][0]["max_running_requests"] == 8
