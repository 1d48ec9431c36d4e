"""Sends conversations to a target at their times, at most so many requests in flight.

Turns of a conversation follow each other, each with the real answers before it. Never raises for
a failed request: its record says so, and the conversation ends there. Called by session.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serving.bench.dataset import Conversation, first_prompt, next_prompt
from serving.bench.record import Clock, Record
from serving.bench.settings import TargetSettings
from serving.bench.targets import Target


@dataclass(frozen=True, slots=True)
class Run:
    """All records of a run. cpu_share: this process's CPU time by wall time; near 1 it is the limit."""

    records: list[Record]
    duration: float
    cpu_share: float


class Runner:
    """Drives one target; `on_done` is called after each request."""

    def __init__(
        self,
        target: Target,
        settings: TargetSettings,
        max_concurrency: int | None = None,
        think_time: float = 0.0,
        on_done: Callable[[Record], None] = lambda _: None,
    ) -> None:
        self._target, self._settings = target, settings
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._think_time, self._on_done = think_time, on_done

    async def run(self, conversations: Sequence[Conversation], starts: Sequence[float]) -> Run:
        """Start each conversation at its time, in seconds; returns when all have ended."""
        records: list[Record] = []
        clock, cpu = Clock(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for number, (conversation, start) in enumerate(zip(conversations, starts, strict=True)):
                if (wait := start - clock()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._converse(number, conversation, start, clock, records))
        duration = max((r.end for r in records), default=0.0)
        cpu_share = (time.process_time() - cpu) / max(clock(), 1e-9)
        return Run(records, duration, cpu_share)

    async def _converse(
        self,
        number: int,
        conversation: Conversation,
        due: float,
        clock: Clock,
        records: list[Record],
    ) -> None:
        backend, turns = self._settings.backend, conversation.turns
        prompt = first_prompt(turns[0].content, backend)
        need_ids = len(turns) > 1 and isinstance(prompt, list) and isinstance(prompt[0], int)
        for index, turn in enumerate(turns):
            record = Record(number, index, due, turn.output_len)
            records.append(record)
            async with self._slots or contextlib.nullcontext():
                await self._target.send(prompt, record, clock, need_ids)
            self._check_length(record)
            self._on_done(record)
            if record.error is not None or index + 1 == len(turns):
                return
            prompt = next_prompt(prompt, record.text, record.ids, turns[index + 1].content, backend)
            due = record.end + self._think_time
            await asyncio.sleep(max(0.0, due - clock()))

    def _check_length(self, record: Record) -> None:
        """Runs that generate other numbers of tokens cannot be compared."""
        count = record.completion_tokens
        if self._settings.ignore_eos and count is not None and count != record.output_len:
            record.fail(
                "wrong length", f"{count} tokens with ignore_eos, asked {record.output_len}"
            )
        if not self._settings.ignore_eos and count is not None and count > record.output_len:
            record.fail("wrong length", f"{count} tokens, at most {record.output_len} were asked")
