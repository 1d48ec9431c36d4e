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
class StateBatch:
    """Slots of one STATE kind. All reads see the pool as it was before the step.

    A slot to read of 0 stands for the start of a sequence: the state is zeros. What is written to slot 0 is
    kept nowhere.

    Attributes:
        row_read, row_write: i32[rows] slots of the decode rows.
        block_read: i32[blocks] slot that a prefill block starts from; CONTINUE goes on from the end of the
            block before. block_write: i32[blocks] slot that keeps the state at the block's end.
    """

    row_read: jax.Array
    row_write: jax.Array
    block_read: jax.Array
    block_write: jax.Array


CONTINUE = -1


@struct.dataclass
class Batch:
    """Tokens of a step: `rows` decode tokens, then `blocks` x `block` prefill tokens.

    Attributes:
        tokens: i32[T] ids (0 for padding). positions: i32[T]. rope_length: i32[T] length that fixes
            length-dependent rope for the token's row.
        block_row: i32[blocks] row (index into tables) of each prefill block; block_start: i32[blocks] its
            first position; block_length: i32[blocks] tokens of it that are real, the rest is padding.
        kinds: a KindBatch or (scope STATE) StateBatch for each CacheSpec, in the order of the model's cache_specs.
    """

    tokens: jax.Array
    positions: jax.Array
    rope_length: jax.Array
    block_row: jax.Array
    block_start: jax.Array
    block_length: jax.Array
    kinds: tuple[KindBatch | StateBatch, ...]
    rows: int = struct.field(pytree_node=False)
    blocks: int = struct.field(pytree_node=False)
    block: int = struct.field(pytree_node=False)
