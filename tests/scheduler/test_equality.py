"""Tokens equal the solo run whatever the batch, the chunking, the pool, the cache or the overlap.

The null model (null_model.py) also checks at every step that a row sees its own entries only.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.null_model import FULL, Runner, request, state, window

KINDS = {
    "full": (FULL,),
    "full+window": (FULL, window(8)),
    "window": (window(6),),
    "full+two windows": (FULL, window(3), window(13)),
    "full+state": (FULL, state()),
    "state": (state(),),
}


def prompts(seed: int, count: int, longest: int = 60) -> list[list[int]]:
    """Random prompts, half of them beginning like one of two others."""
    rng = random.Random(seed)
    roots = [[rng.randrange(500) for _ in range(longest)] for _ in range(2)]
    out = []
    for _ in range(count):
        length = rng.randint(1, longest)
        shared = rng.randint(0, length) if rng.random() < 0.5 else 0
        out.append(
            rng.choice(roots)[:shared] + [rng.randrange(500) for _ in range(length - shared)]
        )
    return out


def serve(runner: Runner, seed: int, count: int = 14, tag: str = "", **options) -> None:
    rng = random.Random(seed + 1)
    requests = [
        request(f"{tag}{i}", prompt, rng.randint(1, 40), seed=rng.randrange(2**63), **options)
        for i, prompt in enumerate(prompts(seed, count))
    ]
    for req in requests:
        runner.add(req)
        if rng.random() < 0.5:
            runner.round()
    runner.drain()
    for req in requests:
        runner.expect(req)
    assert not runner.scheduler.has_work()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("budget", [1, 16, 17, 512])
def test_chunking_and_both_passes(budget, kinds, overlap):
    """R-SCH-05 (odd budgets, more sequences than budget); the second pass reads what the first left."""
    specs = KINDS[kinds]
    pages = (300,) * len(specs)  # enough to keep the first pass
    runner = Runner(specs, pages, 128, overlap=overlap, max_num_batched_tokens=budget)
    serve(runner, seed=budget, count=8, tag="a")
    serve(runner, seed=budget, count=8, tag="b")
    assert runner.scheduler.stats().prefix_hits > 0


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_cache_on_or_off_gives_the_same_tokens(overlap, cache):
    runner = Runner(
        KINDS["full+window"], (300, 300), 128, overlap=overlap, enable_prefix_caching=cache
    )
    serve(runner, seed=3, tag="a")
    serve(runner, seed=3, tag="b")
    stats = runner.scheduler.stats()
    assert (stats.prefix_hits > 0) == cache
    if not cache:
        assert all(kind.free == kind.total for kind in stats.kinds)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("kinds", ["full", "full+window", "full+state"])
def test_scarce_pages(kinds, cache, overlap):
    """R-SCH-03: 8 sequences of 100 output tokens in pools of 30 to 40 pages; many preemptions."""
    preemptions = 0
    specs = KINDS[kinds]
    for pages in (30, 40):
        runner = Runner(
            specs,
            tuple(24 if s.window else pages for s in specs),
            120,
            overlap=overlap,
            enable_prefix_caching=cache,
        )
        requests = [request(f"r{i}", [i, 5, 6], 100, seed=i) for i in range(8)]
        for req in requests:
            runner.add(req)
        runner.drain()
        for req in requests:
            runner.expect(req)
        preemptions += runner.scheduler.stats().preemptions
    assert preemptions >= 20


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("depth", [2, 5])
def test_many_steps_in_flight(depth, cache):
    """A preempted sequence is not admitted again before the last of its steps in flight is committed."""
    kinds = (FULL, window(5), state())
    runner = Runner(kinds, (24, 24, 24), 80, depth=depth, enable_prefix_caching=cache)
    requests = [request(f"r{i}", [i, 5, 6], 60, seed=i) for i in range(8)]
    for req in requests:
        runner.add(req)
    runner.drain()
    for req in requests:
        runner.expect(req)
    assert runner.scheduler.stats().preemptions >= 5


@pytest.mark.parametrize("pages", range(12, 41, 4))
def test_preemption_in_pools_of_every_size(pages):
    """R-SCH-03, with a limit that the smallest pools just hold."""
    runner = Runner((FULL,), (pages,), 44, max_num_batched_tokens=24)
    requests = [request(f"r{i}", [i] * (i + 1), 30, seed=i) for i in range(8)]
    for req in requests:
        runner.add(req)
    runner.drain()
    for req in requests:
        runner.expect(req)
        assert len(runner.outputs[req.request_id]) == 30
    assert runner.scheduler.stats().preemptions > 0 or pages > 36


def test_fifty_rounds_of_concurrent_prompts_warm_and_cold():
    """R-PFX-07."""
    runner = Runner((FULL,), (120,), 128, check=False, max_num_seqs=16)
    for turn in range(50):
        serve(runner, seed=turn // 2, count=10, tag=f"{turn}-")


@given(
    data=st.data(),
    page_size=st.sampled_from([1, 2, 8]),
    budget=st.integers(1, 70),
    rows=st.integers(1, 9),
    partial=st.integers(1, 3),
    threshold=st.sampled_from([0, 1, 7]),
    policy=st.sampled_from(["fcfs", "priority", "lpm"]),
    overlap=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_any_configuration(
    data, page_size, budget, rows, partial, threshold, policy, overlap, seed
):
    windows = data.draw(st.lists(st.integers(1, 20), max_size=2, unique=True))
    specs = (FULL, *(window(w) for w in windows))
    least = 100 // page_size + 2
    pages = data.draw(st.integers(least, 3 * least))
    runner = Runner(
        specs,
        (pages,) * len(specs),
        100,
        page_size=page_size,
        max_num_batched_tokens=budget,
        max_num_seqs=rows,
        max_partial_prefills=partial,
        long_prefill_threshold=threshold,
        policy=policy,
        overlap=overlap,
    )
    serve(runner, seed, count=8, priority=data.draw(st.integers(0, 2)))
