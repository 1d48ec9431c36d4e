"""Pools of recurrent states: how many slots there are, and what the log says about reuse."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jaxinfer import sizing
from jaxinfer.cache import CacheSpec, Scope
from jaxinfer.cache.spec import Field
from jaxinfer.config import EngineConfig
from jaxinfer.errors import CapacityError
from jaxinfer.model_config import ModelConfig

FULL = CacheSpec("full", Scope.TOKEN, (0,), (Field("k", (1, 4), "float32"),))
STATE = CacheSpec("delta", Scope.STATE, (1, 2), (Field("state", (4, 8, 8), "float32"),))
MODEL = cast(ModelConfig, SimpleNamespace(max_length=256, vocab_size=32))
SLOT_BYTES = 2 * 4 * 8 * 8 * 4


def sizes(*specs: CacheSpec, **options: Any) -> tuple[int, ...]:
    config = EngineConfig(max_num_seqs=4, **options)
    return sizing.size_pools(config, MODEL, specs).pages


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Free bytes, as the device tells them."""
    free = [1 << 30]
    monkeypatch.setattr(sizing, "free_memory", lambda: (free[0], "host"))
    return free


def test_states_are_as_many_as_asked_for_or_some_for_each_row(memory: list[int]) -> None:
    assert sizes(FULL, STATE, num_states=7, num_pages=9) == (9, 7)
    assert sizes(FULL, STATE)[1] == 1 + 4 * (1 + sizing.STATES_PER_ROW)
    memory[0] = 20 * SLOT_BYTES + 8 * 32 * 5  # and what the sampling state takes
    assert sizes(FULL, STATE, memory_fraction=1.0)[1] == 10
    memory[0] = 4 * SLOT_BYTES + 8 * 32 * 5
    with pytest.raises(CapacityError, match="holds 2 states.*at least 3.*num_states"):
        sizes(FULL, STATE, memory_fraction=1.0)


def test_pages_get_what_states_leave(memory: list[int]) -> None:
    memory[0] = 40 * SLOT_BYTES + 8 * 32 * 5
    page = FULL.bytes_per_page(16)
    assert sizes(FULL, STATE, memory_fraction=1.0, num_states=38)[0] == 1 + 2 * SLOT_BYTES // page
    with pytest.raises(CapacityError, match="MiB of recurrent states holds no page.*num_states"):
        sizes(FULL, STATE, memory_fraction=1.0, num_states=40)


def test_a_model_of_states_alone_needs_no_page(memory: list[int]) -> None:
    memory[0] = 40 * SLOT_BYTES + 8 * 32 * 5
    result = sizing.size_pools(EngineConfig(memory_fraction=1.0, num_states=40), MODEL, (STATE,))
    assert result == sizing.PoolSizes((40,), 256)


@pytest.mark.parametrize(
    ("specs", "options", "told"),
    [
        ((FULL,), {}, "share prefixes in units of 16 tokens"),
        ((FULL,), {"enable_prefix_caching": False}, "share no prefixes"),
        ((FULL, STATE), {}, "in units of 64 tokens (checkpoint policy align)"),
        ((FULL, STATE), {"checkpoint_interval": 100}, "in units of 112 tokens"),
        ((FULL, STATE), {"checkpoint_policy": "branch"}, "16 tokens (checkpoint policy branch)"),
        ((FULL, STATE), {"checkpoint_policy": "none"}, "no prefixes (checkpoint policy none)"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_log_tells_the_smallest_unit_of_reuse(
    caplog: pytest.LogCaptureFixture,
    specs: tuple[CacheSpec, ...],
    options: dict[str, Any],
    told: str,
) -> None:
    """R-HYB-04."""
    with caplog.at_level(logging.INFO, "jaxinfer.sizing"):
        sizes(*specs, **options)
    assert told in caplog.text
