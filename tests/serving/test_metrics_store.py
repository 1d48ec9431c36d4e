"""Distributions, windows, rings and counters against plain arithmetic."""

from __future__ import annotations

import time
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.metrics_names import token_buckets
from serving.metrics_store import KIND_COUNTERS, Distribution, Ring, SchedulerCounters, Window


def test_token_buckets():
    assert token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_buckets(99) == (1, 2, 5, 10, 20, 50)
    assert token_buckets(1) == (1,)


@given(st.lists(st.floats(0, 200), max_size=60), st.lists(st.floats(0.1, 100), min_size=1))
@settings(max_examples=60, deadline=None)
def test_distribution_counts_as_a_histogram_does(values, bounds):
    bounds = sorted(set(bounds))
    distribution = Distribution(bounds)
    for number in values:
        distribution.observe(number)
    cumulative = np.cumsum(distribution.counts)
    assert cumulative[-1] == len(values)
    assert list(cumulative[:-1]) == [sum(v <= bound for v in values) for bound in bounds]
    assert distribution.total == pytest.approx(sum(values))
    at_once = Distribution(bounds)
    at_once.observe_all(values)
    assert at_once.counts == distribution.counts
    assert at_once.total == pytest.approx(distribution.total)


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=200), st.floats(0.01, 1.0))
@settings(max_examples=100, deadline=None)
def test_window_percentiles_are_right_to_a_few_percent(values, share):
    window = Window(clock=lambda: 0.0)
    for number in values:
        window.add(number)
    count, (found,) = window.percentiles(share)
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    assert count == len(values)
    assert found == pytest.approx(exact, rel=0.026)


def test_many_values_delay_nobody():
    """A call with a hundred outputs may bring a million intervals, in the event loop."""
    values = array("d", np.random.default_rng(0).random(1_000_000))
    distribution, window = Distribution((0.1, 0.5)), Window()
    start = time.perf_counter()
    distribution.observe_all(values)
    window.add_all(values)
    assert time.perf_counter() - start < 1.0  # one by one: some five
    assert sum(distribution.counts) == window.percentiles(0.5)[0] == len(values)


def test_window_forgets_and_stays_small():
    now = [0.0]
    window = Window(seconds=300, slots=30, clock=lambda: now[0])
    window.add(1.0)
    now[0] = 150
    window.add(100.0)
    assert window.percentiles(0.5, 1.0)[0] == 2
    now[0] = 310
    assert window.percentiles(0.5) == (1, [pytest.approx(100.0, rel=0.03)])
    now[0] = 1000
    assert window.percentiles(0.5) == (0, [])
    for i in range(20000):
        now[0] += 0.1
        window.add(10.0 ** (i % 12 - 6))
    assert sum(len(bins) for _, bins in window._slots) <= 30 * 12


def test_ring_gives_rates_of_whole_intervals():
    now = [100.0]
    ring = Ring(count=5, width=2.0, clock=lambda: now[0])
    ring.add(10)
    now[0] = 101.9
    ring.add(4)
    assert ring.rates() == [0, 0, 0, 0]
    now[0] = 102
    ring.add(2)
    assert ring.rates() == [0, 0, 0, 7]
    now[0] = 106
    assert ring.rates() == [0, 7, 1, 0]
    now[0] = 112
    assert ring.rates() == [0, 0, 0, 0]


@given(st.lists(st.one_of(st.integers(1, 9), st.just("reset"), st.just("read")), max_size=40))
@settings(max_examples=60, deadline=None)
def test_scheduler_counters_go_on_over_resets(moves):
    """As long as steps are watched, nothing is lost."""

    class Fake:
        def __init__(self) -> None:
            zeros = dict.fromkeys(KIND_COUNTERS, 0)
            self.kinds = [SimpleNamespace(name=name, **zeros) for name in ("full", "delta")]
            self.numbers = SimpleNamespace(
                preemptions=0, prefix_queries=0, prefix_hits=0, kinds=self.kinds
            )

        def stats(self) -> SimpleNamespace:
            return self.numbers

    core = SimpleNamespace(scheduler=Fake())
    counters, total = SchedulerCounters(core), 0
    for move in moves:
        if move == "reset":
            core.scheduler = Fake()
        elif move != "read":
            core.scheduler.numbers.prefix_hits += move
            core.scheduler.kinds[1].evicted += 2 * move
            total += move
        counters.watch()
        assert counters.read()["prefix_hits"] == total
        kinds = counters.kinds()
        assert kinds.keys() == set(KIND_COUNTERS)
        assert kinds["evicted"] == {"full": 0, "delta": 2 * total}
        assert kinds["thinned"] == {"full": 0, "delta": 0}
