"""What the commands print: strict JSON on stdout, and text for people.

JSON never holds NaN or Infinity. Called by the commands; imports no JAX.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxinfer.types import CompletionOutput, Logprob, RequestOutput, SamplingParams


def print_json(value: Any) -> None:
    """One JSON document on stdout; ValueError for numbers that strict JSON does not have."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def output_json(output: RequestOutput, params: SamplingParams, load_s: float) -> dict[str, Any]:
    """A finished request as plain values. Times in seconds; tokens_per_s counts generated tokens."""
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [_completion(o, params.logprobs or 0) for o in output.outputs],
        "prompt_logprobs": _logprobs(
            output.prompt_token_ids, output.prompt_logprobs, params.prompt_logprobs or 0
        ),
        "num_cached_tokens": output.num_cached_tokens,
        "timing": _timing(output, load_s),
        "error": output.error,
    }


def _completion(output: CompletionOutput, count: int) -> dict[str, Any]:
    return {
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "cumulative_logprob": output.cumulative_logprob,
        "logprobs": _logprobs(output.token_ids, output.logprobs, count),
    }


def _logprobs(
    ids: list[int], entries: Sequence[dict[int, Logprob] | None] | None, count: int
) -> list[dict[str, Any] | None] | None:
    """One entry a token: the chosen one, and `top`, the `count` most likely ones by rank."""
    if entries is None:
        return None
    out: list[dict[str, Any] | None] = []
    for token, entry in zip(ids, entries, strict=True):
        if entry is None:  # nothing comes before a prompt's first token
            out.append(None)
            continue
        ranked = sorted(entry.items(), key=lambda item: (-item[1].logprob, item[1].rank or 0))
        # The chosen token is in `entry` even where it is not among the most likely ones.
        top = [_token(t, p) for t, p in ranked[:count]]
        out.append(_token(token, entry[token]) | {"top": top})
    return out


def _token(token: int, logprob: Logprob) -> dict[str, Any]:
    return {
        "token_id": token,
        "token": logprob.decoded_token,
        "logprob": logprob.logprob,
        "rank": logprob.rank,
    }


def _timing(output: RequestOutput, load_s: float) -> dict[str, float | None]:
    metrics = output.metrics
    start, first, end = metrics.arrival_time, metrics.first_token_time, metrics.finished_time
    total = None if end is None else end - start
    tokens = sum(len(o.token_ids) for o in output.outputs)
    return {
        "load_s": round(load_s, 4),
        "ttft_s": None if first is None else round(first - start, 4),
        "total_s": None if total is None else round(total, 4),
        "tokens_per_s": round(tokens / total, 2) if total else None,
    }
