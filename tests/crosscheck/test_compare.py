"""The arithmetic of the cross-check on made-up numbers: errors, near ties, and the shapes of faults."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.crosscheck.compare import (
    LayerError,
    compare_greedy,
    first_diverging,
    hint,
    layer_errors,
    merge_layers,
    top1,
)

PAGE, LIMIT = 16, 2e-3


def test_layer_errors_are_relative_to_each_token() -> None:
    want = np.array([[3.0, 4.0], [30.0, 40.0]], np.float32)
    got = want + np.array([[0.0, 0.05], [0.0, 0.05]], np.float32)
    (error,) = layer_errors({"embed": got}, {"embed": want})
    assert error.max_abs == pytest.approx(0.05, rel=1e-4)
    assert error.relative == pytest.approx(0.01, rel=1e-4)  # of the small token


def test_what_is_not_finite_diverges() -> None:
    want = np.ones((2, 2), np.float32)
    (error,) = layer_errors({"a": want * np.nan}, {"a": want})
    assert error.relative == 1e30
    assert first_diverging([error], 0.1) == "a"


def test_the_first_layer_past_the_limit_is_named() -> None:
    small, large = LayerError("embed", 0.0, 1e-6), LayerError("layers.0.out", 0.0, 1e-2)
    merged = merge_layers([[small, large], [LayerError("embed", 1.0, 0.0), small]])
    assert merged[0] == LayerError("embed", 1.0, 1e-6)
    assert first_diverging(merged, 1e-4) == "layers.0.out"
    assert first_diverging(merged, 1.0) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "length", "agrees"),
    [
        ([1, 2, 3], [1, 2, 3], 3, True),
        ([1, 9, 3], [1, 2, 3], 1, True),  # where the reference's margin is tiny
        ([1, 2, 9], [1, 2, 3], 2, False),
        ([1, 2], [1, 2, 3], 2, False),  # ended too early
        ([1, 2, 3, 4], [1, 2, 3], 3, False),  # went on after the end
    ],
)
def test_greedy_agreement(ours: list[int], theirs: list[int], length: int, agrees: bool) -> None:
    result = compare_greedy(ours, theirs, [1.0, 1e-4, 0.5], 1e-3)
    assert (result.length, result.agrees) == (length, agrees)
    assert result.identical == (ours == theirs)
    assert result.near_tie == (agrees and ours != theirs)


def test_top1_counts_near_ties_as_right() -> None:
    ids = np.array([[5, 7], [5, 7], [5, 7]])
    logprobs = np.array([[-0.1, -3.0], [-0.7, -0.7004], [-0.1, -3.0]])
    assert top1(np.array([5, 7, 7]), ids, logprobs, 1e-3).tolist() == [True, True, False]


def noise(length: int, seed: int = 0) -> np.ndarray:
    return np.abs(np.random.default_rng(seed).normal(0, 1e-5, length))


def test_noise_gives_no_hint() -> None:
    assert hint([noise(50), noise(7)], LIMIT, PAGE) is None


@pytest.mark.parametrize(
    ("start", "growth", "word"),
    [(0, 0.0, "weights"), (2 * PAGE, 0.0, "page"), (3, 0.02, "rope"), (37, 0.0, "pattern")],
)
def test_the_shape_of_a_fault_tells_its_kind(start: int, growth: float, word: str) -> None:
    deltas = noise(100)
    deltas[start:] += 0.1 + growth * np.arange(100 - start)
    if word == "pattern":
        deltas[start + 1 :] = noise(100 - start - 1)
    assert word in (hint([deltas, noise(20)], LIMIT, PAGE) or "")


def test_nan_counts_as_different() -> None:
    deltas = noise(40)
    deltas[PAGE] = np.nan
    assert "page" in (hint([deltas], LIMIT, PAGE) or "")
