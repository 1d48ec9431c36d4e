"""The status page, /status, and what it shows, /status.json.

The page is one static file without any data, so it is open; the data needs a key where keys are set,
and the page asks its reader for one. Shows counts, never tokens or text. Looking costs the engine one
bounded walk of the prefix tree a second at most, however many people look.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from jaxinfer import __version__
from jaxinfer.cache.tree import NodeView
from serving.metrics import Metrics
from serving.service import Service

MAX_NODES = 1000  # of the prefix tree that one look visits
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
            out |= _of_engine(service)
            out["tree"] = await self._tree()
        return out

    async def _tree(self) -> list[dict[str, Any]] | None:
        """Namespaces of the prefix tree; None if the engine does not answer in time."""
        engine = self._service.engine
        try:
            views = await asyncio.wait_for(engine.prefix_tree(MAX_NODES), TREE_SECONDS)
        except TimeoutError:
            return None
        return namespaces(views, engine.core.config.page_size)


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
        "kinds": [asdict(kind) for kind in core.scheduler.stats().kinds],
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
    tokens, in_use, more: whether pages that were not visited hang below it}.
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
        used, length = views[node].in_use, 1
        while len(below[node]) == views[node].children == 1:
            if views[below[node][0]].in_use != used:
                break
            node = below[node][0]
            length += 1
        more = views[node].children > len(below[node])
        end = start + length * page_size
        pages, deepest, cut = pages + length, max(deepest, end), cut or more
        place = len(runs) if len(runs) < MAX_RUNS else None
        if place is not None and parent is not None:
            tokens = length * page_size
            runs.append(
                {"parent": parent, "start": start, "tokens": tokens, "in_use": used, "more": more}
            )
        queue.extend((child, place, end) for child in below[node])
    return {"pages": pages, "depth": deepest, "complete": not cut, "runs": runs}


async def status_page(request: Request) -> Response:
    """The page itself."""
    del request
    return HTMLResponse(PAGE, headers=HEADERS)


async def status_json(request: Request) -> Response:
    """What the page shows."""
    state = request.app.state
    if not hasattr(state, "status"):
        state.status = Status(state.service)
    return JSONResponse(await state.status.data(), headers={"cache-control": "no-store"})


ROUTES = [
    Route("/status", status_page, methods=["GET"]),
    Route("/status.json", status_json, methods=["GET"]),
]
