"""replay="exact": the scores of prompt and output are bitwise the same for any split of a prompt, any hit,
any neighbours and after any preemption, in whichever form the recurrent layers decay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import pallas_kernels
from jaxinfer import LLM
from jaxinfer.cache import Scope
from tests.engine.traffic import Answer, Family, Job, alone, assert_same, job, random_jobs, serve

# Resumed at every second page, mostly inside a canonical block of 64.
SHAPE: dict[str, Any] = {
    "replay": "exact",
    "page_size": 8,
    "checkpoint_interval": 16,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "max_model_len": 224,
    "num_pages": 29,
    "num_states": 9,
}
# Plain with a decay for each head; the delta rule with one for each channel, and with one for each head.
FORMS = ("mamba2", "kimi_linear", "qwen3_next")
QUICK = ("mamba2", "kimi_linear")
OTHERS = (
    "qwen3_next",
    "minimax",
    "qwen3_5",
    "falcon_h1",
    "bamba",
    "nemotron_h",
    "lfm2",
    "granitemoehybrid",
)


@pytest.fixture(
    scope="module", params=[*QUICK, *(pytest.param(c, marks=pytest.mark.slow) for c in OTHERS)]
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("exact"), request.param, **SHAPE)


@pytest.fixture(scope="module")
def cold(family: Family) -> LLM:
    return family.engine(enable_prefix_caching=False, overlap=False)


@pytest.fixture(scope="module")
def jobs(family: Family, cold: LLM) -> list[Job]:
    """The first two outgrow the pool together."""
    prompt = family.recording.long_prompt
    pair = [job(cold, f"{i}", prompt[i : 90 + i], max_tokens=60) for i in range(2)]
    return pair + random_jobs(cold, seed=2, count=8)


@pytest.fixture(scope="module")
def truth(cold: LLM, jobs: list[Job]) -> dict[str, Answer]:
    return alone(cold, jobs)


@pytest.mark.parametrize("threshold", [0, 7, 50])
def test_any_split_any_hit_any_neighbour(
    family: Family, jobs: list[Job], truth: dict[str, Answer], threshold: int
) -> None:
    llm = family.engine(long_prefill_threshold=threshold, overlap=threshold != 7)
    answers = {}
    for turn in range(2):
        answers = serve(llm, jobs, seed=turn)
        assert_same(answers, truth)
    hits = {answer.cached for answer in answers.values()}
    assert any(hit % 64 for hit in hits), hits
    assert llm.core.stats()["preemptions"] > 0 or not family.has(Scope.TOKEN)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [100, 256])
def test_any_budget(family: Family, jobs: list[Job], truth: dict[str, Answer], budget: int) -> None:
    llm = family.engine(max_num_batched_tokens=budget)
    for turn in range(2):
        assert_same(serve(llm, jobs, seed=turn), truth)


def test_every_resume_gives_the_scores_of_the_whole(family: Family, cold: LLM) -> None:
    """A prompt that shares more and more of a cached one, up to all of it."""
    prompt = family.recording.long_prompt
    cuts = range(17, len(prompt) + 1, 19)
    jobs = [job(cold, f"{cut}", [*prompt[:cut], 1, 2, 3], max_tokens=3) for cut in cuts]
    truth = alone(cold, jobs)
    llm = family.engine()
    serve(llm, [job(llm, "whole", prompt, max_tokens=1)])
    hits = set()
    for one in jobs:
        answers = serve(llm, [one])
        assert_same(answers, truth)
        hits |= {answer.cached for answer in answers.values()}
    assert len(hits) > 3 and any(hit % 64 for hit in hits), hits


@pytest.fixture(params=["mamba2", *(pytest.param(c, marks=pytest.mark.slow) for c in FORMS[1:])])
def by_reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    """One row at a time on the plain definitions of the ops."""
    before = pallas_kernels.get_impl()
    pallas_kernels.set_impl("reference")
    yield Family(tmp_path_factory.mktemp("exact"), request.param, **(SHAPE | {"max_num_seqs": 1}))
    pallas_kernels.set_impl(before)


def test_the_reference_ops_replay_as_exactly(by_reference: Family) -> None:
    """XLA's matmuls round by the number of rows; at equal numbers no split and no hit shows."""
    cold = by_reference.engine(enable_prefix_caching=False, overlap=False)
    prompt = by_reference.recording.long_prompt
    jobs = [
        job(cold, f"{cut} {scored}", [*prompt[:cut], 1, 2], max_tokens=5, prompt_logprobs=scored)
        for cut in (30, 63, 97, 133)
        for scored in (None, 20)
    ]
    truth = alone(cold, jobs)
    for threshold in (0, 7, 50):
        llm = by_reference.engine(long_prefill_threshold=threshold)
        serve(llm, [job(llm, "whole", prompt, max_tokens=1)])
        answers = serve(llm, jobs)
        assert_same(answers, truth)
        assert any(answer.cached % 64 for answer in answers.values())
