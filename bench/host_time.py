"""Host time of a decode round with a null device: plan, pack, unpack and commit, in milliseconds.

    .venv/bin/python bench/host_time.py [--rows 256] [--rounds 400] [--json]

The device's answer is a ready buffer of tokens, so what remains is what the host costs a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxinfer.cache.spec import CacheSpec, Field, Scope
from jaxinfer.config import EngineConfig
from jaxinfer.scheduler import LoadPlan, Scheduler, StepPlan
from jaxinfer.step.forward import unpack_result
from jaxinfer.step.pack import pack_step
from jaxinfer.types import MAX_LOGPROBS, Request, SamplingParams

PARTS = ("plan", "pack", "commit")


def scheduler_of(rows: int, context: int, rounds: int, pages_of: int) -> Scheduler:
    """A scheduler in which `rows` sequences of `context` tokens decode, past their prefill."""
    config = EngineConfig(max_num_seqs=rows, max_num_batched_tokens=rows + 8192)
    fields = (Field("k", (8, 128), "bfloat16"), Field("v", (8, 128), "bfloat16"))
    spec = CacheSpec("full", Scope.TOKEN, tuple(range(32)), fields)
    longest = context + rounds + 64
    pages = rows * -(-longest // config.page_size) + 1
    scheduler = Scheduler(config, (spec,), (pages,), max(longest, pages_of))
    params = SamplingParams(max_tokens=rounds + 32, ignore_eos=True)
    for i in range(rows):
        prompt = tuple((i + 7 * j) % 32000 for j in range(context))
        ids = frozenset({32000, 32001})
        scheduler.add(Request(f"r{i}", prompt, params, ids, (), params.max_tokens or 1, i))
    return scheduler


def answer(plan: StepPlan) -> np.ndarray:
    result = np.zeros(plan.shape.sample_rows * (3 + 2 * MAX_LOGPROBS), np.int32)
    result[: plan.shape.sample_rows] = 17
    return result


def round_trip(scheduler: Scheduler, times: dict[str, list[float]] | None) -> int:
    """One round; returns its decode rows."""
    marks = [time.perf_counter()]
    plan = scheduler.plan()
    assert plan is not None and not isinstance(plan, LoadPlan)
    marks.append(time.perf_counter())
    pack_step(plan, scheduler.layout)
    marks.append(time.perf_counter())
    result = answer(plan)
    start = time.perf_counter()
    scheduler.commit(plan, unpack_result(result, plan.shape))
    if times is not None:
        times["plan"].append(marks[1] - marks[0])
        times["pack"].append(marks[2] - marks[1])
        times["commit"].append(time.perf_counter() - start)
    return len(plan.decode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of each row")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    scheduler = scheduler_of(args.rows, args.context, args.rounds, args.max_model_len)
    while round_trip(scheduler, None) < args.rows:
        pass
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    gc.collect()
    for _ in range(args.rounds - 8):
        assert round_trip(scheduler, times) == args.rows, "a row ended or waited"
    scheduler.check()
    times["round"] = [sum(parts) for parts in zip(*(times[p] for p in PARTS), strict=True)]
    report = {
        part: {
            "median_ms": round(statistics.median(values) * 1e3, 4),
            "p95_ms": round(sorted(values)[int(len(values) * 0.95)] * 1e3, 4),
        }
        for part, values in times.items()
    }
    if args.json:
        print(json.dumps({"rows": args.rows, "rounds": args.rounds, **report}))
        return
    table = Table(title=f"host time of a decode round, {args.rows} rows, null device")
    for column in ("part", "median ms", "p95 ms"):
        table.add_column(column, justify="right")
    for part, row in report.items():
        table.add_row(part, str(row["median_ms"]), str(row["p95_ms"]))
    Console().print(table)


if __name__ == "__main__":
    main()
