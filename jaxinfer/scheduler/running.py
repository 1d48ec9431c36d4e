"""Running: the sequences that hold a row slot and pages, by what their next step feeds.

Keeps the decoding ones in an order that changes only when one joins or leaves, so that a decode
round needs no Python work for each row. Never touches pages. Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxinfer.scheduler.sequence import Sequence, Status


class Running:
    """Three disjoint sets: prefilling, decoding, and draining (nothing more to schedule)."""

    def __init__(self) -> None:
        self._prefill: dict[Sequence, None] = {}
        self._decode: dict[Sequence, None] = {}
        self._drain: dict[Sequence, None] = {}
        self._rows: tuple[list[Sequence], np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._prefill) + len(self._decode) + len(self._drain)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._prefill
        yield from self._decode
        yield from self._drain

    @property
    def num_decoding(self) -> int:
        return len(self._decode)

    def move(self, sequence: Sequence, status: Status) -> None:
        """Into the set of `status`; WAITING and FINISHED are no sets."""
        for members in (self._prefill, self._decode, self._drain):
            members.pop(sequence, 0)
        if Status.DECODE in (status, sequence.status):
            self._rows = None
        sequence.status = status
        if status is Status.PREFILL:
            self._prefill[sequence] = None
        elif status is Status.DECODE:
            self._decode[sequence] = None
        elif status is Status.DRAIN:
            self._drain[sequence] = None

    def prefilling(self) -> list[Sequence]:
        return sorted(self._prefill, key=lambda s: s.rank)

    def decoding(self) -> tuple[list[Sequence], np.ndarray]:
        """The decoding sequences and their slots i32[n]; neither may be changed."""
        if self._rows is None:
            members = list(self._decode)
            slots = np.fromiter((s.slot for s in members), np.int32, len(members))
            self._rows = (members, slots)
        return self._rows

    def starving(self, step: int, limit: int) -> bool:
        """Whether the decode rows are to sit out step number `step`: every second one while a prompt has
        been under way for more than `limit` steps (0: no limit)."""
        if not limit or step % 2:
            return False
        return any(step - sequence.started > limit for sequence in self._prefill)

    def last(self) -> Sequence:
        """Who gives up its pages first: the highest rank among those with tokens to schedule."""
        return max((*self._prefill, *self._decode), key=lambda s: s.rank)
