"""Both forms of the short causal convolution against a float64 oracle, and what changes no bit."""

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
from tests.kernels.recurrent_oracle import Places, conv, make_places, places_at

IMPLS = ("native", "reference")

chunk: Any = jax.jit(pallas_kernels.conv_chunk, static_argnames="impl")
step: Any = jax.jit(pallas_kernels.conv_step, static_argnames="impl")

cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "rows": st.integers(1, 3),
        "blocks": st.integers(1, 4),
        "count": st.sampled_from([1, 2, 5, 16, 33]),
        "channels": st.sampled_from([1, 5, 16, 40, 255, 256, 300]),
        "taps": st.integers(2, 5),
    }
)


def make(seed: int, places: Places, count: int, channels: int, taps: int) -> tuple[Any, Any, Any]:
    """x, w and a pool; padding and slots that nobody reads hold NaN."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(len(places.read), count, channels)).astype(np.float32)
    x[np.arange(count) >= places.length[:, None]] = np.nan
    w = rng.normal(size=(channels, taps)).astype(np.float32)
    pool = np.full((places.slots, taps - 1, channels), np.nan, np.float32)
    used = np.unique(places.read[places.read > 0])
    pool[used] = rng.normal(size=(len(used), taps - 1, channels))
    return x, w, pool


def check(impl: str, seed: int, rows: int, blocks: int, count: int, channels: int, taps: int):
    places = make_places(np.random.default_rng(seed), rows, blocks, count)
    arrays = make(seed, places, count, channels, taps)
    pool, out = chunk(*arrays, places.read, places.write, places.length, impl=impl)
    want_pool, want = conv(*arrays, places)
    np.testing.assert_allclose(out, want, atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(pool[1:], want_pool[1:])  # inputs are kept as they are


@settings(max_examples=8, deadline=None, derandomize=True)
@given(cases)
def test_reference_matches_oracle(options):
    check("reference", **options)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases)
def test_native_matches_oracle(native_kernels, options):
    check("native", **options)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("channels", [7, 300])
def test_steps_are_bitwise_a_chunk(native_kernels, impl, channels):
    places = places_at([2], [2], [40], 5)
    x, w, pool = make(3, places, 40, channels, 4)
    _, want = chunk(x, w, pool, places.read, places.write, places.length, impl=impl)
    cut, lengths = (
        np.full((4, 16, channels), np.nan, np.float32),
        np.array([3, 16, 1, 16], np.int32),
    )
    for n, end in enumerate(np.cumsum(lengths)):
        cut[n, : lengths[n]] = x[0, end - lengths[n] : end]
    read, write = np.array([2, -1, -1, -1], np.int32), np.array([3, 0, 0, 2], np.int32)
    after, out = chunk(cut, w, pool, read, write, lengths, impl=impl)
    got = np.concatenate([np.asarray(out)[n, :length] for n, length in enumerate(lengths)])
    np.testing.assert_array_equal(got, want[0, :36])
    for t in range(3, 40):  # from the checkpoint at 3 on, beside a row that starts afresh
        read, write = np.array([3, 0], np.int32), np.array([3, 4], np.int32)
        after, out = step(x[0, [t, 0]], w, after, read, write, impl=impl)
        np.testing.assert_array_equal(out[0], want[0, t])


@pytest.mark.parametrize("impl", IMPLS)
def test_derivatives(native_kernels, impl):
    """The op is linear in x and in w: its derivatives are its own values."""
    places = places_at([2, -1], [0, 3], [5, 3], 4)
    x, w, pool = make(3, places, 5, 6, 3)
    x, pool = np.nan_to_num(x), np.nan_to_num(pool)
    where = places.read, places.write, places.length

    @jax.jit
    def gradients(x: jax.Array, w: jax.Array, pool: jax.Array) -> Any:
        run = partial(chunk, impl=impl)
        return jax.grad(lambda *a: run(*a, *where)[1].sum(), argnums=(0, 1, 2))(x, w, pool)

    def value(x: np.ndarray, w: np.ndarray, pool: np.ndarray) -> float:
        return conv(x, w, pool, places)[1].sum()

    for i, grad in enumerate(gradients(x, w, pool)):
        arrays = [x, w, pool]
        for at in list(np.ndindex(grad.shape))[::5]:
            moved = [a.astype(np.float64) for a in arrays]
            moved[i][at] += 1.0
            want = value(*moved) - value(*arrays)
            np.testing.assert_allclose(grad[at], want, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16_sums_in_float32(impl):
    places = places_at([1], [1], [16], 3)
    low = [jnp.asarray(a, jnp.bfloat16) for a in make(4, places, 16, 24, 4)]
    pool, out = chunk(*low, places.read, places.write, places.length, impl=impl)
    assert pool.dtype == out.dtype == jnp.bfloat16
    x, w, before = (np.asarray(a, np.float32) for a in low)
    want_pool, want = conv(x, w, before, places)
    np.testing.assert_allclose(np.asarray(out, np.float32), want, atol=1e-3, rtol=0.005)
    np.testing.assert_array_equal(np.asarray(pool, np.float32)[1:], want_pool[1:])


def test_shapes_that_do_not_fit_are_refused():
    places = np.zeros(2, np.int32)
    x, w, pool = jnp.zeros((2, 5)), jnp.zeros((5, 3)), jnp.zeros((4, 2, 5))
    for arrays in ((x, w[:4], pool), (x, w[:, :1], pool[:, :0]), (x, w, pool[:, :1])):
        with pytest.raises(ValueError, match="K >= 2"):
            step(*arrays, places, places)
    with pytest.raises(ValueError, match=r"read\(1,\)"):
        step(x, w, pool, places[:1], places)
