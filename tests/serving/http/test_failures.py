"""What goes wrong after a request was taken: error events, fixed texts, aborts, shutdown, silence.

No internals reach a client, and [DONE] ends every stream that began.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from jaxinfer.errors import Overloaded, Unavailable
from jaxinfer.types import CompletionOutput, RequestOutput
from serving.calls import Call
from serving.errors import INTERNAL
from serving.service import Phase
from tests.serving.http.scripted import item, saying, scripted
from tests.serving.http.wire import events, refusal
from tests.serving.live import LiveServer

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {}},
}
SECRET = "/etc/secret 0x7f00"


async def breaking(call: Call) -> AsyncGenerator[RequestOutput]:
    yield item(call, [CompletionOutput(0, "a", [97])])
    raise RuntimeError(SECRET)


async def broken(call: Call) -> AsyncGenerator[RequestOutput]:
    raise RuntimeError(SECRET)
    yield item(call, [])


@pytest.mark.parametrize("path", ROUTES)
def test_a_failed_output(path: str, http: httpx.Client, server: LiveServer):
    start = saying(server.service, [["a", "b"]], reason="error", error=SECRET)
    with scripted(server.service, start):
        error = refusal(http.post(path, json=ROUTES[path]), 500)
        told = events(http.post(path, json=ROUTES[path] | {"stream": True}))
    assert error == told[-1]["error"]
    assert error["message"] == INTERNAL and error["type"] == "server_error"
    assert len(told) > 1 and all("error" not in chunk for chunk in told[:-1])


@pytest.mark.parametrize("path", ROUTES)
def test_our_own_faults_have_a_fixed_text(
    path: str, http: httpx.Client, server: LiveServer, caplog: pytest.LogCaptureFixture
):
    with scripted(server.service, breaking):
        told = events(http.post(path, json=ROUTES[path] | {"stream": True}))
        whole = refusal(http.post(path, json=ROUTES[path]), 500)
    with scripted(server.service, broken):
        early = refusal(http.post(path, json=ROUTES[path] | {"stream": True}), 500)
    assert told[-1]["error"] == whole == early
    assert whole["message"] == INTERNAL
    assert caplog.text.count(SECRET) == 3  # the log has it, with its traceback, once each


@pytest.mark.parametrize(
    ("error", "status", "retry"), [(Overloaded("full"), 429, "1"), (Unavailable("off"), 503, "1")]
)
def test_refusals_of_the_service(
    error: Exception, status: int, retry: str, http: httpx.Client, server: LiveServer
):
    async def refusing(call: Call) -> AsyncGenerator[RequestOutput]:
        raise error
        yield item(call, [])

    with scripted(server.service, refusing):
        for extra in ({}, {"stream": True}):
            for path, body in ROUTES.items():
                response = http.post(path, json=body | extra)
                assert refusal(response, status)["message"] == str(error)
                assert response.headers["retry-after"] == retry


def test_one_failing_prompt_ends_the_others(http: httpx.Client, server: LiveServer):
    ends: list[str] = []

    async def mixed(call: Call) -> AsyncGenerator[RequestOutput]:
        try:
            if call.prompt.text == "bad":
                await asyncio.sleep(0.05)
                raise Overloaded("full")
            for _ in range(10_000):
                yield item(call, [CompletionOutput(0, "a", [97])])
                await asyncio.sleep(0.01)
        finally:
            ends.append(call.prompt.text or "")

    with scripted(server.service, mixed):
        refusal(http.post("/v1/completions", json={"prompt": ["good", "bad", "fine"]}), 429)
    assert sorted(ends) == ["bad", "fine", "good"]


@pytest.mark.parametrize("path", ROUTES)
def test_aborted_requests_say_so(path: str, http: httpx.Client, server: LiveServer):
    start = saying(server.service, [["a"]], reason="abort")
    with scripted(server.service, start):
        whole = http.post(path, json=ROUTES[path]).json()
        told = events(http.post(path, json=ROUTES[path] | {"stream": True}))
        assert whole["choices"][0]["finish_reason"] == "abort"
        assert told[-1]["choices"][0]["finish_reason"] == "abort"
        server.service.phase = Phase.DRAINING
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(server.service, "_admit", lambda call: None)
                assert "shut down" in refusal(http.post(path, json=ROUTES[path]), 503)["message"]
                told = events(http.post(path, json=ROUTES[path] | {"stream": True}))
                assert told[-1]["error"]["type"] == "service_unavailable"
        finally:
            server.service.phase = Phase.READY


def test_requests_under_way_can_be_aborted(parsing_server: LiveServer):
    begun = threading.Event()
    answers: list[httpx.Response] = []
    body = {"prompt": ["a", "b"], "request_id": "long", "max_tokens": 200, "ignore_eos": True}

    def ask() -> None:
        begun.set()
        answers.append(httpx.post(f"{parsing_server.url}/v1/completions", json=body, timeout=60))

    thread = threading.Thread(target=ask)
    thread.start()
    begun.wait()
    aborted: list[str] = []
    admin = {"authorization": "Bearer root"}
    for _ in range(1000):
        response = httpx.post(
            f"{parsing_server.url}/abort_requests", json={"request_ids": ["long"]}, headers=admin
        )
        aborted += response.json()["aborted"]
        if not thread.is_alive():
            break
    thread.join()
    reasons = {c["finish_reason"] for c in answers[0].json()["choices"]}
    assert set(aborted) <= {"long-0", "long-1"} and "abort" in reasons
    parsing_server.settle()
