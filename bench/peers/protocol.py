"""The one measurement that every contestant goes through: a contestant only says how to generate.

Runs in the contestant's own interpreter, so it uses the standard library alone. Prints one JSON
line. It never judges the numbers: compare.py does. Used by the scripts of this folder.

    prefill   one prompt of --prompt-len tokens, one token out; its wall time is the time to first token
    decode    B prompts of --ctx tokens, greedy, end-of-text ignored: B * (gen - 1) tokens over T(gen) - T(1)
    ready_s   process start to model loaded     first_s   the first request after that (lazy compilation)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

Generate = Callable[[list[list[int]], int], list[list[int]]]

IMPORTED_AT = time.time()
# "What is the capital of France?" in SmolLM2's chat template, and what float32 answers greedily.
QUESTION = [
    1,
    9690,
    198,
    2683,
    359,
    253,
    5356,
    5646,
    11173,
    3365,
    3511,
    308,
    34519,
    28,
    7018,
    411,
    407,
]
QUESTION += [
    19712,
    8182,
    2,
    198,
    1,
    4093,
    198,
    1780,
    314,
    260,
    3575,
    282,
    4649,
    47,
    2,
    198,
    1,
    520,
    9531,
    198,
]
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30]


def arguments(description: str | None) -> argparse.Namespace:
    """Parse the arguments that all contestants share, and keep the process to --threads cores."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="file or folder in the engine's own format")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--ctx", type=int, default=64)
    parser.add_argument("--gen", type=int, default=128)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--exact", action="store_true", help="stop unless the answer is float32's")
    parser.add_argument("--started", type=float, default=IMPORTED_AT, help="epoch of process start")
    parser.add_argument("--library", help="shared library of a compiled contestant")
    parser.add_argument("--cache", help="folder for what the engine compiles")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    return args


def random_prompts(rows: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed * 1_000_003 + length)
    return [[draw.randrange(100, 45_000) for _ in range(length)] for _ in range(rows)]


def peak_rss_mb() -> float:
    """Highest resident size of this process; VmHWM, since ru_maxrss counts the parent's too."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    import resource

    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


class Load:
    """Share of the machine's CPU time that other processes use from construction to `share()`."""

    def __init__(self) -> None:
        self.start = (time.perf_counter(), time.process_time(), self._busy())

    @staticmethod
    def _busy() -> float:
        stat = Path("/proc/stat")
        if not stat.exists():
            return 0.0
        ticks = [int(x) for x in stat.read_text().splitlines()[0].split()[1:]]
        return (sum(ticks[:8]) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")

    def share(self) -> float:
        wall, own, busy = self.start
        spent = self._busy() - busy - (time.process_time() - own)
        total = (time.perf_counter() - wall) * (os.cpu_count() or 1)
        return round(max(0.0, spent / total), 3)


def seconds(generate: Generate, prompts: list[list[int]], count: int) -> float:
    start = time.perf_counter()
    out = generate(prompts, count)
    spent = time.perf_counter() - start
    if [len(row) for row in out] != [count] * len(prompts):
        raise SystemExit(f"asked for {count} tokens a row, got {[len(row) for row in out]}")
    return spent


def measure(args: argparse.Namespace, engine: str, version: str, generate: Generate) -> None:
    """Measure a loaded engine and print the JSON line.

    `generate(prompts, count)` returns `count` new token ids a prompt: greedy, end-of-text ignored,
    nothing remembered from earlier calls.
    """
    record: dict[str, object] = {
        "engine": engine,
        "version": version,
        "dtype": args.dtype,
        "ready_s": round(time.time() - args.started, 3),
    }
    record["first_s"] = round(seconds(generate, random_prompts(1, args.prompt_len, 7), 1), 3)
    answer = [int(token) for token in generate([QUESTION], len(ANSWER))[0]]
    record["check"] = answer
    if args.exact and answer != ANSWER:
        raise SystemExit(f"{engine} {version}: wrong answer {answer}, float32 gives {ANSWER}")
    load = Load()
    if args.reps:
        prefill = [
            seconds(generate, random_prompts(1, args.prompt_len, 100 + i), 1)
            for i in range(args.reps)
        ]
        record["ttft_s"] = statistics.median(prefill)
        record["prefill_tok_s"] = args.prompt_len / statistics.median(prefill)
        record["decode_tok_s"] = {
            str(rows): decode_rate(generate, rows, args.ctx, args.gen, args.reps)
            for rows in args.batches
        }
    record |= {"peak_rss_mb": round(peak_rss_mb(), 1), "elsewhere": load.share()}
    print(json.dumps(record), flush=True)


def decode_rate(generate: Generate, rows: int, ctx: int, gen: int, reps: int) -> float:
    """Aggregate decoded tokens a second over `rows` rows: median of the repetitions."""
    generate(random_prompts(rows, ctx, 50), 4)  # this batch size's buffers and executables
    rates = []
    for i in range(reps):
        prompts = random_prompts(rows, ctx, 200 + i)
        first = seconds(generate, prompts, 1)
        spent = seconds(generate, prompts, gen) - first
        if spent <= 0:
            raise SystemExit(
                f"{gen} tokens took no longer than one: machine too busy, or --gen too small"
            )
        rates.append(rows * (gen - 1) / spent)
    return statistics.median(rates)
