"""The clients over TLS: they trust the authority that they are told of, and nobody else."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxinfer.engine import Engine
from jaxinfer.types import SamplingParams
from serving.cli import main
from serving.client import ApiError, Client
from serving.client_grpc import GrpcClient
from serving.config import ServerConfig
from tests.serving.live import LiveServer


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cert.pem, which vouches for itself, and its key.pem."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "2", "-subj", "/CN=test",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def secured(tiny_engine: Engine, certificate: Path) -> Iterator[LiveServer]:
    key, cert = str(certificate / "key.pem"), str(certificate / "cert.pem")
    config = ServerConfig("tiny", port=0, grpc_port=0, ssl_keyfile=key, ssl_certfile=cert)
    live = LiveServer(config, tiny_engine)
    yield live
    live.close()


def test_http(secured: LiveServer, certificate: Path) -> None:
    with Client(secured.url, ca_certs=str(certificate / "cert.pem")) as client:
        client.wait_ready(5.0)
        assert len(list(client.stream_completions("a", max_tokens=4, ignore_eos=True))) >= 1
    with Client(secured.url) as stranger, pytest.raises(ApiError, match="certificate"):
        stranger.models()


def test_chat(
    secured: LiveServer,
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trust = ["--ca-certs", str(certificate / "cert.pem"), "--max-tokens", "3", "--ignore-eos"]
    for url in (secured.url, f"grpcs://{secured.target}"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
        assert main(["chat", "--server", url, "--json", *trust]) == 0
        assert json.loads(capsys.readouterr().out)["completion_tokens"] == 3
    assert main(["chat", "--server", "http://x", "--ca-certs", "not/there"]) == 2
    assert "not/there" in capsys.readouterr().err


def test_grpc(secured: LiveServer, certificate: Path) -> None:
    url = f"grpcs://{secured.target}"
    with GrpcClient(url, ca_certs=str(certificate / "cert.pem"), timeout=10) as client:
        client.wait_ready(5.0)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        assert list(client.generate([65], params))[-1].choices[0].finish_reason == "length"
    with GrpcClient(url, timeout=10) as stranger, pytest.raises(ApiError) as caught:
        stranger.model_info()
    assert caught.value.status == "UNAVAILABLE"
