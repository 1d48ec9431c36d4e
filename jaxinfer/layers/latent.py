"""Attention over latents: one entry a token that is the key of every head, and holds the values.

Two forms of the same maths. Absorbed: queries are brought into the latents' space, and attend there.
Expanded: keys and values of every head are made from the latents, a chunk of keys at a time. Pure
functions; the entries must have been written before. Called by models/latent.py.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfer.layers.batch import Batch, KindBatch
from jaxinfer.layers.linear import full_precision, head_linear

_CHUNK = 128  # keys that are expanded at once
_LOWEST = -1e30  # a running maximum that is finite, so that exp(m - m) is 1 and never NaN


class Region(NamedTuple):
    """The decode tokens of a step, or its prefill tokens: `tables`.shape[0] blocks of `block` queries.

    Attributes:
        name: "rows" or "blocks". tokens: its place among the step's tokens.
        tables, base: pages of each block's row. start: position of a block's first query.
        length: tokens of a block that are real.
    """

    name: str
    tokens: slice
    block: int
    tables: jax.Array
    base: jax.Array
    start: jax.Array
    length: jax.Array

    def cut(self, x: jax.Array) -> jax.Array:
        """x[T, ...] of the step as [blocks, block, ...]."""
        x = x[self.tokens]
        return x.reshape(-1, self.block, *x.shape[1:])


def regions(batch: Batch, kind: KindBatch) -> list[Region]:
    """The regions that a step has, in the order of their tokens."""
    rows, out = batch.rows, []
    if rows:
        tables, base, start = kind.tables[:rows], kind.base[:rows], batch.positions[:rows]
        out.append(Region("rows", slice(rows), 1, tables, base, start, jnp.ones_like(start)))
    if batch.blocks:
        tables, base = kind.tables[batch.block_row], kind.base[batch.block_row]
        at = (batch.block_start, batch.block_length)
        out.append(Region("blocks", slice(rows, None), batch.block, tables, base, *at))
    return out


def absorbed(
    q: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    pool: jax.Array,
    parts: list[Region],
    chosen: dict[str, jax.Array] | None,
    *,
    scale: float,
) -> jax.Array:
    """[T, H, dv] of the queries q[T, H, dn + dr], all of `parts`.

    Args:
        w_uk: [H, dn, r], latent to key. w_uv: [H, r, dv], latent to value.
        pool: [pages, 1, page, r + dr].
        chosen: i32[blocks, block, topk] positions to attend to for each region by its name; None: all.
    """
    nope, rank = w_uk.shape[1:]
    q = jnp.concatenate([head_linear(q[..., :nope], w_uk), q[..., nope:]], axis=-1)
    out = []
    for part in parts:
        options = {"value_dim": rank, "scale": scale}
        with full_precision(q.dtype):
            if chosen is None:
                mixed = pallas_kernels.latent_attention(
                    part.cut(q), pool, part.tables, part.base, part.start, **options
                )
            else:
                mixed = pallas_kernels.selected_attention(
                    part.cut(q), pool, part.tables, part.base, chosen[part.name], **options
                )
        out.append(mixed.reshape(-1, *mixed.shape[2:]))
    return head_linear(jnp.concatenate(out) if len(out) > 1 else out[0], w_uv)


def expanded(
    q: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    pool: jax.Array,
    part: Region,
    *,
    scale: float,
) -> jax.Array:
    """`absorbed` for one region (q[T, H, dn + dr] of its tokens) in the expanded form.

    A key costs r (dn + dv) products a head to expand, for each block anew, and saves (2r + dr) - (dn + dr + dv)
    of them for each query. With r = 512, dn = dv = 128, dr = 64 these are 131072 and 768: it takes blocks of
    171 queries to gain anything, and blocks are of 32. Measured in float32 on a CPU, 8 heads, 4096 keys,
    absorbed against expanded: 26 and 122 ms for 32 queries, 100 and 131 for 128, 385 and 259 for 512.
    """
    page = pool.shape[2]
    step = max(1, _CHUNK // page)  # pages a chunk
    q = q.reshape(-1, part.block, *q.shape[1:]).astype(jnp.float32) * scale
    blocks, queries, heads = q.shape[:3]
    end = part.start + part.length  # first position that no real query sees
    pos = part.start[:, None] + jnp.arange(queries, dtype=jnp.int32)
    tables = jnp.pad(part.tables, ((0, 0), (0, -part.tables.shape[1] % step)))

    def body(chunk: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = carry
        ids = jax.lax.dynamic_slice_in_dim(tables, chunk * step, step, axis=1)
        key = (part.base[:, None] + chunk * step) * page + jnp.arange(step * page, dtype=jnp.int32)
        held = jnp.repeat(ids > 0, page, axis=1) & (key < end[:, None])
        latent = pool[ids, 0].reshape(blocks, step * page, -1).astype(jnp.float32)
        k, v = _expand(jnp.where(held[..., None], latent, 0.0), w_uk, w_uv)
        seen = (held[:, None] & (key[:, None] <= pos[..., None]))[:, None]
        s = jnp.einsum("nchd,njhd->nhcj", q, k)
        new_top = jnp.maximum(top, jnp.where(seen, s, _LOWEST).max(axis=-1))
        p = jnp.where(seen, jnp.exp(s - new_top[..., None]), 0.0)
        fade = jnp.exp(top - new_top)
        acc = acc * fade[..., None] + jnp.einsum("nhcj,njhd->nhcd", p, v)
        return new_top, total * fade + p.sum(axis=-1), acc

    with full_precision(jnp.float32):
        zeros = jnp.zeros((blocks, heads, queries), jnp.float32)
        first = (zeros + _LOWEST, zeros, jnp.zeros((*zeros.shape, w_uv.shape[2]), jnp.float32))
        chunks = jnp.max(-(-end // page) - part.base) + step - 1
        chunks = jnp.minimum(chunks // step, tables.shape[1] // step)
        _, total, acc = jax.lax.fori_loop(0, chunks, body, first)
    out = acc / jnp.where(total == 0, 1.0, total)[..., None]
    return out.swapaxes(1, 2).reshape(-1, heads, out.shape[-1]).astype(w_uv.dtype)


def _expand(latent: jax.Array, w_uk: jax.Array, w_uv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys [N, S, H, dn + dr] and values [N, S, H, dv] of latent[N, S, r + dr] in float32."""
    rank, heads = w_uk.shape[2], len(w_uk)
    c, rope = latent[..., :rank], latent[..., None, rank:]
    k = jnp.einsum("nsr,hdr->nshd", c, w_uk.astype(jnp.float32))
    v = jnp.einsum("nsr,hrd->nshd", c, w_uv.astype(jnp.float32))
    return jnp.concatenate([k, jnp.repeat(rope, heads, axis=2)], axis=-1), v
