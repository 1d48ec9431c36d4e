"""Pools: which pages or slots of one cache kind are free, and how often each other one is referenced.

A page is either in the free list (count 0) or referenced (count >= 1): never both, never neither.
Page 0 is the trash page that padding rows write to; it is never handed out. Never touches arrays.
All of this holds for the slots of STATE kinds too, and the code says page for both.
Called by the prefix tree, which is the only one that shares and releases pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from jaxinfer.errors import CapacityError


class Pool:
    """Reference counts of pages 1 .. size - 1; `size` counts the reserved one."""

    noun: ClassVar[str] = "page"

    def __init__(self, size: int) -> None:
        if size < 2:
            raise CapacityError(
                f"num_{self.noun}s={size} is below 2: {self.noun} 0 is reserved; "
                "give the pool more memory"
            )
        self.size = size
        self.refs = [0] * size
        # A stack, lowest id on top: pages that were just freed are warm and go out first.
        self._free = list(range(size - 1, 0, -1))

    @property
    def usable(self) -> int:
        """Pages that can be handed out at all."""
        return self.size - 1

    @property
    def free(self) -> int:
        """Pages that nobody references."""
        return len(self._free)

    def alloc(self, count: int) -> list[int]:
        """`count` pages with one reference each; CapacityError (and no change) if too few are free."""
        if count > len(self._free):
            raise CapacityError(
                f"{count} {self.noun}s wanted, {len(self._free)} of {self.usable} are free"
            )
        cut = len(self._free) - count
        pages = self._free[cut:][::-1]
        del self._free[cut:]
        for page in pages:
            self.refs[page] = 1
        return pages

    def share(self, page: int) -> int:
        """Add a reference to a live page; the new count."""
        assert self.refs[page] > 0, f"{self.noun} {page} is free and cannot be shared"
        self.refs[page] += 1
        return self.refs[page]

    def release(self, page: int) -> int:
        """Drop a reference; the new count. At 0 the page is free."""
        count = self.refs[page] - 1
        assert count >= 0, f"{self.noun} {page} was released more often than it was taken"
        self.refs[page] = count
        if count == 0:
            self._free.append(page)
        return count

    def check(self, owners: Iterable[int] | None = None) -> None:
        """Assert the invariants; `owners` lists every reference that should exist, one by one."""
        free = set(self._free)
        assert len(free) == len(self._free), f"a {self.noun} is twice in the free list"
        assert 0 not in free and self.refs[0] == 0, f"{self.noun} 0 left its reserve"
        for page in range(1, self.size):
            assert (self.refs[page] == 0) == (page in free), (
                f"{self.noun} {page}: refs {self.refs[page]}"
            )
        if owners is not None:
            counts = [0] * self.size
            for page in owners:
                counts[page] += 1
            assert counts == self.refs, "reference counts differ from the owners that exist"


class PagePool(Pool):
    """The pages of a TOKEN or WINDOW kind."""


class SlotPool(Pool):
    """The slots of a STATE kind."""

    noun = "slot"
