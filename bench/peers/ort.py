"""Contestant: onnxruntime-genai. --model is a folder that its model builder wrote."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime_genai as genai  # pyright: ignore[reportMissingImports]
from protocol import arguments, measure

args = arguments(__doc__)
config = genai.Config(args.model)
threads = {"intra_op_num_threads": args.threads}
config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
model = genai.Model(config)


def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
    length = len(prompts[0])
    params = genai.GeneratorParams(model)
    # min_length = max_length keeps it from ending at end-of-text.
    params.set_search_options(
        max_length=length + count,
        min_length=length + count,
        batch_size=len(prompts),
        do_sample=False,
    )
    generator = genai.Generator(model, params)
    generator.append_tokens(np.array(prompts, dtype=np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [list(generator.get_sequence(i))[length:] for i in range(len(prompts))]


measure(args, "onnxruntime-genai", genai.__version__, generate)
