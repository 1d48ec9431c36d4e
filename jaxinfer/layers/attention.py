"""Attention of one layer over its paged cache: write this step's keys and values, then read.

Decode tokens are N rows of one query, prefill blocks N rows of `block` queries; both see what was
just written. The maths is pallas_kernels'; this file only cuts the step into its two regions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfer.layers.batch import Batch, KindBatch
from jaxinfer.layers.linear import full_precision

Cache = dict[str, jax.Array]


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: Cache,
    kind: KindBatch,
    batch: Batch,
    *,
    scale: float,
    window: int,
    softcap: float,
    sinks: jax.Array | None = None,
) -> tuple[Cache, jax.Array]:
    """(cache, out[T, H, head_dim]) of q[T, H, head_dim] and k, v[T, kv_heads, head_dim].

    cache: "k" and "v" of [pages, kv_heads, page_size, head_dim]; returned with this step's entries.
    sinks: f32[H] logits of a column of the softmax that is dropped, or None.
    """
    k_pool, v_pool = pallas_kernels.kv_write(
        cache["k"], cache["v"], k, v, kind.write_page, kind.write_offset
    )
    read = partial(_read, q, k_pool, v_pool, scale=scale, window=window, softcap=softcap)
    if sinks is not None:
        read = partial(read, sinks=sinks)
    rows, regions = batch.rows, []
    if rows:
        tables, base = kind.tables[:rows], kind.base[:rows]
        regions.append(read(slice(rows), 1, tables, base, batch.positions[:rows]))
    if batch.blocks:
        tables, base = kind.tables[batch.block_row], kind.base[batch.block_row]
        regions.append(read(slice(rows, None), batch.block, tables, base, batch.block_start))
    out = regions[0] if len(regions) == 1 else jnp.concatenate(regions)
    return {"k": k_pool, "v": v_pool}, out


def _read(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    tokens: slice,
    block: int,
    tables: jax.Array,
    base: jax.Array,
    start: jax.Array,
    **options: Any,
) -> jax.Array:
    """Attention of the region `tokens`, whose queries come in blocks of `block`."""
    q = q[tokens]
    blocks = q.reshape(-1, block, *q.shape[1:])
    with full_precision(q.dtype):
        out = pallas_kernels.paged_attention(blocks, k_pool, v_pool, tables, base, start, **options)
    return out.reshape(q.shape)
