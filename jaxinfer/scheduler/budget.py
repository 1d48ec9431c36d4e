"""Budget: what one step may still take, and the rung of the shape ladder that holds it.

A pure function of the configuration. Never looks at sequences. Called by the scheduler.
"""

from __future__ import annotations

from jaxinfer.config import EngineConfig
from jaxinfer.layout import StepShape


class Ladder:
    """The rungs, and the smallest one that holds a step."""

    def __init__(self, config: EngineConfig) -> None:
        self._rungs = config.ladder()
        self.block = config.block
        self.max_blocks = max(rung.blocks for rung in self._rungs)

    def smallest(self, rows: int, blocks: int) -> StepShape:
        for rung in self._rungs:
            if rung.rows >= rows and rung.blocks >= blocks:
                return rung
        raise AssertionError(f"a step of {rows} rows and {blocks} blocks is off the ladder")


class Budget:
    """Tokens and query blocks left in the step being planned; `threshold` caps one prompt (0: no cap)."""

    def __init__(self, tokens: int, blocks: int, block: int, threshold: int = 0) -> None:
        self.tokens = tokens
        self.blocks = blocks
        self.block = block
        self.threshold = threshold

    def chunk(self, wanted: int) -> int:
        """Tokens of a prompt chunk that still fit."""
        return min(wanted, self.threshold or wanted, self.tokens, self.blocks * self.block)

    def spend(self, tokens: int) -> int:
        """Take a chunk; the number of blocks it is cut into."""
        blocks = -(-tokens // self.block)
        self.tokens -= tokens
        self.blocks -= blocks
        assert self.tokens >= 0 and self.blocks >= 0, "a step exceeds its budget"
        return blocks
