"""Damaged requests: every answer is a result or a refusal, the server stays healthy, pages come back.

Mutations are seeded, so a failure repeats. The long run is marked slow.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jaxinfer.engine import Engine
from serving.grpc_engine import NAME
from tests.serving.grpc_support import Face, idle, join, mutate, request, serving, until

AT_ONCE = 16


def valid() -> list[bytes]:
    """Requests that use every field which the engine takes."""
    first = request([65, 66, 67], stream=True, request_id="fuzz", max_tokens=4, n=2, seed=3,
                    temperature=0.8, top_k=20, top_p=0.9, min_p=0.1, logprobs=2, min_tokens=1,
                    prompt_logprobs=1, stop_token_ids=[5, 9], stop=["ab", "c"],
                    repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.25,
                    logit_bias={70: 1.0, 71: -2.0}, truncate_prompt_tokens=2)  # fmt: skip
    second = request("the hell", max_tokens=3, ignore_eos=True, skip_special_tokens=True)
    third = request([1, 2], max_tokens=2, choice=pb.ChoiceConstraint(choices=["a"]))
    third.mm_inputs.mm_hashes.append("x")
    third.kv_transfer_params_json = "{}"
    return [message.SerializeToString() for message in (first, second, third)]


async def send(face: Face, raw: bytes) -> grpc.StatusCode:
    call: Any = face.channel.unary_stream(f"/{NAME}/Generate")(raw, timeout=60)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        assert not any(word in str(error.details()) for word in ("Traceback", ".py", "0x"))
        return error.code()
    return grpc.StatusCode.OK


async def fuzz(engine: Engine, count: int, seed: int) -> Counter[grpc.StatusCode]:
    rng = random.Random(seed)
    seeds = valid()
    mutants = [mutate(rng, rng.choice(seeds)) for _ in range(count)]
    codes: Counter[grpc.StatusCode] = Counter()
    async with serving(engine) as face:
        stub: Any = health_pb2_grpc.HealthStub(face.channel)
        for start in range(0, count, AT_ONCE):
            batch = mutants[start : start + AT_ONCE]
            codes.update(await asyncio.gather(*(send(face, raw) for raw in batch)))
            health = await stub.Check(health_pb2.HealthCheckRequest(service=NAME))
            assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert join(await face.generate(request([65], max_tokens=2)))[0].complete.output_ids
        await until(lambda: idle(engine) and not face.service.running)
    engine.core.check()
    return codes


def check(codes: Counter[grpc.StatusCode]) -> None:
    fine = {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
    assert set(codes) <= fine, codes
    assert codes[grpc.StatusCode.OK] > 0 and codes[grpc.StatusCode.INVALID_ARGUMENT] > 0


async def test_mutated_requests(tiny_engine: Engine) -> None:
    check(await fuzz(tiny_engine, 300, seed=1))


@pytest.mark.slow
async def test_two_thousand_mutated_requests(tiny_engine: Engine) -> None:
    check(await fuzz(tiny_engine, 2000, seed=2))
