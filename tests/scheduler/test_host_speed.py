"""A decode round costs the host little: 256 rows well under 0.7 ms on an idle core.

Run this file with -s to see the figures. The bound is loose, for busy machines.
"""

from __future__ import annotations

import time

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.scheduler import Scheduler, StepOutput, StepPlan
from tests.scheduler.null_model import FULL, request

ROWS, PAGE, LENGTH = 256, 16, 2048


def test_decode_round_of_256_rows():
    config = EngineConfig(page_size=PAGE, max_num_seqs=ROWS, max_num_batched_tokens=8192)
    scheduler = Scheduler(config, (FULL,), (ROWS * LENGTH // PAGE + 1,), LENGTH)
    for i in range(ROWS):  # lengths differ, so that every round has rows that cross a page
        scheduler.add(request(f"r{i}", [i] * (100 + i % PAGE), 1900, stop_ids=[50_000]))
    rounds: list[tuple[float, float]] = []
    while len(rounds) < 160:
        t0 = time.perf_counter()
        plan = scheduler.plan()
        t1 = time.perf_counter()
        assert isinstance(plan, StepPlan)
        output = StepOutput(np.ones(plan.shape.sample_rows, np.int32))
        t2 = time.perf_counter()
        scheduler.commit(plan, output)
        if len(plan.decode) == ROWS:
            rounds.append((t1 - t0, time.perf_counter() - t2))
    plan_ms, commit_ms = (np.percentile(part, 25) * 1e3 for part in zip(*rounds, strict=True))
    print(f"\n{ROWS} rows: plan {plan_ms:.3f} ms, commit {commit_ms:.3f} ms")
    assert plan_ms + commit_ms < 2.0
    scheduler.check()
