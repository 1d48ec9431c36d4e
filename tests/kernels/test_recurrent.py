"""Both forms of the delta rule and of linear attention against a float64 oracle, token by token."""

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
from tests.kernels.recurrent_oracle import Places, delta, make_delta, make_places, places_at

IMPLS = ("native", "reference")

chunk: Any = jax.jit(pallas_kernels.delta_chunk, static_argnames="impl")
step: Any = jax.jit(pallas_kernels.delta_step, static_argnames="impl")


def check(arrays: tuple[Any, ...], places: Places, impl: str, tolerance: float = 2e-5) -> None:
    pool, out = chunk(*arrays, places.read, places.write, places.length, impl=impl)
    want_pool, want = delta(arrays, places)
    np.testing.assert_allclose(out, want, atol=tolerance, rtol=tolerance)
    kept = np.arange(places.slots) > 0  # slot 0 may hold anything
    np.testing.assert_allclose(
        np.asarray(pool)[kept], want_pool[kept], atol=tolerance, rtol=tolerance
    )


def drawn(seed: int, rows: int, blocks: int, count: int, **options: Any) -> tuple[Any, Places]:
    places = make_places(np.random.default_rng(seed), rows, blocks, count)
    return make_delta(seed, places, count=count, **options), places


cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "rows": st.integers(1, 3),
        "blocks": st.integers(1, 3),
        "count": st.sampled_from([1, 2, 7, 16, 17, 32, 40, 64]),
        "key_heads": st.integers(1, 2),
        "ratio": st.integers(1, 3),
        "dk": st.sampled_from([1, 8, 20, 64]),
        "dv": st.sampled_from([1, 8, 20, 37, 64]),
        "by_channel": st.booleans(),
        "rule": st.booleans(),
        "decay": st.sampled_from(["none", "strong", "mixed"]),
        "same_keys": st.booleans(),
    }
)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(cases)
def test_reference_matches_oracle(options):
    arrays, places = drawn(**options)
    check(arrays, places, "reference", 2e-4)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(cases)
def test_native_matches_oracle(native_kernels, options):
    arrays, places = drawn(**options)
    check(arrays, places, "native")


KINDS = ({}, {"by_channel": True}, {"rule": False}, {"rule": False, "by_channel": True})


def sequence(length: int, **options: Any) -> tuple[list[Any], np.ndarray, Places]:
    """The inputs of one row, [1, length, ...], and a pool with room for checkpoints."""
    places = places_at([1], [1], [length], 9)
    *inputs, pool = make_delta(5, places, count=length, **options)
    return inputs, pool, places


def blocks(inputs: list[Any], ends: list[int], count: int) -> tuple[list[Any], np.ndarray]:
    """The inputs of a row cut into blocks of `count` places, padded with NaN, and their lengths."""
    lengths = np.diff([0, *ends]).astype(np.int32)
    cut = jax.tree.map(
        lambda x: np.full((len(ends), count, *x.shape[2:]), np.nan, np.float32), inputs
    )
    for rows, x in zip(jax.tree.leaves(cut), jax.tree.leaves(inputs), strict=True):
        for n, (end, length) in enumerate(zip(ends, lengths, strict=True)):
            rows[n, :length] = x[0, end - length : end]
    return cut, lengths


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dv", [24, 128])
def test_native_is_bitwise_the_same_however_a_sequence_is_cut(native_kernels, kind, dv):
    inputs, pool, places = sequence(100, key_heads=2, ratio=2, dk=40, dv=dv, **kind)
    where = places.read, places.write, places.length
    want_pool, want = chunk(*inputs, pool, *where, impl="native")
    for ends, count in [
        ([64, 100], 64),
        ([1, 2, 34, 66, 98, 100], 32),
        ([16, 17, 17, 33, 34, 50, 66, 82, 98, 100], 16),
    ]:
        rows, lengths = blocks(inputs, ends, count)
        read = np.array([1] + [-1] * (len(ends) - 1), np.int32)
        write = np.zeros(len(ends), np.int32)
        write[0], write[-1] = 3, 1  # a checkpoint on the way
        after, out = chunk(*rows, pool, read, write, lengths, impl="native")
        got = np.concatenate([np.asarray(out)[n, :length] for n, length in enumerate(lengths)])
        np.testing.assert_array_equal(got, want[0])
        np.testing.assert_array_equal(after[1], want_pool[1])
        # Go on from the checkpoint, one token after another, beside a row that starts afresh.
        for t in range(ends[0], 100):
            token = [None if x is None else x[0, [t, 0]] for x in inputs]
            read, write = np.array([3, 0], np.int32), np.array([3, 4], np.int32)
            after, out = step(*token, after, read, write, impl="native")
            np.testing.assert_array_equal(out[0], want[0, t])
        np.testing.assert_array_equal(after[3], want_pool[1])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_matches_oracle(native_kernels, impl, kind):
    read, write = np.array([4, 0, 2, 5], np.int32), np.array([4, 1, 3, 0], np.int32)
    places = Places(read, write, np.ones(4, np.int32), 7)
    *inputs, pool = make_delta(1, places, count=1, key_heads=2, ratio=3, dk=20, dv=37, **kind)
    want_pool, want = delta((*inputs, pool), places)
    token = [None if x is None else x[:, 0] for x in inputs]
    after, out = step(*token, pool, read, write, impl=impl)
    np.testing.assert_allclose(out, want[:, 0], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(after[1:], want_pool[1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("g", [-1e30, -np.inf, -104.0, -87.5])
def test_a_state_that_is_forgotten_at_once(native_kernels, impl, kind, g):
    """No decay is too strong: nothing overflows, and nothing of the past is left."""
    inputs, pool, places = sequence(40, dk=20, dv=8, **kind)
    inputs[3][:, 7:] = -0.25
    inputs[3][:, 9::5] = g
    with np.errstate(under="ignore"):
        check((*inputs, pool), places, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_keys_that_are_all_the_same_do_not_explode(native_kernels, impl):
    """(I + A)^-1 by products of powers of A does, at any precision."""
    inputs, pool, places = sequence(64, dk=64, dv=64, decay="none", same_keys=True)
    inputs[4][:] = 1.0
    check((*inputs, pool), places, impl, 5e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", KINDS)
def test_padding_rows_change_nothing(native_kernels, impl, kind):
    places = places_at([2, 0, 0], [0, 0, 0], [0, 0, 0], 4)
    arrays = make_delta(3, places, count=8, **kind)
    pool, out = chunk(*arrays, places.read, places.write, places.length, impl=impl)
    np.testing.assert_array_equal(out, 0.0)
    np.testing.assert_array_equal(pool, arrays[-1])


@pytest.mark.parametrize(
    ("impl", "kind"), [*(("reference", kind) for kind in KINDS), ("native", KINDS[0])]
)
def test_derivatives_are_those_of_the_oracle(native_kernels, impl, kind):
    places = places_at([2, -1], [0, 3], [18, 2], 4)
    arrays = make_delta(3, places, count=18, dk=4, dv=3, **kind)
    floats = [x for x in (*arrays[:-1], np.nan_to_num(arrays[-1])) if x is not None]
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=x.shape) for x in (arrays[-1], arrays[2])]

    def loss(form: Any, floats: list[Any]) -> Any:
        *inputs, pool = floats
        after, out = form(*inputs, *[None] * (5 - len(inputs)), pool)
        return (after[1:] * weights[0][1:]).sum() + (out * weights[1]).sum()

    def run(*arrays: Any) -> Any:
        return chunk(*arrays, places.read, places.write, places.length, impl=impl)

    wanted = _numeric(partial(loss, lambda *a: delta(a, places)), floats)
    grads = jax.jit(jax.grad(partial(loss, run)))(floats)
    for x, grad, want in zip(floats, grads, wanted, strict=True):
        assert np.isfinite(grad).all()
        np.testing.assert_allclose(grad[np.isfinite(x)], want[np.isfinite(x)], 2e-3, 1e-4)


def _numeric(loss: Any, floats: list[np.ndarray]) -> list[np.ndarray]:
    """Central differences in float64; 0 where an input is padding."""
    grads = []
    for i, x in enumerate(floats):
        grad = np.zeros(x.shape)
        for at in zip(*np.nonzero(np.isfinite(x)), strict=True):
            values = []
            for move in (1e-5, -1e-5):
                moved = [y.astype(np.float64) for y in floats]
                moved[i][at] += move
                values.append(loss(moved))
            grad[at] = (values[0] - values[1]) / 2e-5
        grads.append(grad)
    return grads


@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16_is_computed_in_float32(impl):
    """The native form takes float32 only: both run as the reference."""
    inputs, pool, places = sequence(32, dk=16, dv=16)
    low = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]]
    where = places.read, places.write, places.length
    _, out = chunk(*low, *inputs[3:], pool, *where, impl=impl)
    assert out.dtype == jnp.bfloat16
    rounded = [np.asarray(x, np.float32) for x in low]
    _, want = delta((*rounded, *inputs[3:], pool), places)
    np.testing.assert_allclose(np.asarray(out, np.float32), want, atol=0.02, rtol=0.01)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("count", [1, 2])
def test_a_donated_step_copies_no_pool(native_kernels, impl, count):
    pool = jax.ShapeDtypeStruct((600, 4, 32, 32), jnp.float32)
    rows = jax.ShapeDtypeStruct((count,), jnp.int32)
    token, gate = (jax.ShapeDtypeStruct(x, jnp.float32) for x in ((count, 4, 32), (count, 4)))

    def two(pool, q, k, v, g, beta, read, write):
        pool, out = pallas_kernels.delta_step(q, k, v, g, beta, pool, read, write, impl=impl)
        blocks = (x[:, None] for x in (q, k, out, g, beta))
        return chunk(*blocks, pool, write, write, write, impl=impl)

    args = (pool, token, token, token, gate, gate, rows, rows)
    compiled = jax.jit(two, donate_argnums=0).lower(*args).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    size = int(np.prod(pool.shape)) * 4
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size


def test_shapes_that_do_not_fit_are_refused():
    inputs, pool, places = sequence(4, key_heads=2, ratio=2)
    q, k, v, g, beta = inputs
    where = places.read, places.write, places.length
    for message, arrays in {
        "key_heads": (q, k, v[:, :, :3], g, beta, pool),
        "the pool is": (q, k, v, g, beta, pool[:, :3]),
        r"g\(1, 4, 2\)": (q, k, v, g[:, :, :2], beta, pool),
        r"beta\(1, 4, 1\)": (q, k, v, g, beta[:, :, :1], pool),
    }.items():
        with pytest.raises(ValueError, match=message):
            chunk(*arrays, *where)
    with pytest.raises(ValueError, match=r"write\(2,\)"):
        chunk(*inputs, pool, where[0], np.zeros(2, np.int32), where[2])
    with pytest.raises(ValueError, match="impl='fast'"):
        chunk(*inputs, pool, *where, impl="fast")
