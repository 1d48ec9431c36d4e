"""A server under load, whatever its protocol: what the runner asks of it.

`send` never raises for what the server does wrong: it marks the record. Called by session.py and
runner.py; the two kinds live in http_target.py and grpc_target.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from serving.bench.dataset import Prompt
from serving.bench.record import Clock, Record
from serving.bench.settings import TargetSettings


@dataclass(frozen=True, slots=True)
class Server:
    """What a server says of itself; None for what it does not tell."""

    model: str
    vocab_size: int | None = None
    version: str | None = None


class Target(Protocol):
    """One server; use as an async context manager."""

    async def __aenter__(self) -> Target: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def describe(self) -> Server:
        """Model and vocabulary; InvalidRequest if the server cannot be reached."""
        ...

    async def send(self, prompt: Prompt, record: Record, clock: Clock, need_ids: bool) -> None:
        """One request, streamed into `record`. `need_ids` asks for the answer's token ids."""
        ...


def open_target(settings: TargetSettings) -> Target:
    """The target of a backend; imports what its protocol needs."""
    if settings.is_grpc:
        from serving.bench.grpc_target import GrpcTarget

        return GrpcTarget(settings)
    from serving.bench.http_target import HttpTarget

    return HttpTarget(settings)
