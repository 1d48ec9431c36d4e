"""grpc.health.v1 from the service's phase: "" says that the process lives, the engine's name that it is ready.

Never answers from a copy: each look reads the phase. Called by grpc_server.py.
"""

# ruff: noqa: ARG002  # every RPC is called with its request and its context

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from serving.errors import NotFound
from serving.service import Phase, Service

ALIVE = frozenset({Phase.STARTING, Phase.READY, Phase.DRAINING})


class Health(health_pb2_grpc.HealthServicer):
    """Check and Watch.

    Args:
        names: services whose health is readiness.
    """

    def __init__(self, service: Service, names: tuple[str, ...]) -> None:
        self._service = service
        self._names = names
        self._watchers: set[asyncio.Event] = set()
        service.on_phase.append(self._on_phase)

    def close(self) -> None:
        """Follow the service no longer; again is fine."""
        if self._on_phase in self._service.on_phase:
            self._service.on_phase.remove(self._on_phase)

    def _on_phase(self, _: Phase) -> None:
        for watcher in self._watchers:
            watcher.set()

    def _status(self, name: str) -> pb.HealthCheckResponse.ServingStatus:
        phase = self._service.phase
        if name == "":
            serving = phase in ALIVE
        elif name in self._names:
            serving = phase is Phase.READY
        else:
            return pb.HealthCheckResponse.SERVICE_UNKNOWN
        return pb.HealthCheckResponse.SERVING if serving else pb.HealthCheckResponse.NOT_SERVING

    async def Check(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        status = self._status(request.service)
        if status == pb.HealthCheckResponse.SERVICE_UNKNOWN:
            raise NotFound(f'service must be "" or one of {", ".join(self._names)}')
        return pb.HealthCheckResponse(status=status)

    async def Watch(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.HealthCheckResponse]:
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            told = None
            while True:
                status = self._status(request.service)
                if status != told:
                    told = status
                    yield pb.HealthCheckResponse(status=status)
                await changed.wait()
                changed.clear()
        finally:
            self._watchers.discard(changed)
