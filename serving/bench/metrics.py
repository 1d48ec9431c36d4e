"""Percentiles, throughput and goodput from records; the one place that defines them.

Only requests that succeeded count. What a server does not tell is None, never guessed. Called by
session.py and plot.py.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxinfer.errors import InvalidRequest
from serving.bench.record import Record

PERCENTILES = (50, 90, 95, 99)
SLOS = ("ttft", "tpot", "e2el")
Slo = dict[str, float]  # limit in ms by name


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), linear between the two nearest ranks, as numpy's default."""
    if not values or not 0 <= q <= 100:
        raise ValueError(f"no percentile {q} of {len(values)} values")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def parse_slo(items: Sequence[str]) -> Slo:
    """Limits in ms from NAME:MS items, like ttft:500; InvalidRequest for anything else."""
    slo: Slo = {}
    for item in items:
        name, _, value = item.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in SLOS or name in slo or not 0 < limit < math.inf:
            raise InvalidRequest(
                f"goodput has {item!r}; write NAME:MS once for each of {', '.join(SLOS)}, like "
                "ttft:500"
            )
        slo[name] = limit
    return slo


def meets(record: Record, slo: Slo) -> bool:
    """Whether a request succeeded within all limits. One token has no TPOT, so none to miss."""
    if record.error is not None or record.ttft is None:
        return False
    found = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.e2e}
    return all(found[name] * 1e3 <= limit for name, limit in slo.items())


def summarize(records: Sequence[Record], duration: float, slo: Slo) -> dict[str, Any]:
    """All results as plain values: times in ms, rates a second, shares from 0 to 1."""
    good = [r for r in records if r.error is None]
    prompt, completion = (_total(good, name) for name in ("prompt_tokens", "completion_tokens"))
    messages = sum(len(r.arrivals) for r in good)
    rate = 1 / duration if duration > 0 else 0.0
    told = [r for r in good if r.cached_tokens is not None and r.prompt_tokens]
    cached = sum(r.cached_tokens or 0 for r in told)
    both = None if prompt is None or completion is None else prompt + completion
    return {
        "requests": len(records),
        "succeeded": len(good),
        "errors": dict(Counter(r.error for r in records if r.error).most_common()),
        "duration_s": round(duration, 4),
        "max_in_flight": max_in_flight(records),
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "cached_tokens": cached if told else None,
        "cached_share": _round(cached / sum(r.prompt_tokens or 0 for r in told)) if told else None,
        "tokens_per_message": _round(completion / messages) if completion and messages else None,
        "requests_per_s": _round(len(good) * rate),
        "input_tokens_per_s": None if prompt is None else _round(prompt * rate),
        "output_tokens_per_s": None if completion is None else _round(completion * rate),
        "total_tokens_per_s": None if both is None else _round(both * rate),
        "goodput": _goodput(records, rate, slo) if slo else None,
        "latency_ms": {name: describe(values) for name, values in latencies(good).items()},
    }


def latencies(good: Sequence[Record]) -> dict[str, list[float]]:
    """Samples in ms by name. send_delay is how late this program sent a request that was due."""
    seconds = {
        "ttft": [r.ttft for r in good if r.ttft is not None],
        "tpot": [r.tpot for r in good if r.tpot is not None],
        "itl": [gap for r in good for gap in r.itl],
        "e2el": [r.e2e for r in good],
        "send_delay": [max(0.0, r.sent - r.scheduled) for r in good],
    }
    return {name: [1e3 * value for value in values] for name, values in seconds.items()}


def describe(values: Sequence[float]) -> dict[str, float | int] | None:
    """Mean, percentiles, extremes and the number of samples; None if there is none."""
    if not values:
        return None
    out: dict[str, float | int] = {"mean": _round(statistics.fmean(values))}
    out |= {f"p{q}": _round(percentile(values, q)) for q in PERCENTILES}
    return out | {"min": _round(min(values)), "max": _round(max(values)), "count": len(values)}


def in_flight(records: Sequence[Record]) -> list[tuple[float, int]]:
    """(time in s, requests in flight from then on), sorted by time."""
    changes = sorted([(r.sent, 1) for r in records] + [(r.end, -1) for r in records])
    out, level = [], 0
    for moment, change in changes:
        level += change
        out.append((moment, level))
    return out


def max_in_flight(records: Sequence[Record]) -> int:
    return max((level for _, level in in_flight(records)), default=0)


def _goodput(records: Sequence[Record], rate: float, slo: Slo) -> dict[str, Any]:
    met = sum(meets(r, slo) for r in records)
    share = _round(met / len(records)) if records else 0.0
    return {"slo_ms": slo, "met": met, "share": share, "requests_per_s": _round(met * rate)}


def _total(records: Sequence[Record], name: str) -> int | None:
    """Sum of the server's counts, None if it left one out."""
    values = [getattr(r, name) for r in records]
    return None if None in values else sum(values)


def _round(value: float) -> float:
    return round(value, 4)
