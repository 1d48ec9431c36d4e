"""What happens before a request is read: its clock, the bytes that may arrive, and where it comes from."""

from __future__ import annotations

import time

import httpx
import pytest

from jaxinfer.engine import Engine
from serving.config import Limits, ServerConfig
from tests.serving.http.wire import refusal
from tests.serving.live import LiveServer

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_requests_clock_runs_while_its_prompt_is_read(
    path: str, server: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
):
    inputs, records = server.engine.inputs, []
    monkeypatch.setattr(server.service, "on_finish", [records.append])
    for name in ("prompt", "chat"):
        real = getattr(inputs, name)
        slow = lambda *a, real=real, **k: (time.sleep(0.3), real(*a, **k))[1]  # noqa: E731
        monkeypatch.setattr(inputs, name, slow)
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    assert http.post(path, json=body).status_code == 200
    (record,) = records
    assert record.first_token - record.arrival >= 0.3


def test_bytes_that_arrive_at_a_time_are_bounded(tiny_engine: Engine):
    limits = Limits(body_bytes=50_000, arriving_bytes=60_000)
    live = LiveServer(ServerConfig(model="tiny", port=0, limits=limits), tiny_engine)
    try:
        with httpx.Client(base_url=live.url, timeout=30) as http:
            live.service.arriving_bytes += 40_000  # of somebody else
            big = b'{"prompt": "a", "user": "' + b"x" * 30_000 + b'"}'
            response = http.post("/v1/completions", content=big, headers=JSON)
            assert refusal(response, 429)["code"] == "overloaded"
            live.service.arriving_bytes -= 40_000
            assert http.post("/v1/completions", content=big, headers=JSON).status_code != 429
        assert live.service.arriving_bytes == 0
    finally:
        live.close()


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1.evil.example"])
def test_pages_of_other_sites_are_refused(origin: str, http: httpx.Client):
    for method, path in (("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/health")):
        response = http.request(method, path, headers={"origin": origin, "host": "evil.example"})
        assert refusal(response, 403)["code"] == "forbidden"


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://127.0.0.1:8000", "http://[::1]"]
)
def test_pages_of_this_machine_are_served(origin: str, http: httpx.Client):
    body = {"prompt": "a", "max_tokens": 1}
    assert http.post("/v1/completions", json=body, headers={"origin": origin}).status_code == 200


def test_minus_one_is_no_seed(http: httpx.Client):
    body = {"prompt": "a", "max_tokens": 8, "seed": -1, "return_token_ids": True}
    answers = [http.post("/v1/completions", json=body).json()["choices"][0] for _ in range(4)]
    assert len({tuple(answer["token_ids"]) for answer in answers}) > 1
