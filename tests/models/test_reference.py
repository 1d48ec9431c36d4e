"""Every supported architecture and option against what PyTorch computed (tests/reference)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pallas_kernels
from jaxinfer.model_config import ModelConfig
from tests.models.paged import BLOCK, Driver, Sequence, load
from tests.reference.cases import CASE_LENGTHS, CASES, prompt, tensor

TOLERANCE = 1e-4
ROWS, BLOCKS = 1, 5
RECORDINGS = Path(__file__).parent.parent / "reference" / "recordings.npz"


@pytest.fixture(scope="module")
def recordings() -> dict[str, np.ndarray]:
    with np.load(RECORDINGS) as file:
        return dict(file)


def parameters(case: str, recordings: dict[str, np.ndarray]) -> tuple[ModelConfig, dict[str, Any]]:
    config = ModelConfig.from_hf(CASES[case])
    shapes = json.loads(recordings[f"{case}/shapes"].tobytes())
    tensors = {name: tensor(case, name, tuple(shape)) for name, shape in shapes.items()}
    return config, load(config, tensors)


def error(actual: list[np.ndarray], expected: np.ndarray) -> float:
    return float(np.abs(np.stack(actual) - expected).max())


def test_every_case_is_recorded(recordings: dict[str, np.ndarray]) -> None:
    assert {name.split("/")[0] for name in recordings} == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, recordings: dict[str, np.ndarray]) -> None:
    """One shot, in chunks beside decoding, token by token: the logits of every position.

    Among the cases: R-WLD-02 (tied heads), R-WLD-03 (explicit head_dim), R-WLD-04 (dynamic rope at
    20, 32, 33 and 50 tokens), R-WLD-05 (a linear rope scaling of every architecture that takes one).
    """
    config, params = parameters(case, recordings)
    driver = Driver(config, params, ROWS, BLOCKS)
    longest = CASE_LENGTHS[case][-1]
    expected = recordings[f"{case}/logits"]
    # The decoding sequence writes the longest prompt one token a step, beside all that follows.
    single = Sequence(0, prompt(case, longest), longest)

    whole = Sequence(1, prompt(case, longest), longest)
    driver.step([single], [(whole, longest)])
    assert error(whole.logits, expected) < TOLERANCE
    hidden = [driver.taps["embed"]]
    hidden += [driver.taps[f"layers.{i}.out"] for i in range(config.num_layers - 1)]
    hidden += [driver.taps["final_norm"]]
    last = ROWS + longest - 1
    assert error([h[last] for h in hidden], recordings[f"{case}/hidden"]) < TOLERANCE

    chunked = Sequence(2, prompt(case, longest), longest)
    for size in (7, BLOCK + 3, 1, 2, longest):
        size = min(size, longest - chunked.done)
        if size:
            driver.step([single], [(chunked, size)])
    assert error(chunked.logits, expected) < TOLERANCE

    for i, length in enumerate(CASE_LENGTHS[case][:-1]):
        short = Sequence(3 + i, prompt(case, length), length)
        driver.step([single], [(short, length)])
        assert error(short.logits[-1:], recordings[f"{case}/last{length}"]) < TOLERANCE

    while single.done < longest:
        driver.step([single], [])
    assert error(single.logits, expected) < TOLERANCE


@pytest.fixture
def plain_ops() -> Iterator[None]:
    """The ops as other platforms run them, without the native kernels."""
    pallas_kernels.set_impl("reference")
    yield
    pallas_kernels.set_impl("auto")


@pytest.mark.usefixtures("plain_ops")
@pytest.mark.parametrize("case", ["llama", "gemma2", "gemma3"])
def test_regions_are_optional(case: str, recordings: dict[str, np.ndarray]) -> None:
    """Steps of prefill alone and of decoding alone, on one cache, give the same logits."""
    config, params = parameters(case, recordings)
    longest = CASE_LENGTHS[case][-1]
    sequence = Sequence(0, prompt(case, longest), longest)
    prefill, decode = Driver(config, params, 0, 2), Driver(config, params, 2, 0)
    prefill.step([], [(sequence, 20)])
    decode.caches = prefill.caches
    while sequence.done < longest:
        decode.step([sequence], [])
    assert error(sequence.logits, recordings[f"{case}/logits"]) < TOLERANCE
