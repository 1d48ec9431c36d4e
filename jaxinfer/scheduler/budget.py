"""Budget: what one step may still take, and the rung of the shape ladder that holds it.

A pure function of the configuration. Never looks at sequences. Called by the scheduler.
"""

from __future__ import annotations

import math

from jaxinfer.config import EngineConfig
from jaxinfer.layout import StepShape


class Budget:
    """Tokens and query blocks left in the step being planned.

    threshold: most tokens of one prompt (0: no cap). weight: what a prompt token costs; above 1 for models
    whose prefill is serial in the tokens, so that their chunks don't hold up the decode rows.
    """

    def __init__(
        self, tokens: int, blocks: int, block: int, threshold: int = 0, weight: float = 1.0
    ) -> None:
        self.tokens = tokens
        self.blocks = blocks
        self.block = block
        self.threshold = threshold
        self.weight = weight

    def chunk(self, wanted: int) -> int:
        """Tokens of a prompt chunk that still fit; at least one while any token is left."""
        affordable = max(int(self.tokens / self.weight), min(self.tokens, 1))
        return min(wanted, self.threshold or wanted, affordable, self.blocks * self.block)

    def spend(self, tokens: int, blocks: int) -> None:
        """Take a chunk that is cut into `blocks` blocks."""
        self.tokens -= min(self.tokens, math.ceil(tokens * self.weight))
        self.blocks -= blocks
        assert self.blocks >= 0, "a step exceeds its budget"


class Ladder:
    """The rungs, and the smallest one that holds a step."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._rungs = config.ladder()
        self.block = config.block
        self.max_blocks = max(rung.blocks for rung in self._rungs)

    def smallest(self, rows: int, blocks: int) -> StepShape:
        for rung in self._rungs:
            if rung.rows >= rows and rung.blocks >= blocks:
                return rung
        raise AssertionError(f"a step of {rows} rows and {blocks} blocks is off the ladder")

    def budget(self, decoding: int, *, serial: bool) -> Budget:
        """What a step with `decoding` decode rows has left; serial: the model has recurrent layers."""
        config = self._config
        tokens = config.max_num_batched_tokens - decoding
        weight = config.serial_weight if serial else 1.0
        return Budget(tokens, self.max_blocks, self.block, config.long_prefill_threshold, weight)
