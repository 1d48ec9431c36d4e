"""The decode kernel in the interpreter, races detected, against the float64 oracle.

The smallest shapes that reach every path: the interpreter takes seconds a case.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.gpu import compat, decode
from tests.kernels.oracle import Case, attention, make_case, real

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

SMALL = {"rows": 1, "kv_heads": 1, "group": 2, "dim": 64, "page": 16, "pages": 5}
CASES = {
    "pages of 16, two rows and kv heads": SMALL | {"rows": 2, "kv_heads": 2},
    "pages of 64": SMALL | {"page": 64, "pages": 2},
    "pages of 128, a group of 9, head_dim 128": SMALL
    | {"page": 128, "pages": 1, "dim": 128, "group": 9},
    "one head, head_dim 256": SMALL | {"dim": 256, "group": 1, "pages": 1},
    "window": SMALL | {"rows": 2, "window": 40, "page": 32, "pages": 3},
    "softcap": SMALL | {"softcap": 3.0},
}


def bf16_case(**options) -> Case:
    """A case whose arrays are bfloat16, with the values that the oracle sees too."""
    case = make_case(7, queries=1, **options)
    case.lengths[:] = 1
    arrays = (x.astype(jnp.bfloat16) if x.dtype == np.float32 else x for x in case.arrays)
    return Case(tuple(arrays), case.options, case.lengths)


def run(case: Case) -> np.ndarray:
    """The kernel's result in the interpreter, as float64; fails if there was a race."""
    options = dict(case.options)
    sinks = options.pop("sinks", None)
    before = pallas_kernels.fallbacks()
    op = partial(pallas_kernels.paged_attention, sinks=sinks, impl="mosaic", **options)
    with compat.interpreter() as raced:
        out = np.asarray(jax.jit(lambda *arrays: op(*arrays))(*case.arrays))
        assert not raced()
    assert pallas_kernels.fallbacks() == before
    return out.astype(np.float64)


def check(case: Case) -> np.ndarray:
    """The kernel's result, once it agrees with the oracle."""
    with np.errstate(invalid="ignore"):
        floats = (x.astype(np.float32) if x.dtype == jnp.bfloat16 else x for x in case.arrays)
        want = real(case, attention(Case(tuple(floats), case.options, case.lengths)))
    out = run(case)
    np.testing.assert_allclose(real(case, out), want, atol=8e-3, rtol=8e-3)
    return out


@pytest.mark.parametrize("name", CASES)
def test_matches_the_oracle(name: str) -> None:
    check(bf16_case(**CASES[name]))


def test_sinks() -> None:
    case = bf16_case(**SMALL, window=30)
    case.options["sinks"] = jnp.asarray([1.5, -2.0])
    check(case)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of three steps and two slots: several splits, and slots that are used again."""
    monkeypatch.setattr(decode, "SPLIT", 192)
    monkeypatch.setattr(decode, "STAGES", {64: 2})


def long_row(**options) -> Case:
    """One row of 370 keys in pages of 16, its table wider than it needs; few keys weigh much."""
    keys, pages = 370, 26
    case = bf16_case(**SMALL | {"pages": pages}, **options)
    q, k_pool, v_pool, tables, base, _ = case.arrays
    rng = np.random.default_rng(8)
    tables = rng.permutation(np.arange(1, pages + 1))[None].astype(np.int32)
    pools = [np.full(k_pool.shape, np.nan, k_pool.dtype) for _ in range(2)]
    for pool in pools:
        for j in range(keys):
            pool[tables[0, j // 16], :, j % 16] = rng.normal(size=(1, 64))
    tables[0, -(-keys // 16) :] = 0
    arrays = (4 * q, *pools, tables, base, np.array([keys - 1], np.int32))
    return Case(arrays, case.options, np.ones(1, int))


def test_several_splits(short_splits) -> None:
    case = long_row()
    case.arrays[3][0, 3] = 0  # an absent page among the others
    check(case)


def test_a_window_over_several_splits(short_splits) -> None:
    check(long_row(window=250))


def test_a_row_depends_on_itself_alone(short_splits) -> None:
    """Bitwise the same beside other rows, on other pages and in a wider table."""
    alone = long_row()
    q, k_pool, v_pool, tables, base, start = alone.arrays
    moved = np.pad(np.where(tables > 0, tables + 1, 0), ((0, 0), (0, 12)))
    both = (
        np.concatenate([q + 1, q]),
        np.roll(k_pool, 1, axis=0),
        np.roll(v_pool, 1, axis=0),
        np.concatenate([moved[:, ::-1], moved]),
        np.concatenate([base, base]),
        np.concatenate([start - 33, start]),
    )
    out = run(Case(both, alone.options, np.ones(2, int)))
    np.testing.assert_array_equal(out[1], run(alone)[0])


def test_rows_without_keys_yield_zeros_and_absent_pages_are_not_seen() -> None:
    case = bf16_case(**SMALL | {"rows": 3, "page": 16, "pages": 8})
    q, k_pool, v_pool, tables, base, start = case.arrays
    start = np.array([0, 100, 5], np.int32)
    base = np.array([0, 0, 3], np.int32)  # row 2: its table begins behind its position
    tables = np.zeros_like(tables)
    tables[1, [2, 6]] = [3, 4]  # row 1: two pages, absent ones before, between and behind
    pools = [pool.copy() for pool in (k_pool, v_pool)]
    for pool in pools:
        pool[3:5] = np.random.default_rng(1).normal(size=pool[3:5].shape)
    out = check(Case((q, *pools, tables, base, start), case.options, case.lengths))
    np.testing.assert_array_equal(out[[0, 2]], 0.0)


@pytest.mark.parametrize("pool", [1, 2])
def test_a_seen_nan_is_not_hidden(pool: int) -> None:
    case = bf16_case(**SMALL | {"pages": 2})
    arrays = list(case.arrays)
    arrays[pool] = arrays[pool].copy()
    arrays[pool][case.arrays[3][0, 0], 0, 0, 0] = np.nan
    assert np.isnan(run(Case(tuple(arrays), case.options, case.lengths))).any()


def test_derivatives_are_those_of_the_reference() -> None:
    case = bf16_case(**SMALL | {"pages": 1})
    q, k_pool, v_pool, *rest = (jnp.asarray(x) for x in case.arrays)
    k_pool, v_pool = (jnp.nan_to_num(x, posinf=0, neginf=0) for x in (k_pool, v_pool))

    def loss(impl: str, q: jax.Array) -> jax.Array:
        out = pallas_kernels.paged_attention(q, k_pool, v_pool, *rest, **case.options, impl=impl)  # type: ignore[arg-type]
        return out.astype(jnp.float32).sum()

    with compat.interpreter():
        got = jax.jit(jax.grad(partial(loss, "mosaic")))(q)
    np.testing.assert_array_equal(got, jax.jit(jax.grad(partial(loss, "reference")))(q))


Function = Callable[..., Any]


def shift_pages(entries: Function) -> Function:
    return lambda spec, tables, row, base, block: entries(spec, tables, row, base - 1, block)


def skip_a_block(blocks: Function) -> Function:
    def mutated(low: jax.Array, high: jax.Array, nth: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, steps = blocks(low, high, nth)
        return first, jnp.maximum(steps - (nth == 1), 1)

    return mutated


# What is wrong, where, and how: (module, function, what stands in for it)
MUTATIONS = {
    "barriers are not waited for": (compat, "barrier_wait", lambda _: lambda barrier: None),
    "writes are not committed": (compat, "commit_smem", lambda _: lambda: None),
    "pages are off by one": (decode, "_entries", shift_pages),
    "the table is not followed": (
        decode,
        "_entries",
        lambda _: lambda *args: [jnp.int32(args[-1] * 4 + i + 1) for i in range(4)],
    ),
    "the last block is skipped": (decode, "_blocks", skip_a_block),
    "the last split is skipped": (decode, "_splits", lambda f: lambda *keys: f(*keys) - 1),
    "absent pages are seen": (
        decode,
        "_mask",
        lambda f: lambda pages, *rest: f([jnp.int32(1)] * len(pages), *rest),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_caught(name: str, short_splits, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function, mutate = MUTATIONS[name]
    monkeypatch.setattr(module, function, mutate(getattr(module, function)))
    case = long_row()
    case.arrays[3][0, 3] = 0  # an absent page among the others
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        check(case)
