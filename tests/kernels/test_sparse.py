"""The indexer's choice and attention over chosen keys, in both forms, against brute force."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels
from tests.kernels.oracle import Case, make_case

IMPLS = ("native", "reference")
Arrays = tuple[Any, ...]


@partial(jax.jit, static_argnames=("topk", "scale", "impl"))
def _select(*arrays: jax.Array, **options):
    return pallas_kernels.index_select(*arrays, **options)


@partial(jax.jit, static_argnames=("value_dim", "scale", "impl"))
def _attend(*arrays: jax.Array, **options):
    return pallas_kernels.selected_attention(*arrays, **options)


def select(arrays: Arrays, topk: int, impl: str, scale: float = 0.5) -> np.ndarray:
    return np.asarray(_select(*arrays, topk=topk, scale=scale, impl=impl))


def attend(arrays: Arrays, impl: str, value_dim: int = 16, scale: float = 0.2) -> np.ndarray:
    return np.asarray(_attend(*arrays, value_dim=value_dim, scale=scale, impl=impl))


def visible(tables: np.ndarray, base: int, page: int, last: int) -> list[int]:
    """Positions up to `last` that have a page in this row's table."""
    places = range(base * page, min(last + 1, (base + len(tables)) * page))
    return [p for p in places if tables[p // page - base] > 0]


def best(arrays: Arrays, n: int, i: int, topk: int, scale: float = 0.5) -> list[int]:
    """Brute force in float64: the positions that query i of row n takes."""
    q, w, pool, tables, base, start = arrays
    page = pool.shape[2]
    scored = []
    for p in visible(tables[n], base[n], page, start[n] + i):
        key = pool[tables[n, p // page - base[n]], 0, p % page].astype(np.float64)
        score = w[n, i].astype(np.float64) @ np.maximum(q[n, i].astype(np.float64) @ key * scale, 0)
        scored.append((-score, p))
    return sorted(p for _, p in sorted(scored)[:topk])


def index_case(seed: int, **shape: int) -> tuple[Arrays, np.ndarray]:
    """Small whole numbers, so that scores are exact and often tie; and the rows' real queries."""
    case = make_case(seed, kv_heads=1, **shape)
    q, pool, _, *places = case.arrays
    rng = np.random.default_rng(seed)
    whole = rng.integers(-2, 3, pool.shape).astype(np.float32)
    pool = np.where(np.isfinite(pool), whole, pool)
    q = rng.integers(-2, 3, q.shape).astype(np.float32)
    w = rng.integers(-2, 3, q.shape[:3]).astype(np.float32)
    return (q, w, pool, *places), case.lengths


index_cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "rows": st.integers(1, 3),
        "queries": st.sampled_from([1, 2, 7, 19]),
        "group": st.sampled_from([1, 2, 5, 40]),
        "dim": st.sampled_from([1, 4, 20]),
        "page": st.sampled_from([1, 4, 16, 24]),
        "pages": st.integers(1, 12),
    }
)
topks = st.sampled_from([1, 3, 8, 50, 400])


def check_choice(options: dict[str, int], topk: int, impl: str) -> None:
    arrays, lengths = index_case(**options)
    got = select(arrays, topk, impl)
    for n, length in enumerate(lengths):
        for i in range(length):
            want = best(arrays, n, i, topk)
            np.testing.assert_array_equal(got[n, i], want + [-1] * (topk - len(want)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(index_cases, topks)
def test_native_choice_is_brute_force(native_kernels, options, topk):
    check_choice(options, topk, "native")


@settings(max_examples=6, deadline=None, derandomize=True)
@given(index_cases, topks)
def test_reference_choice_is_brute_force(options, topk):
    check_choice(options, topk, "reference")


@pytest.mark.parametrize("impl", IMPLS)
def test_a_table_that_begins_late_and_has_holes(native_kernels, impl):
    arrays, _ = index_case(4, rows=2, queries=3, group=2, dim=4, page=4, pages=9)
    q, w, pool, tables, _, _ = arrays
    pool = np.nan_to_num(pool, nan=1.0, posinf=1.0, neginf=1.0)
    tables = np.arange(1, 19, dtype=np.int32).reshape(2, 9)
    tables[0, 3] = tables[1, 0] = 0
    base, start = np.array([5, 0], np.int32), np.array([50, 2], np.int32)
    arrays = (q, w, pool, tables, base, start)
    got = select(arrays, 12, impl)
    for n, i in np.ndindex(2, 3):
        want = best(arrays, n, i, 12)
        np.testing.assert_array_equal(got[n, i], want + [-1] * (12 - len(want)))
    empty = (q, w, pool, np.zeros_like(tables), base, start)
    np.testing.assert_array_equal(select(empty, 12, impl), -1)


@pytest.mark.parametrize("impl", IMPLS)
def test_real_scores_leave_out_nothing_better(native_kernels, impl):
    rng = np.random.default_rng(3)
    arrays, _ = index_case(3, rows=1, queries=20, group=8, dim=32, page=16, pages=50)
    q, w, pool, tables, base, _ = arrays
    q, w, pool = (rng.normal(size=x.shape).astype(np.float32) for x in (q, w, pool))
    tables, start = np.arange(1, 51, dtype=np.int32)[None], np.array([770], np.int32)
    got = select((q, w, pool, tables, base, start), 100, impl)[0]
    keys = pool[tables[0], 0].reshape(-1, 32).astype(np.float64)
    for i in range(20):
        score = w[0, i] @ np.maximum(q[0, i].astype(np.float64) @ keys[: 771 + i].T * 0.5, 0)
        rest = np.delete(score, got[i])
        assert len(set(got[i])) == 100
        assert score[got[i]].min() > rest.max() - 1e-4


@pytest.mark.parametrize("impl", IMPLS)
def test_a_key_that_is_nan_is_chosen(native_kernels, impl):
    arrays, _ = index_case(7, rows=1, queries=1, group=2, dim=4, page=4, pages=6)
    q, w, pool, *_ = arrays
    pool = np.nan_to_num(pool, nan=1.0, posinf=1.0, neginf=1.0)
    pool[3, 0, 1] = np.nan
    tables, zero = np.arange(1, 7, dtype=np.int32)[None], np.zeros(1, np.int32)
    assert 9 in select((q, w, pool, tables, zero, zero + 20), 2, impl)[0, 0]


def test_native_choice_is_the_same_however_a_prompt_is_cut(native_kernels):
    """Keys that differ in their last bits: the choice shows every bit of the scores."""
    rng = np.random.default_rng(1)
    length, heads, dim, page, pages = 700, 12, 40, 16, 44
    q = rng.normal(size=(1, length, heads, dim)).astype(np.float32)
    w = rng.normal(size=(1, length, heads)).astype(np.float32)
    pool = rng.normal(size=dim) * (1 + 3e-7 * rng.normal(size=(pages + 1, 1, page, dim)))
    pool = pool.astype(np.float32)
    tables = rng.permutation(np.arange(1, pages + 1))[None].astype(np.int32)
    base = np.zeros(1, np.int32)
    whole = select((q, w, pool, tables, base, base), 60, "native")[0]
    for first, count in [(0, 1), (63, 2), (65, 40), (511, 1), (500, 200), (699, 1)]:
        part = slice(first, first + count)
        arrays = (q[:, part], w[:, part], pool, tables, base, np.array([first], np.int32))
        np.testing.assert_array_equal(select(arrays, 60, "native")[0], whole[part])
    starts = np.linspace(0, 699, 9).astype(np.int32)
    wide = np.pad(np.repeat(tables, 9, 0), ((0, 0), (0, 5)))
    rows = (q[0, starts][:, None], w[0, starts][:, None], pool, wide, np.repeat(base, 9), starts)
    np.testing.assert_array_equal(select(rows, 60, "native")[:, 0], whole[starts])
    smaller = select(rows, 30, "native")[:, 0]
    assert all(set(few) <= set(many) for few, many in zip(smaller, whole[starts], strict=True))


def test_native_more_scores_than_are_kept_at_once(native_kernels):
    """Queries of long contexts go in waves: each is as if it were alone, and as brute force says."""
    rng = np.random.default_rng(6)
    length, count, page = 1 << 16, 272, 64
    q = rng.integers(-9, 10, (1, count, 1, 2)).astype(np.float32)
    w = rng.choice([-1.0, 1.0], (1, count, 1)).astype(np.float32)
    pool = rng.integers(-9, 10, (length // page + 1, 1, page, 2)).astype(np.float32)
    tables = np.arange(1, length // page + 1, dtype=np.int32)[None]
    base, start = np.zeros(1, np.int32), np.array([length - count], np.int32)
    got = select((q, w, pool, tables, base, start), 40, "native")[0]
    keys = pool[1:].reshape(-1, 2)
    for i in (0, 1, 100, 255, 256, 271):
        alone = (q[:, i : i + 1], w[:, i : i + 1], pool, tables, base, start + i)
        np.testing.assert_array_equal(select(alone, 40, "native")[0, 0], got[i])
        score = w[0, i] * np.maximum(keys[: start[0] + i + 1] @ q[0, i, 0] * 0.5, 0)
        np.testing.assert_array_equal(np.sort(np.argsort(-score, kind="stable")[:40]), got[i])


def lists_case(seed: int, *, topk: int, **shape: int) -> Arrays:
    """Lists of visible positions in any order, with -1 between; everything not listed is poison."""
    case: Case = make_case(seed, kv_heads=1, **shape)
    q, pool, _, tables, base, start = case.arrays
    rng = np.random.default_rng(seed)
    chosen = np.full((*q.shape[:2], topk), -1, np.int32)
    for n, length in enumerate(case.lengths):
        for i in range(length):
            seen = visible(tables[n], base[n], pool.shape[2], start[n] + i)
            taken = rng.permutation(seen)[: rng.integers(0, topk + 1)]
            chosen[n, i, rng.permutation(topk)[: len(taken)]] = taken
    unlisted = np.ones(pool.shape[:3], bool)
    for n, p in {(n, p) for (n, _, _), p in np.ndenumerate(chosen) if p >= 0}:
        unlisted[tables[n, p // pool.shape[2] - base[n]], 0, p % pool.shape[2]] = False
    pool[unlisted] = np.nan
    return q, pool, tables, base, chosen


def over_lists(arrays: Arrays, value_dim: int, scale: float) -> np.ndarray:
    q, pool, tables, base, chosen = arrays
    page = pool.shape[2]
    out = np.zeros((*q.shape[:3], value_dim))
    for n, i in np.ndindex(*q.shape[:2]):
        listed = chosen[n, i][chosen[n, i] >= 0]
        ids = tables[n, listed // page - base[n]]
        keys = pool[ids, 0, listed % page].astype(np.float64)
        if len(listed):
            score = q[n, i].astype(np.float64) @ keys.T * scale
            weight = np.exp(score - score.max(1, keepdims=True))
            out[n, i] = weight / weight.sum(1, keepdims=True) @ keys[:, :value_dim]
    return out


def check_lists(arrays: Arrays, impl: str, value_dim: int) -> None:
    got = attend(arrays, impl, value_dim)
    np.testing.assert_allclose(got, over_lists(arrays, value_dim, 0.2), atol=1e-5, rtol=1e-5)


shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "topk": st.sampled_from([1, 5, 64, 200]),
        "rows": st.integers(1, 3),
        "queries": st.sampled_from([1, 2, 19]),
        "group": st.sampled_from([1, 3, 20, 130]),
        "dim": st.sampled_from([16, 24]),
        "page": st.sampled_from([1, 4, 16, 24]),
        "pages": st.integers(1, 12),
    }
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(shapes)
def test_native_attention_over_lists(native_kernels, shape):
    check_lists(lists_case(**shape), "native", 16)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(shapes)
def test_reference_attention_over_lists(shape):
    check_lists(lists_case(**shape), "reference", 16)


@pytest.mark.parametrize("impl", IMPLS)
def test_lists_longer_than_a_segment(native_kernels, impl):
    shape = {"rows": 2, "queries": 3, "group": 3, "dim": 24, "page": 16, "pages": 70}
    check_lists(lists_case(2, topk=900, **shape), impl, 13)


@pytest.mark.parametrize("impl", IMPLS)
def test_listed_places_without_a_page_are_none(native_kernels, impl):
    q, pool, tables, base = prompt(64)
    q, base = q[:, :1], base + 2
    tables = tables.copy()
    tables[0, 1] = 0  # positions 48 to 63
    lists = np.array([[[40, 0, 50, 95, 96, 10**6, 31, -1, 33]]], np.int32)
    known = np.where(np.isin(lists, (40, 95, 33)), lists, -1)
    got = attend((q, pool, tables, base, lists), impl)
    want = over_lists((q, pool, tables, base, known), 16, 0.2)
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)
    none = attend((q, pool, tables, base, np.where(known < 0, lists, -1)), impl)
    np.testing.assert_array_equal(none, 0.0)


def prompt(length: int = 700) -> Arrays:
    rng = np.random.default_rng(9)
    pages = -(-length // 16)
    q = rng.normal(size=(1, length, 3, 24)).astype(np.float32)
    pool = rng.normal(size=(pages + 1, 1, 16, 24)).astype(np.float32)
    tables = rng.permutation(np.arange(1, pages + 1))[None].astype(np.int32)
    return q, pool, tables, np.zeros(1, np.int32)


def test_native_over_all_keys_is_bitwise_latent_attention(native_kernels):
    """And so is sparse attention of a context that is shorter than what the indexer takes."""
    q, pool, tables, base = prompt()
    latent = jax.jit(partial(pallas_kernels.latent_attention, value_dim=16, scale=0.2))
    whole = np.asarray(latent(q, pool, tables, base, base))
    all_of = select((q, q[..., 0], pool, tables, base, base), 1000, "native")
    np.testing.assert_array_equal(attend((q, pool, tables, base, all_of), "native"), whole)


def test_native_does_not_depend_on_neighbours_or_widths(native_kernels):
    q, pool, tables, base = prompt()
    chosen = select((q, q[..., 0], pool, tables, base, base), 600, "native")
    whole = attend((q, pool, tables, base, chosen), "native")[0]
    starts = np.linspace(0, 699, 9).astype(np.int32)
    for rows in (starts, starts[:2], starts[4:5]):
        count = len(rows)
        wide = np.pad(np.repeat(tables, count, 0), ((0, 0), (0, 4)))
        lists = np.pad(chosen[0, rows][:, None], ((0, 0), (0, 0), (0, 37)), constant_values=-1)
        arrays = (q[0, rows][:, None], pool, wide, np.repeat(base, count), lists)
        np.testing.assert_array_equal(attend(arrays, "native")[:, 0], whole[rows])


@pytest.mark.parametrize("impl", IMPLS)
def test_derivatives_match_differences(native_kernels, impl):
    """Through both ops: the choice itself has no derivative."""
    shape = {"rows": 2, "queries": 4, "group": 3, "dim": 6, "page": 4, "pages": 5}
    q, pool, tables, base, chosen = lists_case(5, topk=7, **shape)
    pool = np.nan_to_num(pool)
    rng = np.random.default_rng(4)
    weight = rng.normal(size=(2, 4, 3, 4))
    steps = [rng.normal(size=x.shape) for x in (q, pool)]

    def loss(q, pool):
        places = (jnp.asarray(tables), jnp.asarray(base))
        options = {"scale": 0.2, "impl": impl}
        ignored = pallas_kernels.index_select(q, q[..., 0], pool, *places, base, topk=7, **options)
        lists = jnp.where(ignored < -1, 0, chosen)  # always `chosen`
        out = pallas_kernels.selected_attention(q, pool, *places, lists, value_dim=4, **options)
        return jnp.sum(out * weight)

    def moved(by: float) -> float:
        arrays = (q + by * steps[0], pool + by * steps[1], tables, base, chosen)
        return float((over_lists(arrays, 4, 0.2) * weight).sum())

    grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(q, pool)
    got = sum(np.sum(np.asarray(g) * s) for g, s in zip(grads, steps, strict=True))
    np.testing.assert_allclose(got, (moved(1e-4) - moved(-1e-4)) / 2e-4, rtol=1e-3, atol=1e-4)


def test_shapes_that_do_not_fit_are_refused():
    q, pool, tables, base = (jnp.asarray(x) for x in prompt(4))
    choose = partial(pallas_kernels.index_select, scale=1.0)
    with pytest.raises(ValueError, match="topk=0"):
        choose(q, q[..., 0], pool, tables, base, base, topk=0)
    with pytest.raises(ValueError, match=r"w\(1, 4, 3\)"):
        choose(q, q[:, :, :2, 0], pool, tables, base, base, topk=1)
    lists = jnp.zeros((1, 3, 2), jnp.int32)
    with pytest.raises(ValueError, match="chosen"):
        pallas_kernels.selected_attention(q, pool, tables, base, lists, value_dim=4, scale=1.0)
