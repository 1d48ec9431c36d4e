"""Requests that the engine's tests send, and short ways to send them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.types import RequestOutput

PROMPT = [5, 5, 5, 9]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}

Item = tuple[list[int], SamplingParams]


def mixed_requests(count: int, vocab: int, seed: int = 0, longest: int = 90) -> list[Item]:
    """Prompts of many lengths (half share a prefix) with seeds, penalties, biases and stops."""
    r = random.Random(seed)
    shared = [r.randrange(5, vocab) for _ in range(longest // 2)]
    items = []
    for i in range(count):
        own = [r.randrange(5, vocab) for _ in range(r.choice([1, 3, 15, 16, 17, 33, longest // 2]))]
        prompt = shared[: r.choice([16, 20, 32, len(shared)])] + own if i % 2 else own
        items.append((prompt, _params(r, i, vocab)))
    return items


def _params(r: random.Random, i: int, vocab: int) -> SamplingParams:
    options: dict = {"max_tokens": r.choice([1, 2, 8, 24, 40]), "temperature": 0.0}
    if i % 3:
        options |= {"temperature": r.choice([0.7, 1.0, 1.5]), "seed": r.randrange(2**62)}
    extra = [
        {},
        {"top_k": 20, "top_p": 0.9},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"presence_penalty": 0.7, "min_p": 0.05},
        {"logit_bias": {7: 3.0, 11: -100.0}},
        {"allowed_token_ids": list(range(10, 40))},
        {"stop_token_ids": [r.randrange(vocab) for _ in range(8)], "min_tokens": 3},
        {"logprobs": 3},
    ]
    chosen = extra[i % len(extra)]
    if "min_tokens" in chosen:
        options["max_tokens"] = max(options["max_tokens"], 4)
    return SamplingParams(**(options | chosen), ignore_eos=i % 5 == 0)


def run(llm: LLM, items: list[Item]) -> list[list[int]]:
    """Token ids of every request."""
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in items]
    outputs = llm.generate(prompts, [params for _, params in items], use_tqdm=False)
    llm.core.check()
    return [ids(output) for output in outputs]


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def ask(llm: LLM, prompt: Any, **params: Any) -> RequestOutput:
    if isinstance(prompt, list):
        prompt = {"prompt_token_ids": prompt}
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]


def ids(output: RequestOutput, index: int = 0) -> list[int]:
    return output.outputs[index].token_ids
