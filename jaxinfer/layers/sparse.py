"""The indexer of sparse attention: which earlier tokens a query attends to.

Pure functions; the index keys must have been written before. Called by models/latent.py.
"""

from __future__ import annotations

import jax

import pallas_kernels
from jaxinfer.layers.batch import Batch, KindBatch
from jaxinfer.layers.latent import regions
from jaxinfer.layers.linear import full_precision


def select(
    q: jax.Array,
    w: jax.Array,
    pool: jax.Array,
    kind: KindBatch,
    batch: Batch,
    *,
    topk: int,
) -> dict[str, jax.Array]:
    """i32[blocks, block, topk] positions for each region of the step by its name, -1 for none.

    Args:
        q: [T, Hi, di]. w: f32[T, Hi], the weight of each head. pool: [pages, 1, page, di].
    """
    scale = q.shape[-1] ** -0.5
    with full_precision(q.dtype):
        return {
            part.name: pallas_kernels.index_select(
                part.cut(q),
                part.cut(w),
                pool,
                part.tables,
                part.base,
                part.start,
                topk=topk,
                scale=scale,
            )
            for part in regions(batch, kind)
        }
