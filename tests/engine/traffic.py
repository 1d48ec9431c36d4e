"""Requests as traffic: a recorded family in service, random jobs, and a driver that sees every update.

Drives the EngineCore itself, because jobs come late, are cut off and have scores to compare bit by bit.
Used by the tests of all families and of exact replay.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinfer import LLM, SamplingParams, load
from jaxinfer.cache import Scope
from jaxinfer.loading import LoadedModel
from jaxinfer.scheduler import Update
from jaxinfer.types import FinishReason, Request
from tests.models.families import Recording, load_case, write_case
from tests.reference.families import VOCAB

Score = tuple[float, int, tuple[int, ...], tuple[float, ...]]
Job = list[Request]  # the n requests of one prompt


@dataclass(slots=True)
class Answer:
    """What one request yielded: tokens with their scores, scores of its prompt, tokens it was spared."""

    tokens: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    prompt: list[Score] = field(default_factory=list)
    cached: int = 0
    reason: FinishReason | None = None


class Family:
    """A recorded case as a checkpoint, and engines for it; those of equal shapes share executables."""

    def __init__(self, folder: Path, case: str, **shape: Any) -> None:
        self.case, self.shape = case, shape
        self.recording: Recording = load_case(case)[2]
        self.model: LoadedModel = load(str(write_case(folder / case, case)))
        self._engines: list[LLM] = []

    def engine(self, **options: Any) -> LLM:
        llm = LLM(self.model, progress=False, **(self.shape | options))
        core = llm.core
        for other in (e.core for e in self._engines):
            ladders = core.config.ladder() == other.config.ladder()
            if ladders and core.sizes == other.sizes and core.step_model == other.step_model:
                core.executables = other.executables
                return llm
        self._engines.append(llm)
        return llm

    @property
    def specs(self):
        return self._engines[0].core.step_model.specs

    def has(self, scope: Scope) -> bool:
        return any(spec.scope is scope for spec in self.specs)


def job(llm: LLM, name: str, prompt: list[int], *, priority: int = 0, **params: Any) -> Job:
    """The requests of one prompt; greedy, scored and of full length unless `params` say otherwise."""
    options = {"temperature": 0.0, "ignore_eos": True, "logprobs": 20} | params
    inputs = llm._inputs
    prompted = inputs.prompt({"prompt_token_ids": prompt})
    return inputs.requests(name, prompted, SamplingParams(**options), priority=priority)


def random_jobs(llm: LLM, seed: int, count: int, longest: int = 130) -> list[Job]:
    """Prompts of which two in three begin like others; forks, priorities, drawn and scored ones among them."""
    r = random.Random(seed)
    stems = [[r.randrange(VOCAB) for _ in range(longest)] for _ in range(3)]
    jobs = []
    for i in range(count):
        own = [r.randrange(VOCAB) for _ in range(r.choice([1, 2, 9, 17, 33]))]
        cut = r.choice([0, 33, 64, 97, longest])
        params: dict[str, Any] = {"max_tokens": r.choice([1, 4, 17, 40, 60])}
        if i % 4 == 1:
            params |= {"n": 3, "temperature": 1.0, "seed": r.randrange(2**62)}
        if i % 5 == 2:
            params |= {"temperature": 0.8, "top_p": 0.9, "seed": r.randrange(2**62)}
        if i % 6 == 3:
            params |= {"prompt_logprobs": 20}
        prompt = stems[r.randrange(3)][:cut] + own
        jobs.append(job(llm, f"{seed}.{i}", prompt, priority=r.randrange(3), **params))
    return jobs


def serve(
    llm: LLM, jobs: list[Job], seed: int | None = None, aborts: Mapping[str, int] | None = None
) -> dict[str, Answer]:
    """Answers by request id. seed: jobs come in one after another, at random; None: all at once.

    aborts: requests that are given up once so many of their tokens have come.
    """
    core, r, left = llm.core, random.Random(seed), list(jobs)
    answers = {request.request_id: Answer() for one in jobs for request in one}
    while left or core.has_work():
        while left and (seed is None or not core.has_work() or r.random() < 0.4):
            for request in left.pop(0):
                core.submit(request)
        for update in core.step():
            _take(answers, update)
        for key, after in (aborts or {}).items():
            answer = answers[key]
            if answer.reason is None and len(answer.tokens) >= after:
                for update in core.abort(key):
                    _take(answers, update)
    core.check()
    return answers


def _take(answers: dict[str, Answer], update: Update) -> None:
    sequence = update.sequence
    answer = answers[sequence.request.request_id]
    if update.token is not None:
        answer.tokens.append(update.token)
    if update.score is not None:
        answer.scores.append(_plain(update.score))
    answer.prompt += [_plain(score) for score in update.prompt_scores or ()]
    answer.cached = sequence.cached_tokens or 0
    answer.reason = update.finish_reason


def _plain(score: Any) -> Score:
    logprob, rank, ids, top = score
    return (logprob, rank, tuple(ids.tolist()), tuple(top.tolist()))


def alone(llm: LLM, jobs: list[Job]) -> dict[str, Answer]:
    """Each request by itself, one after another: the truth, on an engine without a prefix cache."""
    assert not llm.core.config.enable_prefix_caching
    return {key: a for one in jobs for request in one for key, a in serve(llm, [[request]]).items()}


def assert_same(answers: dict[str, Answer], truth: dict[str, Answer], bitwise: bool = True) -> None:
    """Equal tokens, scores (bit by bit) and endings; of an aborted request as far as it came."""
    for key, answer in answers.items():
        expected = truth[key]
        cut = answer.reason is FinishReason.ABORT
        count = len(answer.tokens) if cut else len(expected.tokens)
        assert answer.tokens == expected.tokens[:count], key
        if not cut:
            assert answer.reason is expected.reason, key
        if bitwise:
            assert answer.scores == expected.scores[:count], key
            assert answer.prompt == expected.prompt or cut, key


def kinds(llm: LLM) -> dict[str, dict[str, Any]]:
    """The statistics of each cache kind by name."""
    return {kind["name"]: kind for kind in llm.core.stats()["kinds"]}
