"""Both forms of the matmuls against float64, and the native form's independence of the batch."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels

OPS = {"matmul": pallas_kernels.matmul, "matmul_t": pallas_kernels.matmul_t}


@partial(jax.jit, static_argnames=("op", "impl"))
def _jitted(x, w, op, impl):
    return OPS[op](x, w, impl=impl)


def run(op: str, x: np.ndarray, w: np.ndarray, impl: str) -> np.ndarray:
    """x @ w by `op`; w is [K, N] here and stored as the op wants it."""
    return np.asarray(_jitted(x, w.T.copy() if op == "matmul_t" else w, op, impl))


def draw(m: int, k: int, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(m, k)).astype(np.float32), rng.normal(size=(k, n)).astype(np.float32)


def close(got: np.ndarray, x: np.ndarray, w: np.ndarray) -> None:
    want = x.astype(np.float64) @ w
    bound = 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(w)) + 1e-6
    assert (np.abs(got - want) <= bound).all()


# Edges of tiles (rows 1..9), vectors (4, 8, 16 lanes), panels and packed blocks (128 deep).
rows = st.one_of(st.integers(1, 18), st.sampled_from([31, 64, 65]))
sides = st.one_of(st.integers(1, 40), st.sampled_from([48, 63, 127, 128, 129, 200, 255, 300]))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(OPS)), rows, sides, sides, st.integers(0, 99))
def test_native_matches_float64(native_kernels, op, m, k, n, seed):
    x, w = draw(m, k, n, seed)
    close(run(op, x, w, "native"), x, w)


@pytest.mark.parametrize("op", sorted(OPS))
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (5, 130, 33), (33, 64, 100)])
def test_reference_matches_float64(op, m, k, n):
    x, w = draw(m, k, n)
    close(run(op, x, w, "reference"), x, w)


@pytest.mark.parametrize("op", sorted(OPS))
@pytest.mark.parametrize(("k", "n"), [(576, 960), (576, 576), (576, 3072), (1536, 576), (131, 77)])
def test_native_rows_are_bitwise_independent_of_the_batch(native_kernels, op, k, n):
    x, w = draw(128, k, n)
    whole = run(op, x, w, "native")
    for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 17, 32, 64):
        np.testing.assert_array_equal(run(op, x[:m], w, "native"), whole[:m])
    np.testing.assert_array_equal(run(op, x[77:78], w, "native"), whole[77:78])


@pytest.mark.parametrize("op", sorted(OPS))
def test_one_bad_row_leaves_the_others_alone(native_kernels, op):
    x, w = draw(10, 70, 50)
    good = run(op, x, w, "native")
    x[4] = np.nan
    got = run(op, x, w, "native")
    assert np.isnan(got[4]).all()
    np.testing.assert_array_equal(np.delete(got, 4, 0), np.delete(good, 4, 0))


@pytest.mark.parametrize("impl", ["native", "reference"])
@pytest.mark.parametrize("op", sorted(OPS))
def test_derivatives(native_kernels, op, impl):
    x, w = draw(3, 20, 7)
    w = w.T.copy() if op == "matmul_t" else w
    grads = jax.grad(lambda a, b: jnp.sum(OPS[op](a, b, impl=impl)), argnums=(0, 1))(x, w)
    np.testing.assert_allclose(grads[0], np.tile(w.sum(0 if op == "matmul_t" else 1), (3, 1)), 1e-5)
    want = np.broadcast_to(x.sum(0) if op == "matmul_t" else x.sum(0)[:, None], w.shape)
    np.testing.assert_allclose(grads[1], want, rtol=1e-5)


@pytest.mark.parametrize("op", sorted(OPS))
def test_bfloat16_sums_in_float32(op):
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in draw(2, 4096, 3))
    got = OPS[op](x, w.T if op == "matmul_t" else w, out_dtype=jnp.float32)
    assert got.dtype == jnp.float32
    close(np.asarray(got), np.asarray(x, np.float32), np.asarray(w, np.float32))


@pytest.mark.parametrize("op", sorted(OPS))
def test_shapes_that_do_not_fit_are_refused(op):
    with pytest.raises(ValueError, match="does not fit"):
        OPS[op](jnp.zeros((2, 3)), jnp.zeros((4, 5)))
