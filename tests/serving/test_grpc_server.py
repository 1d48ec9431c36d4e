"""The port itself: health, reflection, keys, TLS, keepalive, a port that is taken."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jaxinfer.engine import Engine
from jaxinfer.errors import ConfigError
from serving.config import ServerConfig
from serving.grpc_engine import NAME
from serving.grpc_server import start_grpc
from serving.service import Phase, Service
from tests.serving.grpc_support import Face, refused, request, serving

SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
DENIED = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture
async def face(tiny_engine: Engine) -> AsyncIterator[Face]:
    async with serving(tiny_engine) as face:
        yield face


def asked(name: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=name)


async def test_health_follows_the_phase(tiny_engine: Engine) -> None:
    async with serving(None) as face:
        stub: Any = health_pb2_grpc.HealthStub(face.channel)

        async def status() -> tuple[int, int]:
            return tuple([(await stub.Check(asked(name))).status for name in ("", NAME)])

        assert await status() == (SERVING, NOT_SERVING)
        face.service.attach(tiny_engine)
        assert await status() == (SERVING, SERVING)
        for phase, want in (
            (Phase.STALLED, (NOT_SERVING, NOT_SERVING)),
            (Phase.READY, (SERVING, SERVING)),
            (Phase.DRAINING, (SERVING, NOT_SERVING)),
            (Phase.STOPPED, (NOT_SERVING, NOT_SERVING)),
        ):
            face.service.set_phase(phase)
            assert await status() == want
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Check(asked("nobody"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watchers_see_every_change(face: Face) -> None:
    """Several at once; one that leaves takes none of the others along."""
    stub: Any = health_pb2_grpc.HealthStub(face.channel)
    first, second, unknown = (
        stub.Watch(asked(NAME)),
        stub.Watch(asked(NAME)),
        stub.Watch(asked("x")),
    )
    assert (await unknown.read()).status == UNKNOWN
    assert (await first.read()).status == (await second.read()).status == SERVING
    first.cancel()
    await asyncio.sleep(0.05)
    face.service.set_phase(Phase.DRAINING)
    assert (await second.read()).status == NOT_SERVING
    face.service.set_phase(Phase.READY)
    assert (await second.read()).status == SERVING


async def test_stopping_ends_watchers(tiny_engine: Engine) -> None:
    async with serving(tiny_engine) as face:
        stub: Any = health_pb2_grpc.HealthStub(face.channel)  # pyright: ignore[reportArgumentType]
        call = stub.Watch(asked(NAME))
        assert (await call.read()).status == SERVING
        await face.server.stop(0.1)
        assert face.service.on_phase == []


async def list_services(face: Face, metadata: Any = None) -> set[str]:
    channel: Any = face.channel
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(metadata=metadata)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    reply = await call.read()
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAME))
    files = (await call.read()).file_descriptor_response.file_descriptor_proto
    assert any(b"GenerateRequest" in file for file in files)
    await call.done_writing()
    return {service.name for service in reply.list_services_response.service}


async def test_reflection(face: Face) -> None:
    assert await list_services(face) == {
        NAME,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_keys(tiny_engine: Engine) -> None:
    """Everything but health needs a key; the wrong ones are all told the same."""
    keys = {"api_keys": ("one", "zwei-ä"), "admin_api_keys": ("boss",)}
    async with serving(tiny_engine, **keys) as face:
        rejected: list[Any] = []
        face.service.on_reject.append(rejected.append)
        texts = set()
        for metadata in ((), (("authorization", "Bearer three"),), (("authorization", "one"),),
                         (("authorization", "Basic one"),), (("authorization", "Bearer "),),
                         (("x-api-key", "one"),)):  # fmt: skip
            error = await refused(face, request([65]), metadata=metadata)
            assert error.code() is DENIED
            texts.add(error.details())
        assert len(texts) == 1 and len(rejected) == 6
        for key in ("one", "boss"):
            assert await face.generate(request([65]), metadata=bearer(key))
            assert NAME in await list_services(face, bearer(key))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await list_services(face)
        assert error.value.code() is DENIED
        stub: Any = health_pb2_grpc.HealthStub(face.channel)
        assert (await stub.Check(asked(NAME))).status == SERVING


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def test_admin_keys(tiny_engine: Engine) -> None:
    async with serving(tiny_engine, admin_api_keys=("boss",)) as face:
        assert await face.generate(request([65]))
        for rpc in (
            lambda **o: face.stub.FlushCache(common_pb2.FlushCacheRequest(), **o),
            lambda **o: face.stub.StartProfile(common_pb2.StartProfileRequest(), **o),
            lambda **o: face.stub.StopProfile(common_pb2.StopProfileRequest(), **o),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await rpc()
            assert error.value.code() is DENIED
        flushed = await face.stub.FlushCache(
            common_pb2.FlushCacheRequest(), metadata=bearer("boss")
        )
        assert flushed.success


# --- TLS ----------------------------------------------------------------------------------------


def openssl(*args: str, folder: Path) -> None:
    subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority (ca), and what it signed for the server and for a client."""
    folder = tmp_path_factory.mktemp("certificates")
    ec = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    name = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    openssl("req", "-x509", *ec, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2",
            "-subj", "/CN=test authority", folder=folder)  # fmt: skip
    for who in ("server", "client"):
        openssl("req", *ec, "-keyout", f"{who}.key", "-out", f"{who}.csr", "-subj", f"/CN={who}",
                *name, folder=folder)  # fmt: skip
        openssl("x509", "-req", "-in", f"{who}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
                "-CAcreateserial", "-copy_extensions", "copy", "-days", "2", "-out", f"{who}.pem",
                folder=folder)  # fmt: skip
    return folder


async def over_tls(face: Face, credentials: grpc.ChannelCredentials) -> int:
    async with grpc.aio.secure_channel(face.server.address, credentials) as channel:
        stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        return len([m async for m in stub.Generate(request([65]), timeout=10)])


async def test_tls(tiny_engine: Engine, certificates: Path) -> None:
    def read(name: str) -> bytes:
        return (certificates / name).read_bytes()

    files = {"ssl_keyfile": str(certificates / "server.key")}
    files["ssl_certfile"] = str(certificates / "server.pem")
    trust = grpc.ssl_channel_credentials(read("ca.pem"))
    known = grpc.ssl_channel_credentials(read("ca.pem"), read("client.key"), read("client.pem"))
    async with serving(tiny_engine, **files) as face:
        assert await over_tls(face, trust) == 1
        error = await refused(face, request([65]))  # plaintext
        assert error.code() is grpc.StatusCode.UNAVAILABLE
    async with serving(tiny_engine, ssl_ca_certs=str(certificates / "ca.pem"), **files) as face:
        assert await over_tls(face, known) == 1
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await over_tls(face, trust)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("no certificate")
    for name, text in (("none", "cannot be read"), ("bad", "certificates")):
        path = str(tmp_path / name)
        config = ServerConfig(
            model="tiny", port=None, grpc_port=0, ssl_keyfile=path, ssl_certfile=path
        )
        with pytest.raises(ConfigError, match=text):
            await start_grpc(Service(config))


async def test_kserve_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tritonclient.grpc.service_pb2_grpc", None)  # type: ignore[arg-type]
    config = ServerConfig(model="tiny", port=None, grpc_port=0, kserve=True)
    with pytest.raises(ConfigError, match=r"jaxinfer\[kserve\]"):
        await start_grpc(Service(config))


# --- transport ----------------------------------------------------------------------------------


async def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"grpc_port={port}"):
            await start_grpc(Service(ServerConfig(model="tiny", port=None, grpc_port=port)))


async def test_two_servers_do_not_share_a_port(face: Face) -> None:
    config = ServerConfig(model="tiny", port=None, grpc_port=face.server.port)
    with pytest.raises(ConfigError, match="grpc_port"):
        await start_grpc(Service(config))


async def test_pings_during_a_silent_call_are_no_offence(face: Face) -> None:
    """A default server ends such a call after 4 to 5 seconds (too_many_pings)."""
    options = [
        ("grpc.keepalive_time_ms", 300),
        ("grpc.keepalive_timeout_ms", 2000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    async with grpc.aio.insecure_channel(face.server.address, options=options) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        call = stub.Watch(asked(NAME))
        assert (await call.read()).status == SERVING
        await asyncio.sleep(6)
        face.service.set_phase(Phase.DRAINING)
        assert (await call.read()).status == NOT_SERVING


async def test_health_answers_while_a_long_prompt_is_read(face: Face) -> None:
    """R-SRV-03: reading a text of the longest allowed length happens beside the event loop."""
    stub: Any = health_pb2_grpc.HealthStub(face.channel)
    text = "the hell in it " * 4000  # 60,000 characters, below the bound for 256 tokens
    prompts = [asyncio.ensure_future(refused(face, request(text))) for _ in range(4)]
    slowest, loop = 0.0, asyncio.get_running_loop()
    while not all(prompt.done() for prompt in prompts):
        start = loop.time()
        await stub.Check(asked(""))
        slowest = max(slowest, loop.time() - start)
    assert slowest < 1.0
    assert all(p.result().code() is grpc.StatusCode.INVALID_ARGUMENT for p in prompts)


async def test_health_check_of_the_engine(face: Face) -> None:
    reply = await face.stub.HealthCheck(pb.HealthCheckRequest())
    assert reply.healthy and reply.message == "ready"
