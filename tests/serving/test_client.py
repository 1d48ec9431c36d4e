"""Client and AsyncClient: against a live server the engine's own answers, and against a bad one clear errors."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from jaxinfer.engine import Engine
from jaxinfer.types import SamplingParams
from serving.client import Answer, ApiError, AsyncClient, Client
from serving.config import ServerConfig
from tests.serving.live import LiveServer

PROMPT = "The quick brown fox"
MESSAGES = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def direct(server: LiveServer, prompt: Any) -> Any:
    """The same greedy request, asked of the engine."""

    async def ask() -> Any:
        params = SamplingParams(temperature=0, max_tokens=12)
        async with aclosing(server.engine.generate(prompt, params)) as outputs:
            return [output async for output in outputs][-1]

    return server.call(ask())


def joined(answers: Sequence[Answer]) -> tuple[str, list[int], str | None]:
    choices = [choice for answer in answers for choice in answer.choices]
    reasons = [c.finish_reason for c in choices if c.finish_reason]
    return "".join(c.text for c in choices), [i for c in choices for i in c.token_ids], reasons[-1]


# --- a live server ----------------------------------------------------------------------------------


def test_completions_are_the_engines(client: Client, server: LiveServer) -> None:
    truth = direct(server, PROMPT)
    answer = client.completions(PROMPT, **GREEDY)
    (choice,), (output,) = answer.choices, truth.outputs
    assert (answer.text, choice.token_ids) == (output.text, tuple(output.token_ids))
    assert choice.finish_reason == output.finish_reason and answer.model == "tiny"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(truth.prompt_token_ids)
    assert answer.usage.completion_tokens == len(output.token_ids)
    parts = list(client.stream_completions(PROMPT, **GREEDY, **USAGE))
    assert joined(parts) == (output.text, output.token_ids, output.finish_reason)
    assert parts[-1].usage is not None and parts[-1].usage.completion_tokens == 12
    assert parts[0].usage is None and len(parts) > 1
    ids = client.completions(truth.prompt_token_ids, **GREEDY)
    assert ids.text == output.text and ids.usage is not None and ids.usage.cached_tokens >= 0


def test_several_prompts_and_outputs(client: Client) -> None:
    answer = client.completions([PROMPT, "x"], n=2, **GREEDY)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    texts = ["", "", "", ""]
    for part in client.stream_completions([PROMPT, "x"], n=2, **GREEDY):
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in answer.choices]


def test_chat_whole_and_streamed(client: Client) -> None:
    whole = client.chat(MESSAGES, **GREEDY)
    assert joined([whole]) == joined(list(client.stream_chat(MESSAGES, **GREEDY)))
    assert whole.usage is not None and whole.usage.completion_tokens > 0
    assert whole.raw["object"] == "chat.completion"


async def test_the_async_client_does_the_same(client: Client, server: LiveServer) -> None:
    async with AsyncClient(server.url, model="tiny") as other:
        assert await other.models() == client.models() == ["tiny"]
        mine, theirs = (
            await other.completions(PROMPT, **GREEDY),
            client.completions(PROMPT, **GREEDY),
        )
        assert mine == dataclasses.replace(theirs, id=mine.id)
        chunks = [part async for part in other.stream_completions(PROMPT, **GREEDY)]
        assert joined(chunks) == joined([client.completions(PROMPT, **GREEDY)])
        chunks = [part async for part in other.stream_chat(MESSAGES, **GREEDY)]
        assert joined(chunks) == joined([client.chat(MESSAGES, **GREEDY)])
        assert joined([await other.chat(MESSAGES, **GREEDY)]) == joined(chunks)
        tokens = await other.tokenize(PROMPT)
        assert tokens == client.tokenize(PROMPT)
        assert await other.detokenize(tokens.token_ids) == client.detokenize(tokens.token_ids)
        await other.wait_ready(1.0)
        assert await other.health() and await other.ready()
        assert (await other.metrics()).keys() >= {
            name for name in client.metrics() if "requests_running" in name
        }


def test_tokens(client: Client, server: LiveServer) -> None:
    tokenizer = server.engine.model.tokenizer
    assert tokenizer is not None
    tokens = client.tokenize(PROMPT)
    assert list(tokens.token_ids) == tokenizer.encode(PROMPT)
    assert tokens.max_model_len == server.engine.core.max_model_len
    assert client.detokenize(tokens.token_ids).endswith(PROMPT)
    chat = client.tokenize(MESSAGES, add_generation_prompt=True)
    usage = client.chat(MESSAGES, max_tokens=1).usage
    assert usage is not None and len(chat.token_ids) == usage.prompt_tokens


def test_health_and_metrics(client: Client) -> None:
    client.wait_ready(1.0)
    assert client.health() and client.ready()
    client.completions(PROMPT, max_tokens=1)
    running = [v for k, v in client.metrics().items() if k.startswith("vllm:num_requests_running")]
    assert running == [0.0]


def test_leaving_a_stream_aborts_the_request(client: Client, server: LiveServer) -> None:
    stream = client.stream_completions(PROMPT, max_tokens=200, ignore_eos=True)
    next(stream)
    assert len(server.service.running) == 1
    stream.close()
    assert server.settle()["running"] == 0


def test_errors_carry_what_the_server_says(client: Client) -> None:
    with pytest.raises(ApiError, match="temperature") as caught:
        client.completions(PROMPT, temperature=-1)
    error = caught.value
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", "temperature")
    with pytest.raises(ApiError, match="nobody") as caught:
        list(client.stream_chat(MESSAGES, model="nobody"))
    assert (caught.value.status, caught.value.code) == (404, "not_found")


def test_a_key_is_shown(tiny_engine: Engine) -> None:
    config = ServerConfig("tiny", port=0, api_keys=("sesame",))
    guarded = LiveServer(config, tiny_engine)
    try:
        with Client(guarded.url) as stranger, Client(guarded.url, "sesame") as friend:
            assert stranger.health() and friend.ready()
            assert friend.completions(PROMPT, max_tokens=1).choices
            with pytest.raises(ApiError) as caught:
                stranger.models()
            assert (caught.value.status, caught.value.type) == (401, "authentication_error")
    finally:
        guarded.close()


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {n: list(inspect.signature(f).parameters) for n, f in found if n[0] != "_"}

    assert methods(Client) == methods(AsyncClient)


# --- a bad server -----------------------------------------------------------------------------------

CHUNK = b'data: {"id":"1","choices":[{"index":0,"text":"%s"}]}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = {"content-type": "text/event-stream"}


@pytest.fixture
def scripted() -> Iterator[Callable[..., str]]:
    """Make a server that gives one answer to everything: (status, headers, pieces of the body)."""
    servers: list[ThreadingHTTPServer] = []

    def make(status: int, headers: dict[str, str], pieces: list[bytes]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                for piece in pieces:
                    self.wfile.write(piece)
                    self.wfile.flush()

            do_GET = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                del format, args

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def streamed(url: str) -> list[Answer]:
    """What a stream gives; both clients must agree."""

    async def collect() -> list[Answer] | ApiError:
        async with AsyncClient(url, timeout=5) as client:
            try:
                return [answer async for answer in client.stream_completions("p")]
            except ApiError as error:
                return error

    other = asyncio.run(collect())
    with Client(url, timeout=5) as client:
        try:
            answers = list(client.stream_completions("p"))
        except ApiError as error:
            assert isinstance(other, ApiError) and vars(other) == vars(error)
            raise
    assert answers == other
    return answers


def test_a_stream_may_be_cut_anywhere(scripted: Callable[..., str]) -> None:
    body = (CHUNK % "grün €".encode() + CHUNK % "😀".encode() + DONE).replace(b"\n", b"\r\n")
    answers = streamed(scripted(200, STREAM, [bytes([b]) for b in body]))
    assert [answer.text for answer in answers] == ["grün €", "😀"]


ERROR = b'{"error": {"message": "no luck", "type": "t", "param": "p", "code": 7}}'


@pytest.mark.parametrize(
    ("status", "headers", "body", "wanted"),
    [
        (400, {}, ERROR, {"status": 400, "type": "t", "param": "p", "code": 7}),
        (429, {"retry-after": "3"}, ERROR, {"status": 429, "retry_after": 3.0}),
        (502, {}, b"<html>bad gateway", {"status": 502, "type": None}),
        (500, {}, b"", {"status": 500}),
        (500, {}, b"[1]", {"status": 500}),
        (200, STREAM, CHUNK % b"a" + b"data: " + ERROR + b"\n\n", {"status": None, "code": 7}),
        (200, STREAM, CHUNK % b"a", {"type": "connection_error"}),
        (200, STREAM, b"", {"type": "connection_error"}),
        (200, STREAM, b"data: {\n\n", {"type": "protocol_error"}),
        (200, STREAM, b"data: 7\n\n", {"type": "protocol_error"}),
        (200, STREAM, b'data: {"choices": [{}]}\n\n', {"type": "protocol_error"}),
        (200, STREAM, b"data: \xff\n\n", {"type": "protocol_error"}),
        (200, {"content-type": "text/html"}, b"hello", {"type": "protocol_error"}),
    ],
)
def test_a_bad_stream_is_a_clear_error(
    scripted: Callable[..., str],
    status: int,
    headers: dict[str, str],
    body: bytes,
    wanted: dict[str, Any],
) -> None:
    with pytest.raises(ApiError) as caught:
        streamed(scripted(status, headers, [body]))
    assert {name: getattr(caught.value, name) for name in wanted} == wanted
    assert str(caught.value)


def test_a_bad_answer_is_a_clear_error(scripted: Callable[..., str]) -> None:
    for body in (b"hello", b"[]", b'{"data": 1}', json.dumps({"data": [{}]}).encode()):
        with Client(scripted(200, {}, [body])) as client:
            with pytest.raises(ApiError) as caught:
                client.models()
            assert caught.value.type == "protocol_error"
    with Client(scripted(503, {}, [b"{}"])) as client:
        assert not client.ready() and not client.health()


def test_nobody_is_there() -> None:
    with Client("http://127.0.0.1:1/v1") as client:
        assert client.base_url == "http://127.0.0.1:1"
        assert not client.health()
        with pytest.raises(ApiError) as caught:
            client.models()
        assert caught.value.type == "connection_error" and "127.0.0.1:1" in str(caught.value)
        with pytest.raises(ApiError, match=r"not ready after 0.05 s"):
            client.wait_ready(0.05)
