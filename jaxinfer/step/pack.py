"""Plan -> one int32 buffer on the host, and buffer -> Batch inside the jitted step by static slices.

A buffer holds: the OR of all row flags, the sampling state to load, the row records, the blocks,
the prefill tokens and their targets. A new buffer is made each step: the CPU backend may alias it while the step runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.spec import CacheSpec, Scope
from jaxinfer.layers.batch import CONTINUE, Batch, KindBatch, StateBatch
from jaxinfer.layout import FLOAT_FIELDS, RecordLayout, RowField, StepShape
from jaxinfer.scheduler.plan import LOAD_ENTRIES, LOAD_RESETS, LoadPlan, StepPlan

LOAD_SIZE = 2 + LOAD_RESETS * 2 + LOAD_ENTRIES * 4
HEADER = 1 + LOAD_SIZE
BLOCK_FIELDS = 3  # row, start, tokens; then the slot that each STATE kind keeps at the block's end


def buffer_size(shape: StepShape, layout: RecordLayout) -> int:
    """int32 elements of a packed step."""
    per_block = BLOCK_FIELDS + len(layout.states) + 2 * shape.block
    return HEADER + shape.sample_rows * layout.width + shape.blocks * per_block


def pack_step(plan: StepPlan, layout: RecordLayout) -> np.ndarray:
    """i32[buffer_size] of a plan; padding is zero (slot 0, page 0, no flags)."""
    shape = plan.shape
    buffer = np.zeros(buffer_size(shape, layout), np.int32)
    first, last = HEADER, HEADER + shape.sample_rows * layout.width
    rows = buffer[first:last].reshape(shape.sample_rows, layout.width)
    rows[: len(plan.decode)] = plan.decode
    rows[shape.rows : shape.rows + len(plan.prefill)] = plan.prefill
    buffer[0] = np.bitwise_or.reduce(rows[:, RowField.FLAGS])
    if plan.load is not None:
        buffer[1:HEADER] = pack_load(plan.load)
    if shape.blocks:
        _pack_blocks(plan, buffer[last:], BLOCK_FIELDS + len(layout.states))
    return buffer


def _pack_blocks(plan: StepPlan, tail: np.ndarray, columns: int) -> None:
    shape, n = plan.shape, len(plan.blocks)
    blocks = tail[: shape.blocks * columns].reshape(shape.blocks, columns)
    blocks[:n] = plan.blocks
    blocks[:n, 0] += shape.rows
    place = np.arange(shape.block)[None, :] < plan.blocks[:, 2:3]
    size = shape.blocks * shape.block
    for i, values in enumerate((plan.tokens, plan.targets)):
        start = shape.blocks * columns + i * size
        tail[start : start + size].reshape(shape.blocks, shape.block)[:n][place] = values


def pack_load(plan: LoadPlan) -> np.ndarray:
    """i32[LOAD_SIZE]: numbers of resets and entries, resets (slot, bits), entries (slot, token, op, bits)."""
    resets = np.zeros((LOAD_RESETS, 2), np.int32)
    entries = np.zeros((LOAD_ENTRIES, 4), np.int32)
    if plan.resets:
        slots, fills = zip(*plan.resets, strict=True)
        resets[: len(slots), 0] = slots
        resets[: len(slots), 1] = np.asarray(fills, np.float32).view(np.int32)
    if plan.entries:
        slots, tokens, ops, values = zip(*plan.entries, strict=True)
        rows = entries[: len(slots)]
        rows[:, 0], rows[:, 1], rows[:, 2] = slots, tokens, [int(op) for op in ops]
        rows[:, 3] = np.asarray(values, np.float32).view(np.int32)
    head = np.asarray([len(plan.resets), len(plan.entries)], np.int32)
    return np.concatenate([head, resets.ravel(), entries.ravel()])


@dataclass(frozen=True, slots=True)
class Rows:
    """Row fields on the device: `ints` i32[R, len(RowField)] with floats bit-cast."""

    ints: jax.Array
    any_flags: jax.Array

    def __getitem__(self, field: RowField) -> jax.Array:
        column = self.ints[:, field]
        if field in FLOAT_FIELDS:
            return jax.lax.bitcast_convert_type(column, jnp.float32)
        return column

    def flag(self, bit: int) -> jax.Array:
        return (self.ints[:, RowField.FLAGS] & bit) != 0


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The device view of a packed step.

    Attributes:
        batch: what the model reads. rows: sampling fields of the sample rows.
        last: i32[sample_rows] index of the token whose hidden state yields the row's logits.
        targets: i32[blocks * block] next tokens of the prefill region.
    """

    batch: Batch
    rows: Rows
    last: jax.Array
    targets: jax.Array


def unpack(
    buffer: jax.Array,
    last_token: jax.Array,
    shape: StepShape,
    layout: RecordLayout,
    specs: tuple[CacheSpec, ...],
    page_size: int,
) -> Unpacked:
    """Slice a packed buffer inside the step; all shapes are static."""
    n, d = shape.sample_rows, shape.rows
    end = HEADER + n * layout.width
    records = buffer[HEADER:end].reshape(n, layout.width)
    rows = Rows(records[:, : len(RowField)], buffer[0])
    tail = buffer[end:]
    columns = BLOCK_FIELDS + len(layout.states)
    blocks = tail[: shape.blocks * columns].reshape(shape.blocks, columns)
    fed = tail[shape.blocks * columns :].reshape(2, shape.blocks * shape.block)

    inside = jnp.arange(shape.block, dtype=jnp.int32)
    block_positions = (blocks[:, 1:2] + inside).reshape(-1)
    block_valid = (inside < blocks[:, 2:3]).reshape(-1)
    row_of = jnp.concatenate(
        [jnp.arange(d, dtype=jnp.int32), jnp.repeat(blocks[:, 0], shape.block)]
    )
    positions = jnp.concatenate([rows[RowField.START][:d], block_positions])
    valid = jnp.concatenate([rows[RowField.LENGTH][:d] > 0, block_valid])
    decode_tokens = last_token[rows[RowField.SLOT][:d]]
    kinds = tuple(
        _state_batch(records, layout, i, blocks, d)
        if spec.scope is Scope.STATE
        else _kind_batch(records, layout, i, row_of, positions, valid, page_size, spec.unit)
        for i, spec in enumerate(specs)
    )
    batch = Batch(
        tokens=jnp.concatenate([decode_tokens, fed[0]]),
        positions=positions,
        rope_length=rows[RowField.ROPE_LENGTH][row_of],
        block_row=blocks[:, 0],
        block_start=blocks[:, 1],
        block_length=blocks[:, 2],
        kinds=kinds,
        rows=shape.rows,
        blocks=shape.blocks,
        block=shape.block,
    )
    return Unpacked(batch, rows, _last_index(rows, blocks, shape), fed[1])


def _kind_batch(
    records: jax.Array,
    layout: RecordLayout,
    kind: int,
    row_of: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    page_size: int,
    unit: int,
) -> KindBatch:
    tables = records[:, layout.table_slice(kind)]
    base = records[:, layout.base_column(kind)]
    place = positions // page_size - base[row_of]
    inside = valid & (place >= 0) & (place < tables.shape[1])
    page = tables[row_of, jnp.clip(place, 0, tables.shape[1] - 1)]
    # An entry is written when the last of its `unit` tokens has come.
    inside &= (positions + 1) % unit == 0
    offset = positions % page_size // unit
    return KindBatch(tables, base, jnp.where(inside, page, 0), offset)


def _state_batch(
    records: jax.Array, layout: RecordLayout, kind: int, blocks: jax.Array, rows: int
) -> StateBatch:
    read, write = records[:, layout.base_column(kind)], records[:, layout.base_column(kind) + 1]
    row, real = blocks[:, 0], blocks[:, 2] > 0
    before = jnp.concatenate([jnp.full((1,), -1, row.dtype), row[:-1]])[: len(row)]
    first = jnp.where(real & (row == before), CONTINUE, read[row])
    place = BLOCK_FIELDS + layout.states.index(kind)
    return StateBatch(read[:rows], write[:rows], jnp.where(real, first, 0), blocks[:, place])


def _last_index(rows: Rows, blocks: jax.Array, shape: StepShape) -> jax.Array:
    """Index (into the step's tokens) of each sample row's last token."""
    decode = jnp.arange(shape.rows, dtype=jnp.int32)
    if not shape.blocks:
        return decode
    ends = jnp.cumsum(rows[RowField.BLOCKS][shape.rows :], dtype=jnp.int32)
    block = jnp.clip(ends - 1, 0, shape.blocks - 1)
    offset = jnp.maximum(blocks[block, 2] - 1, 0)
    return jnp.concatenate([decode, shape.rows + block * shape.block + offset])
