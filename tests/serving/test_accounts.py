"""What the server says it did is what it did: gauges after refusals, turns after a lost client, preemption.

R-SRV-06, R-SRV-07 and R-SRV-08, all read from outside.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jaxinfer.engine import Engine
from serving.config import Limits, ServerConfig
from tests.serving import faces
from tests.serving.faces import Asker
from tests.serving.grpc_support import request
from tests.serving.live import LiveServer
from tests.serving.wave import gauges, settled


def serve(engine: Engine, **config: Any) -> LiveServer:
    names = {"model": "tiny", "served_model_name": ("tiny",)}
    return LiveServer(ServerConfig(**names, port=0, grpc_port=0, **config), engine)


async def test_refusals_leave_no_trace(tiny_engine: Engine):
    """R-SRV-06: 100 requests where four may wait; every gauge is back at 0, and never below."""
    live = serve(tiny_engine, limits=Limits(queued_requests=4))
    seen: list[dict[str, float]] = []
    body = {"prompt": "hello", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    try:
        async with faces.asking(live.url, live.target) as asker:

            async def watch() -> None:
                while True:
                    seen.append(await gauges(asker.http))
                    await asyncio.sleep(0.01)

            watching = asyncio.ensure_future(watch())
            work = [asker.http.post("/v1/completions", json=body) for _ in range(50)]
            work += [over_grpc(asker) for _ in range(50)]
            statuses = [answer.status_code for answer in await asyncio.gather(*work)]
            watching.cancel()
            await settled(asker.http)
            assert set(statuses) == {200, 429} and statuses.count(429) > 20
            assert min(min(found.values()) for found in seen) >= 0
            rejected = await counter(asker.http, "vllm:admission_rejections_total")
            assert rejected == statuses.count(429)
            assert (await asker.http.post("/v1/completions", json=body)).status_code == 200
        live.settle()
    finally:
        live.close()


async def over_grpc(asker: Asker) -> httpx.Response:
    """A gRPC request, its outcome told as HTTP's status."""
    call = asker.stub.Generate(request("hello", max_tokens=30, ignore_eos=True))
    try:
        async for _ in call:
            pass
    except Exception:
        assert (await call.code()).name == "RESOURCE_EXHAUSTED"
        return httpx.Response(429)
    return httpx.Response(200)


async def counter(http: httpx.AsyncClient, name: str) -> float:
    """A metric, summed over its labels."""
    text = (await http.get("/metrics")).text
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    assert found, name
    return sum(map(float, found))


@pytest.mark.parametrize("over_http", [True, False], ids=["http", "grpc"])
async def test_a_turn_after_a_lost_one(over_http: bool, server: LiveServer):
    """R-SRV-07: turn 2 is left after one chunk; turn 3 at once has its whole prompt and a cold answer."""
    face = faces.completions_stream if over_http else faces.grpc_stream
    params = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    async with faces.asking(server.url, server.target, server.engine) as asker:
        for turn in range(5):
            first = list(range(40 + turn, 100 + turn))
            one = await face(asker, first, params)
            second = [*first, *one.outputs[0].ids, 7, 8, 9]
            await one_chunk(asker, second, over_http)
            third = [*second, 10, 11, 12]
            warm = await face(asker, third, params)
            assert warm.usage[0] == len(third) and warm.usage[2] >= 64
            server.settle()
            await server.engine.clear_prefix_cache()
            cold = await face(asker, third, params)
            assert (cold.outputs, cold.usage[:2]) == (warm.outputs, warm.usage[:2])
            assert cold.usage[2] == 0
    server.settle()


async def one_chunk(asker: Asker, prompt: list[int], over_http: bool) -> None:
    """Leave a long answer after its first piece."""
    if not over_http:
        call = asker.stub.Generate(request(prompt, stream=True, max_tokens=100, ignore_eos=True))
        await call.read()
        call.cancel()
        return
    body = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "stream": True}
    async with asker.http.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_raw():
            return


@pytest.fixture(scope="module")
def cramped(tiny_engine: Engine) -> Iterator[LiveServer]:
    """So few pages that two long requests take them from each other."""
    engine = Engine(
        tiny_engine.model,
        progress=False,
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        num_pages=10,
        warmup="eager",
    )
    live = serve(engine)
    yield live
    live.close()
    engine.close()


async def test_preemption_counts_nothing_twice(cramped: LiveServer):
    """R-SRV-08: each token and each first token once, however often a request had to begin again."""
    params = {"max_tokens": 90, "temperature": 0.0, "ignore_eos": True}
    prompts = [list(range(start, start + 20)) for start in range(30, 60, 5)]
    names = {
        "tokens": "vllm:generation_tokens_total",
        "prompt": "vllm:prompt_tokens_total",
        "first": "vllm:time_to_first_token_seconds_count",
        "ends": "vllm:request_success_total",
        "preempted": "vllm:num_preemptions_total",
    }
    async with faces.asking(cramped.url, cramped.target) as asker:
        alone = [await faces.completions_stream(asker, prompt, params) for prompt in prompts]
        before = {key: await counter(asker.http, name) for key, name in names.items()}
        assert before["preempted"] == 0
        answers = await asyncio.gather(
            *(
                (faces.completions_stream, faces.grpc_stream)[i % 2](asker, prompt, params)
                for i, prompt in enumerate(prompts)
            )
        )
        await settled(asker.http)
        after = {key: await counter(asker.http, name) for key, name in names.items()}
    grown = {key: after[key] - before[key] for key in names}
    assert grown["preempted"] > 0
    assert grown["tokens"] == sum(answer.usage[1] for answer in answers) == 90 * len(prompts)
    assert grown["prompt"] == sum(answer.usage[0] for answer in answers) == 20 * len(prompts)
    assert grown["first"] == grown["ends"] == len(prompts)
    for answer, want in zip(answers, alone, strict=True):
        assert answer.outputs[0].ids == want.outputs[0].ids
    cramped.settle()
