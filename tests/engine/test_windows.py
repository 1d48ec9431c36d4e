"""The same contract with sliding layers: pages behind the window are given back while others read on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM, load
from jaxinfer.loading import LoadedModel
from tests.checkpoints import write_tiny
from tests.engine.requests import Item, mixed_requests, run

COMMON: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 16, "progress": False}


@pytest.fixture(scope="module")
def model(checkpoint_root: Path) -> LoadedModel:
    """TINY whose second layer sees 24 tokens."""
    folder = write_tiny(
        checkpoint_root / "tiny-window",
        architectures=["MinistralForCausalLM"],
        model_type="ministral",
        sliding_window=24,
        layer_types=["full_attention", "sliding_attention"],
    )
    return load(str(folder))


@pytest.fixture(scope="module")
def items(model: LoadedModel) -> list[Item]:
    return mixed_requests(24, model.config.vocab_size, seed=4)


@pytest.fixture(scope="module")
def solo(model: LoadedModel, items: list[Item]) -> list[list[int]]:
    llm = LLM(model, enable_prefix_caching=False, overlap=False, **COMMON)
    return [run(llm, [item])[0] for item in items]


@pytest.mark.parametrize(
    "options", [{}, {"overlap": False}, {"max_num_batched_tokens": 16}, {"page_size": 4}], ids=str
)
def test_tokens_equal_the_solo_run(model, items, solo, options) -> None:
    llm = LLM(model, **(COMMON | options))
    assert [kind["name"] for kind in llm.core.stats()["kinds"]] == ["full", "window24"]
    assert run(llm, items) == solo
    assert run(llm, items) == solo, "second pass, on a warm prefix cache"
    assert llm.core.stats()["prefix_hits"] > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_survive_preemption(model, items, solo, overlap) -> None:
    options: dict[str, Any] = COMMON | {"max_model_len": 100, "page_size": 4, "num_pages": 27}
    llm = LLM(model, overlap=overlap, **options)
    chosen = [i for i, (prompt, _) in enumerate(items) if len(prompt) < 50]
    assert run(llm, [items[i] for i in chosen]) == [solo[i] for i in chosen]
    assert llm.core.stats()["preemptions"] > 0
