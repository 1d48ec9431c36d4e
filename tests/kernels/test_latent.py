"""Latent attention and the write of one pool, in both forms, against float64 and plain loops."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels
from tests.kernels.oracle import Case, attention, make_case, real

IMPLS = ("native", "reference")


@partial(jax.jit, static_argnames=("scale", "value_dim", "impl"))
def _jitted(*arrays: jax.Array, **options):
    return pallas_kernels.latent_attention(*arrays, **options)


def run(case: Case, impl: str) -> np.ndarray:
    """The case's keys are the pool; its values must be their first places."""
    q, pool, values, *places = case.arrays
    scale, value_dim = case.options["scale"], values.shape[3]
    return np.asarray(_jitted(q, pool, *places, scale=scale, value_dim=value_dim, impl=impl))


def make(seed: int, *, dim: int, value_dim: int, heads: int, **shape: int) -> Case:
    case = make_case(seed, kv_heads=1, group=heads, dim=dim, **shape)
    q, pool, _, *places = case.arrays
    return replace(case, arrays=(q, pool, pool[..., :value_dim], *places))


def check(case: Case, impl: str) -> None:
    got, want = real(case, run(case, impl)), real(case, attention(case))
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


cases = st.builds(
    lambda dims, **rest: {"dim": dims[0], "value_dim": dims[1], **rest},
    dims=st.sampled_from([(1, 1), (24, 16), (20, 20), (20, 7), (72, 64), (40, 33)]),
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 4),
    queries=st.sampled_from([1, 2, 7, 19]),
    heads=st.sampled_from([1, 3, 6, 20, 130]),
    page=st.sampled_from([1, 4, 16, 24]),
    pages=st.integers(1, 12),
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cases)
def test_native_matches_oracle(native_kernels, options):
    check(make(**options), "native")


@settings(max_examples=5, deadline=None, derandomize=True)
@given(cases)
def test_reference_matches_oracle(options):
    check(make(**options), "reference")


@pytest.mark.parametrize("impl", IMPLS)
def test_contexts_longer_than_a_segment(native_kernels, impl):
    check(make(3, rows=2, queries=20, heads=5, dim=24, value_dim=16, page=16, pages=70), impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_padding_rows_yield_zeros(native_kernels, impl):
    case = make(5, rows=3, queries=2, heads=2, dim=8, value_dim=4, page=4, pages=3)
    q, pool, values, tables, base, start = case.arrays
    empty = np.zeros_like(tables), np.zeros_like(base), np.zeros_like(start)
    out = run(replace(case, arrays=(q, pool, values, *empty)), impl)
    np.testing.assert_array_equal(out, 0.0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("place", [0, 7])
def test_a_seen_nan_is_not_hidden(native_kernels, impl, place):
    """In the part that is the value, and in the part that is only the key."""
    case = make(6, rows=1, queries=1, heads=1, dim=8, value_dim=4, page=4, pages=2)
    q, pool, values, tables, base, start = case.arrays
    poisoned = pool.copy()
    poisoned[tables[0, 0], 0, 0, place] = np.nan
    out = run(replace(case, arrays=(q, poisoned, values, tables, base, start)), impl)
    assert np.isnan(out).any()


def prompt(heads: int, length: int = 700, dim: int = 40, value_dim: int = 32) -> Case:
    """One row whose queries are all the positions of a sequence: 2 segments, ragged last page."""
    page, pages = 16, -(-length // 16)
    rng = np.random.default_rng(9)
    q = rng.normal(size=(1, length, heads, dim)).astype(np.float32)
    pool = rng.normal(size=(pages + 1, 1, page, dim)).astype(np.float32)
    tables = rng.permutation(np.arange(1, pages + 1))[None].astype(np.int32)
    zero = np.zeros(1, np.int32)
    options = {"scale": 0.15, "window": 0, "softcap": 0.0}
    arrays = (q, pool, pool[..., :value_dim], tables, zero, zero)
    return Case(arrays, options, np.array([length]))


@pytest.mark.parametrize("heads", [3, 20])
def test_native_is_bitwise_the_same_however_a_prompt_is_cut(native_kernels, heads):
    case = prompt(heads)
    q, pool, values, tables, base, _ = case.arrays
    whole = run(case, "native")[0]
    for first, count in [(0, 1), (63, 2), (65, 40), (511, 1), (512, 1), (500, 200), (699, 1)]:
        start = np.array([first], np.int32)
        arrays = (q[:, first : first + count], pool, values, tables, base, start)
        part = run(replace(case, arrays=arrays), "native")[0]
        np.testing.assert_array_equal(part, whole[first : first + count])
    wide = np.pad(tables, ((0, 0), (0, 9)))
    for rows in (2, 9):  # as decode rows, with neighbours and a wider table
        starts = np.linspace(0, 699, rows).astype(np.int32)
        places = (np.repeat(wide, rows, 0), np.repeat(base, rows), starts)
        out = run(replace(case, arrays=(q[0, starts][:, None], pool, values, *places)), "native")
        np.testing.assert_array_equal(out[:, 0], whole[starts])


def test_more_segments_than_are_worked_on_at_once(native_kernels):
    """Long contexts of few rows go in waves; a row alone, in a wave with others, and in many rows."""
    length, rows = 35000, 9
    case = prompt(2, length=length, dim=8, value_dim=8)
    q, pool, values, tables, base, _ = case.arrays
    starts = np.array([length - 1, 40, 33000, 600, 20000, 511, 512, 34000, 7], np.int32)
    places = (np.repeat(tables, rows, 0), np.repeat(base, rows))
    queries = q[0, starts][:, None]
    many = run(replace(case, arrays=(queries, pool, values, *places, starts)), "native")
    for count in (1, 3):
        few = (queries[:count], pool, values, *(x[:count] for x in places), starts[:count])
        np.testing.assert_array_equal(run(replace(case, arrays=few), "native"), many[:count])
    few = Case((queries, pool, values, *places, starts), case.options, np.ones(rows, int))
    np.testing.assert_allclose(many, attention(few), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_derivatives_match_differences_of_the_oracle(native_kernels, impl):
    case = make(2, rows=2, queries=4, heads=3, dim=6, value_dim=4, page=4, pages=5)
    q, pool, _, *places = case.arrays
    pool = np.nan_to_num(pool, posinf=0.5, neginf=0.5)
    rng = np.random.default_rng(4)
    weight = rng.normal(size=(2, 4, 3, 4))
    weight *= (np.arange(4)[None, :] < case.lengths[:, None])[..., None, None]
    steps = [rng.normal(size=x.shape) for x in (q, pool)]

    def loss(q, pool):
        out = pallas_kernels.latent_attention(
            q, pool, *map(jnp.asarray, places), value_dim=4, scale=case.options["scale"], impl=impl
        )
        return jnp.sum(out * weight)

    def moved(by: float) -> float:
        at, entries = q + by * steps[0], pool + by * steps[1]
        there = replace(case, arrays=(at, entries, entries[..., :4], *places))
        return float((attention(there) * weight).sum())

    grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(q, pool)
    got = sum(np.sum(np.asarray(g) * s) for g, s in zip(grads, steps, strict=True))
    np.testing.assert_allclose(got, (moved(1e-4) - moved(-1e-4)) / 2e-4, rtol=1e-3, atol=1e-4)


def test_shapes_that_do_not_fit_are_refused():
    case = make(1, rows=2, queries=1, heads=2, dim=8, value_dim=4, page=4, pages=2)
    q, pool, _, tables, base, start = case.arrays
    call = partial(pallas_kernels.latent_attention, scale=1.0)
    with pytest.raises(ValueError, match="value_dim=9"):
        call(q, pool, tables, base, start, value_dim=9)
    with pytest.raises(ValueError, match="pages, 1, page, D"):
        call(q, jnp.repeat(pool, 2, 1), tables, base, start, value_dim=4)
    with pytest.raises(ValueError, match="rows"):
        call(q, pool, tables, base[:1], start, value_dim=4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("tokens", "heads", "page", "dim"), [(1, 1, 1, 1), (9, 3, 16, 20)])
def test_page_write(native_kernels, impl, tokens, heads, page, dim):
    rng = np.random.default_rng(tokens)
    pool = rng.normal(size=(6, heads, page, dim)).astype(np.float32)
    entries = rng.normal(size=(tokens + 2, heads, dim)).astype(np.float32)
    slots = np.append(rng.permutation(np.arange(page, 6 * page))[:tokens], [0, 0])  # 2 of padding
    want = pool.copy()
    for t in range(tokens):
        want[slots[t] // page, :, slots[t] % page] = entries[t]
    places = (slots // page).astype(np.int32), (slots % page).astype(np.int32)
    write = jax.jit(partial(pallas_kernels.page_write, impl=impl), donate_argnums=0)
    np.testing.assert_array_equal(np.asarray(write(pool, entries, *places))[1:], want[1:])
    memory = write.lower(pool, entries, *places).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == pool.nbytes
    grad = jax.grad(lambda p, x: pallas_kernels.page_write(p, x, *places, impl=impl).sum(), 1)
    np.testing.assert_array_equal(grad(jnp.asarray(pool), jnp.asarray(entries))[:tokens], 1.0)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_donated_step_copies_no_pool(native_kernels, impl):
    """Write, choose and attend: pools are aliased, and nothing of their size is kept besides."""
    rows, pages, dim = 4, 1025, 32
    pool = jax.ShapeDtypeStruct((pages, 1, 16, dim), jnp.float32)
    q = jax.ShapeDtypeStruct((rows, 1, 2, dim), jnp.float32)
    ints = jax.ShapeDtypeStruct((rows,), jnp.int32)
    tables = jax.ShapeDtypeStruct((rows, 8), jnp.int32)

    def step(pool, q, tables, base, start, page, offset):
        pool = pallas_kernels.page_write(pool, q[:, 0, :1], page, offset, impl=impl)
        places, options = (pool, tables, base), {"scale": 1.0, "impl": impl}
        chosen = pallas_kernels.index_select(q, q[..., 0], *places, start, topk=20, **options)
        options["value_dim"] = 16
        y = pallas_kernels.selected_attention(q, *places, chosen, **options)
        return pool, y + pallas_kernels.latent_attention(q, *places, start, **options)

    args = (pool, q, tables, ints, ints, ints, ints)
    memory = jax.jit(step, donate_argnums=0).lower(*args).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == pages * 16 * dim * 4
    assert memory.temp_size_in_bytes < pages * 16 * dim * 4 / 2


def test_entries_that_do_not_fit_are_refused():
    pool, index = jnp.zeros((3, 2, 4, 8)), jnp.zeros(5, jnp.int32)
    with pytest.raises(ValueError, match="kv_heads"):
        pallas_kernels.page_write(pool, jnp.zeros((5, 1, 8)), index, index)
