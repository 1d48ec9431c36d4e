"""SchedulerStats: one reading of the scheduler's gauges and counters. Read by metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KindStats:
    """Pages of one cache kind: total = free + evictable + protected (page 0 is not counted).

    evictable: only the prefix tree has them. protected: running sequences hold them.
    """

    name: str
    total: int
    free: int
    evictable: int
    protected: int


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
