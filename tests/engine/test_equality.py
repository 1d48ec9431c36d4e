"""The product's contract: a request's tokens are its own, whatever runs beside it and however it is fed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM, load
from jaxinfer.loading import LoadedModel
from tests.engine.requests import Item, mixed_requests, run

COMMON: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 16, "progress": False}


@pytest.fixture(scope="module")
def model(tiny: Path) -> LoadedModel:
    return load(str(tiny))


@pytest.fixture(scope="module")
def items(model: LoadedModel) -> list[Item]:
    return mixed_requests(64, model.config.vocab_size)


@pytest.fixture(scope="module")
def solo(model: LoadedModel, items: list[Item]) -> list[list[int]]:
    """Every request on its own: no neighbours, no cache, no overlap, whole prompts."""
    llm = LLM(model, enable_prefix_caching=False, overlap=False, **COMMON)
    return [run(llm, [item])[0] for item in items]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 100, "long_prefill_threshold": 7, "max_partial_prefills": 3},
        {"policy": "lpm"},
    ],
    ids=str,
)
def test_tokens_equal_the_solo_run(model, items, solo, options) -> None:
    llm = LLM(model, **(COMMON | options))
    assert run(llm, items) == solo
    assert run(llm, items) == solo, "second pass, on a warm prefix cache"
    assert (llm.core.stats()["prefix_hits"] > 0) == options.get("enable_prefix_caching", True)


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_survive_preemption(model, items, solo, overlap) -> None:
    options: dict[str, Any] = {"max_model_len": 96, "page_size": 4, "num_pages": 25}
    llm = LLM(model, overlap=overlap, **(COMMON | options))
    chosen = [i for i, (prompt, _) in enumerate(items) if len(prompt) < 50]
    for _ in range(2):
        assert run(llm, [items[i] for i in chosen]) == [solo[i] for i in chosen]
    assert llm.core.stats()["preemptions"] >= 20, llm.core.stats()["preemptions"]


def test_a_step_is_one_dispatch_and_one_copy_each_way(model, items) -> None:
    llm = LLM(model, **COMMON)
    run(llm, items)
    stats = llm.core.stats()
    assert stats["dispatches"] == stats["copies_in"] == stats["copies_out"] == stats["steps"]
    assert not stats["load_steps"], "sampling state travels with the step"


def test_nothing_compiles_after_warm_up(model) -> None:
    llm = LLM(model, warmup="eager", strict_compile=True, max_num_batched_tokens=128, **COMMON)
    compiled = llm.core.stats()["compiles"]
    assert compiled == len(llm.core.config.ladder()) + 1
    run(llm, mixed_requests(500, model.config.vocab_size, seed=3))
    assert llm.core.stats()["compiles"] == compiled
