"""Both forms of paged attention against a float64 oracle, and what must not change a result."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels
from tests.kernels.oracle import Case, attention, make_case, real


@partial(jax.jit, static_argnames=("scale", "window", "softcap", "impl"))
def _jitted(*arrays: jax.Array, **options):
    return pallas_kernels.paged_attention(*arrays, **options)


def run(case: Case, impl: str) -> np.ndarray:
    return np.asarray(_jitted(*case.arrays, **case.options, impl=impl))


def check(case: Case, impl: str) -> None:
    got, want = real(case, run(case, impl)), real(case, attention(case))
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "rows": st.integers(1, 4),
        "queries": st.sampled_from([1, 2, 7, 19]),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 4),
        "dim": st.sampled_from([1, 8, 20, 64]),
        "page": st.sampled_from([1, 4, 16, 24]),
        "pages": st.integers(1, 17),
        "window": st.sampled_from([0, 0, 1, 5, 40]),
        "softcap": st.sampled_from([0.0, 0.0, 3.0]),
    }
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(cases)
def test_native_matches_oracle(native_kernels, options):
    check(make_case(**options), "native")


@settings(max_examples=12, deadline=None, derandomize=True)
@given(cases)
def test_reference_matches_oracle(options):
    check(make_case(**options), "reference")


@pytest.mark.parametrize("pages", range(1, 18))
def test_every_table_width(native_kernels, pages):
    case = make_case(pages, rows=2, queries=3, kv_heads=1, group=3, dim=16, page=16, pages=pages)
    check(case, "native")
    if pages in (1, 3, 5, 7, 17):  # R-JAX-05: no multiple of the chunk
        check(case, "reference")


@pytest.mark.parametrize("impl", ["native", "reference"])
@pytest.mark.parametrize(("page", "pages"), [(16, 70), (128, 9)])
def test_contexts_longer_than_a_segment(native_kernels, impl, page, pages):
    case = make_case(3, rows=2, queries=20, kv_heads=1, group=2, dim=8, page=page, pages=pages)
    check(case, impl)


@pytest.mark.parametrize("impl", ["native", "reference"])
def test_padding_rows_yield_zeros(native_kernels, impl):
    case = make_case(5, rows=3, queries=2, kv_heads=2, group=1, dim=8, page=4, pages=3)
    q, k_pool, v_pool, tables, base, start = case.arrays
    empty = np.zeros_like(tables), np.zeros_like(base), np.zeros_like(start)
    out = run(Case((q, k_pool, v_pool, *empty), case.options, case.lengths), impl)
    np.testing.assert_array_equal(out, 0.0)


@pytest.mark.parametrize("impl", ["native", "reference"])
def test_a_seen_nan_is_not_hidden(native_kernels, impl):
    case = make_case(6, rows=1, queries=1, kv_heads=1, group=1, dim=8, page=4, pages=2)
    q, k_pool, v_pool, tables, base, start = case.arrays
    for pool in (k_pool, v_pool):
        poisoned = pool.copy()
        poisoned[tables[0, 0], 0, 0, 0] = np.nan
        pools = (poisoned, v_pool) if pool is k_pool else (k_pool, poisoned)
        out = run(Case((q, *pools, tables, base, start), case.options, case.lengths), impl)
        assert np.isnan(out).any()


def _prompt(dim: int = 64, length: int = 700, page: int = 16) -> Case:
    """One row whose queries are all the positions of a sequence: 2 segments, ragged last page."""
    pages = -(-length // page)
    rng = np.random.default_rng(9)
    q = rng.normal(size=(1, length, 3, dim)).astype(np.float32)
    k_pool, v_pool = rng.normal(size=(2, pages + 1, 1, page, dim)).astype(np.float32)
    tables = rng.permutation(np.arange(1, pages + 1))[None].astype(np.int32)
    zero = np.zeros(1, np.int32)
    options = {"scale": 0.125, "window": 0, "softcap": 0.0}
    return Case((q, k_pool, v_pool, tables, zero, zero), options, np.array([length]))


@pytest.mark.parametrize("window", [0, 100])
def test_native_is_bitwise_the_same_however_a_prompt_is_cut(native_kernels, window):
    case = _prompt()
    case.options["window"] = window
    q, k_pool, v_pool, tables, base, _ = case.arrays
    whole = run(case, "native")[0]
    for first, count in [(0, 1), (63, 2), (65, 40), (511, 1), (512, 1), (500, 200), (699, 1)]:
        start = np.array([first], np.int32)
        arrays = (q[:, first : first + count], k_pool, v_pool, tables, base, start)
        part = run(Case(arrays, case.options, np.array([count])), "native")[0]
        np.testing.assert_array_equal(part, whole[first : first + count])


@pytest.mark.parametrize("rows", [2, 9])
def test_native_rows_do_not_see_each_other(native_kernels, rows):
    case = _prompt()
    q, k_pool, v_pool, tables, base, _ = case.arrays
    starts = np.linspace(0, 699, rows).astype(np.int32)
    arrays = (
        q[0, starts][:, None],
        k_pool,
        v_pool,
        np.repeat(tables, rows, 0),
        np.repeat(base, rows),
        starts,
    )
    out = run(Case(arrays, case.options, np.ones(rows, int)), "native")
    np.testing.assert_array_equal(out[:, 0], run(case, "native")[0, starts])


def test_native_does_not_depend_on_page_size(native_kernels):
    outs = []
    for page in (16, 32):
        case = _prompt(length=640)
        q, k_pool, v_pool, tables, base, start = case.arrays
        pools = [
            pool[tables[0]].transpose(1, 0, 2, 3).reshape(1, -1, page, 64)
            for pool in (k_pool, v_pool)
        ]
        pools = [np.concatenate([pool[:, :1], pool], axis=1).swapaxes(0, 1) for pool in pools]
        ids = np.arange(1, 640 // page + 1, dtype=np.int32)[None]
        outs.append(run(Case((q, *pools, ids, base, start), case.options, case.lengths), "native"))
    np.testing.assert_array_equal(*outs)


def test_shapes_that_do_not_fit_are_refused():
    case = make_case(1, rows=2, queries=1, kv_heads=2, group=1, dim=8, page=4, pages=2)
    q, k_pool, v_pool, tables, base, start = case.arrays
    with pytest.raises(ValueError, match="kv_heads"):
        pallas_kernels.paged_attention(q[:, :, :1], k_pool, v_pool, tables, base, start, scale=1.0)
    with pytest.raises(ValueError, match="rows"):
        pallas_kernels.paged_attention(q, k_pool, v_pool, tables, base[:1], start, scale=1.0)
    with pytest.raises(ValueError, match="impl='fast'"):
        pallas_kernels.paged_attention(
            q,
            k_pool,
            v_pool,
            tables,
            base,
            start,
            scale=1.0,
            impl="fast",  # type: ignore[arg-type]
        )
