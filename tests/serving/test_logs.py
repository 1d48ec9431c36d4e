"""Log lines: what they hold, what they never hold, and that clients can't forge them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine import Engine
from jaxinfer.inputs import Prompt
from jaxinfer.types import SamplingParams
from serving.calls import Call, Record
from serving.config import ServerConfig
from serving.logs import FOREIGN, RequestLog, TextFormatter, configure_logging
from serving.service import Phase, Service

SECRET = "the reader's diary"


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    names = [None, *FOREIGN, "httpx", "httpcore", "jax", "absl"]
    before = [
        (log := logging.getLogger(n), log.level, log.propagate, log.handlers[:]) for n in names
    ]
    yield
    for log, level, propagate, handlers in before:
        log.setLevel(level)
        log.propagate = propagate
        log.handlers[:] = handlers


def config(**options: Any) -> ServerConfig:
    return ServerConfig(**({"model": "m", "stats_interval": 0.0} | options))


def finished(service: Service, request_id: str = "req-1", text: str | None = SECRET, **more: Any):
    """Tell the service's observers of a call that has ended."""
    call = Call(request_id, Prompt(text, (5, 6, 7)), SamplingParams(n=2), endpoint="/v1/x", **more)
    now = time.monotonic()
    record = Record(call, now - 1.0, 3, cached_tokens=2)
    record.output_tokens = [4, 1]
    record.first_scheduled, record.first_token, record.finished = now - 0.75, now - 0.5, now
    record.reason = "length"
    for observe in service.on_finish:
        observe(record)


def test_json_lines(capsys):
    service = Service(config(log_json=True))
    configure_logging(service.config)
    RequestLog(service)
    finished(service, user="ann")
    try:
        raise KeyError("lost")
    except KeyError:
        logging.getLogger("uvicorn.error").exception("it %s", "failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert abs(first.pop("time") - time.time()) < 60
    assert first == {
        "level": "INFO",
        "logger": "jaxinfer.requests",
        "message": "request",
        "id": "req-1",
        "face": "http",
        "endpoint": "/v1/x",
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "output_tokens": 5,
        "queue": 0.25,
        "ttft": 0.5,
        "e2e": 1.0,
        "reason": "length",
        "user": "ann",
    }
    assert second["message"] == "it failed" and "KeyError: 'lost'" in second["exception"]


def test_text_lines_and_what_is_quiet(capsys):
    service = Service(config())
    configure_logging(service.config)
    configure_logging(service.config)  # twice: still one line each
    RequestLog(service)
    finished(service)
    logging.getLogger("uvicorn.access").info("GET /v1/x?prompt=secret")
    logging.getLogger("grpc").warning("about grpc")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert (
        "INFO jaxinfer.requests: request id=req-1 face=http endpoint=/v1/x prompt_tokens=3 "
        "cached_tokens=2 output_tokens=5 queue=0.25 ttft=0.5 e2e=1.0 reason=length" in lines[0]
    )
    assert lines[1].endswith("WARNING grpc: about grpc")


@pytest.mark.parametrize("log_json", [False, True])
def test_prompts_appear_only_when_asked_and_cut(capsys, log_json):
    for options, expected in (({}, False), ({"log_requests": True, "max_log_len": 10}, True)):
        service = Service(config(log_json=log_json, **options))
        configure_logging(service.config)
        RequestLog(service)
        finished(service)
        text = capsys.readouterr().err
        assert ("the reader" in text) is expected
        assert SECRET not in text
    finished(service, text=None)
    assert "[5, 6, 7]" in capsys.readouterr().err.replace("\\", "")


@given(st.text(max_size=40), st.text(max_size=400))
@settings(max_examples=60, deadline=None)
def test_clients_cannot_forge_a_text_line(request_id, user):
    record = logging.LogRecord("x", logging.INFO, "", 0, f"about {request_id}", None, None)
    record.fields = {"id": request_id, "user": user}
    line = TextFormatter().format(record)
    assert len(line.splitlines()) == 1 and line.isprintable()


def test_load_lines_come_while_something_runs(tiny_engine: Engine, capsys):
    service = Service(config(stats_interval=0.02, log_json=True))
    configure_logging(service.config)
    RequestLog(service)

    async def serve() -> None:
        service.attach(tiny_engine)
        await asyncio.sleep(0.1)  # idle: nothing to say
        params = SamplingParams(max_tokens=100, ignore_eos=True, detokenize=False)
        async with aclosing(service.generate(Call("r", Prompt(None, (5, 6, 7)), params))) as stream:
            async for _ in stream:
                await asyncio.sleep(0.005)
        service.set_phase(Phase.STOPPED)
        await asyncio.sleep(0.1)

    asyncio.run(asyncio.wait_for(serve(), 100))
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    kinds = [line["message"] for line in lines if line["logger"] == "jaxinfer.requests"]
    assert set(kinds[:-1]) == {"load"} and kinds[-1] == "request"
    load = next(line for line in lines if line["message"] == "load")
    assert load["in_flight"] == 1 and load["running"] + load["waiting"] <= 1
    assert {"computed_per_s", "sampled_per_s", "pages_used", "prefix_hits"} <= set(load)
