"""Qwen3-Next, Qwen3.5 and Kimi Linear: against PyTorch's recordings, full-width layers against float64
recurrences written from the formulas, and exact replay to the bit.
"""

from __future__ import annotations

import dataclasses
import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from jaxinfer.model_config import ModelConfig
from tests.models.families import Recording, load_case
from tests.models.paged import BLOCK, PAGE, Driver, Sequence, load

CASES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear")
TOLERANCE = 5e-4
ROWS, BLOCKS = 2, 12
EXACT = 64


@cache
def model(case: str, replay: str = "tolerant") -> tuple[ModelConfig, dict[str, Any], Recording]:
    raw, tensors, recording = load_case(case)
    config = dataclasses.replace(ModelConfig.from_hf(raw), replay=replay)
    return config, load(config, tensors), recording


def error(sequence: Sequence, expected: np.ndarray, positions: np.ndarray | None = None) -> float:
    actual = np.stack(sequence.logits)
    return float(np.abs((actual if positions is None else actual[positions]) - expected).max())


def chunks(total: int, seed: int) -> list[int]:
    """Random sizes from those that straddle blocks and pages, with runs of single tokens."""
    sizes, draw = [], random.Random(seed)
    while sum(sizes) < total:
        size = draw.choice((7, BLOCK - 1, BLOCK, BLOCK + 1, PAGE + 1, 1, 1, 2, 40, 64, 65))
        sizes.append(min(size, total - sum(sizes)))
    return sizes


def feed(
    driver: Driver, sequence: Sequence, sizes: list[int], decode: Driver | None = None
) -> Sequence:
    """Single tokens are decode rows, of the driver `decode` if there is one (it shares the caches)."""
    for size in sizes:
        if size > 1:
            driver.step([], [(sequence, size)])
            continue
        (decode or driver).caches = driver.caches
        (decode or driver).step([sequence], [])
        driver.caches = (decode or driver).caches
    return sequence


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str) -> None:
    """One shot, chunks beside a decoding sequence, token by token: the recorded logits."""
    config, params, recording = model(case)
    driver = Driver(config, params, ROWS, BLOCKS)
    short, long, at = len(recording.prompt), len(recording.long_prompt), recording.positions
    whole, longer = (Sequence(i, recording.long_prompt, long) for i in range(2))
    single, other = Sequence(2, recording.prompt, short), Sequence(3, recording.prompt, short)
    driver.step([single], [(other, short), (longer, 100)])  # two of different lengths in one step
    driver.step([single], [(longer, long - 100)])
    assert error(other, recording.logits) < TOLERANCE
    assert error(longer, recording.long_logits, at) < TOLERANCE
    for size in chunks(long, seed=1):
        driver.step([single] if single.done < short else [], [(whole, size)])
    assert error(whole, recording.long_logits, at) < TOLERANCE
    feed(driver, single, [1] * (short - single.done))
    assert error(single, recording.logits) < TOLERANCE
    greedy = Sequence(4, recording.prompt + recording.greedy, short)
    feed(driver, greedy, [short] + [1] * (len(recording.greedy) - 1))
    best = np.argmax(greedy.logits[short - 1 :], axis=-1)
    sure = recording.margins > 10 * TOLERANCE
    assert (best == recording.greedy)[sure].all() and sure.sum() > len(sure) // 2


@pytest.mark.parametrize("case", CASES)
def test_exact_replay_is_bitwise(case: str) -> None:
    """One shot, random chunks, token by token, and going on from a copy: the same bits; and right."""
    config, params, recording = model(case, "exact")
    tokens = recording.long_prompt
    driver = Driver(config, params, ROWS, 3, block=EXACT)
    decode = Driver(config, params, 1, 0, block=EXACT)
    whole = feed(driver, Sequence(0, tokens, len(tokens)), [len(tokens)])
    assert error(whole, recording.long_logits, recording.positions) < TOLERANCE
    expected = np.stack(whole.logits)
    chunked, forks = Sequence(1, tokens, len(tokens)), []
    for size in chunks(len(tokens), seed=2):
        feed(driver, chunked, [size], decode)
        if len(forks) < 2 and chunked.done > 30 * (len(forks) + 1):
            forks.append(driver.fork(chunked, 2 + len(forks)))
    for fork, seed in zip(forks, (3, 4), strict=True):
        feed(driver, fork, chunks(len(tokens) - fork.done, seed), decode)
    single = feed(driver, Sequence(4, tokens, len(tokens)), [1] * (EXACT + 6), decode)
    beside, neighbour = Sequence(5, tokens, len(tokens)), Sequence(6, tokens[::-1], len(tokens))
    driver.step([], [(beside, 70)])
    driver.step([beside], [(neighbour, 90)])
    driver.step([neighbour, beside], [])
    for sequence in (chunked, single, *forks, beside):
        np.testing.assert_array_equal(np.stack(sequence.logits), expected[: sequence.done])
