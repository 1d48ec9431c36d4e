"""rms_norm against float64, and the native form's independence of the batch."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.dispatch import Impl

EPS = 1e-5


def run(x: np.ndarray, weight: np.ndarray, impl: Impl) -> np.ndarray:
    return np.asarray(jax.jit(partial(pallas_kernels.rms_norm, eps=EPS, impl=impl))(x, weight))


@pytest.mark.parametrize("impl", ["native", "reference"])
@pytest.mark.parametrize("shape", [(1,), (2, 3), (5, 64), (3, 9, 65), (200, 576)])
def test_matches_float64(native_kernels, impl, shape):
    rng = np.random.default_rng(len(shape))
    x = rng.normal(size=shape).astype(np.float32)
    weight = rng.normal(size=shape[-1]).astype(np.float32)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * weight
    np.testing.assert_allclose(run(x, weight, impl), want, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dim", [1, 63, 576])
def test_native_rows_are_bitwise_independent_of_the_batch(native_kernels, dim):
    x = np.random.default_rng(dim).normal(size=(300, dim)).astype(np.float32)
    weight = np.linspace(-1, 2, dim, dtype=np.float32)
    whole = run(x, weight, "native")
    for rows in (1, 2, 3, 4, 7, 64):
        np.testing.assert_array_equal(run(x[5 : 5 + rows], weight, "native"), whole[5 : 5 + rows])


def test_derivatives_are_those_of_the_reference(native_kernels):
    x, weight = jnp.linspace(-1, 2, 24).reshape(2, 12), jnp.linspace(1, 2, 12)
    impls: tuple[Impl, ...] = ("native", "reference")

    def largest(x: jax.Array, weight: jax.Array, impl: Impl) -> jax.Array:
        return pallas_kernels.rms_norm(x, weight, EPS, impl=impl).max()

    grads = [jax.grad(partial(largest, impl=impl), (0, 1))(x, weight) for impl in impls]
    for got, want in zip(*grads, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_a_weight_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="last axis"):
        pallas_kernels.rms_norm(jnp.ones((2, 3)), jnp.ones(2), EPS)
