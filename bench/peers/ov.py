"""Contestant: OpenVINO GenAI with its continuous-batching pipeline. --model is a GGUF file."""

from __future__ import annotations

import numpy as np
import openvino  # pyright: ignore[reportMissingImports]
import openvino_genai as genai  # pyright: ignore[reportMissingImports]
from protocol import arguments, measure

args = arguments(__doc__)
scheduler = genai.SchedulerConfig()
scheduler.cache_size = 1  # GB; the default would take what the machine has
scheduler.max_num_seqs = 64
scheduler.max_num_batched_tokens = 2048
scheduler.dynamic_split_fuse = False
scheduler.enable_prefix_caching = False
precision = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": args.threads}
pipeline = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", precision)


def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = count
    config.ignore_eos = True
    config.do_sample = False
    tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
    results = pipeline.generate(tensors, [config] * len(prompts))
    return [list(result.m_generation_ids[0]) for result in results]


measure(args, "openvino-genai", genai.__version__, generate)
