"""Every rope type against formulas written out once more in float64."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.layers.rope import apply_rope, rope_table
from jaxinfer.rope_config import RopeConfig, rope_for

DIM, MAX = 16, 64
POSITIONS = np.array([0, 1, 7, 31, 63, 200, 4095])


def make(head_dim: int = DIM, allow_partial: bool = False, **raw: Any) -> RopeConfig:
    raw = {"rope_theta": 10000.0, **raw}
    return rope_for(
        "rope_scaling", raw, head_dim=head_dim, max_position=MAX, allow_partial=allow_partial
    )


def angles(rope: RopeConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = jnp.full(len(POSITIONS), length, jnp.int32)
    cos, sin = rope_table(rope, jnp.asarray(POSITIONS, jnp.int32), lengths)
    return np.asarray(cos), np.asarray(sin)


def check(rope: RopeConfig, expected: list[float], scale: float = 1.0, length: int = 5) -> None:
    """`expected` are the frequencies in float64; an angle may be wrong by its float32 rounding."""
    cos, sin = angles(rope, length)
    want = POSITIONS[:, None] * np.asarray(expected)
    tolerance = scale * (2e-6 + 3e-7 * POSITIONS[:, None])
    assert (np.abs(cos - scale * np.cos(want)) < tolerance).all()
    assert (np.abs(sin - scale * np.sin(want)) < tolerance).all()


def base(theta: float = 10000.0, dims: int = DIM) -> list[float]:
    return [theta ** (-2 * i / dims) for i in range(dims // 2)]


def test_default_and_partial() -> None:
    check(make(), base())
    check(make(rope_theta=500.0), base(500.0))
    check(make(allow_partial=True, partial_rotary_factor=0.5), base(dims=8))


def test_linear() -> None:
    check(make(type="linear", factor=4.0), [f / 4.0 for f in base()])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 100, 640])
def test_dynamic_grows_with_the_request(length: int) -> None:
    rope = make(rope_type="dynamic", factor=2.0)
    seen = max(length, MAX)
    theta = 10000.0 * (2.0 * seen / MAX - 1.0) ** (DIM / (DIM - 2))
    check(rope, base(theta), length=length)
    assert rope.length_key(length) == (length if length > MAX else 0)


def test_llama3() -> None:
    numbers: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = make(rope_type="llama3", factor=8.0, original_max_position_embeddings=512, **numbers)
    expected = []
    for f in base():
        wavelength = 2 * math.pi / f
        if wavelength < 512 / 4.0:
            expected.append(f)
        elif wavelength > 512 / 1.0:
            expected.append(f / 8.0)
        else:
            smooth = (512 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * f / 8.0 + smooth * f)
    assert len({round(f / g, 6) for f, g in zip(base(), expected, strict=True)}) > 2
    check(rope, expected)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
        {"attention_factor": 1.5},
        {"mscale": 0.7, "mscale_all_dim": 1.1},
    ],
)
def test_yarn(extra: dict[str, Any]) -> None:
    factor, original = 4.0, 256
    given = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    rope = make(**given, **extra)

    def turns(n: float) -> float:
        return DIM * math.log(original / (2 * math.pi * n)) / (2 * math.log(10000.0))

    low, high = turns(extra.get("beta_fast", 32)), turns(extra.get("beta_slow", 1))
    if extra.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, DIM - 1)
    expected = []
    for i, f in enumerate(base()):
        ramp = min(max((i - low) / (high - low), 0), 1)
        expected.append(f * (1 - ramp) + f / factor * ramp)
    scale = extra.get("attention_factor", 0.1 * math.log(factor) + 1)
    if "mscale" in extra:
        up, down = (0.1 * extra[k] * math.log(factor) + 1 for k in ("mscale", "mscale_all_dim"))
        scale = up / down
    check(rope, expected, scale)


@pytest.mark.parametrize(("length", "which"), [(1, 0), (32, 0), (33, 1), (900, 1)])
def test_longrope_chooses_by_length(length: int, which: int) -> None:
    factors = [[1.0 + 0.1 * i for i in range(8)], [1.0 + i for i in range(8)]]
    rope = make(
        rope_type="longrope",
        short_factor=factors[0],
        long_factor=factors[1],
        original_max_position_embeddings=32,
    )
    scale = math.sqrt(1 + math.log(MAX / 32) / math.log(32))
    expected = [f / g for f, g in zip(base(), factors[which], strict=True)]
    check(rope, expected, scale, length)
    assert rope.length_key(length) == (33 if which else 0)


def test_rows_of_different_lengths_do_not_mix() -> None:
    rope = make(rope_type="dynamic", factor=2.0)
    positions, lengths = jnp.full(3, 17, jnp.int32), jnp.asarray([10, 100, 500], jnp.int32)
    together = rope_table(rope, positions, lengths)[0]
    for i in range(3):
        alone = rope_table(rope, positions[i : i + 1], lengths[i : i + 1])[0]
        np.testing.assert_array_equal(together[i], alone[0])
    assert len({float(x) for x in together[:, 3]}) == 3


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 400), st.integers(0, 400))
def test_scores_depend_on_distance_alone(start: int, shift: int) -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, DIM)).astype(np.float32)
    rope = make()

    def score(at: int, to: int) -> float:
        cos, sin = rope_table(rope, jnp.asarray([at, to], jnp.int32), jnp.zeros(2, jnp.int32))
        turned = apply_rope(jnp.asarray(q), cos[:1], sin[:1])
        return float((turned * apply_rope(jnp.asarray(k), cos[1:], sin[1:])).sum())

    assert abs(score(start, start + 9) - score(start + shift, start + shift + 9)) < 1e-3


def test_partial_rope_leaves_the_rest() -> None:
    rope = make(allow_partial=True, partial_rotary_factor=0.5)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((len(POSITIONS), 2, DIM)), jnp.float32)
    cos, sin = rope_table(rope, jnp.asarray(POSITIONS, jnp.int32), jnp.zeros(len(POSITIONS), int))
    y = np.asarray(apply_rope(x, cos, sin))
    np.testing.assert_array_equal(y[..., 8:], x[..., 8:])
    pairs = np.asarray(x[..., :4]) + 1j * np.asarray(x[..., 4:8])
    turned = pairs * np.exp(1j * POSITIONS[:, None, None] * np.asarray(base(dims=8)))
    assert np.abs(y[..., :4] - turned.real)[:5].max() < 1e-4
    assert np.abs(y[..., 4:8] - turned.imag)[:5].max() < 1e-4


@pytest.mark.parametrize("head_dim", [DIM, 24])
def test_interleaved_pairs(head_dim: int) -> None:
    """Neighbours turn together, as complex numbers do; evens come out before odds, the rest passes."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((len(POSITIONS), 2, head_dim)).astype(np.float32)
    cos, sin = (jnp.asarray(a) for a in angles(make(), 5))
    found = np.asarray(apply_rope(jnp.asarray(x), cos, sin, interleaved=True))
    turn = np.exp(1j * POSITIONS[:, None] * np.asarray(base()))[:, None]
    wanted = (x[..., :DIM:2] + 1j * x[..., 1:DIM:2]) * turn
    half = DIM // 2
    np.testing.assert_allclose(found[..., :half], wanted.real, atol=5e-3)
    np.testing.assert_allclose(found[..., half:DIM], wanted.imag, atol=5e-3)
    np.testing.assert_array_equal(found[..., DIM:], x[..., DIM:])
