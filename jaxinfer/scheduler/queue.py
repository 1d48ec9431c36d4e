"""WaitingQueue: sequences that wait for a row, in the order of the policy; and groups of siblings.

A preempted sequence keeps the place of its arrival, so it goes before all that never ran. Never
looks at pages. Called by the admission and the scheduler.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from jaxinfer.scheduler.sequence import Sequence

LPM_HORIZON = 64  # waiting sequences that "lpm" compares: a match costs a walk of the tree

Key = tuple[int, int]


class WaitingQueue:
    """A sorted list: fcfs and lpm by arrival, priority by (priority, arrival)."""

    def __init__(self, policy: str, cached_length: Callable[[Sequence], int]) -> None:
        self._policy = policy
        self._cached_length = cached_length
        self._items: list[tuple[Key, Sequence]] = []

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, sequence: Sequence) -> bool:
        place = self._find(sequence)
        return place < len(self._items) and self._items[place][1] is sequence

    def push(self, sequence: Sequence) -> None:
        insort(self._items, (self._key(sequence), sequence), key=lambda item: item[0])

    def remove(self, sequence: Sequence) -> None:
        place = self._find(sequence)
        assert self._items[place][1] is sequence
        del self._items[place]

    def ordered(self) -> Iterator[Sequence]:
        """Waiting sequences, first to admit first; the queue may be changed while it is read."""
        if self._policy != "lpm":
            return iter([sequence for _, sequence in self._items])
        head = [s for _, s in self._items[:LPM_HORIZON]]
        head.sort(key=lambda s: (not s.preempted, -self._cached_length(s), s.order))
        return iter(head)

    def _key(self, sequence: Sequence) -> Key:
        priority = sequence.request.priority if self._policy == "priority" else 0
        return (priority, sequence.order)

    def _find(self, sequence: Sequence) -> int:
        return bisect_left(self._items, self._key(sequence), key=lambda item: item[0])


class Groups:
    """Requests of one group: all but the first wait until the prompt they share has been computed."""

    def __init__(self) -> None:
        self._members: dict[str, list[Sequence]] = {}
        self._done: set[str] = set()

    def __len__(self) -> int:
        return len(self._members)

    def add(self, sequence: Sequence) -> None:
        if sequence.request.group is not None:
            self._members.setdefault(sequence.request.group, []).append(sequence)

    def mark_done(self, sequence: Sequence) -> None:
        if sequence.request.group is not None:
            self._done.add(sequence.request.group)

    def must_wait(self, sequence: Sequence) -> bool:
        """True while an earlier living member computes the prompt; if that ends, the next one leads."""
        group = sequence.request.group
        if group is None or group in self._done:
            return False
        return self._members[group][0] is not sequence

    def remove(self, sequence: Sequence) -> None:
        group = sequence.request.group
        if group is None:
            return
        self._members[group].remove(sequence)
        if not self._members[group]:
            del self._members[group]
            self._done.discard(group)
