"""kv_write against a plain loop, and that a donated step copies neither pools nor weights."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels

IMPLS = ("native", "reference")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("tokens", "kv_heads", "page", "dim"), [(1, 1, 1, 1), (9, 3, 16, 20)])
def test_entries_land_where_they_belong(native_kernels, impl, tokens, kv_heads, page, dim):
    rng = np.random.default_rng(tokens)
    pools = rng.normal(size=(2, 6, kv_heads, page, dim)).astype(np.float32)
    entries = rng.normal(size=(2, tokens, kv_heads, dim)).astype(np.float32)
    slots = rng.permutation(np.arange(page, 6 * page))[:tokens]  # no slot twice, none on page 0
    want = pools.copy()
    for t, slot in enumerate(slots):
        want[:, slot // page, :, slot % page] = entries[:, t]
    places = (slots // page).astype(np.int32), (slots % page).astype(np.int32)
    got = jax.jit(partial(pallas_kernels.kv_write, impl=impl))(
        pools[0], pools[1], entries[0], entries[1], *places
    )
    np.testing.assert_array_equal(np.stack(got), want)


@pytest.mark.parametrize("impl", IMPLS)
def test_padding_reaches_only_page_0(native_kernels, impl):
    pool, entries = jnp.ones((3, 2, 4, 8)), jnp.full((5, 2, 8), jnp.nan)
    zeros = jnp.zeros(5, jnp.int32)
    out = pallas_kernels.kv_write(pool, pool, entries, entries, zeros, zeros, impl=impl)
    np.testing.assert_array_equal(np.stack(out)[:, 1:], 1.0)


def test_shapes_that_do_not_fit_are_refused():
    pool, index = jnp.zeros((3, 2, 4, 8)), jnp.zeros(5, jnp.int32)
    entries = jnp.zeros((5, 1, 8))
    with pytest.raises(ValueError, match="kv_heads"):
        pallas_kernels.kv_write(pool, pool, entries, entries, index, index)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_donated_step_copies_no_pool_and_no_weight(native_kernels, impl):
    """Two layers of qkv, write, attend, out: pools are aliased, and nothing of their size is copied."""
    dim, kv_heads, rows, pages = 32, 2, 4, 257
    pool = jax.ShapeDtypeStruct((pages, kv_heads, 16, dim), jnp.float32)
    weight = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    wide = jax.ShapeDtypeStruct((128, 256), jnp.float32)
    ints = jax.ShapeDtypeStruct((rows,), jnp.int32)
    tables = jax.ShapeDtypeStruct((rows, 8), jnp.int32)

    def step(pools, weights, x, tables, base, start, page, offset):
        out = []
        for (k_pool, v_pool), (w, o) in zip(pools, weights, strict=True):
            qkv = pallas_kernels.matmul(x, w, impl=impl)
            q, k, v = (a.reshape(rows, -1, dim) for a in jnp.split(qkv, [128, 192], axis=1))
            held = pallas_kernels.kv_write(k_pool, v_pool, k, v, page, offset, impl=impl)
            y = pallas_kernels.paged_attention(
                q[:, None], *held, tables, base, start, scale=1.0, impl=impl
            )
            x = x + pallas_kernels.matmul(y.reshape(rows, -1), o, impl=impl)
            out.append(held)
        return out, x

    x = jax.ShapeDtypeStruct((rows, 128), jnp.float32)
    args = ([(pool, pool)] * 2, [(wide, weight)] * 2, x, tables, ints, ints, ints, ints)
    compiled = jax.jit(step, donate_argnums=0).lower(*args).compile()
    text = compiled.as_text() or ""
    assert len(re.findall(r"may-alias|must-alias", text.split("\n")[0])) == 4
    pool_bytes = pages * kv_heads * 16 * dim * 4
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == 4 * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes
    for line in text.splitlines():
        if re.search(r"= f32\S* copy\(", line):
            assert not re.search(r"f32\[(257,2,16,32|128,128|128,256)\]", line), line
