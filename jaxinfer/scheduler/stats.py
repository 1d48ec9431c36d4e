"""SchedulerStats: one reading of the scheduler's gauges and counters. Read by metrics and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from jaxinfer.cache import PrefixTree, Scope


@dataclass(frozen=True, slots=True)
class KindStats:
    """Pages (STATE kinds: slots) of one cache kind: total = free + evictable + protected, number 0 not counted.

    Attributes:
        scope: "token", "window" or "state".
        evictable: only the prefix tree has them. protected: running sequences hold them.
        cached: in the prefix tree, in use or not.
        published, evicted, thinned, duplicates, shortened: since the start, see cache.ledger.KindCounters.
    """

    name: str
    scope: str
    total: int
    free: int
    evictable: int
    protected: int
    cached: int
    published: int
    evicted: int
    thinned: int
    duplicates: int
    shortened: int


def kind_stats(tree: PrefixTree) -> tuple[KindStats, ...]:
    """A reading of every kind, in order."""
    return tuple(
        KindStats(
            spec.name,
            str(spec.scope),
            total=pool.usable,
            free=pool.free,
            evictable=tree.evictable(kind),
            protected=pool.usable - tree.available(kind),
            cached=tree.cached(kind),
            **asdict(tree.counters(kind)),
        )
        for kind, (spec, pool) in enumerate(zip(tree.specs, tree.pools, strict=True))
    )


class PoolLoad(NamedTuple):
    """How full the pools are. used, total: tokens of the fullest paged kind, 0 if there is none; usage: share of
    its pages, or of a STATE kind's slots, that running sequences hold, of the fullest kind of all."""

    used: int
    total: int
    usage: float


def pool_load(kinds: Sequence[KindStats], page_size: int) -> PoolLoad:
    """What gateways ask for: one number for all pools."""

    def share(kind: KindStats) -> float:
        return kind.protected / max(kind.total, 1)

    paged = max((k for k in kinds if k.scope != Scope.STATE), key=share, default=None)
    used, total = (paged.protected, paged.total) if paged else (0, 0)
    return PoolLoad(used * page_size, total * page_size, max(map(share, kinds), default=0.0))


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges: running, waiting, kinds. Counters since the start: the others.

    Attributes:
        prefix_queries: tokens looked up in the prefix cache at first admission.
        prefix_hits: tokens of them that were found.
    """

    running: int
    waiting: int
    kinds: tuple[KindStats, ...]
    preemptions: int
    prefix_queries: int
    prefix_hits: int
