"""Checkpoints: at which positions of a sequence the states of its STATE kinds are worth keeping.

Positions are multiples of the page size; the policies are named in EngineConfig.checkpoint_policy.
Never allocates. Called by pages.py and the scheduler.
"""

from __future__ import annotations

from jaxinfer.config import EngineConfig
from jaxinfer.scheduler.sequence import Sequence
from jaxinfer.types import Request


class Checkpoints:
    """The policy of one engine. `active`: False where nothing is ever kept (no STATE kinds, or no cache)."""

    def __init__(self, config: EngineConfig, states: bool) -> None:
        self.page = config.page_size
        self.interval = config.checkpoint_grid
        self.stride = -(-config.block // self.interval) * self.interval
        self.policy = config.checkpoint_policy
        self.most = config.max_states_per_path
        self.active = states and config.enable_prefix_caching and self.policy != "none"

    def inside(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Positions in (start, end] at which a prompt chunk keeps the state, in order.

        They lie before the last known token: a prompt that comes again has one token to compute.
        """
        if not (self.active and sequence.request.use_prefix_cache):
            return []
        end = min(end, len(sequence.tokens) - 1)
        wanted = self.declared(sequence.request)
        if sequence.request.group is not None:  # the siblings fork here
            wanted.append((len(sequence.tokens) - 1) // self.page * self.page)
        if self.policy in ("align", "branch"):
            wanted.append(sequence.branch)
        if self.policy == "align":
            wanted += self._grid(start, end)
        if self.policy == "second-hit":
            wanted.append(sequence.branch // self.interval * self.interval)
        return sorted({p for p in wanted if start < p <= end})

    def declared(self, request: Request) -> list[int]:
        """The request's breakpoints in whole pages: what is kept there stays, however many states follow."""
        return [p // self.page * self.page for p in request.breakpoints]

    def _grid(self, start: int, end: int) -> list[int]:
        """Multiples of the interval in (start, end]: the last ones, if a path may not keep them all.

        At most one a query block, and the last one: each cuts its block short.
        """
        first = (start // self.stride + 1) * self.stride
        grid = {*range(first, end + 1, self.stride), end // self.interval * self.interval}
        return sorted(grid)[-self.most :]  # most 0: all of them

    def at_decode(self, sequence: Sequence, position: int) -> bool:
        """Whether a decoding sequence keeps its state at `position`, a multiple of the page size."""
        return (
            self.active
            and self.policy == "align"
            and position % self.interval == 0
            and sequence.request.use_prefix_cache
        )
