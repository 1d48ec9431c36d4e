"""The device view of one step, as the layers see it: flat tokens, rows, and the pages of each cache kind.

Built inside the jitted step from the packed buffer (step/pack.py); layers only read it.
"""

from __future__ import annotations

import jax
from flax import struct


@struct.dataclass
class KindBatch:
    """Pages of one paged cache kind.

    Attributes:
        tables: i32[sample_rows, pages] page ids; 0 stands for "no page".
        base: i32[sample_rows] index of the sequence page that tables[:, 0] holds (0 for TOKEN kinds).
        write_page: i32[tokens] page that each token's entry is written to (0, the trash page, for padding).
        write_offset: i32[tokens] place in that page.
    """

    tables: jax.Array
    base: jax.Array
    write_page: jax.Array
    write_offset: jax.Array


@struct.dataclass
class Batch:
    """Tokens of a step: `rows` decode tokens, then `blocks` x `block` prefill tokens.

    Attributes:
        tokens: i32[T] ids (0 for padding). positions: i32[T]. rope_length: i32[T] length that fixes
            length-dependent rope for the token's row.
        block_row: i32[blocks] row (index into tables) of each prefill block; block_start: i32[blocks] its
            first position.
        kinds: one KindBatch for each paged CacheSpec, in the order of the model's cache_specs.
    """

    tokens: jax.Array
    positions: jax.Array
    rope_length: jax.Array
    block_row: jax.Array
    block_start: jax.Array
    kinds: tuple[KindBatch, ...]
    rows: int = struct.field(pytree_node=False)
    blocks: int = struct.field(pytree_node=False)
    block: int = struct.field(pytree_node=False)
