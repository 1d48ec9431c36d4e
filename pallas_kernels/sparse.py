"""Sparse attention in plain jnp: which keys a query takes (the indexer), and attention over those.

The definition of right for the native forms. Memory is bounded by a block of queries, whatever their
number; never scores or reads a place on page 0 or outside a row's table. Called by ops.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.reference import (
    CHUNK,
    Sums,
    add_chunk,
    entries,
    finish,
    first_sums,
    listed,
)

_QUERIES = 16  # queries that are worked on at once
_NOWHERE = jnp.iinfo(jnp.int32).max


def index_select(
    q: jax.Array,
    w: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    base: jax.Array,
    start: jax.Array,
    *,
    topk: int,
    scale: float,
) -> jax.Array:
    """See ops.index_select."""
    rows, queries = q.shape[:2]
    page = pool.shape[2]
    places = tables.shape[1] * page
    key = base[:, None] * page + jnp.arange(places, dtype=jnp.int32)
    held = jnp.repeat(tables > 0, page, axis=1)

    def block(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, w, pos = args
        score = _scores(q, w, pool, tables, scale)[..., :places]
        seen = held[:, None] & (key[:, None] <= pos[..., None])
        lowest = jnp.finfo(jnp.float32).min  # above what is not seen, even for a score of -inf
        score = jnp.where(score == 0, 0.0, jnp.maximum(score, lowest))  # -0 and 0 are a tie
        _, best = jax.lax.top_k(jnp.where(seen, score, -jnp.inf), min(topk, places))
        taken = jnp.take_along_axis(seen, best, axis=-1)
        found = jnp.sort(jnp.where(taken, best + base[:, None, None] * page, _NOWHERE), axis=-1)
        return jnp.where(found == _NOWHERE, -1, found)

    pos = start[:, None] + jnp.arange(queries, dtype=jnp.int32)
    blocks = jax.lax.map(block, (_cut(q), _cut(w.astype(jnp.float32)), _cut(pos)))
    chosen = blocks.swapaxes(0, 1).reshape(rows, -1, blocks.shape[-1])[:, :queries]
    return jnp.pad(chosen, ((0, 0), (0, 0), (0, topk - chosen.shape[2])), constant_values=-1)


def _cut(x: jax.Array) -> jax.Array:
    """[N, C, ...] as [blocks, N, queries of a block, ...], padded with zeros."""
    size = min(_QUERIES, x.shape[1])
    blocks = -(-x.shape[1] // size)
    x = jnp.pad(x, ((0, 0), (0, blocks * size - x.shape[1]), *((0, 0),) * (x.ndim - 2)))
    return x.reshape(x.shape[0], blocks, size, *x.shape[2:]).swapaxes(0, 1)


def _scores(
    q: jax.Array, w: jax.Array, pool: jax.Array, tables: jax.Array, scale: float
) -> jax.Array:
    """float32 [N, C, places]: sum_h w_h relu(q_h . k * scale), a chunk of keys at a time."""
    step = max(1, CHUNK // pool.shape[2])
    chunks = -(-tables.shape[1] // step)
    ids = jnp.pad(tables, ((0, 0), (0, chunks * step - tables.shape[1])))
    q = q.astype(jnp.float32)

    def chunk(ids: jax.Array) -> jax.Array:
        k = entries(pool, ids)[:, 0]
        s = jnp.einsum("nchd,njd->nchj", q, k, preferred_element_type=jnp.float32)
        return jnp.einsum("nch,nchj->ncj", w, jax.nn.relu(s * scale))

    score = jax.lax.map(chunk, ids.reshape(ids.shape[0], chunks, step).swapaxes(0, 1))
    return jnp.moveaxis(score, 0, 2).reshape(*q.shape[:2], -1)


def selected_attention(
    q: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    base: jax.Array,
    chosen: jax.Array,
    *,
    value_dim: int,
    scale: float,
) -> jax.Array:
    """See ops.selected_attention."""
    rows, queries, heads, dim = q.shape
    page = pool.shape[2]
    chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, -chosen.shape[2] % CHUNK)), constant_values=-1)
    flat = chosen.reshape(rows, -1)
    ids = jnp.where(flat >= 0, listed(tables, flat // page - base[:, None]), 0)

    @jax.checkpoint
    def chunk(carry: tuple[jax.Array, Sums], at: tuple[jax.Array, jax.Array]):
        query, sums = carry
        ids, offset = at
        found = pool[ids, 0, offset].astype(jnp.float32)
        s = jnp.einsum("hd,jd->hj", query, found, preferred_element_type=jnp.float32)
        s, seen = s[None, None, :, None], (ids > 0)[None, None]
        return (query, add_chunk(sums, s, seen, found[None, None, :, :value_dim])), None

    def attend(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        query, ids, offset = args
        first = query.astype(jnp.float32) * scale, first_sums((1, 1, heads, 1), value_dim)
        (_, sums), _ = jax.lax.scan(chunk, first, (ids, offset))
        return finish(sums)[0, 0, :, 0]

    lists = (x.reshape(rows * queries, -1, CHUNK) for x in (ids, flat % page))
    out = jax.lax.map(attend, (q.reshape(-1, heads, dim), *lists), batch_size=_QUERIES)
    return out.reshape(rows, queries, heads, value_dim).astype(q.dtype)
