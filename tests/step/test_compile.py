"""What is compiled, how often, and what the compiled step copies (R-JAX-01, 02, 03, 08)."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer import LLM, load, sizing
from jaxinfer.config import EngineConfig
from jaxinfer.core import EngineCore
from jaxinfer.errors import CapacityError
from jaxinfer.layout import StepShape
from jaxinfer.loading import LoadedModel
from jaxinfer.models.registry import get_family
from jaxinfer.sizing import FALLBACK_MEMORY, free_memory
from jaxinfer.step.forward import StepModel

OPTIONS: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "num_pages": 601,
}


@pytest.fixture(scope="module")
def model(tiny) -> LoadedModel:
    return load(str(tiny))


@pytest.fixture(scope="module")
def core(model) -> EngineCore:
    """A pool of 601 pages: larger than any weight."""
    return model.core(EngineConfig(**OPTIONS))


def large(core: EngineCore) -> set[tuple[int, ...]]:
    """Sorted dimensions of the weights and of all arrays of the state but the small ones."""
    arrays = jax.tree.leaves((core.params, core.state))
    return {tuple(sorted(x.shape)) for x in arrays if x.ndim > 1}


def copied(compiled: Any) -> set[tuple[int, ...]]:
    """Sorted dimensions of everything that a copy in the optimized HLO yields."""
    found = re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", compiled.as_text())
    return {tuple(sorted(int(n) for n in dims.split(",") if n)) for dims in found}


@pytest.mark.parametrize("blocks", [0, 2])
def test_a_step_copies_neither_pool_nor_weights(core, blocks):
    """R-JAX-02: all of the state is aliased, and no copy in the HLO has a pool's or a weight's shape."""
    compiled = core.executables.step(StepShape(2, blocks, core.config.block))
    state = sum(x.nbytes for x in jax.tree.leaves(core.state))
    assert compiled.memory_analysis().alias_size_in_bytes >= state
    assert not copied(compiled) & large(core)


def test_a_load_copies_no_pool(core):
    compiled = core.executables.load()
    state = sum(x.nbytes for x in jax.tree.leaves(core.state))
    assert compiled.memory_analysis().alias_size_in_bytes >= state
    assert not copied(compiled) & large(core)


def test_fifty_steps_allocate_no_second_state(model):
    """Warnings are errors here, so that a donation which JAX cannot use would fail the test."""
    llm = LLM(model, progress=False, **OPTIONS)
    sizes = []
    for _ in range(3):
        llm.generate({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)
        sizes.append(sum(x.nbytes for x in jax.live_arrays()))
    assert len(set(sizes)) == 1


def step_model(model: LoadedModel, core: EngineCore) -> StepModel:
    """Built anew, from parts that are equal and not the same."""
    config = replace(model.config)
    family = get_family(config)
    return StepModel(
        config, family, family.cache_specs(config, model.dtype), replace(core.scheduler.layout), 16
    )


def test_equal_models_compile_once(model, core, tiny):
    """R-JAX-03: static arguments compare by value; a field that differs does compile."""
    traced = []

    def run(static: StepModel, shape: StepShape, x: jax.Array) -> jax.Array:
        traced.append(shape)
        return x + static.page_size

    jitted = jax.jit(run, static_argnums=(0, 1))
    for i in range(100):
        again = load(str(tiny)) if i == 50 else model
        jitted(step_model(again, core), StepShape(1, 0, 64), jnp.zeros(1))
    assert len(traced) == 1
    changed = replace(step_model(model, core), page_size=32)
    jitted(changed, StepShape(1, 0, 64), jnp.zeros(1))
    jitted(changed, StepShape(2, 0, 64), jnp.zeros(1))
    assert len(traced) == 3
    compiles, rung = core.executables.compiles, (2, 0, core.config.block)
    assert core.executables.step(StepShape(*rung)) is core.executables.step(StepShape(*rung))
    assert core.executables.compiles <= compiles + 1


def test_a_compiled_step_has_a_name(core):
    """Profiles and dumps show which rung ran."""
    compiled = core.executables.step(StepShape(2, 0, core.config.block))
    assert "jit_step_2_rows_0_blocks" in compiled.as_text().splitlines()[0]


def test_a_shape_off_the_ladder_is_refused(core):
    with pytest.raises(CapacityError, match=r"rows=3.*not on the ladder"):
        core.executables.step(StepShape(3, 0, 64))


def test_strict_mode_raises(model):
    """R-JAX-01."""
    core = model.core(EngineConfig(**OPTIONS, warmup="eager", strict_compile=True))
    core.executables.warm = True  # as after warm_up, but with a rung left out
    with pytest.raises(CapacityError, match=r"^the rung StepShape\(rows=.{9,99}after warm-up"):
        core.executables.step(core.config.ladder()[0])
    with pytest.raises(CapacityError, match="^load .*after warm-up"):
        core.executables.load()
    assert core.executables.compiles == 0


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 600), st.integers(1, 5000))
def test_the_ladder_is_finite_and_holds_every_step(seqs: int, budget: int):
    config = EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=budget)
    ladder = config.ladder()
    assert ladder == EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=budget).ladder()
    assert len(ladder) == len(set(ladder)) <= 3 * (budget.bit_length() + seqs.bit_length()) + 6
    assert config.rows == min(seqs, budget)
    assert any(s.rows >= config.rows and not s.blocks for s in ladder), "all rows decode"
    assert any(s.rows >= config.rows and s.blocks for s in ladder), "all rows beside a prompt"
    assert all(s.block == config.block <= budget for s in ladder)
    for rows in {1, config.rows // 3 + 1, config.rows}:
        fit = min(s.rows for s in ladder if s.rows >= rows and not s.blocks)
        assert fit <= 2 * rows, "at most half of a decode rung is padding"


# -- memory --------------------------------------------------------------------------------------


def refuse() -> None:
    raise NotImplementedError("memory_stats")


@pytest.mark.parametrize(
    ("query", "free"),
    [
        (lambda: {"bytes_limit": 100, "bytes_in_use": 30}, 70),
        (lambda: {"bytes_limit": 100}, 100),
        (lambda: None, FALLBACK_MEMORY),
        (dict, FALLBACK_MEMORY),
        (refuse, FALLBACK_MEMORY),
    ],
)
def test_memory_of_an_accelerator(monkeypatch, caplog, query, free):
    """R-JAX-08: a backend that cannot say gets a fixed size, with a line in the log."""
    device = SimpleNamespace(platform="tpu", memory_stats=query)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        assert free_memory() == (free, "device")
    assert ("cannot be read" in caplog.text) == (free == FALLBACK_MEMORY)


def test_memory_of_the_host(model):
    size, where = free_memory()
    assert where == "host" and size > 0
    core = model.core(EngineConfig(max_num_seqs=2, max_num_batched_tokens=64))
    assert core.max_model_len == 512 and core.sizes.pages[0] > 512 // 16


def test_sampling_state_is_taken_off_the_free_memory(model, monkeypatch, caplog):
    """counts and bias: 8 bytes for each slot and vocabulary entry, before any page."""
    rows, page = 512, 16
    config = EngineConfig(max_num_seqs=rows, max_num_batched_tokens=rows, memory_fraction=1.0)
    specs = get_family(model.config).cache_specs(model.config, model.dtype)
    per_page = page * sum(s.bytes_per_token() for s in specs)
    state = 8 * model.config.vocab_size * (rows + 1)
    monkeypatch.setattr(sizing, "free_memory", lambda: (state + 40 * per_page, "device"))
    with caplog.at_level(logging.INFO, "jaxinfer"):
        assert sizing.size_pools(config, model.config, specs).pages[0] == 40 + 1
    assert "less 1 MiB of sampling state" in caplog.text
    monkeypatch.setattr(sizing, "free_memory", lambda: (state // 2, "device"))
    with pytest.raises(CapacityError, match="sampling state holds no page.*max_num_seqs"):
        sizing.size_pools(config, model.config, specs)
    monkeypatch.setattr(sizing, "free_memory", lambda: (state + 4 * per_page, "device"))
    with pytest.raises(CapacityError, match="sampling state.*lower max_model_len to at most 64"):
        sizing.size_pools(replace(config, max_model_len=128), model.config, specs)
