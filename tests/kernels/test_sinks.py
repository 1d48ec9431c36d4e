"""Attention with sinks in both forms: a column of the softmax that takes weight and yields nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import pallas_kernels
from tests.kernels.oracle import Case, attention, make_case, real
from tests.kernels.test_attention import _prompt, cases

IMPLS = ("native", "reference")


@partial(jax.jit, static_argnames=("scale", "window", "softcap", "impl"))
def _jitted(*arrays: jax.Array, sinks: jax.Array | None, **options):
    return pallas_kernels.paged_attention(*arrays, sinks=sinks, **options)


def run(case: Case, impl: str) -> np.ndarray:
    return np.asarray(_jitted(*case.arrays, **case.options, impl=impl))


def with_sinks(case: Case, sinks: np.ndarray | None = None) -> Case:
    """The case with `sinks`, or with drawn ones: some take nearly all the weight, some nearly none."""
    heads = case.arrays[0].shape[2]
    rng = np.random.default_rng(heads)
    drawn = rng.choice([-40.0, 30.0, 0.0, 1.0], heads) + rng.normal(size=heads)
    return replace(
        case, options={**case.options, "sinks": (drawn if sinks is None else sinks).astype("f4")}
    )


def check(case: Case, impl: str) -> None:
    got, want = real(case, run(case, impl)), real(case, attention(case))
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases)
def test_native_matches_oracle(native_kernels, options):
    check(with_sinks(make_case(**options)), "native")


@settings(max_examples=6, deadline=None, derandomize=True)
@given(cases)
def test_reference_matches_oracle(options):
    check(with_sinks(make_case(**options)), "reference")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("queries", [3, 40])
def test_contexts_longer_than_a_segment(native_kernels, impl, queries):
    case = make_case(
        3, rows=2, queries=queries, kv_heads=2, group=2, dim=8, page=16, pages=70, window=600
    )
    check(with_sinks(case), impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_without_keys_yield_zeros(native_kernels, impl):
    case = with_sinks(make_case(5, rows=3, queries=2, kv_heads=2, group=1, dim=8, page=4, pages=3))
    q, k_pool, v_pool, tables, base, start = case.arrays
    empty = np.zeros_like(tables), np.zeros_like(base), np.zeros_like(start)
    out = run(replace(case, arrays=(q, k_pool, v_pool, *empty)), impl)
    np.testing.assert_array_equal(out, 0.0)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_sink_of_minus_infinity_is_no_sink(native_kernels, impl):
    case = make_case(8, rows=2, queries=5, kv_heads=1, group=3, dim=16, page=4, pages=6)
    none = replace(case, options={**case.options, "sinks": None})
    off = with_sinks(case, np.full(3, -np.inf))
    np.testing.assert_array_equal(real(case, run(off, impl)), real(case, run(none, impl)))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_sink_that_is_nan_is_not_hidden(native_kernels, impl):
    case = make_case(8, rows=1, queries=2, kv_heads=1, group=2, dim=8, page=4, pages=2)
    out = real(case, run(with_sinks(case, np.array([0.0, np.nan])), impl))
    assert np.isnan(out[:, 1]).all()
    assert not np.isnan(out[:, 0]).any()


def test_native_is_bitwise_the_same_however_a_prompt_is_cut(native_kernels):
    case = with_sinks(_prompt())
    q, k_pool, v_pool, tables, base, _ = case.arrays
    whole = run(case, "native")[0]
    for first, count in [(0, 1), (65, 40), (511, 1), (500, 200)]:
        start = np.array([first], np.int32)
        arrays = (q[:, first : first + count], k_pool, v_pool, tables, base, start)
        part = run(replace(case, arrays=arrays), "native")[0]
        np.testing.assert_array_equal(part, whole[first : first + count])
    starts = np.linspace(0, 699, 9).astype(np.int32)  # as decode rows, many at once
    rows = (q[0, starts][:, None], k_pool, v_pool, np.repeat(tables, 9, 0), np.repeat(base, 9))
    out = run(replace(case, arrays=(*rows, starts)), "native")
    np.testing.assert_array_equal(out[:, 0], whole[starts])


def _clean(case: Case) -> Case:
    """Without the poison: derivatives walk the whole table."""
    q, k_pool, v_pool, *places = case.arrays
    pools = (np.nan_to_num(pool, posinf=0.5, neginf=0.5) for pool in (k_pool, v_pool))
    return replace(case, arrays=(q, *pools, *places))


@pytest.mark.parametrize("impl", IMPLS)
def test_derivatives_match_differences_of_the_oracle(native_kernels, impl):
    case = make_case(2, rows=2, queries=4, kv_heads=2, group=2, dim=6, page=4, pages=5, window=9)
    case = with_sinks(_clean(case), np.array([0.5, -1.0, 2.0, 0.0]))
    q, k_pool, v_pool, *places = case.arrays
    options = dict(case.options)
    sinks = options.pop("sinks")
    rng = np.random.default_rng(4)
    weight = (
        rng.normal(size=q.shape) * (np.arange(4)[None, :] < case.lengths[:, None])[..., None, None]
    )
    steps = [rng.normal(size=x.shape) for x in (q, k_pool, v_pool, sinks)]

    def loss(q, k_pool, v_pool, sinks):
        out = pallas_kernels.paged_attention(
            q, k_pool, v_pool, *map(jnp.asarray, places), sinks=sinks, impl=impl, **options
        )
        return jnp.sum(out * weight)

    primals = [jnp.asarray(x) for x in (q, k_pool, v_pool, sinks)]
    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*primals)
    tangents = [jnp.asarray(s, jnp.float32) for s in steps]
    _, forward = jax.jit(partial(jax.jvp, loss))(primals, tangents)

    def moved(by: float, only: int | None = None) -> float:
        arrays = [
            x + by * s * (only in (None, i))
            for i, (x, s) in enumerate(zip((q, k_pool, v_pool, sinks), steps, strict=True))
        ]
        there = Case((*arrays[:3], *places), {**options, "sinks": arrays[3]}, case.lengths)
        return float((attention(there) * weight).sum())

    for i, (grad, step) in enumerate(zip(grads, steps, strict=True)):
        want = (moved(1e-4, i) - moved(-1e-4, i)) / 2e-4
        np.testing.assert_allclose(np.sum(np.asarray(grad) * step), want, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(forward, (moved(1e-4) - moved(-1e-4)) / 2e-4, rtol=1e-3, atol=1e-4)


def test_sinks_that_do_not_fit_are_refused():
    case = make_case(1, rows=1, queries=1, kv_heads=2, group=1, dim=8, page=4, pages=2)
    with pytest.raises(ValueError, match=r"sinks\(3,\)"):
        pallas_kernels.paged_attention(*case.arrays, scale=1.0, sinks=jnp.zeros(3))
