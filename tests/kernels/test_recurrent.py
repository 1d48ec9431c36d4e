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
from tests.kernels.recurrent_oracle import Places, delta, make_delta, make_places

IMPLS = ("native", "reference")

chunk = jax.jit(pallas_kernels.delta_chunk, static_argnames="impl")
step = jax.jit(pallas_kernels.delta_step, static_argnames="impl")


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


@settings(max_examples=12, deadline=None, derandomize=True)
@given(cases)
def test_reference_matches_oracle(options):
    arrays, places = drawn(**options)
    check(arrays, places, "reference", 2e-4)
