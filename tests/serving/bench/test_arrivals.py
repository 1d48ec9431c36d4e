"""Arrival processes: reproducible, at the right rate, with the right spread of gaps."""

from __future__ import annotations

import itertools
import math
import statistics

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.bench.arrivals import arrival_times

COUNT = 3000


def gaps(rate: float, burstiness: float, seed: int) -> list[float]:
    return [b - a for a, b in itertools.pairwise(arrival_times(COUNT, rate, burstiness, seed))]


@settings(max_examples=40, deadline=None)
@given(st.floats(0.01, 1e4), st.floats(0.1, 50), st.integers(0, 2**32), st.integers(1, 200))
def test_the_same_seed_gives_the_same_sorted_times(
    rate: float, burstiness: float, seed: int, count: int
) -> None:
    times = arrival_times(count, rate, burstiness, seed)
    assert times == arrival_times(count, rate, burstiness, seed)
    assert len(times) == count and times[0] == 0 and times == sorted(times)
    if count > 5:
        assert times != arrival_times(count, rate, burstiness, seed + 1)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.1, 1000), st.floats(0.25, 20), st.integers(0, 1000))
def test_mean_and_spread_of_the_gaps(rate: float, burstiness: float, seed: int) -> None:
    """A gamma gap of shape b and mean 1/r has the standard deviation 1/(r*sqrt(b))."""
    found = gaps(rate, burstiness, seed)
    deviation = 1 / (rate * math.sqrt(burstiness))
    assert abs(statistics.fmean(found) - 1 / rate) < 6 * deviation / math.sqrt(COUNT)
    assert 0.7 < statistics.stdev(found) / deviation < 1.4


def test_burstiness_one_is_a_poisson_process() -> None:
    """Counts in windows of a Poisson process have a variance equal to their mean."""
    times = arrival_times(20_000, 10.0, 1.0, seed=3)
    counts = [0] * int(times[-1])
    for moment in times:
        if moment < len(counts):
            counts[int(moment)] += 1
    assert abs(statistics.fmean(counts) - 10) < 0.4
    assert 0.85 < statistics.variance(counts) / statistics.fmean(counts) < 1.15


def test_all_at_once_and_constant() -> None:
    assert arrival_times(4, math.inf, 1.0, 0) == [0, 0, 0, 0]
    assert arrival_times(4, 2.0, math.inf, 0) == [0, 0.5, 1.0, 1.5]
    assert arrival_times(1, 2.0, 1.0, 0) == [0]
