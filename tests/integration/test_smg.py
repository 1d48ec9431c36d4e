"""The gateway `smg`, unmodified, in front of two of our servers: what its users do with vLLM.

Run with -m clients --clients=FOLDER (README.md). One gateway and two servers for all tests but the last, which
kills a server.
"""

from __future__ import annotations

import random
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from tests.integration.processes import Process, Served, free_port

pytestmark = pytest.mark.clients
EVENTS = '{"enable_kv_cache_events": true, "publisher": "null"}'
FLAGS = ("--served-model-name", "tiny", "--page-size", "16", "--kv-events-config", EVENTS,
         "--max-num-seqs", "8", "--max-num-batched-tokens", "128")  # fmt: skip


@dataclass
class Cluster:
    """Two servers behind a gateway. `client` talks to the gateway."""

    servers: tuple[Served, Served]
    gateway: Process
    client: openai.OpenAI

    def complete(self, prompt: str, **options) -> openai.types.Completion:
        options = {"max_tokens": 8, "temperature": 0.0, **options}
        return self.client.completions.create(model="tiny", prompt=prompt, **options)

    def count(self, name: str) -> float:
        """A metric, summed over both servers and its labels."""
        return sum(metric(server, name) for server in self.servers)


def metric(server: Served, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert f"# TYPE {name} " in text or f"# TYPE {name.removesuffix('_total')} " in text, name
    return sum(float(v) for v in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def launch(folder: Path, smg: Path, model: Path, started: list[Process]) -> Cluster:
    servers = (
        Served(model, folder / "a.log", *FLAGS),
        Served(model, folder / "b.log", *FLAGS),
    )
    started += servers
    for server in servers:
        server.wait_ready()
    port = free_port()
    urls = [f"grpc://{server.target}" for server in servers]
    gateway = Process(
        [smg, "launch", "--worker-urls", *urls, "--backend", "vllm", "--policy", "cache_aware",
         "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1",
         "--prometheus-port", str(free_port())],
        folder / "smg.log",
    )  # fmt: skip
    started.append(gateway)
    gateway.wait_http(f"http://127.0.0.1:{port}/health")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)
    cluster = Cluster(servers, gateway, client)
    wait_until(lambda: len(list(client.models.list())) >= 1, "the gateway knows no model", 60)
    wait_until(lambda: both_serve(cluster), "one server gets no request", 60)
    return cluster


def wait_until(condition: Callable[[], bool], message: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, message
        time.sleep(0.02)


def both_serve(cluster: Cluster) -> bool:
    """Whether unrelated prompts reach both servers by now."""
    tag = time.monotonic_ns()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: cluster.complete(f"{i} {tag} warm", max_tokens=2), range(8)))
    return all(metric(s, "vllm:request_success_total") > 0 for s in cluster.servers)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, clients: Path, tiny: Path) -> Iterator[Cluster]:
    started: list[Process] = []
    try:
        yield launch(tmp_path_factory.mktemp("smg"), clients / "smg", tiny, started)
    finally:
        for process in reversed(started):
            process.close()


def test_chat_and_completions_through_the_gateway(cluster: Cluster):
    direct = openai.OpenAI(base_url=f"{cluster.servers[0].url}/v1", api_key="x", max_retries=0)
    options = {"model": "tiny", "max_tokens": 12, "temperature": 0.0}
    messages = [{"role": "user", "content": "hello there"}]
    ours = direct.chat.completions.create(messages=messages, **options)  # type: ignore[call-overload]
    theirs = cluster.client.chat.completions.create(messages=messages, **options)  # type: ignore[call-overload]
    assert theirs.choices[0].message.content == ours.choices[0].message.content
    assert theirs.choices[0].finish_reason == ours.choices[0].finish_reason
    assert theirs.usage.completion_tokens == ours.usage.completion_tokens
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    stream = list(cluster.client.chat.completions.create(messages=messages, **streaming, **options))  # type: ignore[call-overload]
    joined = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert joined == ours.choices[0].message.content
    (usage,) = [c.usage for c in stream if c.usage]
    assert usage.completion_tokens == ours.usage.completion_tokens == 12
    assert usage.prompt_tokens == ours.usage.prompt_tokens
    text = cluster.complete("the quick", max_tokens=12)
    assert (
        text.choices[0].text
        == direct.completions.create(prompt="the quick", **options).choices[0].text
    )


def test_a_bad_request_is_the_clients_fault_and_not_retried(cluster: Cluster):
    """The gateway hands it on; an engine refuses it, once."""
    before = cluster.count("vllm:admission_rejections_total")
    with pytest.raises(openai.BadRequestError):
        cluster.complete("x", max_tokens=100_000)
    assert cluster.count("vllm:admission_rejections_total") == before + 1


def test_a_client_that_leaves_frees_its_pages(cluster: Cluster):
    for _ in range(3):
        stream = cluster.client.completions.create(
            model="tiny",
            prompt="go on",
            max_tokens=400,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        assert cluster.count("vllm:num_requests_running") == 1
        stream.close()
        wait_until(lambda: cluster.count("vllm:kv_cache_usage_perc") == 0, "pages are held", 1.0)
        assert cluster.count("vllm:num_requests_running") == 0


@pytest.mark.parametrize("way", ["through the gateway", "past the gateway"])
def test_second_turns_go_where_the_prefix_is(cluster: Cluster, way: str):
    """At least 95 % find their first turn's pages. Of those past it, it knows by KV events alone."""
    hits, turns, rng = 0, 40, random.Random(way)
    direct = [
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        for server in cluster.servers
    ]
    before = [metric(server, "vllm:request_success_total") for server in cluster.servers]
    first: list[str] = []
    for i in range(turns):
        client = cluster.client if way == "through the gateway" else direct[i % 2]
        prompt = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=96))
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=8)
        first.append(prompt + answer.choices[0].text)
    time.sleep(1.0)  # events reach the gateway
    for prompt in first:
        found = cluster.count("vllm:prefix_cache_hits_total")
        cluster.complete(prompt + " and then")
        hits += cluster.count("vllm:prefix_cache_hits_total") - found >= 80
    now = [metric(server, "vllm:request_success_total") for server in cluster.servers]
    served = [after - earlier for after, earlier in zip(now, before, strict=True)]
    print(f"{hits} of {turns} second turns found their pages; requests per server: {served}")
    assert hits >= 0.95 * turns, f"{hits} of {turns}"
    if way == "past the gateway":
        assert min(served) >= 0.4 * sum(served), f"one server did it all: {served}"


def test_the_rest_goes_on_when_a_server_dies(tmp_path, clients, tiny, processes):
    cluster = launch(tmp_path, clients / "smg", tiny, processes)
    done: list[str] = []

    long = {"max_tokens": 96, "extra_body": {"ignore_eos": True}}

    def ask(i: int) -> str | None:
        try:
            done.append(cluster.complete(f"{i} {'z' * (i % 50)}", **long).choices[0].text)
        except openai.APIError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(8) as pool:
        load = [pool.submit(ask, i) for i in range(120)]
        wait_until(lambda: len(done) > 20, "no load", 60)
        doomed = cluster.servers[0]
        wait_until(lambda: metric(doomed, "vllm:num_requests_running") > 0, "it is idle", 10)
        doomed.signal(9)
        left = len(load) - len(done)
        failures = [f.result() for f in load if f.result() is not None]
    print(f"{len(failures)} of the {left} that were not done failed: {set(failures)}")
    assert left > 40
    assert len(failures) <= 8, "more than what was in flight"
    assert [ask(i) for i in range(500, 520)] == [None] * 20, "the other one serves"
