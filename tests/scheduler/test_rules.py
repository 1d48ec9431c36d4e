"""The rules of scheduling (R-SCH) and prefix caching (R-PFX) that need no model, one by one."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.errors import CapacityError, ConfigError, InvalidRequest
from jaxinfer.scheduler import Scheduler, StepOutput, StepPlan
from jaxinfer.types import FinishReason
from tests.scheduler.null_model import FULL, Runner, request, window


def serve(runner: Runner, *requests) -> list[int | None]:
    """Run requests together; what the prefix cache spared each of them."""
    sequences = [runner.add(req) for req in requests]
    runner.drain()
    for req in requests:
        runner.expect(req)
    return [s.cached_tokens for s in sequences]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    """R-SCH-01."""
    runner = Runner((FULL,), (50,), 2048, page_size=16)
    with pytest.raises(CapacityError, match=r"1002 tokens needs 63 pages.*has 49; at most 783"):
        runner.add(request("long", [1] * 1002, 10))
    with pytest.raises(CapacityError, match="49"):
        runner.scheduler.check_fits(request("long", [1] * 784, 2))
    runner.scheduler.check_fits(request("edge", [1] * 783, 2))
    serve(runner, *(request(f"short{i}", [i] * 9, 5) for i in range(5)))
    assert runner.scheduler.stats().waiting == 0


def test_output_ends_where_the_pool_does():
    """A prompt that fits, with more output than the pool can ever hold: length, not a hang."""
    runner = Runner((FULL,), (6,), 500)
    sequence = runner.add(request("r", [1] * 10, 300))
    runner.drain()
    assert sequence.finish_reason is FinishReason.LENGTH
    assert len(sequence.output) == 5 * 4 - 10 + 1  # the last token is never fed


@pytest.mark.parametrize("length", [16, 32, 48, 64])
def test_exact_page_multiples_leave_the_last_token_to_compute(length):
    """R-SCH-02: the hit is one page less; the null model asserts that no shared page is written."""
    runner = Runner((FULL,), (50,), 256, page_size=16, max_num_batched_tokens=32)
    prompt = list(range(length))
    assert serve(runner, request("a", prompt, 5)) == [0]
    for key in "bc":
        assert serve(runner, request(key, prompt, 5)) == [length - 16]


def test_max_tokens_zero_and_one():
    """R-SCH-04."""
    runner = Runner()
    for logprobs in (None, 3):
        sequence = runner.add(request(f"zero{logprobs}", [1] * 9, 0, prompt_logprobs=logprobs))
        runner.drain()
        assert sequence.output == [] and sequence.finish_reason is FinishReason.LENGTH
    one = runner.add(request("one", [1] * 9, 1))
    runner.drain()
    assert len(one.output) == 1 and one.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("budget", [1, 17, 2000])
def test_budgets_that_are_no_power_of_two(budget):
    """R-SCH-05, with max_num_seqs above the budget."""
    runner = Runner((FULL,), (300,), 512, max_num_batched_tokens=budget, max_num_seqs=40)
    assert runner.config.rows == min(40, budget)
    serve(runner, *(request(f"r{i}", [i] * 101, 9) for i in range(3)))


def test_aborts_free_everything_at_once():
    """R-SCH-06: while queued, during prefill, while decoding, with a step in flight."""
    runner = Runner((FULL, window(8)), (60, 60), 512, max_num_batched_tokens=16, max_num_seqs=2)
    for turn in range(20):
        for i in range(4):
            runner.add(request(f"{turn}-{i}", [turn, i] * 20, 300))
        for _ in range(turn):
            runner.launch()
            while len(runner.inflight) > 1:
                runner.collect()
        for i in range(4):
            sequence = runner.scheduler.abort(f"{turn}-{i}")
            assert sequence is not None and sequence.finish_reason is FinishReason.ABORT
        stats = runner.scheduler.stats()
        assert stats.running == stats.waiting == 0
        assert all(kind.protected == 0 for kind in stats.kinds)
        while runner.inflight:
            assert not runner.collect(), "a token was counted after the abort"
        runner.scheduler.check()


def test_maps_return_to_their_base_size():
    """R-SCH-07."""
    runner = Runner((FULL,), (60,), 64, check=False)
    for i in range(3000):
        runner.add(request(str(i), [i % 7, 3], 1, group=f"g{i}", deadline=1e12))
        if i % 5 == 0:
            runner.scheduler.abort(str(i))
        if i % 8 == 0:
            runner.drain()
            runner.model.truths.clear()
            runner.outputs.clear()
            runner.reasons.clear()
            runner.streamed.clear()
    runner.drain()
    scheduler = runner.scheduler
    for name, value in vars(scheduler).items():
        if isinstance(value, (dict, list)) or name in ("_ready", "_waiting", "_groups"):
            assert len(value) == 0, name
    assert len(scheduler._running) == 0 and not scheduler._groups._done


@pytest.mark.parametrize("options", [{"use_prefix_cache": False}, {"prompt_logprobs": 1}])
def test_long_prompts_that_bypass_the_cache(options):
    """R-SCH-08: five chunks, no hit, and no more pages than the prompt needs."""
    runner = Runner((FULL,), (60,), 256, max_num_batched_tokens=16)
    prompt = list(range(80))
    first, again = (request(k, prompt, 3, **options) for k in "ab")
    assert serve(runner, first) == [0] and serve(runner, again) == [0]
    stats = runner.scheduler.stats()
    kept = 20 if "prompt_logprobs" in options else 0  # scored prompts read nothing but may be read
    assert stats.kinds[0].evictable == kept and stats.kinds[0].protected == 0
    assert stats.prefix_queries == 0


@pytest.mark.parametrize(
    ("length", "max_tokens", "output"), [(62, 2, 2), (63, 1, 1), (63, 9, 1), (64, 0, 0)]
)
def test_prompts_up_to_the_maximum_length(length, max_tokens, output):
    """R-SCH-09."""
    runner = Runner((FULL,), (50,), 64)
    sequence = runner.add(request("r", [1] * length, max_tokens))
    runner.drain()
    assert len(sequence.output) == output and sequence.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("length", "max_tokens"), [(64, 1), (65, 0), (65, 5)])
def test_prompts_past_the_maximum_length(length, max_tokens):
    """R-SCH-09."""
    runner = Runner((FULL,), (50,), 64)
    with pytest.raises(CapacityError, match=f"{length} tokens.*max_model_len is 64"):
        runner.add(request("r", [1] * length, max_tokens))
    serve(runner, request("alive", [1] * 8, 3))


def test_two_equal_prompts_in_one_step_share_nothing_uncomputed():
    """R-PFX-01: pages are published at commit; the aborted third one leaves nothing behind."""
    runner = Runner()
    prompt = list(range(64))
    assert serve(runner, request("a", prompt, 4), request("b", prompt, 4)) == [0, 0]
    runner = Runner()
    runner.add(request("gone", prompt, 4))
    runner.launch()
    runner.scheduler.abort("gone")
    assert serve(runner, request("c", prompt, 4)) == [0]


def test_namespaces_never_share():
    """R-PFX-02."""
    runner = Runner()
    prompt = list(range(30))
    spaces = [("w1", None), ("w1", "a"), ("w1", "b"), ("w2", "a")]
    for i, space in enumerate(spaces):
        assert serve(runner, request(f"cold{i}", prompt, 3, namespace=space)) == [0]
        assert serve(runner, request(f"warm{i}", prompt, 3, namespace=space)) == [28]


@pytest.mark.parametrize("length", [31, 32, 33, 47])
def test_hits_follow_a_formula_and_never_drop(length):
    """R-PFX-08: only full pages are hit, also those that decoding filled."""
    runner = Runner((FULL,), (80,), 256, page_size=16)
    prompt = list(range(length))
    expected = (length - 1) // 16 * 16
    hits = [serve(runner, request(f"{i}", prompt, 20))[0] for i in range(3)]
    assert hits == [0, expected, expected]
    longer = prompt + runner.outputs["0"]
    computed = (length + 20 - 1) // 16 * 16  # the last output token is never fed
    assert serve(runner, request("longer", [*longer, 5], 3)) == [computed]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [7, 8, 9, 31, 32, 33])
def test_window_kinds_hit_and_let_go(length, overlap):
    """R-PFX-06: window 8, page 4; the null model compares every visible entry for 40 steps."""
    runner = Runner((FULL, window(8)), (80, 16), 256, overlap=overlap)
    prompt = list(range(length))
    sequence = runner.add(request("cold", prompt, 40))
    while runner.scheduler.has_work():
        runner.round()
        assert len(sequence.held.pages[1]) <= max(5, -(-length // 4) + 1)
    runner.drain()
    assert serve(runner, request("warm", prompt, 40)) == [(length - 1) // 4 * 4]
    assert runner.outputs["warm"] == runner.outputs["cold"]


def test_a_window_pool_of_one_window_is_enough():
    """A long prompt is cut to what the pool holds, and goes on as its window moves."""
    runner = Runner((FULL, window(8)), (60, 4), 200, max_num_batched_tokens=64)
    serve(runner, *(request(f"r{i}", [i] * 90, 20) for i in range(3)))
    with pytest.raises(ConfigError, match=r"num_pages=3 of cache kind 'window8'.*at least 4"):
        Runner((FULL, window(8)), (60, 3), 200)


def test_ids_in_use_and_empty_prompts_are_refused():
    runner = Runner()
    runner.add(request("r", [1], 3))
    with pytest.raises(InvalidRequest, match="request_id='r' is in use"):
        runner.add(request("r", [2], 3))
    with pytest.raises(InvalidRequest, match="prompt_token_ids is empty"):
        runner.add(request("e", [], 3))
    runner.drain()
    assert runner.scheduler.add(request("r", [2], 3)).tokens == [2]


def test_stop_ids_count_only_from_min_tokens_on():
    plain = Runner()
    serve(plain, request("r", [1, 2], 12))
    output = plain.outputs["r"]
    for min_tokens, ends in ((0, 4), (4, 4), (5, 12)):
        runner = Runner()
        sequence = runner.add(request("r", [1, 2], 12, stop_ids=[output[3]], min_tokens=min_tokens))
        runner.drain()
        assert sequence.output == output[:ends]
        assert (sequence.finish_reason is FinishReason.STOP) == (ends == 4)


@pytest.mark.parametrize("overlap", [False, True])
def test_nan_ends_its_own_sequence_only(overlap):
    runner = Runner(overlap=overlap)
    runner.model.poison.add("bad")
    bad, good = request("bad", [1, 2], 9), request("good", [1, 2], 9)
    sequence = runner.add(bad)
    assert serve(runner, good) == [0]
    assert sequence.finish_reason is FinishReason.ERROR and sequence.output == []
    assert runner.reasons["bad"] is FinishReason.ERROR


def test_overlap_plans_ahead_and_never_past_the_limit():
    """One step in flight ahead, exactly as many rows as tokens when only max_tokens ends a sequence."""
    runner = Runner(overlap=True)
    runner.add(request("r", [1, 2], 6))
    rows = 0
    for _ in range(3):
        assert runner.launch()
    assert len(runner.inflight) == 3
    while runner.launch():
        pass
    rows = sum(len(plan.sampled) for plan, _ in runner.inflight)
    assert rows == 6
    while runner.inflight:
        runner.collect()
    assert len(runner.outputs["r"]) == 6


def test_a_surplus_row_after_a_stop_is_dropped():
    plain = Runner()
    serve(plain, request("r", [1, 2], 12))
    stop = plain.outputs["r"][2]
    runner = Runner(overlap=True)
    req = request("r", [1, 2], 12, stop_ids=[stop])
    serve(runner, req)
    assert runner.model.steps == 4  # three tokens and one surplus row
    assert runner.streamed["r"] == plain.outputs["r"][:3]


@pytest.mark.parametrize("pages", [60, 30])
def test_prompt_scores_cover_each_position_once(pages):
    """Also when a preemption makes the prompt be computed again, which the small pool does."""
    runner = Runner((FULL,), (pages,), 110, max_num_batched_tokens=20, max_num_seqs=4)
    prompt = list(range(70))
    runner.add(request("other", [1] * 30, 70))
    sequence = runner.add(request("r", prompt, 20, prompt_logprobs=2))
    seen: list[int] = []
    while runner.scheduler.has_work():
        if not runner.launch() or len(runner.inflight) > 1:
            seen += _scored(runner.inflight[0][0], prompt)
            runner.collect()
    assert seen == list(range(1, 70))
    assert sequence.preempted == (pages == 30)


def _scored(plan: StepPlan, prompt: list[int]) -> list[int]:
    """Prompt positions that a plan scores, found by the targets in the padded prefill region."""
    padded = [0] * (plan.shape.blocks * plan.shape.block)
    cursor = 0
    for index, (_, _, count) in enumerate(plan.blocks.tolist()):
        begin = index * plan.shape.block
        padded[begin : begin + count] = plan.targets[cursor : cursor + count].tolist()
        cursor += count
    seen: list[int] = []
    for _, first, index, count in plan.scored:
        assert padded[index : index + count] == prompt[first + 1 : first + 1 + count]
        seen += range(first + 1, first + 1 + count)
    return seen


def test_metrics_are_stamped_in_order():
    now = iter(range(1000))
    scheduler = Scheduler(EngineConfig(), (FULL,), (50,), 64, clock=lambda: float(next(now)))
    sequence = scheduler.add(request("r", [1, 2, 3], 2, arrival=-1.0))
    while scheduler.has_work():
        plan = scheduler.plan()
        assert isinstance(plan, StepPlan)
        scheduler.commit(plan, StepOutput(np.zeros(plan.shape.sample_rows, np.int32)))
    m = sequence.metrics
    assert m.first_scheduled_time is not None and m.first_token_time is not None
    assert m.finished_time is not None
    assert m.arrival_time < m.first_scheduled_time < m.first_token_time < m.finished_time
