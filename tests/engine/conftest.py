"""TINY in service with few shapes to compile; shared by the tests of LLM and Engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM, load
from jaxinfer.loading import LoadedModel

SMALL: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_pages": 49,
    "progress": False,
}


@pytest.fixture(scope="session")
def tiny_model(tiny: Path) -> LoadedModel:
    return load(str(tiny))


@pytest.fixture(scope="session")
def llm(tiny_model: LoadedModel) -> LLM:
    return LLM(tiny_model, **SMALL)


@pytest.fixture(autouse=True)
def leaves_no_trace(request: pytest.FixtureRequest):
    """After each test that uses the shared LLM nothing runs and nothing leaks."""
    yield
    if "llm" in request.fixturenames:
        core = request.getfixturevalue("llm").core
        assert not core.has_work()
        core.check()
