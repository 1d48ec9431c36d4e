"""Dtypes and precision of a whole forward pass: what is float32, whatever the compute dtype."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import get_family
from jaxinfer.params import ParamSpec
from pallas_kernels import dispatch
from tests.models.paged import Driver, Sequence, run
from tests.reference.cases import CASES, prompt


@pytest.fixture(autouse=True)
def plain_ops() -> Iterator[None]:
    """The ops as GPUs run them: in XLA's own products."""
    pallas_kernels.set_impl("reference")
    yield
    pallas_kernels.set_impl("auto")


def parameters(config: ModelConfig, dtype: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def leaf(spec: ParamSpec) -> jax.Array:
        scale = 1.0 if len(spec.shape) == 1 else spec.shape[0] ** -0.5
        return jnp.asarray(rng.standard_normal(spec.shape) * scale, jnp.float32).astype(dtype)

    specs = get_family(config).param_specs(config)
    return jax.tree.map(leaf, specs, is_leaf=lambda x: isinstance(x, ParamSpec))


def trace(case: str, dtype: str) -> tuple[Driver, str]:
    """A driver and the traced program of its step."""
    config = ModelConfig.from_hf(CASES[case])
    driver = Driver(config, parameters(config, dtype), 1, 1, sequences=1, dtype=dtype)
    batch, _ = driver.batch([], [])
    program = jax.jit(partial(run, config)).trace(driver.params, driver.caches, batch).jaxpr
    return driver, str(program)


@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_float32_products_are_not_rounded(case: str) -> None:
    """A GPU would take TF32 for float32 operands unless every product asks for full precision."""
    _, program = trace(case, "float32")
    products = program.count("dot_general[")
    assert products >= 6
    assert program.count("Precision.HIGHEST") == 2 * products  # named for both operands


@pytest.mark.parametrize("case", ["llama", "gemma2", "granite", "ministral3", "qwen3", "olmo2"])
def test_bfloat16_stays_bfloat16(case: str) -> None:
    """Every cache and hidden state has the compute dtype; logits are float32."""
    driver, program = trace(case, "bfloat16")
    batch, _ = driver.batch([], [])
    caches, logits, taps = jax.eval_shape(
        partial(run, driver.config), driver.params, driver.caches, batch
    )
    dtypes = {name: value.dtype for name, value in taps.items()}
    assert {name for name, dtype in dtypes.items() if dtype != jnp.bfloat16} == set()
    assert all(a.dtype == jnp.bfloat16 for cache in caches for a in cache.values())
    assert logits.dtype == jnp.float32
    # A product of bfloat16 operands may sum in float32, but no weight is widened for it.
    width = driver.config.intermediate_size * 2
    assert f"f32[{driver.config.hidden_size},{width}]" not in program


def test_bfloat16_is_near() -> None:
    config = ModelConfig.from_hf(CASES["gemma2_linear"])
    params = parameters(config, "bfloat16")
    near = Driver(config, params, 0, 1, sequences=1, dtype="bfloat16")
    exact = Driver(config, jax.tree.map(_wide, params), 0, 1, sequences=1)
    logits = []
    for driver in (near, exact):
        sequence = Sequence(0, prompt("llama", 16), 16)
        driver.step([], [(sequence, 16)])
        logits.append(np.stack(sequence.logits))
    error = np.abs(logits[0] - logits[1])
    assert 0 < error.mean() < 0.03 * np.std(logits[1])


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def test_the_switch_reaches_layers_that_were_traced_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_missing", lambda: "")  # tracing needs no compiler
    config = ModelConfig.from_hf(CASES["llama"])
    driver = Driver(config, parameters(config, "float32"), 1, 1, sequences=1)
    batch, _ = driver.batch([], [])
    forward = get_family(config).forward
    programs = {}
    for impl in ("native", "reference", "native"):
        pallas_kernels.set_impl(impl)
        step = jax.jit(lambda *inputs: forward(inputs[0], config, *inputs[1:]))
        programs[impl] = str(step.trace(driver.params, driver.caches, batch).jaxpr)
    assert "jaxinfer_paged_attention" in programs["native"]
    assert "jaxinfer_" not in programs["reference"]
