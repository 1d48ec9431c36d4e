"""Batches for sequences that own their pages: sequence b has pages 1 + b * pages onwards, in order.

The device view is the one that service builds from its packed buffer; only the page table is the identity.
Knows no models. Called by the other files of this package.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.spec import CacheSpec
from jaxinfer.errors import InvalidRequest
from jaxinfer.layers.batch import Batch, KindBatch
from jaxinfer.model_config import ModelConfig

PAGE = 16
BLOCK = 64  # query tokens of a prefill block


def make_batch(
    specs: tuple[CacheSpec, ...],
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    rope_length: jax.Array,
    *,
    pages: int,
) -> Batch:
    """The Batch that feeds count[b] of tokens[b] to sequence b, from position start[b] on.

    Args:
        tokens: i32[B, T]; T is 1 (decode rows), a multiple of BLOCK, or the length of a single block.
        start, count, rope_length: i32[B]. pages: pages that each sequence owns in every kind.
    """
    many, length = tokens.shape
    decode = length == 1
    block = BLOCK if length % BLOCK == 0 else length
    blocks = 0 if decode else length // block
    inside = jnp.arange(length, dtype=jnp.int32)
    positions = start[:, None] + inside
    own = 1 + pages * jnp.arange(many, dtype=jnp.int32)[:, None]
    table = own + jnp.arange(pages, dtype=jnp.int32)
    kinds = []
    for spec in specs:
        size = PAGE // spec.unit
        place = positions // size
        valid = (inside < count[:, None]) & (place < pages)
        page = jnp.where(valid, own + place, 0).reshape(-1)
        base = jnp.zeros((many,), jnp.int32)
        kinds.append(KindBatch(table, base, page, (positions % size).reshape(-1)))
    firsts = start[:, None] + block * jnp.arange(blocks, dtype=jnp.int32)
    return Batch(
        tokens=tokens.reshape(-1),
        positions=positions.reshape(-1),
        rope_length=jnp.repeat(rope_length, length),
        block_row=jnp.repeat(jnp.arange(many, dtype=jnp.int32), blocks),
        block_start=firsts.reshape(-1),
        kinds=tuple(kinds),
        rows=many if decode else 0,
        blocks=many * blocks,
        block=block,
    )


def capacity(tokens: int, limit: int) -> int:
    """Pages that hold `tokens`, on a ladder of few values: 8, 16, 32, ... up to what `limit` needs."""
    needed = -(-tokens // PAGE)
    top = max(needed, -(-limit // PAGE))
    return min(max(8, 1 << (needed - 1).bit_length()), top)


def checked_tokens(config: ModelConfig, tokens: Iterable[int], before: int = 0) -> np.ndarray:
    """i32[T] of token ids. Raises InvalidRequest if there are none, one is unknown, or they are too many."""
    array = np.asarray(tokens)
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise InvalidRequest(
            f"tokens must be a non-empty flat list of token ids; got {array.dtype}{list(array.shape)}"
        )
    if array.min() < 0 or array.max() >= config.vocab_size:
        wrong = int(array[(array < 0) | (array >= config.vocab_size)][0])
        raise InvalidRequest(f"tokens has id {wrong}, outside [0, {config.vocab_size - 1}]")
    if before + len(array) > config.max_length:
        raise InvalidRequest(
            f"{before} tokens so far and {len(array)} more exceed the model's length; "
            f"allowed range [1, {config.max_length}] in all"
        )
    return array.astype(np.int32)
