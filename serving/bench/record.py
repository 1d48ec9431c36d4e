"""What is known of one request: when it was sent, when output came, how many tokens, what went wrong.

Times are seconds of one monotonic clock after the start of the run. Filled by the targets, read by
metrics.py.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

MAX_MESSAGE = 300


class Clock:
    """Seconds since the run began."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._start


@dataclass(slots=True)
class Record:
    """One request.

    Attributes:
        scheduled: when it was due. sent: when it left. end: when its stream ended.
        arrivals: when each message with output came. A message may hold several tokens.
        counts: tokens so far at each arrival, where the server tells; else empty.
        prompt_tokens, completion_tokens, cached_tokens: the server's own counts, None if not told.
        error: kind of what went wrong ("http 429", "disconnect", ...), None for a good request.
    """

    conversation: int
    turn: int
    scheduled: float
    output_len: int
    sent: float = 0.0
    end: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    message: str | None = None

    def output(self, now: float, text: str, ids: list[int], count: int | None) -> None:
        """A message with output; `count` is the number of tokens so far, if the server told."""
        self.arrivals.append(now)
        self.text += text
        self.ids += ids
        if count is not None:
            self.counts.append(count)

    def fail(self, kind: str, message: str) -> None:
        """Mark the request as failed; the first failure is kept."""
        if self.error is None:
            text = " ".join(message.split())
            self.error, self.message = kind, text[:MAX_MESSAGE] or kind

    @property
    def ttft(self) -> float | None:
        """Time to first token: from sending to the first message with output."""
        return self.arrivals[0] - self.sent if self.arrivals else None

    @property
    def e2e(self) -> float:
        """End to end: from sending to the end of the stream."""
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first message, by the server's token counts.

        None if they are unknown, or if everything came in one message.
        """
        if self.completion_tokens is None or len(self.arrivals) < 2:
            return None
        known = len(self.counts) == len(self.arrivals)
        later = self.completion_tokens - (self.counts[0] if known else 1)
        return (self.arrivals[-1] - self.arrivals[0]) / later if later > 0 else None

    @property
    def itl(self) -> list[float]:
        """Gaps between messages with output, however many tokens each holds."""
        return [b - a for a, b in itertools.pairwise(self.arrivals)]
