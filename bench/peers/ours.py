"""Contestant: jaxinfer through its offline API. --model is any model reference."""

from __future__ import annotations

from protocol import arguments, measure

import jaxinfer
from jaxinfer import LLM, SamplingParams

args = arguments(__doc__)
llm = LLM(
    args.model,
    progress=False,
    dtype=args.dtype,
    max_model_len=max(args.prompt_len, args.ctx + args.gen) + 64,
    enable_prefix_caching=False,
    compile_cache=args.cache,
)


def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=count, detokenize=False)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [result.outputs[0].token_ids for result in results]


measure(args, "jaxinfer", jaxinfer.__version__, generate)
