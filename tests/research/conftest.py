"""Small models for the research tests: the shared random Llama, one with windows, one with dynamic rope."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxinfer.llm import LLM
from jaxinfer.loading import LoadedModel, load
from tests import checkpoints

WINDOWED = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24}
DYNAMIC = {
    "max_position_embeddings": 64,
    "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
}


@pytest.fixture(scope="session")
def model(tiny: Path) -> LoadedModel:
    return load(str(tiny))


@pytest.fixture(scope="session")
def windowed(checkpoint_root: Path) -> LoadedModel:
    return load(str(checkpoints.write_tiny(checkpoint_root / "windowed", seed=1, **WINDOWED)))


@pytest.fixture(scope="session")
def dynamic(checkpoint_root: Path) -> LoadedModel:
    return load(str(checkpoints.write_tiny(checkpoint_root / "dynamic", seed=2, **DYNAMIC)))


def serve(model: LoadedModel) -> LLM:
    """The model in service, with few shapes to compile."""
    return LLM(model, progress=False, max_num_batched_tokens=64, max_num_seqs=1, num_pages=64)


@pytest.fixture(scope="session")
def served(model: LoadedModel) -> LLM:
    return serve(model)


@pytest.fixture(scope="session")
def served_windowed(windowed: LoadedModel) -> LLM:
    return serve(windowed)


@pytest.fixture(scope="session")
def served_dynamic(dynamic: LoadedModel) -> LLM:
    return serve(dynamic)
