"""Every bad field is refused by name and value before it reaches the step loop, and the engine goes on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.errors import InvalidRequest
from tests import checkpoints
from tests.engine.requests import GREEDY, PROMPT, ask, ids

BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n=0"),
    ({"n": 100000}, "n=100000"),
    ({"best_of": 5}, "best_of=5"),
    ({"temperature": -0.1}, "temperature=-0.1"),
    ({"temperature": math.nan}, "temperature=nan"),
    ({"temperature": math.inf}, "temperature=inf"),
    ({"temperature": "hot"}, "temperature='hot'"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": True}, "temperature=True"),
    ({"top_k": -2}, "top_k=-2"),
    ({"top_k": 1.5}, "top_k=1.5"),
    ({"top_p": 1.1}, "top_p=1.1"),
    ({"top_p": math.nan}, "top_p=nan"),
    ({"min_p": -1}, "min_p=-1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
    ({"presence_penalty": 3}, "presence_penalty=3"),
    ({"frequency_penalty": -math.inf}, "frequency_penalty=-inf"),
    ({"max_tokens": -1}, "max_tokens=-1"),
    ({"max_tokens": 10**18}, f"max_tokens={10**18}"),
    ({"max_tokens": 1000}, "max_tokens=1000"),
    ({"min_tokens": -1}, "min_tokens=-1"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9"),
    ({"seed": -2}, "seed=-2"),
    ({"seed": 2**63}, f"seed={2**63}"),
    ({"logprobs": 21}, "logprobs=21"),
    ({"logprobs": -1}, "logprobs=-1"),
    ({"prompt_logprobs": 513}, "prompt_logprobs=513"),
    ({"logit_bias": {"99999": 5}}, "logit_bias.*99999"),
    ({"logit_bias": {"-1": 5}}, "logit_bias.*-1"),
    ({"logit_bias": {"abc": 1}}, "logit_bias.*'abc'"),
    ({"logit_bias": {1.5: 1}}, "logit_bias.*1.5"),
    ({"logit_bias": {3: math.nan}}, r"logit_bias\[3\]=nan"),
    ({"logit_bias": {3: 1e9}}, r"logit_bias\[3\]=1000000000"),
    ({"logit_bias": [3, 4]}, r"logit_bias=\[3, 4\]"),
    ({"allowed_token_ids": []}, r"allowed_token_ids=\[\]"),
    ({"allowed_token_ids": [288]}, "allowed_token_ids.*288"),
    ({"allowed_token_ids": 5}, "allowed_token_ids=5"),
    ({"allowed_token_ids": [checkpoints.EOS], "min_tokens": 1}, "min_tokens=1.*allowed_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.*-1"),
    ({"stop_token_ids": "abc"}, "stop_token_ids='abc'"),
    ({"stop_token_ids": [1.0]}, "stop_token_ids=1.0"),
    ({"stop": ["a"] * 10000}, "stop has 10000"),
    ({"stop": "x" * 1_000_000}, "stop="),
    ({"stop": ""}, "stop=''"),
    ({"stop": 5}, "stop=5"),
    ({"stop": "a", "detokenize": False}, "detokenize"),
    ({"ignore_eos": "yes"}, "ignore_eos='yes'"),
]  # fmt: skip


@pytest.mark.parametrize(("params", "message"), BAD_PARAMS, ids=lambda x: str(x)[:40])
def test_bad_parameters_are_named(llm, params, message):
    """R-SMP-04, R-LPB-02, R-SRV-09 and the rest: the field and its value; the engine goes on."""
    with pytest.raises(InvalidRequest, match=message):
        ask(llm, PROMPT, **params)
    assert not llm.core.has_work()


def test_the_next_request_works(llm):
    assert len(ids(ask(llm, PROMPT, max_tokens=2, **GREEDY))) == 2


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [5, 288]}, r"prompt_token_ids\[1\]=288"),
        ({"prompt_token_ids": [-1]}, r"prompt_token_ids\[0\]=-1"),
        ({"prompt_token_ids": [True]}, r"prompt_token_ids\[0\]=True"),
        ({"prompt_token_ids": ["a"]}, r"prompt_token_ids\[0\]='a'"),
        ({"prompt_token_ids": 5}, r'prompt\["prompt_token_ids"\]=5 must be a list of token ids'),
        ({"prompt_token_ids": "abc"}, r'prompt\["prompt_token_ids"\]=\'abc\' must be a list'),
        ({"prompt": 5}, r'prompt\["prompt"\]=5 must be text'),
        ({"prompt_token_ids": np.array([1.0])}, r"prompt_token_ids\[0\]=1.0"),
        ({"prompt_token_ids": np.array([True])}, r"prompt_token_ids\[0\]=True"),
        ({"prompt_token_ids": [np.bool_(True)]}, r"prompt_token_ids\[0\]=np.True_"),
        ({"prompt_token_ids": np.array(5)}, r"prompt_token_ids.*array\(5\)"),
        (np.array(5), r"prompts=array\(5\)"),
        ({"prompt": None}, "neither"),
        ({"prompt": "a", "image": 1}, "image"),
        (5, "prompts=5"),
        ([None], "prompt=None"),
        ([[1, 2], [2.5]], r"prompt_token_ids\[0\]=2.5"),
    ],
    ids=str,
)
def test_bad_prompts_are_named(llm, prompt, message):
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    assert not llm.core.has_work()


def test_bad_arguments_are_named(llm):
    for params in ({"temperature": 0}, [SamplingParams(), None], "greedy"):
        with pytest.raises(InvalidRequest, match="sampling_params="):
            llm.generate(["a", "b"], params, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="1 entries for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="priority='high'"):
        llm.generate(["a"], SamplingParams(), use_tqdm=False, priority=["high"])
    with pytest.raises(InvalidRequest, match="priority has 1 entries"):
        llm.generate(["a", "b"], SamplingParams(), use_tqdm=False, priority=[1])
    with pytest.raises(InvalidRequest, match="continuations has 1 entries"):
        llm.score(["a", "b"], ["c"])
    assert llm.generate([], SamplingParams(), use_tqdm=False) == []


@pytest.mark.parametrize("timeout", [0, -1, math.nan, math.inf, 10**400, True, "1"], ids=str)
def test_a_timeout_that_is_no_time_is_refused(llm, timeout):
    with pytest.raises(InvalidRequest, match="timeout="):
        llm._inputs.requests("a", llm.prompt("a"), SamplingParams(), timeout=timeout)


def test_chat_arguments_that_clash(llm):
    messages = [{"role": "assistant", "content": "It is"}]
    with pytest.raises(InvalidRequest, match="needs add_generation_prompt=False"):
        llm.chat(messages, continue_final_message=True)
    for name in ("messages", "add_generation_prompt", "continue_final_message"):
        with pytest.raises(InvalidRequest, match=f"chat_template_kwargs may not set .*{name}"):
            llm.chat(messages, chat_template_kwargs={name: True})
