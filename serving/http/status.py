"""The status page, /status, what it shows, /status.json, and the cache in full, /debug/cache.

The page is one static file without any data, so it is open; the data needs a key where keys are set,
and the page asks its reader for one. Shows counts, never tokens or text. Looking costs the engine one
bounded walk of the prefix tree a second at most, however many people look; walks for /debug/cache
follow each other.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections import defaultdict, deque
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from jaxinfer import __version__
from jaxinfer.cache.tree import NodeView
from jaxinfer.errors import Unavailable
from jaxinfer.scheduler.inspection import MAX_NODES, CacheView
from serving.errors import BadField
from serving.http.errors import JsonResponse
from serving.metrics import Metrics
from serving.service import Service

DRAWN_NODES = 1000  # of the prefix tree that one look at the page visits
MAX_RUNS = 60  # of these that are drawn, for each of MAX_NAMESPACES
MAX_NAMESPACES = 6
FRESH_SECONDS = 1.0
TREE_SECONDS = 1.0  # a stalled engine answers nothing, and the page must say so

PAGE = Path(__file__).with_name("status.html").read_text(encoding="utf-8")


def _script_hash(page: str) -> str:
    script = page.partition("<script>")[2].partition("</script>")[0]
    return b64encode(sha256(script.encode()).digest()).decode()


HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_script_hash(PAGE)}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


class Status:
    """What one Service looks like now, gathered once for all who ask within FRESH_SECONDS."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = asyncio.Lock()
        self._data: dict[str, Any] = {}
        self._when = float("-inf")

    async def data(self) -> dict[str, Any]:
        """The JSON object of /status.json."""
        async with self._lock:
            if time.monotonic() - self._when >= FRESH_SECONDS:
                self._data = await self._gather()
                self._when = time.monotonic()
            return self._data

    async def _gather(self) -> dict[str, Any]:
        service = self._service
        metrics: Metrics | None = service.metrics
        out: dict[str, Any] = {
            "version": __version__,
            "models": list(service.model_names),
            "phase": service.phase.value,
            "uptime": round(time.time() - service.started, 1),
            "in_flight": len(service.running),
        }
        if metrics is not None:
            out |= _of_metrics(metrics)
        if service.loaded:
            out |= _of_engine(service) | await self._cache()
        return out

    async def cache(self, limit: int) -> CacheView:
        """The cache, with `limit` nodes. Raises Unavailable if the engine does not answer in time."""
        async with self._lock:
            return await self._inspect(limit)

    async def _inspect(self, limit: int) -> CacheView:
        try:
            return await asyncio.wait_for(self._service.engine.inspect(limit), TREE_SECONDS)
        except TimeoutError:
            raise Unavailable("the engine did not answer in time; try again later") from None

    async def _cache(self) -> dict[str, Any]:
        """What only the engine thread can tell; "tree" is None if it does not answer in time."""
        try:
            view = await self._inspect(DRAWN_NODES)
        except Unavailable:
            return {"tree": None}
        told = view.as_dict()
        told["tree"] = namespaces(view.tree, view.page_size)
        return told


def _of_metrics(metrics: Metrics) -> dict[str, Any]:
    latency = {}
    for name, window in metrics.latency.items():
        count, values = window.percentiles(0.5, 0.95, 0.99)
        rounded = [round(value, 6) for value in values] or [None] * 3
        latency[name] = {
            "count": count,
            **dict(zip(("p50", "p95", "p99"), rounded, strict=True)),
        }
    return {
        "latency": latency,
        "throughput": {
            "interval": metrics.sampled.width,
            "sampled": metrics.sampled.rates(),
            "computed": metrics.fed.rates(),
        },
        "tokens": metrics.tokens(),
        "finished": dict(metrics.finished),
        "rejected": dict(metrics.rejected),
        "prefix": metrics.scheduler(),
    }


def _of_engine(service: Service) -> dict[str, Any]:
    core, stats = service.engine.core, service.engine.stats()
    slots = stats["token_slots"]
    return {
        "device": jax.local_devices()[0].device_kind,
        "dtype": core.dtype,
        "max_model_len": core.max_model_len,
        "page_size": core.config.page_size,
        "running": stats["running"],
        "waiting": stats["waiting"],
        "max_running": core.config.rows,
        "kinds": stats["kinds"],
        "engine": {
            name: stats[name] for name in ("steps", "failed_steps", "compiles", "preemptions")
        }
        | {
            "compile_seconds": round(stats["compile_seconds"], 3),
            "padding": round(1 - stats["tokens_fed"] / slots, 4) if slots else 0.0,
            "host_ms": round(1e3 * stats["host_seconds"] / max(1, stats["steps"]), 3),
            "silence": round(service.engine.silence(), 3),
        },
    }


def namespaces(views: Sequence[NodeView], page_size: int) -> list[dict[str, Any]]:
    """The tree's top for drawing: for each namespace its size and its runs.

    A run is a chain of pages without a branch: {parent: place of the run before it or -1, start,
    tokens, in_use, states: lengths in tokens at which it has a checkpoint, locks: most that sequences
    hold of one page, more: whether pages that were not visited hang below it}.
    """
    below: dict[int, list[int]] = defaultdict(list)
    roots: list[int] = []
    for place, view in enumerate(views):
        (roots if view.parent < 0 else below[view.parent]).append(place)
    return [_namespace(root, views, below, page_size) for root in roots[:MAX_NAMESPACES]]


def _namespace(
    root: int, views: Sequence[NodeView], below: dict[int, list[int]], page_size: int
) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    queue: deque[tuple[int, int | None, int]] = deque((child, -1, 0) for child in below[root])
    pages = deepest = 0
    cut = views[root].children > len(below[root])
    while queue:
        node, parent, start = queue.popleft()
        used, chain = views[node].in_use, [node]
        while len(below[node]) == views[node].children == 1:
            if views[below[node][0]].in_use != used:
                break
            node = below[node][0]
            chain.append(node)
        more = views[node].children > len(below[node])
        length = len(chain)
        end = start + length * page_size
        pages, deepest, cut = pages + length, max(deepest, end), cut or more
        place = len(runs) if len(runs) < MAX_RUNS else None
        if place is not None and parent is not None:
            states = [views[n].depth for n in chain if views[n].states]
            locks = max(views[n].locks for n in chain)
            run = {"parent": parent, "start": start, "tokens": length * page_size, "in_use": used}
            runs.append(run | {"states": states, "locks": locks, "more": more})
        queue.extend((child, place, end) for child in below[node])
    return {"pages": pages, "depth": deepest, "complete": not cut, "runs": runs}


async def status_page(request: Request) -> Response:
    """The page itself."""
    del request
    return HTMLResponse(PAGE, headers=HEADERS)


async def status_json(request: Request) -> Response:
    """What the page shows."""
    data = await _status(request).data()
    return JSONResponse(data, headers={"cache-control": "no-store"})


async def debug_cache(request: Request) -> Response:
    """Pools, prefix tree, locks, states and hit statistics; `limit`: most nodes of the tree."""
    text = request.query_params.get("limit", "1000")
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if not 1 <= limit <= MAX_NODES:
        raise BadField("limit", f"limit={text!r:.60} is out of range [1, {MAX_NODES}]")
    view = await _status(request).cache(limit)
    return JsonResponse(view.as_dict(), headers={"cache-control": "no-store"})


def _status(request: Request) -> Status:
    state = request.app.state
    if not hasattr(state, "status"):
        state.status = Status(state.service)
    return state.status


ROUTES = [
    Route("/status", status_page, methods=["GET"]),
    Route("/status.json", status_json, methods=["GET"]),
    Route("/debug/cache", debug_cache, methods=["GET"]),
]
