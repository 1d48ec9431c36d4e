"""Numbers that grow while the server runs: distributions, sliding percentiles, rates, counters.

Plain Python with bounded memory. One thread writes each of them (for steps that is the engine thread),
any thread reads; nothing here waits for a lock in a step. Called by serving.metrics.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

SMALLEST, LARGEST, RATIO = 1e-5, 1e5, 1.05  # seconds; percentiles are right to half a RATIO
_LOG_RATIO = math.log(RATIO)
SCHEDULER_COUNTERS = ("preemptions", "prefix_queries", "prefix_hits")
KIND_COUNTERS = ("published", "evicted", "thinned", "duplicates", "shortened")


class Distribution:
    """Counts by bucket, as a Prometheus histogram has them: bounds are inclusive, +Inf comes last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Sequence[float]) -> None:
        """The same for many, of which each costs some nanoseconds."""
        places, counts = np.unique(np.searchsorted(self.bounds, values), return_counts=True)
        for place, count in zip(places.tolist(), counts.tolist(), strict=True):
            self.counts[place] += count
        self.total += float(np.sum(values))


class Window:
    """Percentiles over the last `seconds`, from counts in geometric bins: some 450 a slot at most."""

    def __init__(
        self, seconds: float = 300.0, slots: int = 30, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._width = seconds / slots
        self._slots: deque[tuple[int, Counter[int]]] = deque(maxlen=slots)
        self._clock = clock

    def add(self, value: float) -> None:
        inside = min(max(value, SMALLEST), LARGEST)
        self._bins()[math.ceil(math.log(inside / SMALLEST) / _LOG_RATIO)] += 1

    def add_all(self, values: Sequence[float]) -> None:
        """The same for many, of which each costs some nanoseconds."""
        inside = np.clip(values, SMALLEST, LARGEST)
        bins = np.ceil(np.log(inside / SMALLEST) / _LOG_RATIO).astype(int)
        places, counts = np.unique(bins, return_counts=True)
        self._bins().update(dict(zip(places.tolist(), counts.tolist(), strict=True)))

    def _bins(self) -> Counter[int]:
        """Of the slot that is now."""
        number = int(self._clock() / self._width)
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append((number, Counter()))
        return self._slots[-1][1]

    def percentiles(self, *shares: float) -> tuple[int, list[float]]:
        """(count of values, the value below which each share of them lies); no values: (0, [])."""
        oldest = int(self._clock() / self._width) - (self._slots.maxlen or 0)
        bins: Counter[int] = Counter()
        for number, slot in self._slots:
            if number > oldest:
                bins.update(slot)
        count = bins.total()
        return count, [_quantile(bins, share * count) for share in shares] if count else []


def _quantile(bins: Counter[int], rank: float) -> float:
    seen = 0
    place = 0
    for place in sorted(bins):
        seen += bins[place]
        if seen >= rank:
            break
    return SMALLEST * RATIO ** (place - 0.5)


class Ring:
    """Sums over each of the last `count` intervals of `width` seconds."""

    def __init__(
        self, count: int = 150, width: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.width = width
        self._clock = clock
        self._sums = [(-1, 0)] * count  # (number of the interval, sum)

    def add(self, amount: int) -> None:
        number = int(self._clock() / self.width)
        place = number % len(self._sums)
        known, total = self._sums[place]
        self._sums[place] = (number, total + amount if known == number else amount)

    def rates(self) -> list[float]:
        """Per second, oldest first; the interval that is still running is left out."""
        count = len(self._sums)
        now = int(self._clock() / self.width)
        cells = (self._sums[n % count] + (n,) for n in range(now - count + 1, now))
        return [total / self.width if number == n else 0.0 for number, total, n in cells]


class SchedulerCounters:
    """The scheduler's counters, going on where EngineCore.reset makes a new scheduler."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._before: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Notice a new scheduler; called after every step, so that none is missed."""
        if self._core.scheduler is not self._scheduler:
            with self._lock:
                self._adopt()

    def _adopt(self) -> None:
        current = self._core.scheduler
        if current is not self._scheduler:
            self._before = self._sum()
            self._scheduler = current

    def _sum(self) -> Counter[tuple[str, str]]:
        """By (cache kind, counter); those of the scheduler itself have the kind ""."""
        stats = self._scheduler.stats()
        total = self._before.copy()
        for name in SCHEDULER_COUNTERS:
            total["", name] += getattr(stats, name)
        for kind in stats.kinds:
            for name in KIND_COUNTERS:
                total[kind.name, name] += getattr(kind, name)
        return total

    def _read(self) -> Counter[tuple[str, str]]:
        with self._lock:
            self._adopt()
            return self._sum()

    def read(self) -> dict[str, int]:
        """Totals since the engine started."""
        total = self._read()
        return {name: total["", name] for name in SCHEDULER_COUNTERS}

    def kinds(self) -> dict[str, Counter[str]]:
        """Totals of each cache kind since the engine started: counter -> kind -> total."""
        total = self._read()
        kinds = [kind.name for kind in self._scheduler.stats().kinds]
        return {name: Counter({k: total[k, name] for k in kinds}) for name in KIND_COUNTERS}
