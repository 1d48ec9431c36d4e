"""Names, help texts and buckets of the metrics page.

The `vllm:` names and buckets are those that dashboards, autoscalers and routers made for vLLM ask for;
what only this engine has is under `jaxinfer:`. Data only; read by serving.metrics.
"""

from __future__ import annotations

TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
PER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0,
)  # fmt: skip
LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_TIME = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip

# Histograms that are there from the start: name -> (buckets, help).
HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "vllm:time_to_first_token_seconds": (TTFT, "From arrival to the first token."),
    "vllm:inter_token_latency_seconds": (PER_TOKEN, "Between two tokens of one output."),
    "vllm:time_per_output_token_seconds": (PER_TOKEN, "inter_token_latency_seconds' older name."),
    "vllm:request_time_per_output_token_seconds": (
        PER_TOKEN,
        "Decode time of a request by its tokens after the first, longest output.",
    ),
    "vllm:e2e_request_latency_seconds": (LATENCY, "From arrival to the end of a request."),
    "vllm:request_queue_time_seconds": (LATENCY, "From arrival to the first step."),
    "vllm:request_prefill_time_seconds": (LATENCY, "From the first step to the first token."),
    "vllm:request_decode_time_seconds": (LATENCY, "From the first token to the end."),
    "vllm:request_inference_time_seconds": (LATENCY, "From the first step to the end."),
    "vllm:request_params_n": ((1, 2, 5, 10, 20), "The n of requests."),
    "vllm:iteration_tokens_total": (ITERATION_TOKENS, "Tokens that a step computes."),
    "jaxinfer:step_time_seconds": (STEP_TIME, "Time a step takes, not counting overlap."),
}

# Histograms whose buckets reach up to max_model_len, so they begin when the model is loaded.
TOKEN_HISTOGRAMS: dict[str, str] = {
    "vllm:request_prompt_tokens": "Prompt tokens of a request.",
    "vllm:request_generation_tokens": "Output tokens of a request, all its outputs together.",
    "vllm:request_max_num_generation_tokens": "Tokens of a request's longest output.",
    "vllm:request_params_max_tokens": "The max_tokens of requests that give one.",
    "vllm:request_prefill_kv_computed_tokens": "Prompt tokens that the prefix cache did not spare.",
}

# Counters that the engine keeps: key of Engine.stats() -> (name, help).
ENGINE_COUNTERS: dict[str, tuple[str, str]] = {
    "steps": ("jaxinfer:steps", "Steps dispatched."),
    "load_steps": ("jaxinfer:load_steps", "Dispatches that only load sampling state."),
    "dispatches": ("jaxinfer:dispatches", "Executables started."),
    "copies_in": ("jaxinfer:copies_in", "Copies from host to device."),
    "copies_out": ("jaxinfer:copies_out", "Copies from device to host."),
    "tokens_fed": ("jaxinfer:tokens_fed", "Tokens computed, repeated ones included."),
    "token_slots": ("jaxinfer:token_slots", "Tokens that the steps' shapes had room for."),
    "tokens_sampled": ("jaxinfer:tokens_sampled", "Tokens drawn, dropped ones included."),
    "failed_steps": ("jaxinfer:failed_steps", "Steps that raised an error."),
    "host_seconds": ("jaxinfer:host_seconds", "Host time spent on planning and committing steps."),
    "compiles": ("jaxinfer:compiles", "Executables compiled or read from the cache."),
    "compile_seconds": ("jaxinfer:compile_seconds", "Time spent on that."),
}

# Counters of the scheduler: key of SchedulerCounters.read() -> (names, help).
SCHEDULER: dict[str, tuple[tuple[str, ...], str]] = {
    "preemptions": (("vllm:num_preemptions",), "Times a sequence lost its pages to another."),
    "prefix_queries": (
        ("vllm:prefix_cache_queries", "jaxinfer:prefix_query_tokens"),
        "Prompt tokens looked up in the prefix cache.",
    ),
    "prefix_hits": (
        ("vllm:prefix_cache_hits", "jaxinfer:prefix_hit_tokens"),
        "Prompt tokens found in the prefix cache.",
    ),
}

# Counters of each cache kind: key of SchedulerCounters.kinds() -> (name, help).
KINDS: dict[str, tuple[str, str]] = {
    "published": ("jaxinfer:cache_published", "Pages or states that came into the prefix tree."),
    "evicted": ("jaxinfer:cache_evicted", "Pages or states that left it to make room."),
    "thinned": ("jaxinfer:cache_thinned", "States that left it as their path had too many."),
    "duplicates": (
        "jaxinfer:cache_duplicates",
        "Pages that were computed, but were there already.",
    ),
    "shortened": ("jaxinfer:cache_shortened_tokens", "Tokens by which this kind alone cut hits."),
}


def token_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `most`."""
    digits = len(str(most))
    return tuple(m * 10**e for e in range(digits) for m in (1, 2, 5) if m * 10**e <= most)
