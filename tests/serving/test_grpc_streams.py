"""How a stream ends when it does not run to its end, and what a slow reader gets.

Every way must end the work and give the pages back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from jaxinfer.engine import Engine
from jaxinfer.types import CompletionOutput, RequestOutput
from serving.config import Limits
from serving.errors import INTERNAL
from serving.grpc_engine import VllmEngine
from serving.service import Phase, Service
from tests.serving.grpc_support import (
    Face,
    idle,
    join,
    refused,
    request,
    serving,
    slow_steps,
    until,
)

LONG = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture
async def face(tiny_engine: Engine) -> AsyncIterator[Face]:
    async with serving(tiny_engine) as face:
        yield face
        await until(lambda: idle(tiny_engine))
        tiny_engine.core.check()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_abort_ends_the_stream_itself(face: Face, stream: bool, n: int) -> None:
    """A gateway aborts and goes on reading: the stream must end with "abort" for each output."""
    with slow_steps(face.engine):
        sent = request("abc", request_id="it", stream=stream, n=n, **LONG)
        call = asyncio.ensure_future(face.generate(sent))
        await until(lambda: "it" in face.service.running)
        await face.stub.Abort(pb.AbortRequest(request_ids=["other", "it"]))
        outputs = join(await asyncio.wait_for(call, 5))
    assert [outputs[i].complete.finish_reason for i in range(n)] == ["abort"] * n
    assert all(len(output.ids) < 200 for output in outputs.values())


async def test_abort_while_the_prompt_is_read(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    """An Abort right behind its request is not lost."""
    gate, read = asyncio.Event(), face.service.prompt

    async def slow(*args: Any) -> Any:
        await gate.wait()
        return await read(*args)

    monkeypatch.setattr(face.service, "prompt", slow)
    call = asyncio.ensure_future(face.generate(request("abc", request_id="it", n=2, **LONG)))
    await asyncio.sleep(0.1)
    await face.stub.Abort(pb.AbortRequest(request_ids=["it"]))
    gate.set()
    outputs = join(await call)
    assert [outputs[i].complete.finish_reason for i in range(2)] == ["abort", "abort"]
    assert not outputs[0].ids


async def test_abort_of_nothing(face: Face) -> None:
    assert await face.stub.Abort(pb.AbortRequest(request_ids=["a", "", "b"])) == pb.AbortResponse()


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_client_that_leaves(face: Face, how: str) -> None:
    await face.generate(request("abc", n=2))  # compiles what follows
    records = []
    face.service.on_finish.append(records.append)
    with slow_steps(face.engine):
        channel = grpc.aio.insecure_channel(face.server.address)
        stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        call = stub.Generate(request("abc", stream=True, n=2, **LONG))
        await call.read()
        if how == "cancel":
            call.cancel()
        await channel.close()
        await until(lambda: idle(face.engine), 1.0)
    assert records[0].reason == "abort" and not face.service.running


async def test_deadline(face: Face) -> None:
    with slow_steps(face.engine, 0.03):
        error = await refused(face, request("abc", stream=True, **LONG), timeout=0.3)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: idle(face.engine), 1.0)


class Ended(Exception):
    """What FakeContext.abort raises: the code."""


class FakeContext:
    """A call with `remaining` seconds whose transport never cuts it off."""

    def __init__(self, remaining: float) -> None:
        self._end = time.monotonic() + remaining

    def time_remaining(self) -> float:
        return max(self._end - time.monotonic(), 0.0)

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Ended(code)


@pytest.mark.parametrize("remaining", [0.0, 0.2])
async def test_the_engine_keeps_the_deadline(face: Face, remaining: float) -> None:
    """Also where the transport is late: the server's own answer is DEADLINE_EXCEEDED."""
    context: Any = FakeContext(remaining)
    with slow_steps(face.engine, 0.03), pytest.raises(Ended) as error:
        async for _ in VllmEngine(face.service).Generate(request("abc", **LONG), context):
            pass
    assert error.value.args == (grpc.StatusCode.DEADLINE_EXCEEDED,)


SMALL = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]


async def test_a_reader_that_stopped_holds_no_pages(tiny_engine: Engine) -> None:
    """limits.idle_seconds: its request ends with "abort", which it learns when it reads on."""
    sent = request("abc", request_id="it", stream=True, n=2, logprobs=20, **LONG)
    async with serving(tiny_engine, limits=Limits(idle_seconds=0.2)) as face:
        async with grpc.aio.insecure_channel(face.server.address, options=SMALL) as channel:
            stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            call = stub.Generate(sent).__aiter__()
            with slow_steps(tiny_engine, 0.02):
                messages = [await anext(call)]
                while tiny_engine.stats()["running"]:
                    await asyncio.sleep(0.05)
                    await face.service.abort_unread()
            held = sum(kind["protected"] for kind in tiny_engine.stats()["kinds"])
            assert held == 0  # before it reads on
            messages += [message async for message in call]
        outputs = join(messages)
        assert {o.complete.finish_reason for o in outputs.values()} == {"abort"}
        assert all(len(o.ids) < 200 for o in outputs.values())


async def test_a_slow_reader_gets_longer_messages(face: Face) -> None:
    """The engine runs on, the messages grow, no token is lost."""
    sent = request("abc", stream=True, logprobs=20, **LONG)
    fast = join(await face.generate(sent))[0]
    async with grpc.aio.insecure_channel(face.server.address, options=SMALL) as channel:
        stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        call = stub.Generate(sent).__aiter__()
        messages = [await anext(call)]
        await until(lambda: face.engine.stats()["running"] == 0)
        messages += [message async for message in call]
    slow = join(messages)[0]
    assert slow.ids == fast.ids and slow.top == fast.top
    assert slow.logprobs == pytest.approx(fast.logprobs, abs=1e-4)
    sizes = [len(m.chunk.token_ids) for m in messages if m.HasField("chunk")]
    assert max(sizes) > 20 and len(sizes) < 100


@pytest.mark.parametrize("what", ["error", "exception"])
async def test_failures_say_nothing_of_the_inside(
    face: Face, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async def broken(_: Any) -> AsyncIterator[RequestOutput]:
        yield RequestOutput("x", None, [1], [CompletionOutput(0, token_ids=[5])])
        if what == "exception":
            raise RuntimeError("secret in ~/models/secret")
        ended = CompletionOutput(0, finish_reason="error")
        yield RequestOutput("x", None, [1], [ended], finished=True, error="secret")

    monkeypatch.setattr(face.service, "generate", broken)
    error = await refused(face, request("abc", stream=True))
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, INTERNAL)


async def test_draining(face: Face) -> None:
    """R-SRV-04: what runs finishes, what is new is told to go elsewhere."""
    with slow_steps(face.engine, 0.002):
        running = asyncio.ensure_future(face.generate(request("abc", request_id="old", **LONG)))
        await until(lambda: "old" in face.service.running)
        face.service.set_phase(Phase.DRAINING)
        error = await refused(face, request("abc"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert join(await running)[0].complete.finish_reason == "length"


async def test_stop_gives_running_calls_their_grace(tiny_engine: Engine) -> None:
    async with serving(tiny_engine) as face:
        with slow_steps(tiny_engine, 0.001):
            running = asyncio.ensure_future(face.generate(request("abc", request_id="it", **LONG)))
            await until(lambda: "it" in face.service.running)
            await face.server.stop(30)
        assert len(join(await running)[0].ids) == 200


async def test_overload(tiny_engine: Engine) -> None:
    """R-SRV-06: the second waiting request is told to come later, and the count goes back."""
    async with serving(tiny_engine, limits=Limits(queued_requests=1)) as face:
        service: Service = face.service
        with slow_steps(tiny_engine, 0.2):
            first = asyncio.ensure_future(face.generate(request("abc", request_id="a")))
            await until(lambda: service.waiting()[0] == 1)
            error = await refused(face, request("abc"))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await face.stub.Abort(pb.AbortRequest(request_ids=["a"]))
            await first
        assert join(await face.generate(request("abc")))[0].complete.finish_reason == "length"
        assert service.waiting() == (0, 0)


async def test_before_the_model_is_loaded() -> None:
    async with serving(None) as face:
        error = await refused(face, request("abc"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        health = await face.stub.HealthCheck(pb.HealthCheckRequest())
        assert (health.healthy, health.message) == (False, "starting")
        with pytest.raises(grpc.aio.AioRpcError, match="loading"):
            await face.stub.GetModelInfo(pb.GetModelInfoRequest())
