"""Routes for whoever runs the server: forget cached prefixes, write profiles, abort requests.

They exist only on a server with admin keys, and take only those. No path comes from a client.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serving.errors import Unsupported
from serving.http.body import read_model
from serving.http.errors import JsonResponse
from serving.http.exchange import parent_id
from serving.http.schemas import AbortRequest
from serving.profiler import Profiler
from serving.service import Service


async def reset_prefix_cache(request: Request) -> Response:
    service: Service = request.app.state.service
    await service.engine.clear_prefix_cache()
    return JsonResponse({"success": True})


async def start_profile(request: Request) -> Response:
    service: Service = request.app.state.service
    return JsonResponse({"name": await service.in_thread(_profiler(service).start)})


async def stop_profile(request: Request) -> Response:
    service: Service = request.app.state.service
    return JsonResponse({"name": await service.in_thread(_profiler(service).stop)})


def _profiler(service: Service) -> Profiler:
    if service.profiler is None:
        raise Unsupported("profiling is off; start the server with --profile-dir DIR")
    return service.profiler


async def abort_requests(request: Request) -> Response:
    """Ends requests by the ids that clients know; tells which were running."""
    service: Service = request.app.state.service
    body = await read_model(request, AbortRequest)
    wanted = set(body.request_ids)
    running = [i for i in service.running if i in wanted or parent_id(i) in wanted]
    aborted = [i for i in running if await service.abort(i)]
    return JsonResponse({"aborted": aborted})


ROUTES = [
    Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
    Route("/start_profile", start_profile, methods=["POST"]),
    Route("/stop_profile", stop_profile, methods=["POST"]),
    Route("/abort_requests", abort_requests, methods=["POST"]),
]
