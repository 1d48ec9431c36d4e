"""The gRPC port: VllmEngine, health, reflection and, if asked for, KServe, behind one guard.

Lives in the event loop of its Service, which may still be loading the model. Plaintext, TLS or mutual
TLS. Called by server.py and by tests.
"""

from __future__ import annotations

from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from jaxinfer.errors import ConfigError
from serving.config import Limits, ServerConfig
from serving.grpc_engine import ADMIN, NAME, VllmEngine
from serving.grpc_guard import Guard
from serving.grpc_health import Health
from serving.service import Service
from serving.sockets import bind


class GrpcServer:
    """A listening server.

    Attributes:
        port: the real one. address: host:port, as clients dial it.
    """

    def __init__(self, server: grpc.aio.Server, health: Health, host: str, port: int) -> None:
        self._server = server
        self._health = health
        self.port = port
        self.address = _address(host, port)

    async def stop(self, grace: float) -> None:
        """Take no new RPCs, give running ones `grace` seconds, then cancel them."""
        await self._server.stop(grace)
        self._health.close()


async def start_grpc(service: Service) -> GrpcServer:
    """Listen on config.host:config.grpc_port (0: a free port). Raises ConfigError if that can't be."""
    config = service.config
    server = grpc.aio.server(
        interceptors=[Guard(service, ADMIN)],
        options=_options(config.limits),
        maximum_concurrent_rpcs=config.limits.connections + config.limits.queued_requests,
    )
    names = [NAME, health.SERVICE_NAME, reflection.SERVICE_NAME]
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngine(service), server)
    if config.kserve:
        from serving.kserve import add_kserve

        names.append(add_kserve(service, server))
    reflection.enable_server_reflection(names, server)
    port = _listen(server, config)
    watch = Health(service, (NAME, *names[3:]))
    health_pb2_grpc.add_HealthServicer_to_server(watch, server)
    await server.start()
    return GrpcServer(server, watch, config.host, port)


def _options(limits: Limits) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a lottery
        # Clients ping while a call is silent; gRPC's defaults would cut them off for it.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),  # finds clients that are gone without a word
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


def _listen(server: grpc.aio.Server, config: ServerConfig) -> int:
    address = _address(config.host, config.grpc_port or 0)
    bind(config.host, "grpc_port", config.grpc_port or 0).close()  # gRPC does not tell why it can't
    credentials = _credentials(config)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:
        what = " with these certificates" if credentials else ""
        raise ConfigError(
            f"host={config.host!r} grpc_port={config.grpc_port} cannot be listened on{what}; choose "
            "another --grpc-port (0: any free one) or --host"
        ) from None


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    key, chain = (
        _read("ssl_keyfile", config.ssl_keyfile),
        _read("ssl_certfile", config.ssl_certfile),
    )
    authority = _read("ssl_ca_certs", config.ssl_ca_certs) if config.ssl_ca_certs else None
    return grpc.ssl_server_credentials(
        [(key, chain)], root_certificates=authority, require_client_auth=authority is not None
    )


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{option}={path!r} cannot be read: {error.strerror}") from None
