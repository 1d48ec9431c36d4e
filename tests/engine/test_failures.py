"""A step that fails ends its own requests with an error; the others and the next ones never notice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.errors import JaxinferError
from jaxinfer.loading import LoadedModel
from jaxinfer.scheduler import loads
from serving.present import output_json
from tests.engine.conftest import SMALL
from tests.engine.requests import GREEDY, PROMPT, ask, ids, tokens


class Failing:
    """Stands in for core.executables: the call number `at` of `kind` raises."""

    def __init__(self, core: Any, kind: str, at: int, error: Exception) -> None:
        self._real, self._kind, self._error = core.executables, kind, error
        self._left = at
        core.executables = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def step(self, shape: Any) -> Any:
        return self._wrap("step", self._real.step(shape))

    def load(self) -> Any:
        return self._wrap("load", self._real.load())

    def _wrap(self, kind: str, run: Any) -> Any:
        def call(*args: Any) -> Any:
            if kind == self._kind:
                self._left -= 1
                if self._left == 0:
                    raise self._error
            return run(*args)

        return call


@pytest.fixture(scope="module")
def engines(tiny_model: LoadedModel) -> dict[bool, LLM]:
    """By overlap. They outlive every failure that follows."""
    return {overlap: LLM(tiny_model, **SMALL, overlap=overlap) for overlap in (True, False)}


@pytest.fixture(params=[True, False], ids=["overlap", "no overlap"])
def injected(engines: dict[bool, LLM], request: pytest.FixtureRequest) -> Iterator[LLM]:
    core = engines[request.param].core
    core.scheduler.clear_prefix_cache()
    real = core.executables
    yield engines[request.param]
    core.executables = real


def failure() -> Exception:
    return jax.errors.JaxRuntimeError("INTERNAL: injected")


@pytest.mark.parametrize(("kind", "at"), [("step", 1), ("step", 4), ("load", 1)])
def test_a_failing_executable(injected, llm, kind, at, monkeypatch):
    """Six requests on four slots: those that wait give their solo tokens after the failure."""
    # So little that a step carries only a part of a penalty's prompt, and the rest comes before it.
    monkeypatch.setattr(loads, "LOAD_ENTRIES", 8)
    params = [
        SamplingParams(
            max_tokens=9, repetition_penalty=1.2 if kind == "load" and i < 2 else 1.0, **GREEDY
        )
        for i in range(6)
    ]
    prompts = [{"prompt_token_ids": tokens(9 + i, seed=i)} for i in range(6)]
    failed = injected.core.stats()["failed_steps"]
    Failing(injected.core, kind, at, failure())
    outputs = injected.generate(prompts, params, use_tqdm=False)
    reasons = [o.outputs[0].finish_reason for o in outputs]
    assert "error" in reasons and reasons[4:] == ["length", "length"]
    if kind == "load":
        assert reasons == ["error"] + ["length"] * 5  # only the slot that was being loaded
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        if output.outputs[0].finish_reason == "error":
            assert "step failed" in (output.error or "")
        else:
            assert ids(output) == ids(llm.generate(prompt, one, use_tqdm=False)[0])
    injected.core.check()
    assert injected.core.stats()["failed_steps"] == failed + 1
    assert ids(ask(injected, PROMPT, max_tokens=5, **GREEDY)) == ids(
        ask(llm, PROMPT, max_tokens=5, **GREEDY)
    )


def test_what_python_raises_comes_out_and_the_next_call_works(injected, llm):
    """An interrupt, or a fault in host code: generate() raises it and leaves nothing behind."""
    real = injected.core.executables
    for error in (KeyboardInterrupt(), TypeError("injected")):
        Failing(injected.core, "step", 2, error)  # type: ignore[arg-type]
        with pytest.raises(type(error)):
            injected.generate([tokens(20)] * 6, SamplingParams(max_tokens=9), use_tqdm=False)
        injected.core.executables = real
        assert not injected.core.has_work()
        injected.core.check()
        assert ids(ask(injected, PROMPT, max_tokens=5, **GREEDY)) == ids(
            ask(llm, PROMPT, max_tokens=5, **GREEDY)
        )


def test_reset_ends_everything(injected):
    core = injected.core
    inputs = injected.model.inputs(core)
    for i in range(6):
        params = SamplingParams(max_tokens=30, **GREEDY)
        (request,) = inputs.requests(f"r{i}", inputs.prompt(tokens(9, i)), params)
        core.submit(request)
    for _ in range(4):
        core.step()
    old = jax.tree.leaves(core.state)
    updates = core.reset()
    assert [u.sequence.request.request_id for u in updates] == [f"r{i}" for i in range(6)]
    assert all(u.finish_reason == "error" for u in updates)
    assert all(array.is_deleted() for array in old), "memory may not hold two states"
    assert not core.has_work()
    core.check()


def test_scores_of_an_expired_request_do_not_reach_the_next_of_its_id(injected, monkeypatch):
    core = injected.core
    inputs = injected.model.inputs(core)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)

    def submit(timeout: float | None) -> None:
        (request,) = inputs.requests("same", inputs.prompt(tokens(100)), params, timeout=timeout)
        core.submit(request)

    submit(timeout=1000.0)
    while "same" not in core._scores:  # a part of the prompt is scored
        core.step()
    monkeypatch.setattr(core.scheduler, "_clock", lambda: time.monotonic() + 2000.0)
    assert [u.finish_reason for u in core.step()] == ["abort"]
    submit(timeout=None)
    updates = []
    while core.has_work():
        updates += core.step()
    assert [len(u.prompt_scores or []) for u in updates] == [99]
    assert not core._scores


def test_scores_are_given_whole_or_not_at_all(injected):
    Failing(injected.core, "step", 2, failure())
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    output = ask(injected, tokens(100), max_tokens=1, prompt_logprobs=0)
    assert output.error is not None and output.prompt_logprobs is None
    assert output_json(output, params, 0.0)["prompt_logprobs"] is None
    Failing(injected.core, "step", 2, failure())
    with pytest.raises(JaxinferError, match="could not be scored.*step failed"):
        injected.score({"prompt_token_ids": tokens(100, 1)})


def test_host_time_is_without_compilation(tiny_model):
    llm = LLM(tiny_model, **SMALL)
    ask(llm, PROMPT, max_tokens=5, **GREEDY)
    stats = llm.core.stats()
    assert stats["compile_seconds"] > 0.0
    assert 0.0 < stats["host_seconds"] < 0.5 * stats["compile_seconds"]
