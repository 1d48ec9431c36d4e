"""pack_step and unpack are inverse, padding is harmless: compared with loops over the plan."""

from __future__ import annotations

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.cache.spec import CacheSpec, Field, Scope
from jaxinfer.layers.batch import Batch
from jaxinfer.layout import RecordLayout, RowField, StepShape
from jaxinfer.scheduler.plan import StepPlan
from jaxinfer.step.pack import buffer_size, pack_step, unpack

PAGE, BLOCK, TABLE = 4, 8, 6
SHAPE = StepShape(rows=4, blocks=3, block=BLOCK)
LAYOUT = RecordLayout((TABLE, 4))
FIELDS = (Field("k", (1, 8), "float32"),)
SPECS = (
    CacheSpec("full", Scope.TOKEN, (0,), FIELDS),
    CacheSpec("window", Scope.WINDOW, (1,), FIELDS, window=5),
)


@jax.jit
def unpacked(
    buffer: jax.Array, last_token: jax.Array
) -> tuple[Batch, jax.Array, jax.Array, jax.Array]:
    got = unpack(buffer, last_token, SHAPE, LAYOUT, SPECS, PAGE)
    return got.batch, got.rows.ints, got.last, got.targets


def random_plan(rng: np.random.Generator, decode: int, lengths: list[int]) -> StepPlan:
    """`decode` decode rows and prefill chunks of `lengths` tokens, with random pages."""

    def record(start: int, length: int, blocks: int) -> np.ndarray:
        row = rng.integers(0, 2**31, LAYOUT.width).astype(np.int32)
        row[RowField.SLOT] = rng.integers(1, 5)
        row[RowField.FLAGS] = 1 << rng.integers(8)
        row[RowField.START], row[RowField.LENGTH] = start, length
        row[RowField.BLOCKS] = blocks
        for kind in range(2):
            row[LAYOUT.base_column(kind)] = 0 if kind == 0 else max(0, start - 4) // PAGE
            row[LAYOUT.table_slice(kind)] = rng.integers(1, 90, LAYOUT.tables[kind])
        return row

    blocks, prefill = [], []
    for i, length in enumerate(lengths):
        start = int(rng.integers(0, 4))
        cuts = range(start, start + length, BLOCK)
        blocks += [(i, c, min(BLOCK, start + length - c)) for c in cuts]
        prefill.append(record(start, length, len(cuts)))
    total = sum(lengths)
    return StepPlan(
        SHAPE,
        np.array([record(int(rng.integers(0, 20)), 1, 0) for _ in range(decode)], np.int32).reshape(
            -1, LAYOUT.width
        ),
        np.array(prefill, np.int32).reshape(-1, LAYOUT.width),
        np.array(blocks, np.int32).reshape(-1, 3),
        rng.integers(1, 99, total).astype(np.int32),
        rng.integers(1, 99, total).astype(np.int32),
        [],
    )


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(0, 4),
    st.sampled_from([[], [1], [8], [9], [3, 8, 5], [8, 16], [24], [1, 1, 1]]),
)
def test_every_token_arrives_at_its_place(seed: int, decode: int, lengths: list[int]):
    rng = np.random.default_rng(seed)
    plan = random_plan(rng, decode, lengths)
    last_token = rng.integers(100, 200, 5).astype(np.int32)
    buffer = pack_step(plan, LAYOUT)
    assert buffer.dtype == np.int32 and len(buffer) == buffer_size(SHAPE, LAYOUT)
    assert buffer[0] == np.bitwise_or.reduce(
        [*plan.decode[:, RowField.FLAGS], *plan.prefill[:, RowField.FLAGS], 0]
    )
    batch, records, last, targets = jax.tree.map(np.asarray, unpacked(buffer, last_token))
    columns = len(RowField)
    assert np.array_equal(records[:decode], plan.decode[:, :columns])
    assert np.array_equal(records[4 : 4 + len(lengths)], plan.prefill[:, :columns])
    assert not records[decode:4].any() and not records[4 + len(lengths) :].any()

    where = {}  # token index of the step -> (record, position, token, target)
    for i, row in enumerate(plan.decode):
        where[i] = (row, row[RowField.START], last_token[row[RowField.SLOT]], None)
    fed = 0
    ends = []
    for b, (row, start, length) in enumerate(plan.blocks.tolist()):
        for offset in range(length):
            at = 4 + b * BLOCK + offset
            where[at] = (plan.prefill[row], start + offset, plan.tokens[fed], plan.targets[fed])
            fed += 1
        if b + 1 == len(plan.blocks) or plan.blocks[b + 1][0] != row:
            ends.append(4 + b * BLOCK + length - 1)
    for at in range(SHAPE.tokens):
        for kind, tables in enumerate(batch.kinds):
            page, slot = int(tables.write_page[at]), int(tables.write_offset[at])
            if at not in where:
                assert page == 0, "padding may write to the trash page alone"
                continue
            record, position, _, _ = where[at]
            place = position // PAGE - record[LAYOUT.base_column(kind)]
            table = record[LAYOUT.table_slice(kind)]
            assert page == (table[place] if 0 <= place < len(table) else 0)
            assert slot == position % PAGE
        if at in where:
            record, position, token, target = where[at]
            assert int(batch.positions[at]) == position and int(batch.tokens[at]) == token
            assert int(batch.rope_length[at]) == record[RowField.ROPE_LENGTH]
            assert target is None or int(targets[at - 4]) == target
    assert np.asarray(last)[:4].tolist() == [0, 1, 2, 3]
    assert np.asarray(last)[4 : 4 + len(lengths)].tolist() == ends
    assert (np.asarray(last) < SHAPE.tokens).all()
