"""Real servers on loopback whose answers and delays a test decides: OpenAI over HTTP, VllmEngine.

They speak the protocols through starlette and the published stubs, and know nothing of the bench.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import uvicorn
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as stubs
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Body = dict[str, Any]
Script = Callable[[Body], Response]


def event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def stream(parts: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(parts, media_type="text/event-stream; charset=utf-8")


def chunk(body: Body, text: str, finish: str | None = None, **more: Any) -> Body:
    """One chunk of the endpoint that the body was meant for."""
    part = {"delta": {"content": text}} if "messages" in body else {"text": text}
    return {"choices": [{"index": 0, "finish_reason": finish, **part, **more}]}


def usage(prompt: int, completion: int, cached: int | None = None) -> Body:
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
    }


def answers(
    first: float = 0.0, gap: float = 0.0, size: int = 1, cached: int = 0, counted: bool = True
) -> Script:
    """max_tokens tokens, `size` in a message; the delays are in seconds. Prompts count as 10."""

    def script(body: Body) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            count, wanted = 0, body["max_tokens"]
            options = body["stream_options"]
            if "messages" in body:  # servers announce the role in a chunk without text
                yield event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
            await asyncio.sleep(first)
            while count < wanted:
                new = min(size, wanted - count)
                ids = [1000 + i for i in range(count, count + new)]
                count += new
                more = {"token_ids": ids} if body.get("return_token_ids") else {}
                finish = "length" if count == wanted else None
                out = chunk(body, " w" * new, finish, **more)
                if counted and options.get("continuous_usage_stats"):
                    out["usage"] = usage(10, count)
                yield b": ping\n\n" + event(out)
                if count < wanted:
                    await asyncio.sleep(gap)
            if counted:
                yield event({"choices": [], "usage": usage(10, wanted, cached)})
            yield b"data: [DONE]\n\n"

        return stream(parts())

    return script


class FakeOpenAI:
    """An HTTP server in a thread of its own; `script` answers, everything else is recorded."""

    def __init__(self) -> None:
        self.script: Script = answers()
        self.models: Any = {"data": [{"id": "fake", "meta": {"n_vocab": 50}}]}
        self.bodies: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.most_running = 0
        self.url = ""

    def reset(self) -> None:
        url = self.url
        self.__init__()
        self.url = url

    async def models_route(self, request: Request) -> Response:
        return JSONResponse(self.models)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": "1.2.3"})

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        answer = self.script(body)
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = self._counted(answer.body_iterator)
        return answer

    async def _counted(self, parts: Any) -> AsyncIterator[Any]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async for part in parts:
                yield part
        finally:
            self.running -= 1

    @contextlib.contextmanager
    def serving(self) -> Iterator[FakeOpenAI]:
        routes = [
            Route("/v1/models", self.models_route),
            Route("/version", self.version),
            Route("/v1/completions", self.generate, methods=["POST"]),
            Route("/v1/chat/completions", self.generate, methods=["POST"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_level="critical", lifespan="off", ws="none"
        )
        server = uvicorn.Server(config)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            try:
                yield self
            finally:
                server.should_exit = True
                thread.join(timeout=20)
        assert not thread.is_alive()


class FakeEngine(stubs.VllmEngineServicer):
    """Streams `max_tokens` ids, `size` in a message; a test may replace `generate`."""

    def __init__(self, first: float = 0.0, gap: float = 0.0, size: int = 1) -> None:
        self.first, self.gap, self.size = first, gap, size
        self.requests: list[Any] = []
        self.metadata: list[dict[str, Any]] = []
        self.generate = self.answer

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return pb.GetModelInfoResponse(served_model_name="fake", vocab_size=60)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return pb.GetServerInfoResponse(server_type="fake-grpc")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        async for response in self.generate(request, context):
            yield response

    async def answer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        wanted, prompt = request.sampling_params.max_tokens, len(request.tokenized.input_ids)
        await asyncio.sleep(self.first)
        ids = list(range(100, 100 + wanted))
        for start in range(0, wanted, self.size):
            if start:
                await asyncio.sleep(self.gap)
            part = ids[start : start + self.size]
            yield token_chunk(part, prompt, start + len(part))
        yield complete(ids, prompt)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = grpc.aio.server()
        stubs.add_VllmEngineServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"grpc://127.0.0.1:{port}"
        finally:
            await server.stop(None)


def token_chunk(ids: list[int], prompt: int, so_far: int) -> Any:
    inner = pb.GenerateStreamChunk(
        token_ids=ids, prompt_tokens=prompt, completion_tokens=so_far, cached_tokens=4
    )
    return pb.GenerateResponse(chunk=inner)


def complete(ids: list[int], prompt: int, finish: str = "length", count: int | None = None) -> Any:
    inner = pb.GenerateComplete(
        output_ids=ids,
        prompt_tokens=prompt,
        completion_tokens=len(ids) if count is None else count,
        cached_tokens=4,
        finish_reason=finish,
    )
    return pb.GenerateResponse(complete=inner)
