"""Ledger: which pages and slots the tree owns, which ones sequences hold, and who gets free ones.

The tree owns one reference to each page in a node, a sequence one to each page it holds; what only
the tree references can be evicted. A working slot is written by one sequence and read by nobody else;
a checkpoint is a slot that nobody writes any more. Never looks at tokens. Base of the PrefixTree, whose
methods the scheduler calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.cache.node import Held, Node
from jaxinfer.cache.pool import PagePool, Pool, SlotPool
from jaxinfer.cache.resume import first_page
from jaxinfer.cache.spec import CacheSpec, Scope
from jaxinfer.errors import ConfigError


@dataclass(slots=True)
class KindCounters:
    """What has happened to one kind since the start.

    Attributes:
        published: pages (STATE kinds: checkpoints) that came into the tree.
        evicted: pages that left it to make room or because their tokens' entries had to.
        thinned: checkpoints that left it because a path had more than max_states.
        duplicates: computed pages given up because the tree had them.
        shortened: tokens by which this kind alone cut hits: over all counted matches, how far every other
            kind could have resumed together, less the hit.
    """

    published: int = 0
    evicted: int = 0
    thinned: int = 0
    duplicates: int = 0
    shortened: int = 0


class Ledger(ABC):
    """Pages of all kinds behind one door: allocation, sharing, working slots and checkpoints."""

    def __init__(self, specs: Sequence[CacheSpec], page_size: int, pools: Sequence[Pool]) -> None:
        if len(specs) != len(pools):
            raise ConfigError(f"{len(specs)} cache kinds need as many pools, not {len(pools)}")
        for spec, pool in zip(specs, pools, strict=True):
            kind_of_pool = PagePool if spec.paged else SlotPool
            if not isinstance(pool, kind_of_pool):
                raise ConfigError(
                    f"cache kind {spec.name!r} of scope {spec.scope} needs a {kind_of_pool.__name__}, "
                    f"not a {type(pool).__name__}"
                )
            if spec.paged and page_size % spec.unit:
                raise ConfigError(
                    f"page_size={page_size} is no multiple of unit={spec.unit} of kind {spec.name!r}"
                )
            if spec.scope is Scope.WINDOW and spec.window < 1:
                raise ConfigError(f"cache kind {spec.name!r} has window={spec.window}; at least 1")
        self.specs = tuple(specs)
        self.page_size = page_size
        self.pools = tuple(pools)
        # Visible tokens of each kind; 0 for the others, TOKEN kinds because they keep everything.
        self.windows = tuple(s.window if s.scope is Scope.WINDOW else 0 for s in specs)
        self.state_kinds = tuple(k for k, s in enumerate(specs) if not s.paged)
        self._owner: list[dict[int, Node]] = [{} for _ in specs]
        # Pages that only the tree references, longest unused first. The order is the clock. A sequence
        # releases its last page first, so that no TOKEN page ever stands before one of its children.
        self._idle: list[OrderedDict[int, Node]] = [OrderedDict() for _ in specs]
        self._counters = tuple(KindCounters() for _ in specs)

    @abstractmethod
    def evict(self, kind: int, count: int) -> None:
        """Free the `count` longest unused pages of a kind (at most `evictable(kind)`)."""

    # -- pages ---------------------------------------------------------------------------------

    def evictable(self, kind: int) -> int:
        return len(self._idle[kind])

    def available(self, kind: int) -> int:
        """Pages that `allocate` can supply now."""
        return self.pools[kind].free + len(self._idle[kind])

    def cached(self, kind: int) -> int:
        """Pages in the tree, in use or not."""
        return len(self._owner[kind])

    def counters(self, kind: int) -> KindCounters:
        return self._counters[kind]

    def allocate(self, kind: int, count: int) -> list[int] | None:
        """`count` private pages, evicting exactly the shortfall; None (and no change) if impossible."""
        short = count - self.pools[kind].free
        if short > len(self._idle[kind]):
            return None
        if short > 0:
            self.evict(kind, short)
        return self.pools[kind].alloc(count)

    def take(self, kind: int, page: int) -> None:
        """Add a sequence's reference to a page."""
        if self.pools[kind].share(page) == 2:
            self._idle[kind].pop(page, None)

    def give_back(self, kind: int, page: int) -> None:
        """Drop a sequence's reference to a page."""
        if self.pools[kind].release(page) == 1 and page in self._owner[kind]:
            self._idle[kind][page] = self._owner[kind][page]

    def release(self, held: Held) -> None:
        """Drop everything that a sequence holds, last pages first, and leave `held` empty."""
        for kind in range(len(self.specs)):
            for page in reversed(held.references(kind)):
                self.give_back(kind, page)
        held.__init__(len(self.specs))

    def trim(self, held: Held, position: int) -> None:
        """Drop WINDOW pages that no token from `position` on can see."""
        for kind, window in enumerate(self.windows):
            if window:
                dead = self.first_page(kind, position) - held.base[kind]
                if dead > 0:
                    for page in held.pages[kind][:dead]:
                        self.give_back(kind, page)
                    del held.pages[kind][:dead]
                    held.base[kind] += dead

    def first_page(self, kind: int, position: int) -> int:
        """Index of the first page that the token at `position` (and all later ones) can see."""
        return first_page(self.specs[kind], position, self.page_size)

    # -- working slots and checkpoints ---------------------------------------------------------

    def open_states(self, held: Held) -> bool:
        """A working slot in every STATE kind that has none; False (and no change) if one can't be had."""
        slots = self._slots([k for k in self.state_kinds if not held.pages[k]])
        if slots is None:
            return False
        for kind, slot in slots.items():
            held.pages[kind] = [slot]
        return True

    def reserve_checkpoint(self, held: Held, position: int) -> tuple[int, ...] | None:
        """Slots, one for each STATE kind in order, that a step is to write the state at `position` to.

        They are pending until an insert reaches `position` (a multiple of the page size, above those
        that are pending). None (and no change) if some kind has none to give.
        """
        self._check_pending(held, position)
        slots = self._slots(self.state_kinds)
        if slots is None:
            return None
        held.pending.append((position, self._by_kind(slots)))
        return tuple(slots.values())

    def turn_checkpoint(self, held: Held, position: int) -> bool:
        """Keep the state at `position`, which the working slots hold after the steps in flight.

        They become a pending checkpoint that the next step reads, and fresh slots the working ones. The
        source must have been settled. False (and no change) if some kind has no slot to give.
        """
        old = {kind: held.pages[kind][0] for kind in self.state_kinds}
        assert all(held.source[kind] == slot for kind, slot in old.items()), (
            f"the working slots {old} do not hold the state at {position}: the next step reads {held.source}"
        )
        self._check_pending(held, position)
        slots = self._slots(self.state_kinds)
        if slots is None:
            return False
        held.pending.append((position, self._by_kind(old)))
        for kind, slot in slots.items():
            held.pages[kind] = [slot]
            self.take(kind, old[kind])  # as the source: it is no longer the working slot
        return True

    def read_from_pending(self, held: Held) -> None:
        """The next step reads the last pending checkpoint: a chunk ends there."""
        for kind in self.state_kinds:
            self._read(held, kind, held.pending[-1][1][kind])

    def settle_source(self, held: Held) -> None:
        """The step that reads the source is planned: the one after it reads the working slots.

        Call it when nothing more is allocated for that step: what it reads may be evicted from here on,
        and no other row of the same step may write it.
        """
        for kind in self.state_kinds:
            self._read(held, kind, held.pages[kind][0])

    def _slots(self, kinds: Sequence[int]) -> dict[int, int] | None:
        """A private slot in each of `kinds`; None (and no change) if that is impossible."""
        if not all(self.available(kind) for kind in kinds):
            return None
        return {kind: slot for kind in kinds for slot in self.allocate(kind, 1) or ()}

    def _check_pending(self, held: Held, position: int) -> None:
        assert position > 0 and position % self.page_size == 0, f"no page ends at {position}"
        assert not held.pending or position > held.pending[-1][0], f"{position} is pending already"

    def _by_kind(self, slots: dict[int, int]) -> list[int]:
        return [slots.get(kind, 0) for kind in range(len(self.specs))]

    def _read(self, held: Held, kind: int, slot: int) -> None:
        """Make `slot` the source, with a reference unless it is the working slot."""
        old = held.source[kind]
        if slot not in held.pages[kind]:
            self.take(kind, slot)
        if old and old not in held.pages[kind]:
            self.give_back(kind, old)
        held.source[kind] = slot
