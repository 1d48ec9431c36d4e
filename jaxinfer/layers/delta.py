"""Linear attention with a state (delta rule, or plain) over a step's tokens, each sequence going on
from the state in its slot.

The maths is pallas_kernels'; this file only cuts the step into its two regions and picks the form:
"tolerant" rounds differently for chunks and single steps, "exact" never does. Called by the mixers of
recurrent families.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfer.cache.spec import Field
from jaxinfer.layers.batch import Batch, StateBatch
from jaxinfer.layers.elementwise import alone

Cache = dict[str, jax.Array]


def state_fields(
    key_heads: int, dk: int, heads: int, dv: int, *, by_channel: bool, rule: bool, replay: str
) -> tuple[Field, ...]:
    """What a slot keeps for `recur`: "state", and for exact replay "pending", both in float32.

    by_channel: g has an entry for each key channel. rule: beta is given.
    """
    fields = (Field("state", (heads, dk, dv), "float32"),)
    if replay == "exact":
        width = pallas_kernels.pending_width(key_heads, dk, heads, dv, by_channel, rule=rule)
        fields += (Field("pending", (pallas_kernels.EXACT, width), "float32"),)
    return fields


def recur(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array | None,
    cache: Cache,
    state: StateBatch,
    batch: Batch,
    replay: str,
) -> tuple[Cache, jax.Array]:
    """(cache, o[T, Hv, dv]) of S <- e^g S; S <- S + k (beta (v - S^T k))^T; o = S^T q.

    Exact replay needs blocks that do not cross a multiple of pallas_kernels.EXACT positions.

    Args:
        q, k: [T, Hk, dk], q scaled already. v: [T, Hv, dv]; value head h uses key head h // (Hv // Hk).
        g: logarithm of the decay, f32[T, Hv] or f32[T, Hv, dk]. beta: f32[T, Hv], or None: S + k v^T.
        cache: "state" [slots, Hv, dk, dv] and, for exact replay, "pending"; returned with this step's.
        replay: see ModelConfig.replay.
    Returns:
        The cache, and o in q's dtype.
    """
    rows, regions = batch.rows, []
    if rows:
        one = _cut((q, k, v, g, beta), slice(rows), rows, 1)
        places = (state.row_read, state.row_write, batch.positions[:rows])
        cache, out = _region(one, cache, *places, None, replay)
        regions.append(out)
    if batch.blocks:
        many = _cut((q, k, v, g, beta), slice(rows, None), batch.blocks, batch.block)
        places = (state.block_read, state.block_write, batch.block_start)
        cache, out = _region(many, cache, *places, batch.block_length, replay)
        regions.append(out)
    return cache, regions[0] if len(regions) == 1 else jnp.concatenate(regions)


def decay(x: jax.Array, bias: jax.Array, rate: jax.Array) -> jax.Array:
    """-e^rate softplus(x + bias) of f32[T, n]: the logarithm of what is kept of a state.

    rate, bias: f32[n]. A token's bits do not depend on the others.
    """
    kept = alone(jax.nn.softplus, x + bias)
    return jax.lax.optimization_barrier(-alone(jnp.exp, rate[None]) * kept)


def _cut(inputs: tuple[Any, ...], tokens: slice, blocks: int, block: int) -> tuple[Any, ...]:
    """The region `tokens` of each input that there is, as [blocks, block, ...]."""
    regions = (None if x is None else x[tokens] for x in inputs)
    return tuple(None if x is None else x.reshape(blocks, block, *x.shape[1:]) for x in regions)


def _region(
    inputs: tuple[Any, ...],
    cache: Cache,
    read: jax.Array,
    write: jax.Array,
    start: jax.Array,
    length: jax.Array | None,
    replay: str,
) -> tuple[Cache, jax.Array]:
    """One region of [N, C, ...] inputs: the cache, and o[N * C, Hv, dv]. length: None for decode rows."""
    q, k, v, g, beta = inputs
    pool = cache["state"]
    if replay == "exact":
        length = jnp.ones_like(read) if length is None else length
        pool, pending, out = pallas_kernels.delta_exact(
            q, k, v, g, beta, pool, cache["pending"], read, write, start, length
        )
        cache = cache | {"pending": pending}
    elif length is None:
        q, k, v, g = (x[:, 0] for x in (q, k, v, g))
        beta = None if beta is None else beta[:, 0]
        pool, out = pallas_kernels.delta_step(q, k, v, g, beta, pool, read, write)
    else:
        pool, out = pallas_kernels.delta_chunk(q, k, v, g, beta, pool, read, write, length)
    return cache | {"state": pool}, out.reshape(-1, *v.shape[-2:])
