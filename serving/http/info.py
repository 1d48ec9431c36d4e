"""GET routes that tell about the server: health, readiness, models, version, load, metrics, settings.

Health routes are open; nothing here reveals keys or paths. Called by people, probes and routers.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import jaxinfer
from serving.errors import NotFound
from serving.http.errors import JsonResponse
from serving.service import Phase, Service

# Routers take "vllm" or "sglang" here for the dialect; any other name sends them to /version.
OWNER = "jaxinfer"
SHOWN = (  # settings that hold no key, path or address
    "tool_call_parser", "reasoning_parser", "enable_auto_tool_choice", "kserve", "stream_interval",
    "shutdown_timeout", "watchdog_timeout", "max_logprobs",
)  # fmt: skip


async def ready(request: Request) -> Response:
    """200 while requests are taken, else 503."""
    phase = _service(request).phase
    return _phase(phase, phase is Phase.READY)


async def live(request: Request) -> Response:
    """200 unless a restart would help."""
    phase = _service(request).phase
    return _phase(phase, phase not in (Phase.STALLED, Phase.STOPPED))


def _phase(phase: Phase, good: bool) -> Response:
    headers = None if good else {"retry-after": "1"}
    return JsonResponse({"status": str(phase)}, 200 if good else 503, headers)


async def models(request: Request) -> Response:
    service = _service(request)
    return JsonResponse(
        {"object": "list", "data": [_model(service, name) for name in service.model_names]}
    )


async def model(request: Request) -> Response:
    service, name = _service(request), request.path_params["model"]
    if name not in service.model_names:
        raise NotFound(f"model={name!r:.100} does not exist")
    return JsonResponse(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    loaded = service.loaded
    return {
        "id": name,
        "object": "model",
        "created": int(service.started),
        "owned_by": OWNER,
        "root": service.engine.model.name if loaded else name,
        "parent": None,
        "max_model_len": service.engine.core.max_model_len if loaded else None,
        "cache_unit_tokens": service.engine.cache_unit if loaded else None,
    }


async def version(request: Request) -> Response:
    del request
    return JsonResponse({"version": jaxinfer.__version__})


async def load(request: Request) -> Response:
    """vLLM's: requests under way."""
    return JsonResponse({"server_load": len(_service(request).running)})


async def loads(request: Request) -> Response:
    """SGLang's, which routers poll: one entry, as there is one engine."""
    service = _service(request)
    engine, entries = service.engine, []
    if request.query_params.get("dp_rank", "0") in ("0", ""):
        stats, rows, pool = engine.stats(), engine.core.config.rows, engine.pool_load()
        running, waiting = stats["running"], stats["waiting"]
        entries.append(
            {
                "dp_rank": 0,
                "num_running_reqs": running,
                "num_waiting_reqs": waiting,
                "num_waiting_uncached_tokens": service.waiting()[1] if waiting else 0,
                "num_total_reqs": running + waiting,
                "num_used_tokens": pool.used,
                "max_total_num_tokens": pool.total,
                "token_usage": pool.usage,
                "cache_hit_rate": stats["prefix_hits"] / max(stats["prefix_queries"], 1),
                "utilization": running / rows,
                "max_running_requests": rows,
            }
        )
    body = {"timestamp": time.time(), "version": jaxinfer.__version__}
    return JsonResponse({**body, "dp_rank_count": len(entries), "loads": entries})


async def metrics(request: Request) -> Response:
    source = getattr(_service(request), "metrics", None)
    if source is None:
        return PlainTextResponse("this server keeps no metrics\n", 501)
    body, kind = source.render()
    return Response(body, headers={"content-type": kind})


async def server_info(request: Request) -> Response:
    """The settings, less keys and paths, and the engine's counters."""
    service = _service(request)
    config = {name: getattr(service.config, name) for name in SHOWN}
    config["limits"] = dataclasses.asdict(service.config.limits)
    engine = service.engine
    return JsonResponse(
        {
            "version": jaxinfer.__version__,
            "model_path": service.model_names[0],
            "served_model_name": service.model_names[0],
            "max_model_len": engine.core.max_model_len,
            "cache_unit_tokens": engine.cache_unit,
            "phase": str(service.phase),
            "config": config,
            "engine": engine.stats(),
        }
    )


def _service(request: Request) -> Service:
    return request.app.state.service


ROUTES = [
    *(Route(path, ready) for path in ("/health", "/ping", "/ready", "/readyz", "/v1/health/ready")),
    *(Route(path, live) for path in ("/live", "/livez", "/v1/health/live")),
    Route("/v1/models", models),
    Route("/v1/models/{model:path}", model),
    Route("/version", version),
    Route("/load", load),
    *(Route(path, loads) for path in ("/v1/loads", "/loads")),
    Route("/metrics", metrics),
    Route("/server_info", server_info),
]
