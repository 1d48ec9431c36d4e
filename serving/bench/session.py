"""One measurement from settings to results: asks the server, makes the data, warms up, runs.

Called by commands/bench.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxinfer.errors import InvalidRequest
from serving.bench.arrivals import arrival_times
from serving.bench.dataset import Conversation, conversations, first_prompt
from serving.bench.record import Record
from serving.bench.runner import Run, Runner
from serving.bench.settings import DataSettings, TargetSettings, TrafficSettings
from serving.bench.targets import Server, Target, open_target


@dataclass(frozen=True, slots=True)
class Session:
    """What was asked for, which server answered, and what happened."""

    server: Server
    run: Run


async def measure(
    target_settings: TargetSettings,
    traffic: TrafficSettings,
    data: DataSettings,
    on_start: Callable[[int], None] = lambda _: None,
    on_done: Callable[[Record], None] = lambda _: None,
) -> Session:
    """Run the load once. `on_start` gets the number of requests, `on_done` each finished one.

    Raises InvalidRequest if the server cannot be reached, a warm-up fails, or the data does not fit.
    """
    kind = data.kind(target_settings.backend)
    async with open_target(target_settings) as target:
        server = await target.describe()
        vocab_size = _vocab_size(data, server) if kind == "ids" else None
        load = conversations(data, vocab_size)
        _check(load, target_settings, traffic, data)
        if traffic.num_warmups:
            # Another seed, so that synthetic prompts are not found in the prefix cache later.
            other = conversations(replace(data, seed=-1 - data.seed), vocab_size)
            await _warm_up(target, target_settings, other, traffic.num_warmups)
        load, starts = _schedule(load, traffic, data.seed)
        on_start(sum(len(c.turns) for c in load))
        runner = Runner(
            target, target_settings, traffic.max_concurrency, traffic.think_time, on_done
        )
        # Scanning what was imported takes the collector tens of ms, which would show as latency.
        gc.collect()
        gc.freeze()
        try:
            return Session(server, await runner.run(load, starts))
        finally:
            gc.unfreeze()


def _vocab_size(data: DataSettings, server: Server) -> int:
    size = data.vocab_size or server.vocab_size
    if size is None:
        raise InvalidRequest(
            "vocab_size=None and the server does not tell it; give --vocab-size, or use "
            "--prompt-kind text"
        )
    return size


def _check(
    load: list[Conversation], target: TargetSettings, traffic: TrafficSettings, data: DataSettings
) -> None:
    """Refuse, before anything is sent, what the backend cannot take and what would change nothing."""
    for turn in (turn for c in load for turn in c.turns):
        first_prompt(turn.content, target.backend)
    if traffic.think_time and all(len(c.turns) == 1 for c in load):
        raise InvalidRequest(
            f"think_time={traffic.think_time} has no effect on single turns; give --turns"
        )
    if data.dataset is not None and data.prompt_kind != "auto" and load[0].at is None:
        raise InvalidRequest(
            f"prompt_kind={data.prompt_kind!r} has no effect on a file of prompts; leave it out"
        )
    if traffic.time_scale != 1 and load[0].at is None:
        raise InvalidRequest(
            f"time_scale={traffic.time_scale} has no effect without a trace; leave it out"
        )


async def _warm_up(
    target: Target, settings: TargetSettings, load: list[Conversation], count: int
) -> None:
    """`count` first turns, one after another; the prompts of a file are the file's own."""
    single = [replace(c, turns=c.turns[:1]) for c in load]
    chosen = [single[i % len(single)] for i in range(count)]
    done = await Runner(target, settings, max_concurrency=1).run(chosen, [0.0] * count)
    for record in done.records:
        if record.error is not None:
            raise InvalidRequest(
                f"a warm-up request failed ({record.error}): {record.message}; nothing was measured"
            )


def _schedule(
    load: list[Conversation], traffic: TrafficSettings, seed: int
) -> tuple[list[Conversation], list[float]]:
    """Conversations in the order of their start times, and those times in seconds."""
    if traffic.request_rate is None and load[0].at is not None:
        load = sorted(load, key=lambda c: c.at or 0.0)
        first = load[0].at or 0.0
        return load, [((c.at or 0.0) - first) * traffic.time_scale for c in load]
    rate = float("inf") if traffic.request_rate is None else traffic.request_rate
    return load, arrival_times(len(load), rate, traffic.burstiness, seed)
