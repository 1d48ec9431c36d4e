"""Who goes first: policies, budgets of prompts, groups, deadlines, preemption."""

from __future__ import annotations

import pytest

from jaxinfer.scheduler import StepPlan
from jaxinfer.types import FinishReason
from tests.scheduler.null_model import FULL, Runner, request, window


def started(runner: Runner, *keys: str) -> list[str]:
    """Ids in the order in which they are first scheduled, one at a time."""
    order: list[str] = []
    while runner.scheduler.has_work() or runner.inflight:
        if runner.launch():
            order += [s.request.request_id for s, _ in runner.inflight[-1][0].chunks]
        while runner.inflight:
            runner.collect()
    assert sorted(order) == sorted(keys)
    return order


def test_fcfs_and_priority():
    for policy, expected in (("fcfs", "abcd"), ("priority", "cbda")):
        runner = Runner(policy=policy, max_num_seqs=1)
        for key, priority in (("a", 5), ("b", 1), ("c", 0), ("d", 1)):
            runner.add(request(key, [1, 2], 2, priority=priority))
        assert started(runner, *"abcd") == list(expected)


def test_longest_prefix_first():
    runner = Runner(policy="lpm", max_num_seqs=1)
    runner.add(request("seed", list(range(40)), 2))
    runner.drain()
    runner.add(request("none", [9] * 30, 2))
    runner.add(request("some", [*range(10), 0], 2))
    runner.add(request("most", [*range(33), 0], 2))
    runner.add(request("other", [8] * 30, 2))
    assert started(runner, "none", "some", "most", "other") == ["most", "some", "none", "other"]


def test_decode_rows_go_before_prompts():
    runner = Runner(max_num_batched_tokens=16, max_num_seqs=4, overlap=False)
    for key in "ab":
        runner.add(request(key, [1, 2], 30))
        runner.round()
    runner.add(request("long", [3] * 60, 3))
    for fed in (14, 28, 42, 56):
        runner.launch()
        plan, _ = runner.inflight[-1]
        assert len(plan.decode) == 2 and [end for _, end in plan.chunks] == [fed]
        runner.collect()
    runner.drain()


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_partial_prefills_and_threshold(limit):
    runner = Runner(
        max_num_batched_tokens=256,  # four blocks: each chunk takes one at least
        max_partial_prefills=limit,
        long_prefill_threshold=10,
        enable_prefix_caching=False,
        overlap=False,
    )
    for key in "abcd":
        runner.add(request(key, [1] * 25, 2))
    most = 0
    while runner.scheduler.has_work():
        runner.launch()
        plan, _ = runner.inflight[-1]
        assert all(record[2] <= 10 for record in plan.prefill)
        most = max(most, sum(end < 25 for _, end in plan.chunks))
        runner.collect()
    assert most == limit


def test_smallest_rung_that_holds_the_step():
    runner = Runner(max_num_batched_tokens=128, max_num_seqs=8, overlap=False)
    for i in range(3):
        runner.add(request(f"r{i}", [i] * 70, 4))
    shapes = []
    while runner.scheduler.has_work():
        runner.launch()
        shapes.append(runner.inflight[-1][0].shape)
        runner.collect()
    assert shapes[0].rows == 0 and shapes[0].blocks == 4  # 3 blocks of 32 hold 70 tokens, 1 more
    assert shapes[-1].rows <= 4 and shapes[-1].blocks == 0


# -- groups ----------------------------------------------------------------------------------------


def test_siblings_hit_the_pages_of_the_first():
    runner = Runner((FULL, window(8)), (100, 100))
    prompt = list(range(41))
    siblings = [runner.add(request(f"r{i}", prompt, 5, group="g", seed=i)) for i in range(4)]
    runner.drain()
    assert [s.cached_tokens for s in siblings] == [0, 40, 40, 40]


@pytest.mark.parametrize("options", [{"use_prefix_cache": False}, {"prompt_logprobs": 0}])
def test_siblings_that_cannot_share_do_not_wait(options):
    runner = Runner(max_num_batched_tokens=256)
    for i in range(3):
        runner.add(request(f"r{i}", list(range(21)), 5, group="g", **options))
    runner.launch()
    assert len(runner.inflight[0][0].chunks) == 3
    runner.drain()


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 6])
def test_the_next_sibling_leads_when_the_first_is_aborted(rounds):
    runner = Runner(max_num_batched_tokens=16)
    siblings = [runner.add(request(f"r{i}", list(range(41)), 5, group="g")) for i in range(3)]
    for _ in range(rounds):
        runner.round()
    runner.scheduler.abort("r0")
    runner.drain()
    assert siblings[1].finish_reason is siblings[2].finish_reason is FinishReason.LENGTH
    assert siblings[2].cached_tokens == 40


def test_a_waiting_group_does_not_hold_up_others():
    runner = Runner(max_num_batched_tokens=16, max_num_seqs=3)
    for i in range(2):
        runner.add(request(f"r{i}", list(range(12)), 5, group="g"))
    other = runner.add(request("other", [1, 2], 5))
    runner.launch()
    runner.launch()
    assert other.running
    runner.drain()


# -- deadlines -------------------------------------------------------------------------------------


def test_deadlines_end_waiting_and_running_requests():
    runner = Runner(max_num_seqs=1)
    running = runner.add(request("running", [1, 2], 50, deadline=10.0))
    waiting = runner.add(request("waiting", [1, 2], 50, deadline=5.0))
    free = runner.add(request("free", [1, 2], 5))
    runner.launch()
    assert runner.scheduler.expire(4.9) == []
    (update,) = runner.scheduler.expire(5.0)
    assert update.sequence is waiting and update.finish_reason is FinishReason.ABORT
    assert [u.sequence for u in runner.scheduler.expire(60.0)] == [running]
    assert runner.scheduler.expire(60.0) == []
    runner.drain()
    assert free.finish_reason is FinishReason.LENGTH


# -- preemption ------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_the_least_important_and_latest_gives_way(overlap):
    runner = Runner((FULL,), (21,), 200, overlap=overlap, enable_prefix_caching=False)
    keys = {"old": 1, "low": 2, "new": 1}
    sequences = {k: runner.add(request(k, [1] * 8, 40, priority=p)) for k, p in keys.items()}
    runner.drain()
    assert not sequences["old"].preempted
    assert sequences["low"].preempted
    for key in keys:
        assert sequences[key].finish_reason is FinishReason.LENGTH


def test_a_preempted_sequence_waits_for_its_token_in_flight_and_goes_first():
    runner = Runner((FULL,), (9,), 64, overlap=True, max_num_seqs=2, enable_prefix_caching=False)
    runner.add(request("a", [1] * 12, 16))
    victim = runner.add(request("b", [2] * 8, 16, seed=3))
    later = runner.add(request("c", [3] * 4, 2))
    while not victim.preempted:
        runner.round()
    while not victim.running:
        assert not later.running
        assert victim.inflight == 0 or not victim.running
        runner.round()
    runner.drain()
    for key in "abc":
        assert len(runner.outputs[key]) == (2 if key == "c" else 16)


def test_no_admission_before_the_last_token_has_arrived():
    """However many pages are free: the token in flight is part of what must be computed again."""
    runner = Runner(overlap=True)
    for key in "ab":
        runner.add(request(key, [1, 2], 12))
        runner.launch()
    runner.launch()
    victim = runner.scheduler._sequences["b"]
    runner.scheduler._preempt(victim)
    while victim.inflight:
        runner.launch()
        assert not victim.running
        runner.collect()
    runner.launch()
    assert victim.running
    runner.drain()
    for key in "ab":
        assert runner.outputs[key] == runner.model.truths[key].output


def test_a_prompt_waits_until_all_of_it_fits_beside_the_others():
    """Two prompts of 13 pages and 19 pages: the second one starts when the first has ended."""
    runner = Runner(
        (FULL,),
        (20,),
        64,
        max_num_batched_tokens=256,
        long_prefill_threshold=10,
        enable_prefix_caching=False,
    )
    first, second = (runner.add(request(key, [1] * 50, 3)) for key in "ab")
    while first.finish_reason is None:
        assert not second.running
        runner.round()
    runner.drain()
    assert second.finish_reason is FinishReason.LENGTH
    assert runner.scheduler.stats().preemptions == 0


def test_plans_are_snapshots():
    runner = Runner(overlap=True)
    runner.add(request("r", [1, 2, 3], 20))
    runner.launch()
    runner.launch()
    plan = runner.inflight[-1][0]
    assert isinstance(plan, StepPlan)
    before = plan.decode.copy()
    for _ in range(6):
        runner.launch()
    assert (plan.decode == before).all()
    runner.drain()
