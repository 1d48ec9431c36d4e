"""Grouped matmuls in both forms against float64, and the native form against the plain matmul."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels

IMPLS = ("native", "reference")


@partial(jax.jit, static_argnames="impl")
def _jitted(x, w, sizes, impl):
    return pallas_kernels.grouped_matmul(x, w, sizes, impl=impl)


def run(x: np.ndarray, w: np.ndarray, sizes: np.ndarray, impl: str) -> np.ndarray:
    return np.asarray(_jitted(x, w, sizes, impl))


def draw(
    sizes: list[int], k: int, n: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(sizes), k)).astype(np.float32)
    w = rng.normal(size=(len(sizes), k, n)).astype(np.float32)
    return x, w, np.array(sizes, np.int32)


def check(x: np.ndarray, w: np.ndarray, sizes: np.ndarray, impl: str) -> None:
    group = np.repeat(np.arange(len(sizes)), sizes)
    want = np.einsum("mk,mkn->mn", x.astype(np.float64), w[group])
    bound = 1e-6 * np.einsum("mk,mkn->mn", np.abs(x).astype(np.float64), np.abs(w)[group]) + 1e-6
    assert (np.abs(run(x, w, sizes, impl) - want) <= bound).all()


counts = st.lists(st.sampled_from([0, 0, 0, 1, 1, 2, 3, 5, 9, 20]), min_size=1, max_size=9).filter(
    any
)
sides = st.sampled_from([1, 3, 8, 16, 33, 64, 130, 200])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(counts, sides, sides, st.integers(0, 99))
def test_native_matches_float64(native_kernels, sizes, k, n, seed):
    check(*draw(sizes, k, n, seed), "native")


@pytest.mark.parametrize(
    ("sizes", "k", "n"), [([1], 1, 1), ([0, 3, 0, 0, 2, 9], 33, 20), ([7, 0], 64, 130)]
)
def test_reference_matches_float64(sizes, k, n):
    check(*draw(sizes, k, n), "reference")


@pytest.mark.parametrize("sizes", [[1] * 70, [16, 0, 17, 33, 0], [0, 0, 200]])
def test_reference_at_the_rims_of_its_blocks(sizes):
    check(*draw(sizes, 9, 6), "reference")


def test_reference_multiplies_a_row_with_one_group():
    """Its temporary memory is that of the rows, not of rows times groups."""
    x, w, sizes = draw([16] * 64, 128, 128)
    memory = _jitted.lower(x, w, sizes, "reference").compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 6 * x.nbytes


SIZES = [3, 0, 1, 40, 0, 0, 7, 1, 2, 10]


@pytest.mark.parametrize(("k", "n"), [(576, 768), (131, 77), (1024, 600)])
def test_native_rows_are_bitwise_those_of_the_plain_matmul(native_kernels, k, n):
    """Whatever the other rows are: every group is what `matmul` gives, and a row alone gives it too."""
    x, w, sizes = draw(SIZES, k, n)
    whole = run(x, w, sizes, "native")
    ends = np.cumsum(sizes)
    for e, end in enumerate(ends):
        rows = slice(end - sizes[e], end)
        if sizes[e]:
            plain = pallas_kernels.matmul(jnp.asarray(x[rows]), jnp.asarray(w[e]), impl="native")
            np.testing.assert_array_equal(whole[rows], np.asarray(plain))
            one = np.eye(len(sizes), dtype=np.int32)[e]
            alone = run(x[end - 1 : end], w, one, "native")
            np.testing.assert_array_equal(alone[0], whole[end - 1])
    few = np.minimum(sizes, 2)  # a smaller batch of the same rows
    kept = np.concatenate(
        [np.arange(e - s, e - s + f) for e, s, f in zip(ends, sizes, few, strict=True)]
    )
    np.testing.assert_array_equal(run(x[kept], w, few, "native"), whole[kept])


def test_native_reads_no_weight_of_a_group_without_rows(native_kernels):
    x, w, sizes = draw(SIZES, 40, 24)
    whole = run(x, w, sizes, "native")
    w[sizes == 0] = np.nan
    np.testing.assert_array_equal(run(x, w, sizes, "native"), whole)


@pytest.mark.parametrize("impl", IMPLS)
def test_one_bad_row_leaves_the_others_alone(native_kernels, impl):
    x, w, sizes = draw(SIZES, 40, 24)
    good = run(x, w, sizes, impl)
    x[20] = np.nan
    got = run(x, w, sizes, impl)
    assert np.isnan(got[20]).all()
    np.testing.assert_array_equal(np.delete(got, 20, 0), np.delete(good, 20, 0))


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_beyond_the_groups_are_zeros(native_kernels, impl):
    x, w, sizes = draw([2, 3], 8, 5)
    sizes[1] = 1
    out = run(x, w, sizes, impl)
    np.testing.assert_array_equal(out[3:], 0.0)
    assert out[:3].all()


@pytest.mark.parametrize("impl", IMPLS)
def test_derivatives(native_kernels, impl):
    x, w, sizes = (jnp.asarray(a) for a in draw([3, 0, 2], 20, 7))
    weight = np.random.default_rng(1).normal(size=(5, 7)).astype(np.float32)

    def loss(x, w):
        return jnp.sum(pallas_kernels.grouped_matmul(x, w, sizes, impl=impl) * weight)

    dx, dw = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    for e, rows in ((0, slice(0, 3)), (1, slice(3, 3)), (2, slice(3, 5))):
        np.testing.assert_allclose(dx[rows], weight[rows] @ w[e].T, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(dw[e], x[rows].T @ weight[rows], rtol=1e-4, atol=1e-4)


def test_bfloat16_sums_in_float32():
    x, w, sizes = draw([1, 0, 2], 4096, 3)
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in (x, w))
    call = partial(pallas_kernels.grouped_matmul, x, w, jnp.asarray(sizes))
    assert call().dtype == jnp.bfloat16
    got = np.asarray(call(out_dtype=jnp.float32))
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    np.testing.assert_allclose(got[:1], x[:1] @ w[0], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(got[1:], x[1:] @ w[2], rtol=1e-3, atol=1e-3)


def test_shapes_that_do_not_fit_are_refused():
    x, w, sizes = (jnp.asarray(a) for a in draw([1, 2], 8, 5))
    for args in ((x[:, :7], w, sizes), (x, w, sizes[:1]), (x, w[0], sizes)):
        with pytest.raises(ValueError, match="do not fit"):
            pallas_kernels.grouped_matmul(*args)
