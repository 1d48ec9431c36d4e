"""Ten thousand random operations: nothing leaks, nothing hangs, every finished output is right."""

from __future__ import annotations

import random

import pytest

from jaxinfer.layout import LoadOp
from jaxinfer.scheduler import LoadPlan
from jaxinfer.scheduler.plan import LOAD_ENTRIES
from jaxinfer.types import FinishReason
from tests.scheduler.null_model import FULL, Runner, request, state, window


def random_request(rng: random.Random, key: str):
    root = [7] * 40 if rng.random() < 0.5 else list(range(40))
    prompt = root[: rng.randint(0, 40)] + [rng.randrange(50) for _ in range(rng.randint(1, 8))]
    options = {}
    if rng.random() < 0.2:
        options |= {"presence_penalty": 0.5, "repetition_penalty": 1.1}
    if rng.random() < 0.1:
        options |= {"allowed_token_ids": (1, 2, 3), "logit_bias": {2: 1.0}}
    if rng.random() < 0.1:
        options |= {"prompt_logprobs": 0}
    if rng.random() < 0.2:
        options |= {"group": f"g{rng.randrange(3)}"}
    if rng.random() < 0.3:
        options |= {"breakpoints": (rng.randint(1, len(prompt)),)}
    if rng.random() < 0.2:
        options |= {"stop_ids": range(0, 997, 9)}
    return request(
        key,
        prompt,
        rng.choice([0, 1, 5, 30, 60]),
        seed=rng.randrange(2**63),
        priority=rng.randrange(3),
        use_prefix_cache=rng.random() < 0.8,
        namespace=("w", rng.randrange(2)),
        **options,
    )


def finish_some(rng: random.Random, runner: Runner, live: list[str]) -> None:
    key = rng.choice(live)
    if key in runner.reasons:
        return
    reason = rng.choice([FinishReason.ABORT, FinishReason.STOP])
    sequence = runner.scheduler.finish(key, reason)
    assert sequence is not None and sequence.finish_reason is reason
    runner.reasons[key] = reason
    assert runner.scheduler.abort(key) is None


# Cache kinds and their pools: pages are scarce, and so are slots.
PAGED = ((FULL, window(10)), (36, 36), {})
HYBRID = ((FULL, window(10), state()), (40, 40, 14), {})
SETTINGS = [
    (*PAGED, "fcfs"),
    (*PAGED, "priority"),
    (*PAGED, "lpm"),
    (*HYBRID[:2], {"checkpoint_interval": 8, "max_states_per_path": 2}, "fcfs"),
    (*HYBRID[:2], {"checkpoint_interval": 4, "serial_weight": 3.0}, "lpm"),
    (*HYBRID[:2], {"max_num_batched_tokens": 8, "prefill_deadline": 2}, "fcfs"),
    (*HYBRID[:2], {"checkpoint_policy": "branch"}, "fcfs"),
    (*HYBRID[:2], {"checkpoint_policy": "second-hit", "checkpoint_interval": 4}, "priority"),
    (*HYBRID[:2], {"checkpoint_policy": "declared"}, "fcfs"),
    (*HYBRID[:2], {"checkpoint_policy": "none"}, "fcfs"),
    ((state(), state("second")), (11, 14), {"checkpoint_interval": 4}, "fcfs"),
    ((state(), FULL, state("second")), (24, 40, 11), {"checkpoint_interval": 8}, "fcfs"),
]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("overlap", [False, True])
def test_random_operations(overlap, setting):
    specs, pools, options, policy = setting
    rng = random.Random(f"{overlap}{policy}{options}")
    runner = Runner(
        specs,
        pools,
        120,
        check=False,
        overlap=overlap,
        policy=policy,
        **{"max_num_batched_tokens": 40, **options},
    )
    live: list[str] = []
    requests = {}
    for step in range(1700):  # more than 30,000 operations in all
        action = rng.random()
        if action < 0.12 and len(runner.scheduler._waiting) < 8:
            req = random_request(rng, f"r{step}")
            requests[req.request_id] = req
            live.append(req.request_id)
            runner.add(req)
        elif action < 0.15 and live:
            finish_some(rng, runner, live)
        elif action < 0.153:
            runner.scheduler.clear_prefix_cache()
        elif action < 0.5 and len(runner.inflight) < (2 if overlap else 1):
            runner.launch()
        elif runner.inflight:
            runner.collect()
        runner.scheduler.check()
        runner.check_tree()
    kinds = runner.scheduler.stats().kinds
    assert runner.scheduler.stats().preemptions > 0 or all(k.scope == "state" for k in kinds)
    caching = options.get("checkpoint_policy") != "none"
    assert (runner.scheduler.stats().prefix_hits > 0) == caching
    runner.drain()
    ended = [k for k in requests if k in runner.outputs]
    assert len(ended) > 50 and set(runner.reasons) == set(requests)
    for key in ended:
        runner.expect(requests[key])
    runner.scheduler.clear_prefix_cache()
    runner.scheduler.check()
    assert all(kind.free == kind.total for kind in runner.scheduler.stats().kinds)


def test_failing_steps_end_their_own_sequences_only():
    rng = random.Random(5)
    runner = Runner((FULL,), (60,), 120, overlap=True, max_num_batched_tokens=40)
    requests = [random_request(rng, f"r{i}") for i in range(60)]
    failed = 0
    for req in requests:
        runner.add(req)
        runner.round()
        if runner.inflight and rng.random() < 0.15:
            plan, _ = runner.inflight.popleft()
            for update in runner.scheduler.fail(plan):
                assert update.finish_reason is FinishReason.ERROR
                failed += 1
                runner.note(update)
            runner.scheduler.check()
    runner.drain()
    assert failed > 3
    for req in requests:
        reason = runner.reasons[req.request_id]
        if reason is not FinishReason.ERROR:
            runner.expect(req)
    assert len(runner.reasons) == len(requests)


@pytest.mark.parametrize("seed", range(4))
def test_a_failed_step_leaves_no_state_behind(seed):
    """The engine's way out: what was in flight ends with an error, the device and the tree begin anew."""
    rng = random.Random(seed)
    runner = Runner(HYBRID[0], HYBRID[1], 120, max_num_batched_tokens=40, overlap=seed % 2 > 0)
    requests = {f"r{i}": random_request(rng, f"r{i}") for i in range(60)}
    for req in requests.values():
        runner.add(req)
        runner.round()
        if rng.random() < 0.2 and runner.launch():
            plans = [plan for plan, _ in runner.inflight]
            runner.inflight.clear()
            for plan in plans:
                for update in runner.scheduler.fail(plan):
                    runner.note(update)
            runner.scheduler.restart()
            runner.forget()
            runner.scheduler.check()
            runner.check_tree()
    runner.drain()
    reasons = runner.reasons
    failed = {key for key, reason in reasons.items() if reason is FinishReason.ERROR}
    assert len(failed) > 3 and len(reasons) == len(requests)
    for key in reasons.keys() - failed:
        runner.expect(requests[key])


# More than a step carries, so that some of it comes before the step.
LONG_BIAS = dict.fromkeys(range(LOAD_ENTRIES + 1), 1.0)


def test_a_failed_load_ends_the_sequences_of_its_slots():
    runner = Runner()
    runner.add(request("biased", [1, 2], 4, logit_bias=LONG_BIAS))
    plain = request("plain", [1, 2], 4)
    runner.add(plain)
    plan = runner.scheduler.plan()
    assert isinstance(plan, LoadPlan) and plan.entries[3] == (1, 3, LoadOp.BIAS, 1.0)
    (update,) = runner.scheduler.fail(plan)
    assert update.sequence.request.request_id == "biased"
    assert update.finish_reason is FinishReason.ERROR
    runner.drain()
    runner.expect(plain)


@pytest.mark.parametrize("overlap", [False, True])
def test_restart_computes_everything_again(overlap):
    """The device lost its state: no page is trusted, no token is lost or doubled."""
    runner = Runner((FULL, window(6), state()), (60, 60, 40), 120, overlap=overlap)
    requests = [request(f"r{i}", list(range(i + 9)), 20, seed=i) for i in range(10)]
    for req in requests:
        runner.add(req)
    for _ in range(9):
        runner.round()
    runner.inflight.clear()
    runner.scheduler.restart()
    runner.forget()
    runner.scheduler.check()
    assert runner.scheduler.stats().running == 0
    runner.drain()
    for req in requests:
        runner.expect(req)


def test_restart_scores_again_what_never_ran():
    """The step behind a failed load was planned but not run: its prompt scores are still owed."""
    runner = Runner(max_num_batched_tokens=128)
    runner.add(request("biased", [1, 2], 4, logit_bias=LONG_BIAS))
    runner.add(request("scored", list(range(20)), 4, prompt_logprobs=0))
    load = runner.scheduler.plan()
    assert isinstance(load, LoadPlan)
    runner.scheduler.fail(load)
    runner.scheduler.restart()
    assert runner.launch()
    plan, _ = runner.inflight[0]
    assert [(first, count) for _, first, _, count in plan.scored] == [(0, 19)]
    runner.drain()
