"""Attention of one layer over its paged cache: write this step's keys and values, then read.

Decode tokens are N rows of one query, prefill blocks N rows of `block` queries; both see what was
just written. The maths is pallas_kernels'; this file only cuts the step into its two regions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfer.layers.batch import Batch, KindBatch

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
) -> tuple[Cache, jax.Array]:
    """(cache, out[T, H, head_dim]) of q[T, H, head_dim] and k, v[T, kv_heads, head_dim].

    cache: "k" and "v" of [pages, kv_heads, page_size, head_dim]; returned with this step's entries.
    """
    k_pool, v_pool = pallas_kernels.kv_write(
        cache["k"], cache["v"], k, v, kind.write_page, kind.write_offset
    )
    rows, regions = batch.rows, []
    options = {"scale": scale, "window": window, "softcap": softcap}
    if rows:
        tables, base = kind.tables[:rows], kind.base[:rows]
        start = batch.positions[:rows]
        out = pallas_kernels.paged_attention(
            q[:rows, None], k_pool, v_pool, tables, base, start, **options
        )
        regions.append(out[:, 0])
    if batch.blocks:
        blocks = q[rows:].reshape(batch.blocks, batch.block, *q.shape[1:])
        tables, base = kind.tables[batch.block_row], kind.base[batch.block_row]
        out = pallas_kernels.paged_attention(
            blocks, k_pool, v_pool, tables, base, batch.block_start, **options
        )
        regions.append(out.reshape(-1, *q.shape[1:]))
    out = regions[0] if len(regions) == 1 else jnp.concatenate(regions)
    return {"k": k_pool, "v": v_pool}, out
