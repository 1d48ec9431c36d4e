"""Fixtures of the server tests: one tiny engine and one live server that most tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxinfer.engine import Engine
from serving.config import ServerConfig
from tests.serving.live import LiveServer

# Few rungs, so that little is compiled; lazily, so that only what a test uses is.
SMALL = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "page_size": 16}


@pytest.fixture(scope="session")
def tiny_engine(tiny: Path) -> Iterator[Engine]:
    """An Engine on TINY that all server tests share; leave no request running in it."""
    engine = Engine(str(tiny), progress=False, **SMALL)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def server(tiny_engine: Engine) -> Iterator[LiveServer]:
    """A live server without authentication, HTTP and gRPC, model name "tiny"."""
    config = ServerConfig(model="tiny", served_model_name=("tiny",), port=0, grpc_port=0)
    live = LiveServer(config, tiny_engine)
    yield live
    live.close()
