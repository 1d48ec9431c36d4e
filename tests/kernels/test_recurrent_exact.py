"""delta_exact: right by the oracle, and bitwise the same for every way to cut a sequence into calls."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import pallas_kernels
from tests.kernels.recurrent_oracle import delta, make_delta, places_at

KINDS = ({}, {"by_channel": True}, {"rule": False}, {"rule": False, "by_channel": True})
LENGTH = 150  # two full canonical blocks and a part of one
SLOTS = 6
HEADS: dict[str, Any] = {"key_heads": 2, "ratio": 2, "dk": 16, "dv": 24}

exact: Any = jax.jit(pallas_kernels.delta_exact)


class Sequence:
    """One sequence fed in pieces: W is its working slot; every other slot holds NaN."""

    def __init__(self, **kind: Any) -> None:
        places = places_at([0], [1], [LENGTH], SLOTS)
        *self.inputs, self.pool = make_delta(7, places, count=LENGTH, **HEADS, **kind)
        by_channel, rule = kind.get("by_channel", False), kind.get("rule", True)
        width = pallas_kernels.pending_width(2, 16, 4, 24, by_channel, rule=rule)
        self.pending = np.full((SLOTS, pallas_kernels.EXACT, width), np.nan, np.float32)
        self.oracle = delta((*self.inputs, self.pool), places)

    def call(self, blocks: list[tuple[int, int, int, int]], count: int) -> list[np.ndarray]:
        """Blocks (start, end, read, write) of `count` places in one call; the results of each."""
        rows = jax.tree.map(
            lambda x: np.full((len(blocks), count, *x.shape[2:]), np.nan, "f4"), self.inputs
        )
        for n, (start, end, *_) in enumerate(blocks):
            for row, x in zip(jax.tree.leaves(rows), jax.tree.leaves(self.inputs), strict=True):
                row[n, : end - start] = x[0, start:end]
        table = np.array(blocks, np.int32)
        start, length = table[:, 0], table[:, 1] - table[:, 0]
        read, write = table[:, 2], table[:, 3]
        self.pool, self.pending, out = exact(
            *rows, self.pool, self.pending, read, write, start, length
        )
        return [np.asarray(out)[n, :tokens] for n, tokens in enumerate(length)]


def cut(ends: list[int], **kind: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs, state and pending inputs after one call for each piece."""
    sequence, out, start = Sequence(**kind), [], 0
    for end in ends:
        count = 1 if end - start == 1 else 64
        out += sequence.call([(start, end, 1 if start else 0, 1)], count)
        start = end
    kept = np.asarray(sequence.pending)[1, : LENGTH % 64]
    return np.concatenate(out), np.asarray(sequence.pool)[1], kept


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_is_bitwise_the_same_however_it_is_cut(kind: dict[str, Any]) -> None:
    whole = cut([64, 128, 150], **kind)
    np.testing.assert_allclose(whole[0], Sequence(**kind).oracle[1][0], atol=2e-5, rtol=2e-5)
    ways: dict[str, Any] = {
        "one by one": list(range(1, LENGTH + 1)),
        "13 + 51": [13, 64, 65, 128, 149, 150],
        "ragged": [1, 2, 40, 63, 64, 100, 127, 128, 140, 150],
    }
    for name, ends in ways.items():
        for got, want in zip(cut(ends, **kind), whole, strict=True):
            np.testing.assert_array_equal(got, want, err_msg=name)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_chains_checkpoints_and_neighbours_change_no_bit(kind: dict[str, Any]) -> None:
    want = cut([64, 128, 150], **kind)[0]
    sequence = Sequence(**kind)
    # One call: a chain that leaves a checkpoint at 80 in slot 3, and neighbours that start afresh.
    first = sequence.call(
        [(0, 16, 0, 4), (0, 32, 0, 0), (32, 64, -1, 0), (64, 80, -1, 3), (80, 99, -1, 1)], 32
    )
    # Rows that go on from the checkpoint and from the working slot, beside one another.
    ends = sequence.call([(99, 100, 1, 1), (80, 81, 3, 5), (16, 17, 4, 4), (0, 1, 0, 2)], 1)
    rest = sequence.call(
        [(81, 113, 5, 0), (113, 128, -1, 0), (128, 150, -1, 5), *[(0, 0, 0, 0)] * 2], 32
    )
    for start, out in [
        *zip((0, 0, 32, 64, 80), first, strict=True),
        *zip((99, 80, 16, 0), ends, strict=True),
        *zip((81, 113, 128, 0, 0), rest, strict=True),
    ]:
        np.testing.assert_array_equal(out, want[start : start + len(out)])
