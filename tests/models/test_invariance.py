"""With the native CPU ops a position's logits are bitwise its own: alone, in a batch, in any chunking."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

from jaxinfer.model_config import ModelConfig
from tests.models.paged import Driver, Sequence
from tests.models.test_precision import parameters
from tests.reference.cases import CASES, prompt

LENGTH = 37
Params = dict[str, Any]


def run_alone(
    config: ModelConfig, params: Params, tokens: list[int], chunks: list[int]
) -> np.ndarray:
    """Logits [LENGTH, V] of one sequence fed in `chunks`; a chunk of 1 is a decode row."""
    prefill = Driver(config, params, 0, 3)
    decode = Driver(config, params, 1, 0)
    sequence = Sequence(0, tokens, len(tokens))
    for n in chunks:
        driver = decode if n == 1 else prefill
        driver.step([sequence] if n == 1 else [], [] if n == 1 else [(sequence, n)])
        (prefill if n == 1 else decode).caches = driver.caches
    return np.stack(sequence.logits)


def run_together(config: ModelConfig, params: Params, tokens: list[int]) -> np.ndarray:
    """The same beside two neighbours: prefill next to decode rows, then decode in a batch of three."""
    driver = Driver(config, params, 3, 3)
    mine, other, third = (
        Sequence(i, tokens if i == 0 else tokens[i:] + tokens[:i], len(tokens)) for i in range(3)
    )
    driver.step([], [(other, 5), (third, 9)])
    driver.step([other, third], [(mine, 20)])
    while mine.done < len(tokens):
        driver.step([third, mine, other] if third.done < len(tokens) else [mine], [])
    return np.stack(mine.logits)


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "gemma3", "olmo2", "granite"])
def test_logits_are_bitwise_independent_of_the_batch(case: str) -> None:
    assert shutil.which("g++") or shutil.which("clang++"), "the native ops need a C++ compiler"
    config = ModelConfig.from_hf(CASES[case])
    params = parameters(config, "float32")
    tokens = prompt(case, LENGTH)
    whole = run_alone(config, params, tokens, [LENGTH])
    for chunks in ([1] * LENGTH, [16, 1, 1, 2, 15, 1, 1]):
        np.testing.assert_array_equal(run_alone(config, params, tokens, chunks), whole)
    np.testing.assert_array_equal(run_together(config, params, tokens), whole)
