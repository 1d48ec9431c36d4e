"""The status page: what it shows adds up, it holds no text, and a browser can draw it."""

from __future__ import annotations

import asyncio
import json
import random
from base64 import b64encode
from hashlib import sha256
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from jaxinfer.cache import CacheSpec, PagePool, PrefixTree, Scope
from jaxinfer.cache.tree import NodeView
from jaxinfer.engine import Engine
from jaxinfer.scheduler.inspection import CacheView
from serving.config import ServerConfig
from serving.http import status
from serving.http.status import MAX_RUNS, Status, namespaces
from serving.http_server import build_app
from serving.metrics import Metrics
from serving.service import Service
from tests.serving.http.wire import refusal
from tests.serving.live import LiveServer

SECRET = "my diary says hello"


def complete(url: str, prompt: Any, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True, **more}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


# --- the data -----------------------------------------------------------------------------------


def test_data_while_the_model_loads():
    service = Service(ServerConfig(model="m"))
    service.metrics = Metrics(service)
    with TestClient(build_app(service)) as client:
        data = client.get("/status.json").json()
    assert (data["phase"], data["models"], data["in_flight"]) == ("starting", ["m"], 0)
    assert data["latency"]["ttft"] == {"count": 0, "p50": None, "p95": None, "p99": None}
    assert "kinds" not in data


def test_data_adds_up_and_holds_no_text(server: LiveServer, monkeypatch):
    monkeypatch.setattr(status, "FRESH_SECONDS", 0.0)
    before = httpx.get(f"{server.url}/status.json").json()
    prompt = list(range(5, 45))
    for _ in range(2):
        complete(server.url, prompt, max_tokens=8)
    text = complete(server.url, SECRET, max_tokens=8)["choices"][0]["text"]
    server.settle()
    answer = httpx.get(f"{server.url}/status.json")
    assert answer.headers["cache-control"] == "no-store"
    assert SECRET not in answer.text and "diary" not in answer.text
    assert not text or text not in answer.text
    data = answer.json()
    assert data["phase"] == "ready" and data["models"] == ["tiny"]
    assert data["running"] == data["waiting"] == data["in_flight"] == 0
    assert data["tokens"]["output"] - before["tokens"]["output"] == 24
    assert data["finished"]["length"] - before["finished"]["length"] == 3
    for name in ("ttft", "itl", "e2e"):
        shown = data["latency"][name]
        assert shown["count"] > before["latency"][name]["count"]
        assert 0 < shown["p50"] <= shown["p95"] <= shown["p99"] < 100
    for kind in data["kinds"]:
        assert kind["free"] + kind["evictable"] + kind["protected"] == kind["total"]
        assert kind["protected"] == 0
    assert len(data["throughput"]["sampled"]) == len(data["throughput"]["computed"]) == 149
    assert sum(space["pages"] for space in data["tree"]) <= data["kinds"][0]["evictable"]
    runs = [run for space in data["tree"] for run in space["runs"]]
    assert any(run["tokens"] >= 16 for run in runs)
    assert not any(run["states"] or run["locks"] for run in runs)
    assert data["unit_tokens"] == data["page_size"] == 16
    assert data["prefix"]["prefix_hits"] >= 32


def test_the_cache_as_json(server: LiveServer):
    for _ in range(2):
        complete(server.url, list(range(5, 45)), max_tokens=8)
    complete(server.url, SECRET * 2, max_tokens=1)
    server.settle()
    answer = httpx.get(f"{server.url}/debug/cache")
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    assert SECRET not in answer.text and "diary" not in answer.text
    cache = answer.json()
    (kind,) = cache["kinds"]
    assert (kind["name"], kind["scope"], kind["unit"], kind["window"]) == ("full", "token", 1, 0)
    assert kind["free"] + kind["evictable"] + kind["protected"] == kind["total"]
    assert kind["published"] >= kind["cached"] >= 4 and kind["shortened"] == 0
    assert cache["complete"] and len([n for n in cache["tree"] if n["depth"]]) == kind["cached"]
    for node in cache["tree"]:
        above = cache["tree"][node["parent"]] if node["parent"] >= 0 else None
        assert node["depth"] == (0 if above is None else above["depth"] + cache["page_size"])
        assert node["pages"] == (["full"] if node["depth"] else []) and node["locks"] == 0
    assert 0 < cache["hits"] < cache["queries"]
    assert cache["hit_rate"] == cache["hits"] / cache["queries"]
    assert cache["working_states"] == cache["pending_checkpoints"] == 0
    short = httpx.get(f"{server.url}/debug/cache", params={"limit": 2}).json()
    assert short["tree"] == cache["tree"][:1] + short["tree"][1:] and not short["complete"]
    assert len(short["tree"]) == 2


@pytest.mark.parametrize("limit", ["0", "10001", "-1", "many", "", "1e3", "9" * 40])
def test_a_wrong_limit_is_named(server: LiveServer, limit: str):
    error = refusal(httpx.get(f"{server.url}/debug/cache", params={"limit": limit}), 400)
    assert error["param"] == "limit" and "[1, 10000]" in error["message"]


def test_a_stalled_engine_has_no_cache_to_show(tiny_engine: Engine, monkeypatch):
    monkeypatch.setattr(status, "TREE_SECONDS", 0.05)

    async def never(limit: int) -> CacheView:
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr(tiny_engine, "inspect", never)
    service = Service(ServerConfig(model="m"), tiny_engine)
    with TestClient(build_app(service)) as client:
        response = client.get("/debug/cache")
        assert response.status_code == 503 and "in time" in response.json()["error"]["message"]


def test_one_look_serves_all_who_ask_and_a_stalled_engine_is_told(tiny_engine: Engine, monkeypatch):
    monkeypatch.setattr(status, "TREE_SECONDS", 0.05)
    asked = []

    async def never(limit: int) -> CacheView:
        asked.append(limit)
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr(tiny_engine, "inspect", never)

    async def look() -> list[dict[str, Any]]:
        service = Service(ServerConfig(model="m"))
        service.attach(tiny_engine)
        shown = Status(service)
        return await asyncio.gather(*(shown.data() for _ in range(10)))

    answers = asyncio.run(asyncio.wait_for(look(), 20))
    assert [answer["tree"] for answer in answers] == [None] * 10
    assert all(answer["kinds"][0]["name"] == "full" for answer in answers)
    assert len(asked) == 1


# --- the tree -----------------------------------------------------------------------------------


def grow(seed: int, spaces: int = 2, prompts: int = 30) -> PrefixTree:
    """A tree of random prompts over two tokens, so that they branch; the last prompt stays held."""
    rng = random.Random(seed)
    spec = CacheSpec("full", Scope.TOKEN, (0,), (), 1, 0)
    tree = PrefixTree([spec], 2, [PagePool(2000)])
    for i in range(prompts):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(2, 30))]
        namespace = ("salt of somebody", rng.randrange(spaces))
        held = tree.lock(tree.match(namespace, tokens, limit=len(tokens) - 1))
        pages = tree.allocate(0, -(-len(tokens) // 2) - held.end(0))
        assert pages is not None
        held.pages[0] += pages
        tree.insert(namespace, tokens, len(tokens), held)
        if i < prompts - 1:
            tree.release(held)
    return tree


@pytest.mark.parametrize("seed", range(8))
def test_runs_cover_the_tree(seed, monkeypatch):
    monkeypatch.setattr(status, "MAX_RUNS", 10_000)
    tree = grow(seed)
    views = tree.inspect(10_000)
    assert len([v for v in views if v.parent >= 0]) == tree.cached(0)
    assert sum(v.in_use for v in views) == tree.cached(0) - tree.evictable(0)
    spaces = namespaces(views, 2)
    assert sum(space["pages"] for space in spaces) == tree.cached(0)
    for space in spaces:
        assert space["complete"]
        assert sum(run["tokens"] for run in space["runs"]) == 2 * space["pages"]
        assert max(run["start"] + run["tokens"] for run in space["runs"]) == space["depth"]
        for place, run in enumerate(space["runs"]):
            assert run["parent"] < place
            above = (
                space["runs"][run["parent"]] if run["parent"] >= 0 else {"start": 0, "tokens": 0}
            )
            assert run["start"] == above["start"] + above["tokens"]
    assert "salt" not in json.dumps(spaces)


@pytest.mark.parametrize("limit", [1, 2, 7, 50])
def test_a_look_is_bounded_and_says_what_it_left_out(limit):
    tree = grow(1)
    views = tree.inspect(limit)
    assert len(views) == min(limit, tree.cached(0) + 2)
    assert all(view.parent < place for place, view in enumerate(views))
    spaces = namespaces(views, 2)
    assert not all(space["complete"] for space in spaces)
    assert all(len(space["runs"]) <= MAX_RUNS for space in spaces)
    assert PrefixTree(tree.specs, 2, [PagePool(4)]).inspect(limit) == []


def test_states_and_locks_are_told():
    chain = [
        NodeView(-1, 1, False, 0, (), (), 0),
        NodeView(0, 1, True, 4, (), ("full",), 2),
        NodeView(1, 1, True, 8, ("delta",), ("full",), 3),
        NodeView(2, 0, False, 12, ("delta",), ("full",), 0),
    ]
    (space,) = namespaces(chain, 4)
    held, idle = space["runs"]
    assert (held["tokens"], held["states"], held["locks"]) == (8, [8], 3)
    assert (idle["tokens"], idle["states"], idle["locks"]) == (4, [12], 0)


def test_only_so_many_runs_are_drawn():
    root, wide = NodeView(-1, 500, False), [NodeView(0, 1, False)] * 500
    below = [NodeView(i, 0, False) for i in range(1, 501)]
    (space,) = namespaces([root, *wide, *below], 4)
    assert space["pages"] == 1000 and space["complete"] and len(space["runs"]) == MAX_RUNS


# --- the page -----------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_elsewhere(server: LiveServer):
    answer = httpx.get(f"{server.url}/status")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    script = answer.text.partition("<script>")[2].partition("</script>")[0]
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'") and f"script-src 'sha256-{digest}'" in policy
    assert answer.text.count("<script") == 1
    rest = answer.text.replace("http://www.w3.org/2000/svg", "")
    assert not any(sign in rest for sign in ("://", "src=", "href=", "@import", "innerHTML"))


def test_with_keys_the_page_is_open_and_the_data_is_not():
    service = Service(ServerConfig(model="secret-model", api_keys=("key",)))
    with TestClient(build_app(service)) as client:
        page = client.get("/status")
        assert page.status_code == 200 and "secret-model" not in page.text
        assert client.get("/status.json").status_code == 401
        assert client.get("/debug/cache").status_code == 401
        good = client.get("/status.json", headers={"authorization": "Bearer key"})
        assert good.json()["models"] == ["secret-model"]


# --- in a browser -------------------------------------------------------------------------------


@pytest.mark.clients
def test_a_browser_draws_it(server: LiveServer, browse):
    complete(server.url, list(range(5, 45)), max_tokens=8)
    dom = browse(f"{server.url}/status")
    assert "<title>tiny: ready</title>" in dom and 'data-phase="ready"' in dom
    assert 'aria-label="full: 0 in use' in dom
    assert 'class="kept" x=' in dom and "Namespace 1: " in dom  # bars of the prefix tree
    assert "Tokens drawn in the last 5 minutes" in dom and "<polyline" in dom
    assert "Ended: length" in dom and '<section id="login" hidden' in dom


@pytest.mark.clients
def test_a_browser_asks_for_the_key(tiny_engine: Engine, browse):
    live = LiveServer(ServerConfig(model="tiny", port=0, api_keys=("key",)), tiny_engine)
    try:
        dom = browse(f"{live.url}/status")
    finally:
        live.close()
    assert "key needed" in dom and '<section id="login" hidden' not in dom
    assert "<polyline" not in dom
