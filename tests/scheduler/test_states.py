"""States of recurrent kinds under the scheduler: where they are kept, what a hit reads, who waits for whom.

Every run is checked by the null model: a row that went on from a wrong state would fail.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import CHECKPOINT_POLICIES, EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.scheduler import Scheduler
from jaxinfer.scheduler.prefill import cut_blocks
from tests.scheduler.null_model import FULL, Runner, mix, request, state, window

HYBRID = (FULL, state())


def hybrid(states: int = 60, **config) -> Runner:
    config = {"checkpoint_interval": 8, **config}
    return Runner(HYBRID, (300, states), 512, **config)


def run(runner: Runner, key: str, prompt: list[int], max_tokens: int = 1, **options) -> int:
    """Serve one request; the prompt tokens that the cache spared it."""
    req = request(key, prompt, max_tokens, **options)
    sequence = runner.add(req)
    runner.drain()
    runner.expect(req)
    assert sequence.cached_tokens is not None
    return sequence.cached_tokens


@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17, 25, 100])
def test_hits_follow_the_grid(length):
    """R-HYB-04: a prompt that comes again is spared the last multiple of the interval before its end; then
    the state is also kept where its pages ended, and the next one is spared whole pages."""
    runner = hybrid()
    prompt = list(range(length))
    assert run(runner, "cold", prompt) == 0
    assert run(runner, "again", prompt) == (length - 1) // 8 * 8
    assert run(runner, "longer", [*prompt, 999]) == (length - 1) // 4 * 4


@pytest.mark.parametrize(("shared", "hit"), [(31, 0), (32, 32), (33, 32), (64, 64), (100, 96)])
def test_prompts_that_part_early_share_whole_intervals(shared, hit):
    """R-HYB-04, where the first prompt goes on: what both have, in units of the interval."""
    runner = hybrid(checkpoint_interval=32)
    prompt = list(range(150))
    run(runner, "first", prompt)
    assert run(runner, "other", [*prompt[:shared], *range(300, 320)]) == hit


def test_a_path_keeps_its_last_states():
    """Six intervals, room for three; the branch point stays where others part from it."""
    runner = hybrid(checkpoint_interval=32, max_states_per_path=3)
    prompt = list(range(200))
    run(runner, "first", prompt)
    assert runner.scheduler.stats().kinds[1].cached == 3
    assert run(runner, "early", [*prompt[:70], 7]) == 0
    assert run(runner, "again", [*prompt[:70], 8]) == 68
    assert run(runner, "late", prompt) == 192


def test_a_hit_ends_at_a_checkpoint_however_many_pages_are_there():
    """R-HYB-01: pages alone never make a hit, and dropping a state shortens it."""
    runner = hybrid(checkpoint_interval=32)
    prompt = list(range(100))
    run(runner, "cold", prompt)
    tree, tokens = runner.scheduler._pages.tree, [*prompt, 5]
    assert tree.match((), tokens).length == 96
    assert tree.drop_checkpoint((), prompt[:96], 1)
    shorter = tree.match((), tokens)
    assert shorter.length == 64 and shorter.known == 100
    assert run(runner, "again", tokens) == 64


@pytest.mark.parametrize(
    ("policy", "second", "third"),
    [
        ("align", 16, 20),
        ("branch", 0, 20),
        ("second-hit", 0, 16),
        ("declared", 0, 0),
        ("none", 0, 0),
    ],
)
def test_where_prompts_part(policy, second, third):
    """The first prompt leaves pages; the second finds where they part and keeps the state there."""
    runner = hybrid(checkpoint_policy=policy, checkpoint_interval=16)
    shared = list(range(20))
    run(runner, "first", [*shared, *range(100, 112)])  # align keeps the state at 16 and at no other
    assert run(runner, "second", [*shared, *range(200, 230)]) == second
    assert run(runner, "third", [*shared, *range(300, 330)]) == third


def test_declared_breakpoints_are_kept_under_every_policy_but_none():
    for policy in ("declared", "branch", "second-hit", "align", "none"):
        runner = hybrid(checkpoint_policy=policy, checkpoint_interval=256)
        run(runner, "first", list(range(60)), breakpoints=(30,))
        assert run(runner, "then", [*range(30), 7, 7, 7]) == (0 if policy == "none" else 28)


@pytest.mark.parametrize("blocks", [1, 2, 3, 16])
@pytest.mark.parametrize("most", [1, 2, 8])
def test_only_states_that_a_block_ends_at_are_kept(most, blocks):
    """Breakpoints cut a chunk into more blocks than the budget has, so that it ends early, off the grid."""
    runner = Runner(
        HYBRID,
        (300, 60),
        1024,
        max_num_batched_tokens=32 * blocks,
        checkpoint_interval=16,
        max_states_per_path=most,
    )
    prompt = [7 * i % 500 for i in range(520)]
    for i in range(4, 44, 4):
        run(runner, f"r{i}", [i, *prompt], breakpoints=(i, 2 * i + 4, 3 * i + 9))


def test_a_prompt_that_breakpoints_cut_is_partial():
    """It would fit the tokens that are left, but not the blocks; one other prompt is partial already."""
    options = {"max_num_batched_tokens": 96, "long_prefill_threshold": 20}
    runner = hybrid(max_partial_prefills=1, checkpoint_interval=256, **options)
    runner.add(request("long", [1] * 60, 1))
    other = runner.add(request("other", [2] * 20, 1, breakpoints=(4, 8)))
    runner.round()
    assert len(runner.scheduler._running.prefilling()) == 1 and not other.running
    runner.drain()
    assert len(runner.outputs) == 2


def test_breakpoints_outlive_the_states_that_follow():
    """The longer the rest of the prompt, the more it matters to keep what others share."""
    runner = hybrid(max_states_per_path=2)
    run(runner, "first", list(range(200)), max_tokens=60, breakpoints=(61,))
    assert runner.scheduler.stats().kinds[1].cached == 2
    assert run(runner, "other", [*range(61), 7, 7]) == 60


def test_what_cuts_hits_is_counted_once_a_request():
    """A prompt that waits is looked up at every step, and counted when it runs."""
    runner = hybrid(policy="lpm", max_partial_prefills=1, max_num_batched_tokens=32)
    run(runner, "first", [*range(45), 1])
    runner.add(request("long", [1] * 200, 1))
    runner.add(request("waits", [*range(47), *[2] * 80], 1))
    runner.drain()
    shortened = [kind.shortened for kind in runner.scheduler.stats().kinds]
    assert shortened == [0, 4]


def test_siblings_fork_where_the_prompt_ends():
    """n > 1 shares pages and reads one state: at most a page of the prompt is computed again."""
    runner = hybrid(checkpoint_interval=256)
    prompt = list(range(61))
    requests = [request(f"r{i}", prompt, 9, seed=i, group="g") for i in range(5)]
    sequences = [runner.add(req) for req in requests]
    runner.drain()
    assert [s.cached_tokens for s in sequences] == [0, 60, 60, 60, 60]
    for req in requests:
        runner.expect(req)


def test_a_conversation_computes_its_new_tokens_and_at_most_one_interval():
    """Twenty turns; what was generated is reused too."""
    rng, interval = random.Random(3), 8
    runner = hybrid(states=20, checkpoint_interval=interval, max_states_per_path=3)
    history: list[int] = []
    for turn in range(20):
        new = [rng.randrange(500) for _ in range(rng.randint(1, 12))]
        req = request(f"t{turn}", [*history, *new], rng.randint(1, 15), seed=turn)
        before = runner.model.fed
        sequence = runner.add(req)
        runner.drain()
        computed = runner.model.fed - before - sequence.output_length + 1
        # The last token of a turn has never been fed: it is as new as the next turn's.
        assert computed <= len(new) + 1 + interval, f"turn {turn} computed {computed} tokens"
        history = list(sequence.tokens)
    states = runner.scheduler.stats().kinds[1]
    assert states.thinned > 0 and states.cached <= 3


def test_states_are_kept_only_as_far_as_there_are_slots():
    """Two rows and three slots: no checkpoint ever holds up a row."""
    runner = hybrid(states=4, max_num_seqs=2)
    for i in range(6):
        runner.add(request(f"r{i}", [i] * 30, 20))
    runner.drain()
    assert len(runner.outputs) == 6
    kind = runner.scheduler.stats().kinds[1]
    assert kind.protected == 0 and kind.free + kind.evictable == kind.total == 3


def test_slots_bound_the_rows_that_run():
    """Pages for all, slots for three: the fourth waits, and nobody is preempted for it."""
    runner = hybrid(states=4)
    for i in range(5):
        runner.add(request(f"r{i}", [i] * 6, 30))
    runner.round()
    runner.round()
    stats = runner.scheduler.stats()
    assert (stats.running, stats.waiting) == (3, 2)
    runner.drain()
    assert runner.scheduler.stats().preemptions == 0 and len(runner.outputs) == 5


def test_a_failed_admission_gives_its_slots_back():
    """R-HYB-02: pages run out after a slot was given, a thousand times."""
    runner = Runner(HYBRID, (12, 60), 44, checkpoint_interval=8)
    runner.add(request("long", [1] * 20, 24))
    runner.add(request("big", [2] * 40, 1))
    for _ in range(1000):
        plan = runner.scheduler._admission
        budget = runner.scheduler._ladder.budget(0, serial=True)
        runner.round() if not len(runner.scheduler._running) else None
        plan._refused = None
        assert plan.admit(budget, []) == []
        runner.scheduler.check()
    runner.drain()
    kind = runner.scheduler.stats().kinds[1]
    assert kind.free + kind.evictable == kind.total


def test_a_prompt_token_costs_its_weight_where_layers_are_serial():
    prompt = [1] * 64
    for weight, steps in ((1.0, 2), (2.0, 3), (8.0, 9)):
        runner = hybrid(serial_weight=weight, max_num_batched_tokens=64, checkpoint_interval=256)
        runner.add(request("r", prompt, 2))
        runner.drain()
        assert runner.model.steps == steps
    plain = Runner((FULL,), serial_weight=8.0, max_num_batched_tokens=64)
    plain.add(request("r", prompt, 2))
    plain.drain()
    assert plain.model.steps == 2


@pytest.mark.parametrize("deadline", [0, 10])
def test_decode_rows_cannot_starve_a_long_prompt(deadline):
    """Seven decode rows leave one token a step; past the deadline the prompt gets every second step."""
    options = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "prefill_deadline": deadline}
    runner = Runner((FULL,), (600,), 512, **options)
    for i in range(7):
        runner.add(request(f"r{i}", [i], 200))
    for _ in range(8):
        runner.round()
    long = runner.add(request("long", list(range(90)), 1))
    start = runner.model.steps
    while long.finish_reason is None:
        runner.round()
    took = runner.model.steps - start
    assert took > 80 if deadline == 0 else took < 45
    runner.drain()
    assert len(runner.outputs) == 8


def test_few_decode_rows_never_wait_for_a_long_prompt():
    """They leave it most of every step: to stop them would not end it sooner."""
    runner = Runner((FULL,), (600,), 512, max_num_batched_tokens=8, prefill_deadline=1)
    runner.add(request("row", [1], 60))
    for _ in range(2):
        runner.round()
    runner.add(request("long", list(range(200)), 1))
    start = runner.model.steps
    while "row" not in runner.outputs:
        runner.round()
    assert runner.model.steps - start <= 60
    runner.drain()


def test_exact_replay_cuts_blocks_at_canonical_places():
    assert cut_blocks(0, 130, [], 64, True) == [(0, 64), (64, 64), (128, 2)]
    assert cut_blocks(50, 130, [], 64, True) == [(50, 14), (64, 64), (128, 2)]
    assert cut_blocks(50, 130, [80, 96], 64, True) == [
        (50, 14),
        (64, 16),
        (80, 16),
        (96, 32),
        (128, 2),
    ]
    assert cut_blocks(50, 130, [80], 32, False) == [(50, 30), (80, 32), (112, 18)]
    runner = hybrid(replay="exact", max_num_batched_tokens=100, checkpoint_interval=20)
    for i in range(4):
        runner.add(request(f"r{i}", [*range(70), *[i] * (30 * i)], 20))
    runner.drain()
    assert len(runner.outputs) == 4


def test_one_slot_is_not_enough():
    with pytest.raises(ConfigError, match="num_states=2.*at least 3"):
        Scheduler(EngineConfig(), HYBRID, (10, 2), 64)


def test_windows_states_and_pages_together():
    """Five kinds of three scopes, scarce in all of them, twice over."""
    specs = (FULL, window(6), state(), window(13), state("second"))
    runner = Runner(
        specs, (40, 30, 16, 30, 12), 120, checkpoint_interval=8, max_num_batched_tokens=48
    )
    rng = random.Random(9)
    for i in range(40):
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 40))]
        runner.add(request(f"r{i}", prompt, rng.randint(1, 30), seed=i))
        if i % 3 == 0:
            runner.round()
    runner.drain()
    for i in range(40):
        truth = runner.model.truths[f"r{i}"]
        assert runner.outputs[f"r{i}"] == truth.output


@given(
    kinds=st.sampled_from([(FULL, state()), (state(), state("second")), (window(9), state())]),
    slots=st.integers(3, 30),
    depth=st.integers(0, 2),
    seed=st.integers(0, 1000),
    config=st.fixed_dictionaries(
        {
            "page_size": st.sampled_from([2, 8]),
            "max_num_batched_tokens": st.integers(64, 130),
            "max_num_seqs": st.integers(1, 6),
            "max_partial_prefills": st.integers(1, 3),
            "long_prefill_threshold": st.sampled_from([0, 0, 3]),
            "checkpoint_policy": st.sampled_from(("align", *CHECKPOINT_POLICIES, "align")),
            "checkpoint_interval": st.integers(1, 80),
            "max_states_per_path": st.integers(0, 4),
            "replay": st.sampled_from(["tolerant", "exact"]),
            "serial_weight": st.sampled_from([1.0, 1.1, 7.5]),
            "prefill_deadline": st.integers(0, 3),
        }
    ),
)
@settings(max_examples=40, deadline=None)
def test_any_configuration_keeps_right_states(kinds, slots, depth, seed, config):
    """Prompts with common beginnings, breakpoints and siblings; the tree is checked after every round."""
    pools = tuple(slots if kind.scope == "state" else 160 for kind in kinds)
    runner = Runner(kinds, pools, 200, depth=depth, **config)
    rng = random.Random(mix(seed))
    requests = []
    for i in range(12):
        prompt = [5] * rng.randint(0, 90) + [rng.randrange(3) for _ in range(rng.randint(1, 60))]
        marks = tuple(rng.randint(1, len(prompt)) for _ in range(rng.randrange(4)))
        group = rng.choice([None, None, "g"])
        requests.append(
            request(f"r{i}", prompt, rng.randint(0, 20), breakpoints=marks, group=group)
        )
        runner.add(requests[-1])
        runner.round()
        partial = [s for s in runner.scheduler._running.prefilling() if s.scheduled]
        assert len(partial) <= runner.config.max_partial_prefills
    runner.drain()
    for req in requests:
        runner.expect(req)
