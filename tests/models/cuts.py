"""One recorded case in every cut that a scheduler can make of it, for the tests of recurrent families.

Whole prompts, two at once, random chunks beside a decoding row, token by token; and exact replay.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from jaxinfer.model_config import ModelConfig
from tests.models.families import OLD_STYLE, Recording, load_case, load_config
from tests.models.paged import BLOCK, PAGE, Driver, Sequence, load

ROWS, BLOCKS, EXACT = 1, 10, 64
SIZES = (7, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2, PAGE + 3, 3 * PAGE)


@cache
def model(case: str) -> tuple[ModelConfig, dict[str, Any], Recording]:
    raw, tensors, recording = load_case(case)
    config = ModelConfig.from_hf(raw)
    return config, load(config, tensors), recording


def error(logits: list[np.ndarray], recording: Recording) -> float:
    """Largest difference of the logits of the long prompt's beginning, relative to logits of about 5."""
    actual = np.stack(logits)
    short = min(len(actual), len(recording.logits))
    known = recording.positions[recording.positions < len(actual)]
    far = np.abs(actual[known] - recording.long_logits[: len(known)])
    near = np.abs(actual[:short] - recording.logits[:short])
    return float(max(near.max(), far.max(initial=0.0))) / max(
        1.0, np.abs(recording.logits).max() / 5
    )


def run_every_cut(
    config: ModelConfig, params: dict[str, Any], recording: Recording
) -> list[Sequence]:
    """Sequences that have fed the recorded prompt, or its beginning, in different ways."""
    driver = Driver(config, params, ROWS, BLOCKS)
    prompt, short = recording.long_prompt, len(recording.prompt)
    whole, single, pair, chunked = (Sequence(i, prompt, 0) for i in range(4))
    driver.step([], [(whole, len(prompt))])
    driver.step([single], [(pair, short), (chunked, 2 * BLOCK + 3)])
    for size in random_sizes(len(prompt) - chunked.done):
        driver.step([single], [(chunked, size)])
    while single.done < len(prompt):
        driver.step([single], [])
    alone = Sequence(0, prompt, 0)
    decode = Driver(config, params, 1, 0, sequences=1)
    while alone.done < short:
        decode.step([alone], [])
    return [whole, single, pair, chunked, alone]


def check_every_cut(case: str, tolerance: float) -> None:
    """The recorded logits in every cut, and with the native ops the same bits in all of them."""
    assert shutil.which("g++") or shutil.which("clang++"), "the native ops need a C++ compiler"
    config, params, recording = model(case)
    whole, *others = run_every_cut(config, params, recording)
    assert error(whole.logits, recording) < tolerance
    check_same(whole, others)


def check_exact_replay(case: str, tolerance: float) -> None:
    config, params, recording = model(case)
    whole, *others = run_exact(config, params, recording)
    assert error(whole.logits, recording) < tolerance
    check_same(whole, others)


def check_same(whole: Sequence, others: list[Sequence]) -> None:
    """Bitwise equal logits, of sequences that began at the first position or ended at the last one."""
    for sequence in others:
        begin = sequence.done - len(sequence.logits)
        expected = whole.logits[begin : sequence.done]
        np.testing.assert_array_equal(np.stack(sequence.logits), np.stack(expected))


def random_sizes(total: int, seed: int = 0) -> list[int]:
    rng, sizes = np.random.default_rng(seed), []
    while sum(sizes) < total:
        sizes.append(min(int(rng.choice(SIZES)), total - sum(sizes)))
    return sizes


def run_exact(config: ModelConfig, params: dict[str, Any], recording: Recording) -> list[Sequence]:
    """The same under exact replay, and one that goes on from a copy of another's slots."""
    driver = Driver(replace(config, replay="exact"), params, ROWS, 4, block=EXACT)
    prompt = recording.long_prompt
    whole, chunked, single = (Sequence(i, prompt, 0) for i in range(3))
    driver.step([], [(whole, len(prompt))])
    copy = None
    for size in random_sizes(len(prompt), seed=1):
        driver.step([single], [(chunked, size)])
        if copy is None and chunked.done > 70:
            copy = driver.fork(chunked, 3)
    assert copy is not None
    driver.step([], [(copy, len(prompt) - copy.done)])
    while single.done < 100:  # past the first canonical block
        driver.step([single], [])
    return [whole, chunked, single, copy]


def published(case: str) -> ModelConfig:
    """The model of the case's config.json in the words of the published files; equal to the case's."""
    (raw,) = [raw for name, raw in OLD_STYLE if name == case]
    return ModelConfig.from_hf(raw)


def written(case: str, **fields: Any) -> ModelConfig:
    """The model of the case's config.json with some fields changed (None: as if not there)."""
    raw = load_config(case) | fields
    return ModelConfig.from_hf({k: v for k, v in raw.items() if v is not None})
