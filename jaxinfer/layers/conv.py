"""Short causal convolutions over a step's tokens, each sequence going on from the inputs in its slot.

The maths is pallas_kernels'; this file only cuts the step into its two regions. Called by the mixers
of recurrent families.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfer.layers.batch import Batch, StateBatch


def convolve(
    x: jax.Array, w: jax.Array, pool: jax.Array, state: StateBatch, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """(pool, y[T, channels]) of x[T, channels]: y_t = sum_j w[:, j] x_{t - K + 1 + j} within a sequence.

    No bias, no activation; sums in float32, y in x's dtype.

    Args:
        w: [channels, K], or [channels, 1, K] as checkpoints hold it.
        pool: [slots, K - 1, channels], the last inputs, oldest first; returned with this step's.
    """
    w = w.reshape(w.shape[0], w.shape[-1])
    rows, regions = batch.rows, []
    if rows:
        read, write = state.row_read, state.row_write
        pool, y = pallas_kernels.conv_step(x[:rows], w, pool, read, write)
        regions.append(y)
    if batch.blocks:
        blocks = x[rows:].reshape(batch.blocks, batch.block, -1)
        read, write, length = state.block_read, state.block_write, batch.block_length
        pool, y = pallas_kernels.conv_chunk(blocks, w, pool, read, write, length)
        regions.append(y.reshape(-1, x.shape[1]))
    return pool, regions[0] if len(regions) == 1 else jnp.concatenate(regions)
