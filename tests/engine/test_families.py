"""The contract for every recorded family: one request gives the same tokens alone, batched, in any chunks,
after a cache hit and after preemption, and they are those that PyTorch recorded.

Scores are compared bit by bit: with the native ops of the CPU nothing that happens around a request may
move them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM
from jaxinfer.cache import Scope
from tests.engine.traffic import Family, alone, assert_same, job, kinds, random_jobs, serve
from tests.models.families import CASES
from tests.reference.families import VOCAB

PAGE, INTERVAL, BUDGET = 8, 16, 32
# Five rungs to compile; pools that hold one long sequence, but not three.
SHAPE: dict[str, Any] = {
    "page_size": PAGE,
    "checkpoint_interval": INTERVAL,
    "max_num_seqs": 3,
    "max_num_batched_tokens": BUDGET,
    "max_model_len": 312,
    "num_pages": 40,
    "num_states": 9,
}
# At least one of each mixer and of each mix of cache kinds; `-m slow` runs the others.
QUICK = ("qwen3_next", "kimi_linear", "glm_moe_dsa", "gpt_oss", "falcon_h1", "minimax", "lfm2")
QUICK += ("mamba2",)
OTHERS = tuple(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c not in QUICK)


@pytest.fixture(scope="module", params=[*QUICK, *OTHERS])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    made = Family(tmp_path_factory.mktemp("families"), request.param, **SHAPE)
    made.engine()
    return made


def idle(llm: LLM) -> None:
    """Nothing runs, nothing leaks, and a cleared cache gives everything back."""
    core = llm.core
    core.check()
    core.scheduler.clear_prefix_cache()
    core.check()
    for kind in kinds(llm).values():
        assert kind["free"] == kind["total"] and not kind["protected"] and not kind["cached"], kind


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def tolerance(family: Family) -> float:
    """Of a logit: the bound of the cross-check for this sort of model."""
    largest = np.abs(family.recording.long_logits).max()
    return (5e-4 if family.has(Scope.STATE) else 1e-4) * max(1.0, largest / 5)


def test_prompt_scores_are_those_recorded(family: Family) -> None:
    llm, recording, bound = family.engine(), family.recording, tolerance(family)
    params = {"prompt_logprobs": 20, "max_tokens": 1}
    jobs = [job(llm, "short", recording.prompt, **params)]
    jobs += [job(llm, "long", recording.long_prompt, **params)]
    answers = serve(llm, jobs)
    short = zip(range(len(recording.prompt)), recording.logits, strict=True)
    long = zip(recording.positions.tolist(), recording.long_logits, strict=True)
    for name, tokens, rows in (
        ("short", recording.prompt, short),
        ("long", recording.long_prompt, long),
    ):
        answer = answers[name]
        assert len(answer.prompt) == len(tokens) - 1
        for position, logits in rows:
            expected = log_softmax(logits)
            if position == len(tokens) - 1:
                token, score = answer.tokens[0], answer.scores[0]
            else:
                token, score = tokens[position + 1], answer.prompt[position]
            logprob, _, ids, top = score
            assert abs(logprob - expected[token]) < bound, (name, position)
            np.testing.assert_allclose(top, expected[list(ids)], atol=bound, rtol=0)


def test_greedy_tokens_are_those_recorded_cold_and_warm(family: Family) -> None:
    llm, recording = family.engine(), family.recording
    sure = recording.margins > 10 * tolerance(family)
    count = len(sure) if sure.all() else int(sure.argmin())
    assert count >= 1
    prompt = recording.prompt

    def ask(name: str):
        return serve(llm, [job(llm, name, prompt, max_tokens=12)])[name]

    cold = ask("cold")
    assert cold.tokens[:count] == recording.greedy[:count] and cold.cached == 0
    # A recurrent model first resumes on the grid; then where the pages of the first run ended, too.
    whole = (len(prompt) - 1) // PAGE * PAGE
    grid = (len(prompt) - 1) // INTERVAL * INTERVAL
    hits = [grid if family.has(Scope.STATE) else whole, whole, whole]
    for number, hit in enumerate(hits):
        warm = ask(f"warm{number}")
        assert (warm.tokens, warm.scores, warm.cached) == (cold.tokens, cold.scores, hit)
    idle(llm)


def test_traffic_in_scarce_pools_is_served_as_alone(family: Family) -> None:
    """Shared prefixes, forks, priorities, aborts, preemptions and evictions, with a step ahead and without."""
    cold = family.engine(enable_prefix_caching=False, overlap=False)
    jobs = random_jobs(cold, seed=1, count=16)
    truth = alone(cold, jobs)
    aborts = {"1.5/1": 2, "1.6": 1, "1.9/0": 0, "1.13/2": 1}
    options: dict[str, Any] = {"overlap": False, "policy": "lpm"}
    if not family.has(Scope.WINDOW):  # the width of a window's table follows the chunks
        options["long_prefill_threshold"] = 7
    for llm in (family.engine(), family.engine(**options)):
        for turn in range(2):
            assert_same(serve(llm, jobs, seed=turn, aborts=aborts), truth)
        stats = llm.core.stats()
        assert stats["prefix_hits"] > 0
        for kind in stats["kinds"]:
            assert kind["evicted"] + kind["thinned"] > 0, kind
        if family.has(Scope.TOKEN):
            assert stats["preemptions"] > 0
        idle(llm)


def test_short_and_long_prompts_warm_and_cold_side_by_side(family: Family) -> None:
    """R-HYB-03: states and windows of different length share a batch; the engine lives on."""
    llm = family.engine()
    cold = family.engine(enable_prefix_caching=False, overlap=False)
    long = (family.recording.long_prompt * 2)[:300]
    prompts = {"ten": long[5:15], "more": long[:26], "long": long, "again": long[:120] + [3, 1, 4]}
    jobs = [job(llm, name, prompt, max_tokens=9) for name, prompt in prompts.items()]
    truth = alone(cold, jobs)
    assert_same(serve(llm, jobs[:2]), truth)
    for turn in range(2):
        answers = serve(llm, jobs, seed=turn)
        assert_same(answers, truth)
        assert turn or answers["more"].cached > 0
    idle(llm)


def test_what_is_evicted_or_dropped_is_computed_again(family: Family) -> None:
    """R-HYB-01: a hit ends where every kind can resume, whichever has lost something; never beyond."""
    llm, prompt = family.engine(), family.recording.long_prompt
    cold = family.engine(enable_prefix_caching=False, overlap=False)
    longer = [*prompt, 1, 2, 3]
    truth = alone(cold, [job(cold, "longer", longer, max_tokens=5)])
    tree = llm.core.scheduler._pages.tree

    def matched() -> int:
        return tree.match(("",), longer, len(longer) - 1).length

    for kind, spec in enumerate(tree.specs):
        hits = [len(longer)]
        for lost in range(3):
            idle(llm)
            serve(llm, [job(llm, "whole", prompt, max_tokens=1)])
            assert matched() >= (len(prompt) - 1) // INTERVAL * INTERVAL
            if spec.scope is not Scope.STATE:
                tree.evict(kind, tree.evictable(kind) * lost // 2)
            for _ in range(lost if spec.scope is Scope.STATE else 0):
                assert tree.drop_checkpoint(("",), longer[: matched()], kind)
            hits.append(matched())
            answers = serve(llm, [job(llm, "longer", longer, max_tokens=5)])
            assert_same(answers, truth)
            assert answers["longer"].cached == hits[-1]
        # Pages behind the last window are missed by nobody.
        assert hits == sorted(hits, reverse=True) and hits[1] > hits[3], hits
        assert spec.scope is not Scope.STATE or hits[1] > hits[2] > hits[3], hits
    idle(llm)


def test_a_conversation_computes_its_new_tokens_and_at_most_one_interval(family: Family) -> None:
    llm, rng = family.engine(), random.Random(4)
    cold = family.engine(enable_prefix_caching=False, overlap=False)
    unit = INTERVAL if family.has(Scope.STATE) else PAGE
    history: list[int] = []
    for turn in range(20):
        new = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        one = job(llm, f"turn{turn}", [*history, *new], max_tokens=rng.randint(1, 8))
        before = llm.core.counters.tokens_fed
        answer = serve(llm, [one])[f"turn{turn}"]
        computed = llm.core.counters.tokens_fed - before - len(answer.tokens) + 1
        # The last token of a turn has never been fed: it is as new as the next turn's.
        assert computed <= len(new) + 1 + unit, f"turn {turn} computed {computed} tokens"
        if turn % 5 == 4:
            assert_same({f"turn{turn}": answer}, alone(cold, [one]))
        history += [*new, *answer.tokens]
    assert len(history) > 150
    idle(llm)


BUDGETS = [
    ("lfm2", 64),
    ("mamba2", 17),
    ("kimi_linear", 16),
    ("gpt_oss", 17),
    ("falcon_h1", 64),
    ("glm_moe_dsa", 64),
]


@pytest.mark.parametrize(
    ("case", "budget"),
    [BUDGETS[0], *(pytest.param(*b, marks=pytest.mark.slow) for b in BUDGETS[1:])],
)
def test_blocks_of_other_sizes_and_many_in_a_step(tmp_path: Path, case: str, budget: int) -> None:
    """A budget of 64 is two blocks, of which the second goes on from the first; one of 17 is one of 16."""
    family = Family(tmp_path, case, **SHAPE)
    cold = family.engine(enable_prefix_caching=False, overlap=False)
    jobs = random_jobs(cold, seed=3, count=8)
    truth = alone(cold, jobs)
    llm = family.engine(max_num_batched_tokens=budget)
    for turn in range(2):
        assert_same(serve(llm, jobs, seed=turn), truth)
    idle(llm)
