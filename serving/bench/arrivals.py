"""When each conversation starts: all at once, Poisson, gamma or constant gaps; seeded.

Times are seconds after the start, sorted, the first is 0. Called by session.py.
"""

from __future__ import annotations

import itertools
import math
import random


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """`count` start times; the same arguments give the same times.

    Gaps have mean 1/rate. They are gamma distributed with shape `burstiness`: 1 is a Poisson
    process, less is burstier, inf is a constant gap. rate inf starts everything at 0.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(f"{seed}/arrivals")
    if math.isinf(burstiness):
        gaps = itertools.repeat(1 / rate, count - 1)
    else:
        scale = 1 / (rate * burstiness)
        gaps = (rng.gammavariate(burstiness, scale) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))
