"""Bad clients do not hurt good ones: waves of clients of which a third leaves and a tenth sends nonsense.

The small wave runs on TINY in this process, where the core can check its invariants; the full one of 300
clients on the demo model behind a real process (marks: slow, demo).
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest

from tests.integration.processes import Served
from tests.serving import faces
from tests.serving.live import LiveServer
from tests.serving.wave import FACES, alone, behave, rss, settled, wave

GROWTH = 64.0  # MiB that a second wave like the first may add


async def test_a_wave_of_clients(server: LiveServer):
    prompts = ["hello", [1, 2, 3], "the hell in it", list(range(40, 90)), "x" * 60, "Grüße 🙂"]
    async with faces.asking(server.url, server.target, server.engine) as asker:
        asks = await alone(asker, prompts, temperature=0.0, max_tokens=60, ignore_eos=True)
        memory = []
        for seed in range(3):  # the first two warm up what a process keeps
            assert await wave(asker, asks, 60, seed, span=2.0) > 0
            await settled(asker.http)
            stats = server.settle()
            assert stats["active_requests"] == stats["running"] == stats["waiting"] == 0
            assert [kind["protected"] for kind in stats["kinds"]] == [0] * len(stats["kinds"])
            gc.collect()
            memory.append(rss(os.getpid()))
        assert memory[2] - memory[1] < GROWTH, memory
        for face in FACES:
            for ask in asks:
                await behave(asker, ask, face)


@pytest.mark.slow
@pytest.mark.demo
async def test_300_clients_of_the_demo_model(demo_model: Path, tmp_path: Path):
    served = Served(demo_model, tmp_path / "server.log", "--max-model-len", "512")
    pid = served.popen.pid
    prompts = [
        "The capital of France is", "def fibonacci(n):", "Once upon a time", "Grüße aus",
        "The three laws of thermodynamics are", [1, 2, 3, 4, 5], "import numpy as np\n\n",
        "In the year 1969, " * 8, "Dear Sir or Madam,",
    ]  # fmt: skip
    try:
        served.wait_ready(300)
        async with faces.asking(served.url, served.target) as asker:
            asks = await alone(asker, prompts, temperature=0.0, max_tokens=48, ignore_eos=True)
            memory = [rss(pid)]
            for seed in range(3):
                start = time.monotonic()
                probes = await wave(asker, asks, 300, seed, span=30.0)
                await settled(asker.http, 30.0)
                memory.append(rss(pid))
                print(f"wave {seed}: {time.monotonic() - start:.1f} s, {probes} probes")
            print("MiB before and after each wave:", [round(m) for m in memory])
            assert memory[3] - memory[2] < GROWTH, memory
            for face in FACES:
                for ask in asks:
                    await behave(asker, ask, face)
        served.signal()
        assert served.wait(40) == 0
        assert "Traceback" not in served.output()
    finally:
        served.close()
