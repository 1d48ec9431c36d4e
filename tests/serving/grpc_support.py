"""What the gRPC tests share: a server on an engine, a client of it, requests and their results.

Imports no test of its own. Called by tests/serving/test_grpc*.py and test_kserve.py.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from jaxinfer.core import StepReport
from jaxinfer.engine import Engine
from serving.config import ServerConfig
from serving.grpc_server import GrpcServer, start_grpc
from serving.service import Service

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"


@dataclass(slots=True)
class Face:
    """A server under test and a client of it."""

    service: Service
    server: GrpcServer
    channel: grpc.aio.Channel

    @property
    def stub(self) -> Any:
        return vllm_engine_pb2_grpc.VllmEngineStub(self.channel)

    @property
    def engine(self) -> Engine:
        return self.service.engine

    async def generate(self, request: pb.GenerateRequest, **options: Any) -> list[Any]:
        """All messages of a request."""
        return [message async for message in self.stub.Generate(request, **options)]


@asynccontextmanager
async def serving(engine: Engine | None, **config: Any) -> AsyncIterator[Face]:
    """A server on a free port (the engine is not closed with it), and a plaintext channel to it."""
    service = Service(ServerConfig(model="tiny", port=None, grpc_port=0, **config), engine)
    server = await start_grpc(service)
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield Face(service, server, channel)
    finally:
        await server.stop(0)


def request(
    prompt: str | list[int] = "hello", *, stream: bool = False, request_id: str = "", **params: Any
) -> pb.GenerateRequest:
    """A request; greedy unless `params` say otherwise."""
    sampling = pb.SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | params))
    out = pb.GenerateRequest(request_id=request_id, stream=stream, sampling_params=sampling)
    if isinstance(prompt, str):
        out.text = prompt
    else:
        out.tokenized.input_ids.extend(prompt)
    return out


@dataclass(slots=True)
class Joined:
    """One output, put together from its messages."""

    ids: list[int]
    logprobs: list[float]
    top: list[list[int]]
    complete: Any
    chunks: int = 0
    prompt: Any = None


def join(messages: list[Any]) -> dict[int, Joined]:
    """What a client makes of a stream: deltas appended, by index."""
    outputs: dict[int, Joined] = {}
    for message in messages:
        kind = message.WhichOneof("response")
        part = getattr(message, kind)
        out = outputs.setdefault(part.index, Joined([], [], [], None))
        assert out.complete is None, "news after the end"
        if part.HasField("input_logprobs"):
            assert out.prompt is None and out.chunks == 0, "not in the first message"
            out.prompt = part.input_logprobs
        out.logprobs += part.output_logprobs.token_logprobs
        out.top += [list(top.token_ids) for top in part.output_logprobs.top_logprobs]
        if kind == "chunk":
            assert part.completion_tokens == len(part.token_ids)
            out.ids += part.token_ids
            out.chunks += 1
        else:
            out.complete = part
            if out.chunks == 0:
                out.ids = list(part.output_ids)
    return outputs


async def refused(face: Face, sent: pb.GenerateRequest, **options: Any) -> grpc.aio.AioRpcError:
    """The error that a request ends with."""
    try:
        await face.generate(sent, **options)
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the request was taken")


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something that must come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        await asyncio.sleep(0.005)


def idle(engine: Engine) -> bool:
    """Whether nothing runs and no page is held."""
    stats = engine.stats()
    held = sum(kind["protected"] for kind in stats["kinds"])
    return not (stats["running"] or stats["waiting"] or stats["active_requests"] or held)


@contextmanager
def slow_steps(engine: Engine, seconds: float = 0.01) -> Iterator[None]:
    """Every step takes `seconds` longer, so that a test can act in the middle of a request."""
    before = engine.core.on_step

    def wait(report: StepReport) -> None:
        time.sleep(seconds)
        if before is not None:
            before(report)

    engine.core.on_step = wait
    try:
        yield
    finally:
        engine.core.on_step = before


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Up to four changes: bits, bytes, cuts, copies, insertions, huge varints."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(6):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at % len(out)] = rng.randrange(256)
            case 2:
                del out[at : at + rng.randint(1, 8)]
            case 3:
                out[at:at] = out[at : at + rng.randint(1, 12)]
            case 4:
                out[at:at] = rng.randbytes(rng.randint(1, 6))
            case _:
                out[at:at] = b"\xff" * rng.randint(1, 9) + b"\x01"
    return bytes(out)
