"""The metrics page against what was really asked and answered."""

from __future__ import annotations

import asyncio
import math
import timeit
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.core import StepReport
from jaxinfer.engine import Engine
from jaxinfer.errors import Overloaded, Unavailable
from jaxinfer.inputs import Prompt
from jaxinfer.types import RequestOutput, SamplingParams
from serving.calls import Call
from serving.config import ServerConfig
from serving.metrics import Metrics
from serving.service import Phase, Service

Page = dict[tuple[str, frozenset[tuple[str, str]]], float]
EVERY = {("model_name", "m"), ("engine", "0")}

VLLM = {
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason",
    "kv_cache_usage_perc", "engine_sleep_state", "cache_config_info", "prefix_cache_queries",
    "prefix_cache_hits", "prompt_tokens", "prompt_tokens_cached", "generation_tokens",
    "num_preemptions", "request_success", "admission_rejections", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "time_per_output_token_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_params_n", "request_params_max_tokens", "request_max_num_generation_tokens",
    "iteration_tokens_total", "request_prefill_kv_computed_tokens",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    """So few pages that two long requests can't both keep theirs; few shapes to compile."""
    engine = Engine(
        str(tiny),
        progress=False,
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        num_pages=10,
    )
    yield engine
    engine.close()


def make(engine: Engine | None = None) -> tuple[Service, Metrics]:
    service = Service(ServerConfig(model="m", served_model_name=("m",)))
    service.metrics = Metrics(service)
    if engine is not None:
        service.attach(engine)
    return service, service.metrics


def read(metrics: Metrics) -> Page:
    """All samples of the page; checks what must hold for any page."""
    body, kind = metrics.render()
    assert kind.startswith("text/plain; version=0.0.4")
    page: Page = {}
    for family in text_string_to_metric_families(body.decode()):
        assert family.documentation and family.type in ("counter", "gauge", "histogram")
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in page, f"{sample.name} stands there twice"
            assert math.isfinite(sample.value)
            page[key] = sample.value
    return page


def value(page: Page, name: str, **labels: str) -> float:
    return page[name, frozenset({*EVERY, *labels.items()})]


def buckets(page: Page, name: str) -> dict[str, float]:
    found = {dict(k)["le"]: v for (n, k), v in page.items() if n == f"{name}_bucket"}
    counts = list(found.values())
    assert counts == sorted(counts), "buckets are cumulative"
    assert counts[-1] == found["+Inf"] == value(page, f"{name}_count")
    return found


async def ask(
    service: Service, prompt: list[int], leave_after: int | None = None, **params: Any
) -> tuple[int, int]:
    """(output tokens, cached tokens) of one call."""
    params = {"temperature": 0.0, "ignore_eos": True, "detokenize": False} | params
    call = Call(service.new_id(), Prompt(None, tuple(prompt)), SamplingParams(**params))
    tokens = cached = 0
    async with aclosing(service.generate(call)) as stream:
        async for item in stream:
            tokens += sum(len(part.token_ids) for part in item.outputs)
            cached = item.num_cached_tokens
            if leave_after is not None and tokens >= leave_after:
                break
    return tokens, cached


def test_the_page_is_there_before_the_model():
    service, metrics = make()
    page = read(metrics)
    assert value(page, "jaxinfer:ready") == 0
    assert value(page, "jaxinfer:phase", phase="starting") == 1
    assert value(page, "vllm:request_success_total", finished_reason="stop") == 0
    assert not any(name.startswith("vllm:num_requests") for name, _ in page)
    service.reject(Unavailable("loading"))
    service.reject(Overloaded("full"))
    service.reject(Overloaded("full"))
    page = read(metrics)
    assert value(page, "vllm:admission_rejections_total", reason="overloaded") == 2
    assert value(page, "vllm:admission_rejections_total", reason="unavailable") == 1


def test_names_and_buckets_are_those_of_vllm(engine):
    _, metrics = make(engine)
    body = metrics.render()[0].decode()
    names = {family.name for family in text_string_to_metric_families(body)}
    assert {name.removeprefix("vllm:") for name in names if name.startswith("vllm:")} == VLLM
    page = read(metrics)
    ttft = list(buckets(page, "vllm:time_to_first_token_seconds"))
    assert (ttft[0], ttft[-2], len(ttft)) == ("0.001", "2560.0", 23)
    for name in ("inter_token_latency", "time_per_output_token", "request_time_per_output_token"):
        found = list(buckets(page, f"vllm:{name}_seconds"))
        assert (found[0], found[-2], len(found)) == ("0.01", "80.0", 20)
    latency = list(buckets(page, "vllm:e2e_request_latency_seconds"))
    assert (latency[0], latency[-2], len(latency)) == ("0.3", "7680.0", 22)
    assert list(buckets(page, "vllm:iteration_tokens_total"))[-2] == "16384.0"
    assert list(buckets(page, "vllm:request_prompt_tokens"))[:-1] == [
        "1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0",
    ]  # fmt: skip
    (config,) = (dict(k) for name, k in page if name == "vllm:cache_config_info")
    assert (config["block_size"], config["num_gpu_blocks"], config["engine"]) == ("16", "9", "0")


def test_the_page_adds_up(engine):
    """Against what the streams yielded."""
    service, metrics = make(engine)
    before = read(metrics)
    results = asyncio.run(asyncio.wait_for(mixed(service), 120))
    after = read(metrics)
    total, prompts = sum(tokens for tokens, _ in results), 3 * 36 + 11 + 27 + 36
    assert value(after, "vllm:generation_tokens_total") == total
    assert value(after, "vllm:prompt_tokens_total") == prompts
    assert results[-1][1] == 32
    assert value(after, "vllm:prompt_tokens_cached_total") == sum(cached for _, cached in results)
    assert value(after, "vllm:request_success_total", finished_reason="length") == 5
    assert value(after, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(after, "jaxinfer:requests_total", face="http") == 6
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert buckets(after, f"vllm:{name}_seconds")["+Inf"] == 6
    # The first token of an output has none before it, nor has what came together with it.
    assert 0 < buckets(after, "vllm:inter_token_latency_seconds")["+Inf"] <= total - 7
    assert value(after, "vllm:request_prompt_tokens_sum") == prompts
    assert value(after, "vllm:request_params_n_sum") == 7
    longest = value(after, "vllm:request_max_num_generation_tokens_sum")
    assert longest == total - results[3][0] / 2
    ran = value(after, "jaxinfer:steps_total") - value(before, "jaxinfer:steps_total")
    assert 0 < buckets(after, "jaxinfer:step_time_seconds")["+Inf"] <= ran


def test_nothing_goes_backwards_and_gauges_return_to_zero(engine):
    """R-SRV-06."""
    service, metrics = make(engine)
    pages = [read(metrics)]
    service.on_finish.append(lambda _: pages.append(read(metrics)))  # the others still run

    async def watched() -> None:
        work = asyncio.create_task(mixed(service))
        while not work.done():
            await asyncio.wait([work], timeout=0.01)
            pages.append(read(metrics))
        await work
        while engine.core.has_work():
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(watched(), 120))
    pages.append(idle := read(metrics))
    assert max(value(page, "jaxinfer:requests_in_flight") for page in pages) > 0
    for earlier, later in pairwise(pages):
        for key, number in earlier.items():
            if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
                assert later[key] >= number, f"{key} went backwards"
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        assert value(idle, name) == 0
    assert (
        value(idle, "jaxinfer:requests_in_flight") == value(idle, "vllm:kv_cache_usage_perc") == 0
    )
    states = [
        value(idle, "jaxinfer:pages", kind="full", state=state)
        for state in ("free", "evictable", "protected")
    ]
    assert sum(states) == 9 and states[2] == 0
    assert value(idle, "jaxinfer:pages_capacity", kind="full") == 9
    assert value(idle, "jaxinfer:pages_cached", kind="full") == states[1] > 0
    assert value(idle, "jaxinfer:cache_unit_tokens") == 16
    published = value(idle, "jaxinfer:cache_published_total", kind="full")
    evicted = value(idle, "jaxinfer:cache_evicted_total", kind="full")
    assert published - evicted == states[1]


async def mixed(service: Service) -> list[tuple[int, int]]:
    """Six calls: alike ones, one with two outputs, one whose client leaves, one that hits the cache."""
    jobs = [ask(service, [7, *range(5, 40)], max_tokens=6 + i) for i in range(3)]
    jobs.append(ask(service, list(range(9, 20)), max_tokens=4, n=2))
    jobs.append(ask(service, list(range(3, 30)), max_tokens=90, leave_after=3))
    results = await asyncio.gather(*jobs)
    return [*results, await ask(service, [7, *range(5, 40)], max_tokens=1)]


def test_preempted_requests_count_each_token_once(engine):
    """R-SRV-08."""
    service, metrics = make(engine)
    before = value(read(metrics), "vllm:num_preemptions_total")

    async def crowd() -> list[tuple[int, int]]:
        prompts = [[30 + i, *range(5, 35)] for i in range(4)]
        return await asyncio.gather(*(ask(service, p, max_tokens=60) for p in prompts))

    results = asyncio.run(asyncio.wait_for(crowd(), 120))
    page = read(metrics)
    assert value(page, "vllm:num_preemptions_total") > before, (
        "the pool was too large for this test"
    )
    assert [tokens for tokens, _ in results] == [60] * 4
    assert value(page, "vllm:generation_tokens_total") == 240
    assert value(page, "vllm:prompt_tokens_total") == 4 * 31
    assert buckets(page, "vllm:time_to_first_token_seconds")["+Inf"] == 4
    assert 0 < buckets(page, "vllm:inter_token_latency_seconds")["+Inf"] <= 4 * 59


def test_counters_survive_a_reset_of_the_engine(engine, monkeypatch):
    service, metrics = make(engine)
    asyncio.run(ask(service, list(range(5, 40)), max_tokens=4))
    before = read(metrics)
    assert value(before, "jaxinfer:prefix_query_tokens_total") > 0
    step, failures = engine.core.step, [RuntimeError("a fault in host code")]

    def broken() -> Any:
        if failures:
            raise failures.pop()
        return step()

    monkeypatch.setattr(engine.core, "step", broken)
    scheduler = engine.core.scheduler
    asyncio.run(ask(service, list(range(5, 40)), max_tokens=4))
    asyncio.run(ask(service, list(range(5, 40)), max_tokens=4))
    assert engine.core.scheduler is not scheduler
    after = read(metrics)
    name = "vllm:prefix_cache_queries_total"
    assert value(after, name) >= value(before, name) + 30
    assert value(after, "vllm:request_success_total", finished_reason="error") == 1


def test_an_engine_outlives_a_server(engine):
    """Two servers on one engine count the same steps; the first goes on when the second stops."""
    first, first_metrics = make(engine)
    second, second_metrics = make(engine)
    asyncio.run(ask(first, [5, 6, 7], max_tokens=3))
    counts = [
        buckets(read(m), "vllm:iteration_tokens_total") for m in (first_metrics, second_metrics)
    ]
    assert counts[0] == counts[1] and counts[0]["+Inf"] > 0
    second.set_phase(Phase.STOPPED)
    asyncio.run(ask(first, [5, 6, 7], max_tokens=3))
    now = [buckets(read(m), "vllm:iteration_tokens_total") for m in (first_metrics, second_metrics)]
    assert now[0]["+Inf"] > counts[0]["+Inf"] and now[1] == counts[1]


def test_watching_a_step_costs_little(engine):
    _, metrics = make(engine)
    step, report = engine.core.on_step, StepReport(64, 64, 8, 0.01)
    assert step is not None
    metrics.on_step.clear()  # other servers of this module
    best = min(timeit.repeat(lambda: step(report), number=1000, repeat=5)) / 1000
    assert best < 20e-6, "a step's time is about a millisecond"


def test_a_call_that_dies_of_a_fault_keeps_its_tokens(engine, monkeypatch):
    service, metrics = make(engine)
    start = service._start

    async def faulty(call: Call) -> AsyncGenerator[RequestOutput]:
        async with aclosing(start(call)) as stream:
            async for item in stream:
                yield item
                raise RuntimeError("a fault")

    monkeypatch.setattr(service, "_start", faulty)
    with pytest.raises(RuntimeError):
        asyncio.run(ask(service, [5, 6, 7], max_tokens=30))
    page = read(metrics)
    assert value(page, "vllm:request_success_total", finished_reason="error") == 1
    assert value(page, "vllm:generation_tokens_total") >= 1
    assert value(page, "jaxinfer:requests_in_flight") == 0
