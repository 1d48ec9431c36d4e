"""Batches for sequences that own their pages and slots: sequence b has pages 1 + b * pages onwards, in
order, and slot 1 + b.

The device view is the one that service builds from its packed buffer; only the page table is the identity.
Knows no models. Called by the other files of this package.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.spec import CacheSpec, Scope
from jaxinfer.errors import InvalidRequest
from jaxinfer.layers.batch import CONTINUE, Batch, KindBatch, StateBatch
from jaxinfer.model_config import ModelConfig
from jaxinfer.step.state import cache_shapes

Caches = list[dict[str, jax.Array]]
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
    before = block * jnp.arange(blocks, dtype=jnp.int32)
    lengths = jnp.clip(count[:, None] - before, 0, block)
    kinds: list[KindBatch | StateBatch] = []
    for spec in specs:
        if spec.scope is Scope.STATE:
            kinds.append(_slots(start, lengths, decode))
            continue
        place = positions // PAGE
        valid = (inside < count[:, None]) & (place < pages) & ((positions + 1) % spec.unit == 0)
        page = jnp.where(valid, own + place, 0).reshape(-1)
        base = jnp.zeros((many,), jnp.int32)
        offset = (positions % PAGE // spec.unit).reshape(-1)
        kinds.append(KindBatch(table, base, page, offset))
    firsts = start[:, None] + before
    return Batch(
        tokens=tokens.reshape(-1),
        positions=positions.reshape(-1),
        rope_length=jnp.repeat(rope_length, length),
        block_row=jnp.repeat(jnp.arange(many, dtype=jnp.int32), blocks),
        block_start=firsts.reshape(-1),
        block_length=lengths.reshape(-1),
        kinds=tuple(kinds),
        rows=many if decode else 0,
        blocks=many * blocks,
        block=block,
    )


def _slots(start: jax.Array, lengths: jax.Array, decode: bool) -> StateBatch:
    """Sequence b reads and writes slot 1 + b; lengths: i32[B, blocks] real tokens of its blocks."""
    many, blocks = lengths.shape
    own = 1 + jnp.arange(many, dtype=jnp.int32)
    read = jnp.where(start > 0, own, 0)
    none = jnp.zeros((0,), jnp.int32)
    if decode:
        return StateBatch(read, own, none, none)
    first = jnp.arange(blocks) == 0
    reads = jnp.where(first, read[:, None], CONTINUE)
    after = jnp.concatenate([lengths[:, 1:], jnp.zeros((many, 1), lengths.dtype)], axis=1)
    last = (lengths > 0) & (after == 0)
    writes = jnp.where(last, own[:, None], 0)
    return StateBatch(none, none, reads.reshape(-1), writes.reshape(-1))


def empty_caches(specs: tuple[CacheSpec, ...], many: int, pages: int, layers: int) -> Caches:
    """Caches of `many` sequences with `pages` pages each, all zeros."""
    counts = tuple(1 + many * (1 if s.scope is Scope.STATE else pages) for s in specs)
    shapes = cache_shapes(specs, counts, PAGE, layers)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def pages_of(specs: tuple[CacheSpec, ...], caches: Caches) -> int:
    """Pages that the single sequence of `caches` has; 1 where the model keeps none."""
    return min(
        (_paged(s, caches)[0].shape[0] - 1 for s in specs if s.scope is not Scope.STATE), default=1
    )


def with_pages(specs: tuple[CacheSpec, ...], caches: Caches, pages: int) -> Caches:
    """Caches with at least `pages` pages: the same arrays if they have them, else larger copies."""
    missing = pages - pages_of(specs, caches)
    paged = {
        (layer, field.name)
        for spec in specs
        if spec.scope is not Scope.STATE
        for layer in spec.layers
        for field in spec.fields
    }
    if missing <= 0 or not paged:
        return caches
    return [
        {
            name: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if (i, name) in paged else x
            for name, x in cache.items()
        }
        for i, cache in enumerate(caches)
    ]


def _paged(spec: CacheSpec, caches: Caches) -> list[jax.Array]:
    return [caches[layer][field.name] for layer in spec.layers for field in spec.fields]


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
