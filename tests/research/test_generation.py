"""generate gives the tokens and log-probabilities of LLM, for every kind of sampling parameter."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.errors import InvalidRequest
from jaxinfer.llm import LLM
from jaxinfer.loading import LoadedModel
from jaxinfer.research import extend, generate, prefill
from jaxinfer.types import SamplingParams
from tests.research.hand import assert_close, some_tokens

PARAMS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.3, "seed": 5},
    "filters": {"temperature": 3.0, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "seed": 2**63 - 1},
    "penalties": {
        "temperature": 2.0,
        "seed": 9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 1.5,
    },
    "bias": {"temperature": 1.0, "seed": 3, "logit_bias": {7: 50.0, 9: 49.5, 11: -100.0}},
    "allowed": {"temperature": 1.0, "seed": 4, "allowed_token_ids": [1, 2, 3, 4, 5, 6]},
    "min_tokens": {
        "temperature": 1.0,
        "seed": 6,
        "allowed_token_ids": [1, 2, 3],
        "stop_token_ids": [1, 2],
        "min_tokens": 5,
    },
    "stop": {"temperature": 1.0, "seed": 6, "allowed_token_ids": [1, 2, 3], "stop_token_ids": [2]},
}


@pytest.mark.parametrize("kind", PARAMS)
def test_tokens_equal_those_of_service(model: LoadedModel, served: LLM, kind: str) -> None:
    prompt = some_tokens(45, seed=11)
    params = SamplingParams(max_tokens=12, logprobs=0, **PARAMS[kind])
    expected = served.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    state, _ = prefill(model, prompt[:20])
    state, _ = extend(model, state, prompt[20:])
    end, got = generate(model, state, 12, params)
    assert got.tokens == expected.token_ids
    assert str(got.finish_reason) == expected.finish_reason
    assert expected.logprobs is not None
    entries = zip(expected.logprobs, got.tokens, strict=True)
    assert_close(got.logprobs, [entry[token].logprob for entry, token in entries])
    assert end.tokens.tolist() == prompt + got.tokens and state.length == 45


def test_the_state_goes_on_where_generation_ended(model: LoadedModel) -> None:
    state, _ = prefill(model, some_tokens(30, seed=12))
    whole, all_at_once = generate(model, state, 8)
    half, first = generate(model, state, 4)
    again, second = generate(model, half, 4)
    assert first.tokens + second.tokens == all_at_once.tokens
    np.testing.assert_array_equal(again.logits, whole.logits)


def test_length_dependent_rope_as_in_service(dynamic: LoadedModel, served_dynamic: LLM) -> None:
    prompt, params = some_tokens(90, seed=13), SamplingParams(temperature=0.0, max_tokens=8)
    expected = served_dynamic.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    state, _ = prefill(dynamic, prompt)
    assert generate(dynamic, state, 8)[1].tokens == expected.token_ids


def test_logits_that_are_not_finite_are_named(model: LoadedModel) -> None:
    state, _ = prefill(model, [1, 2, 3], interventions={"final_norm": np.nan})
    with pytest.raises(InvalidRequest, match="position 3 are not finite"):
        generate(model, state, 2)


@pytest.mark.parametrize(
    ("count", "options", "words"),
    [
        (0, {}, "max_tokens=0"),
        (510, {}, r"allowed range \[0, 509\]"),
        (4, {"n": 2}, "n=2 is not for research.generate"),
        (4, {"stop": "x"}, "stop="),
        (4, {"prompt_logprobs": 1}, "prompt_logprobs=1"),
        (4, {"stop_token_ids": [999]}, "999"),
        (4, {"min_tokens": 9}, "min_tokens=9 exceeds max_tokens=4"),
    ],
)
def test_bad_parameters_are_refused(
    model: LoadedModel, count: int, options: dict, words: str
) -> None:
    state, _ = prefill(model, [1, 2, 3])
    params = SamplingParams(**{"max_tokens": None, **options})
    with pytest.raises(InvalidRequest, match=words):
        generate(model, state, count, params)
