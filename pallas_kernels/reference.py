"""The ops in plain jnp: the definition of right, and what runs where no faster form exists.

Attention loops over fixed chunks of keys, so its cost follows the real lengths and a row's result
does not depend on the other rows. Every op can be differentiated, forwards and backwards.
Never reads a table entry outside the table. Called by ops.py; sparse.py shares the softmax.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

# Keys that one step of the online softmax covers. Fixed: it decides the order of the sums.
CHUNK = 128
GROUP = 16  # rows of a group that are multiplied at once
# maximum, total, weighted values, poisoned
Sums = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
_LOWEST = -1e30  # a running maximum that is finite, so that exp(m - m) is 1 and never NaN


def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    tables: jax.Array,
    base: jax.Array,
    start: jax.Array,
    sinks: jax.Array | None,
    *,
    scale: float,
    window: int,
    softcap: float,
) -> jax.Array:
    """See ops.paged_attention."""
    options = (scale, window, softcap, q.shape[3])
    return _attention(q, k_pool, v_pool, tables, base, start, sinks, *options)


def latent_attention(
    q: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    base: jax.Array,
    start: jax.Array,
    *,
    value_dim: int,
    scale: float,
) -> jax.Array:
    """See ops.latent_attention."""
    return _attention(q, pool, pool, tables, base, start, None, scale, 0, 0.0, value_dim)


@partial(jax.custom_jvp, nondiff_argnums=(7, 8, 9, 10))
def _attention(
    q, k_pool, v_pool, tables, base, start, sinks, scale, window, softcap, value_dim
) -> jax.Array:
    options = {"scale": scale, "window": window, "softcap": softcap, "value_dim": value_dim}
    return _attend(q, k_pool, v_pool, tables, base, start, sinks, **options, whole=False)


@_attention.defjvp
def _attention_jvp(scale, window, softcap, value_dim, primals, tangents):
    # A loop whose length is data cannot be run backwards, so the derivative walks the whole table.
    tables, base, start = primals[3:6]
    options = {"scale": scale, "window": window, "softcap": softcap, "value_dim": value_dim}

    def attend(
        q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, sinks: jax.Array | None
    ) -> jax.Array:
        return _attend(q, k_pool, v_pool, tables, base, start, sinks, **options, whole=True)

    return jax.jvp(attend, (*primals[:3], primals[6]), (*tangents[:3], tangents[6]))


def _attend(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    tables: jax.Array,
    base: jax.Array,
    start: jax.Array,
    sinks: jax.Array | None,
    *,
    scale: float,
    window: int,
    softcap: float,
    value_dim: int,
    whole: bool,
) -> jax.Array:
    """Attention over the chunks that some query sees or, if `whole`, over all of the table."""
    rows, queries, heads, dim = q.shape
    kv_heads, page = k_pool.shape[1:3]
    pages = tables.shape[1]
    step = max(1, CHUNK // page)  # pages a chunk
    group = heads // kv_heads
    query = q.reshape(rows, queries, kv_heads, group, dim).astype(jnp.float32) * scale
    pos = start[:, None] + jnp.arange(queries, dtype=jnp.int32)
    oldest = jnp.maximum(pos - window + 1, 0) if window else jnp.zeros_like(pos)

    def body(chunk: jax.Array, carry: Sums) -> Sums:
        place = (origin + chunk)[:, None] * step + jnp.arange(step, dtype=jnp.int32)
        ids = listed(tables, place - base[:, None])
        key = (place[..., None] * page + jnp.arange(page, dtype=jnp.int32)).reshape(rows, 1, -1)
        held = jnp.repeat(ids > 0, page, axis=1)  # page 0 stands for "no page"
        # seen[n, i, j]: query i of row n sees key j of this chunk
        seen = (key <= pos[..., None]) & (key >= oldest[..., None]) & held[:, None, :]
        k = entries(k_pool, ids)
        s = jnp.einsum("nckgd,nkjd->nkgcj", query, k, preferred_element_type=jnp.float32)
        if softcap:
            s = softcap * jnp.tanh(s / softcap)
        return add_chunk(carry, s, seen, entries(v_pool, ids)[..., :value_dim])

    if whole:
        origin, first_chunk, end_chunk = base // step, 0, -(-pages // step) + 1
        body = jax.checkpoint(body)  # keep the running sums of a chunk, not its scores
    else:
        origin = jnp.zeros_like(base)
        last = jnp.minimum(pos[:, -1] // page, base + pages - 1)
        first_chunk = jnp.min(oldest[:, 0]) // (step * page)
        end_chunk = jnp.max(last) // step + 1
    sums = first_sums((rows, kv_heads, group, queries), value_dim, sinks)
    out = finish(jax.lax.fori_loop(first_chunk, end_chunk, body, sums))
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, queries, heads, value_dim).astype(q.dtype)


def first_sums(shape: tuple[int, int, int, int], dim: int, sinks: jax.Array | None = None) -> Sums:
    """The sums before any key for [rows, kv_heads, group, queries]; a sink counts as a weight."""
    top, total = jnp.full(shape, _LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32)
    if sinks is not None:
        top, total = jnp.maximum(top, sinks.reshape(1, *shape[1:3], 1)), jnp.ones_like(total)
    zeros = jnp.zeros((*shape, dim), jnp.float32)
    return top, total, zeros, jnp.zeros((shape[0], shape[3]), bool)


def finish(sums: Sums) -> jax.Array:
    """float32 [rows, kv_heads, group, queries, dim]; a query without keys yields zeros."""
    _, total, acc, poisoned = sums
    out = acc / jnp.where(total == 0, 1.0, total)[..., None]
    return jnp.where(poisoned[:, None, None, :, None], jnp.nan, out)


def listed(tables: jax.Array, index: jax.Array) -> jax.Array:
    """i32[rows, step]: tables[n, index[n]], and 0 where the index lies outside the table."""
    inside = (index >= 0) & (index < tables.shape[1])
    ids = jnp.take_along_axis(tables, jnp.clip(index, 0, tables.shape[1] - 1), axis=1)
    return jnp.where(inside, ids, 0)


def add_chunk(carry: Sums, s: jax.Array, seen: jax.Array, v: jax.Array) -> Sums:
    """One step of the online softmax: scores s[n,k,g,c,j], seen[n,c,j], values v[n,k,j,d]."""
    m, total, acc, poisoned = carry
    # Stale entries may hold NaN, and 0 * NaN is NaN: take such values out, remember who saw one.
    wrong = ~jnp.isfinite(v).all(axis=-1, keepdims=True)
    v = jnp.where(wrong, 0.0, v)
    poisoned |= (seen & wrong.any(axis=1)[:, None, :, 0]).any(axis=-1)
    mask = seen[:, None, None]
    s = jnp.where(mask, s, -jnp.inf)
    m_new = jnp.maximum(m, s.max(axis=-1))
    p = jnp.where(mask, jnp.exp(s - m_new[..., None]), 0.0)
    fade = jnp.exp(m - m_new)
    new = jnp.einsum("nkgcj,nkjd->nkgcd", p, v, preferred_element_type=jnp.float32)
    return m_new, total * fade + p.sum(axis=-1), acc * fade[..., None] + new, poisoned


def entries(pool: jax.Array, ids: jax.Array) -> jax.Array:
    """The pages `ids` [rows, step] as float32 [rows, kv_heads, step * page, dim]."""
    rows, step = ids.shape
    _, kv_heads, page, dim = pool.shape
    out = pool[ids].transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, step * page, dim)
    return out.astype(jnp.float32)


def kv_write(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page: jax.Array,
    offset: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See ops.kv_write."""
    return page_write(k_pool, k, page, offset), page_write(v_pool, v, page, offset)


def page_write(pool: jax.Array, x: jax.Array, page: jax.Array, offset: jax.Array) -> jax.Array:
    """See ops.page_write."""
    return pool.at[page, :, offset].set(x.astype(pool.dtype), mode="drop")


def matmul(x: jax.Array, w: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """See ops.matmul."""
    return jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(out_dtype)


def matmul_t(x: jax.Array, w: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """See ops.matmul_t."""
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, w, dims, preferred_element_type=jnp.float32).astype(out_dtype)


def grouped_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """See ops.grouped_matmul. Blocks of rows of one group, one after the other: jax.lax.ragged_dot multiplies
    every row with the weights of all groups but on TPUs."""
    rows, groups = len(x), len(w)
    after = jnp.cumsum(sizes)
    first, blocks = after - sizes, -(-sizes // GROUP)
    last_block = jnp.cumsum(blocks)
    first_block = last_block - blocks
    count = rows // GROUP + min(groups, rows)  # as many as there may be
    block = jnp.arange(count, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last_block, block, side="right"), groups - 1)
    start = first[group] + (block - first_block[group]) * GROUP
    row = start[:, None] + jnp.arange(GROUP, dtype=jnp.int32)
    held = x.at[row].get(mode="fill", fill_value=0)

    def product(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.matmul(args[0], w[args[1]], preferred_element_type=jnp.float32)

    out = jax.lax.map(product, (held, group)).astype(out_dtype).reshape(-1, w.shape[2])
    row = jnp.arange(rows)
    own = jnp.minimum(jnp.searchsorted(after, row, side="right"), groups - 1)
    place = jnp.where(row < after[-1], first_block[own] * GROUP + row - first[own], len(out))
    return out.at[place].get(mode="fill", fill_value=0)


def head_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """See ops.head_matmul."""
    return jnp.einsum("thd,hdf->thf", x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """See ops.rms_norm."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed * weight.astype(jnp.float32)).astype(x.dtype)
