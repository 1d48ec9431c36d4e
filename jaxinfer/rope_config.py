"""RopeConfig: the rotary embedding of one kind of layer, read from a checkpoint's config.json.

Knows both spellings (rope_theta + rope_scaling, and rope_parameters, flat or nested by layer type)
and refuses what it cannot apply. Called by configs/; layers/rope.py turns it into angles.
Imports no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.config_reader import LARGEST
from jaxinfer.errors import ConfigError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
LAYER_TYPES = ("full_attention", "sliding_attention")
_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast"}
    | {"beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor"}
    | {"short_factor", "long_factor"},
}
# Keys that a type may carry without using them: they describe, or belong to the model class.
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned", "factor"}
_COMMON_KEYS |= {"original_max_position_embeddings", "max_position_embeddings"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding; which dims turn together is the mixer's to say (layers/rope.py).

    Attributes:
        type: one of ROPE_TYPES. theta: base. dims: leading dims of a head that are rotated (even).
        factor: length scaling. original: length that the unscaled model was trained for.
        attention_factor: multiplies cos and sin (yarn, longrope).
        low_freq, high_freq: wavelength bounds (llama3). ramp: (low, high) dims of yarn's ramp.
        short, long: per-dim divisors (longrope) for lengths up to, and above, `original`.
    """

    type: str
    theta: float
    dims: int
    factor: float = 1.0
    original: int = 0
    attention_factor: float = 1.0
    low_freq: float = 0.0
    high_freq: float = 0.0
    ramp: tuple[float, float] = (0.0, 0.0)
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    @property
    def length_dependent(self) -> bool:
        """True if the frequencies depend on the length of the request."""
        return self.type == "dynamic" or (self.type == "longrope" and self.short != self.long)

    def length_key(self, length: int) -> int:
        """Canonical length: requests with equal keys have equal frequencies (0: not extended)."""
        if not self.length_dependent or length <= self.original:
            return 0
        return length if self.type == "dynamic" else self.original + 1


def rope_for(
    name: str, raw: Mapping[str, Any], *, head_dim: int, max_position: int, allow_partial: bool
) -> RopeConfig:
    """Read one rope dictionary (type, theta and the numbers of the type, all in one mapping).

    Raises ConfigError, naming `name` and the key, for unknown types and keys, and for missing or
    impossible values.
    """
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError(f"{name}.rope_type={kind!r} is not one of {', '.join(ROPE_TYPES)}")
    for key, value in raw.items():
        if key not in _KEYS[kind] | _COMMON_KEYS and value not in (None, False, "default"):
            raise ConfigError(
                f"{name}.{key}={value!r} is not applied to rope_type {kind!r}; remove it"
            )
    partial = _number(name, "partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0)
    if partial != 1.0 and not allow_partial:
        raise ConfigError(
            f"{name}.partial_rotary_factor={partial} must be 1.0 for this architecture"
        )
    dims = int(head_dim * partial)
    if dims % 2 or not 2 <= dims <= head_dim:
        raise ConfigError(
            f"{name}.partial_rotary_factor={partial} of head_dim={head_dim} gives {dims} dims; "
            f"an even number in [2, {head_dim}] is needed"
        )
    rope = RopeConfig(kind, _number(name, "rope_theta", raw["rope_theta"]), dims)
    return rope if kind == "default" else _SCALINGS[kind](name, raw, rope, max_position)


def _linear(name: str, raw: Mapping[str, Any], rope: RopeConfig, max_position: int) -> RopeConfig:
    # dynamic: the frequencies stay as they are up to max_position_embeddings.
    factor = _number(name, "factor", raw.get("factor"))
    return RopeConfig(rope.type, rope.theta, rope.dims, factor, max_position)


def _llama3(name: str, raw: Mapping[str, Any], rope: RopeConfig, max_position: int) -> RopeConfig:
    low = _number(name, "low_freq_factor", raw.get("low_freq_factor"))
    high = _number(name, "high_freq_factor", raw.get("high_freq_factor"))
    if high <= low:
        raise ConfigError(f"{name}.high_freq_factor={high} must exceed low_freq_factor={low}")
    factor = _number(name, "factor", raw.get("factor"))
    original = _original(name, raw, max_position)
    return RopeConfig(
        rope.type, rope.theta, rope.dims, factor, original, low_freq=low, high_freq=high
    )


def _yarn(name: str, raw: Mapping[str, Any], rope: RopeConfig, max_position: int) -> RopeConfig:
    original = _original(name, raw, max_position)
    factor = raw.get("factor")
    factor = max_position / original if factor is None else _number(name, "factor", factor)
    scale = raw.get("attention_factor")
    mscale, all_dim = (_number(name, k, raw.get(k) or 1.0) for k in ("mscale", "mscale_all_dim"))
    if scale is None and raw.get("mscale") and raw.get("mscale_all_dim"):
        scale = _yarn_scale(factor, mscale) / _yarn_scale(factor, all_dim)
    elif scale is None:
        scale = _yarn_scale(factor, 1.0)

    if rope.theta <= 1:
        raise ConfigError(f"{name}.rope_theta={rope.theta} must be above 1 for rope_type 'yarn'")

    def turns(n: float) -> float:
        """The dim whose angle makes `n` turns over the original length."""
        return rope.dims * math.log(original / (n * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = turns(_number(name, "beta_fast", raw.get("beta_fast") or 32))
    high = turns(_number(name, "beta_slow", raw.get("beta_slow") or 1))
    if raw.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    return RopeConfig(
        rope.type,
        rope.theta,
        rope.dims,
        factor,
        original,
        attention_factor=_number(name, "attention_factor", scale),
        ramp=(float(low), float(high + 0.001 if low == high else high)),
    )


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(name: str, raw: Mapping[str, Any], rope: RopeConfig, max_position: int) -> RopeConfig:
    original = _original(name, raw, max_position)
    factor = raw.get("factor")
    factor = max_position / original if factor is None else _number(name, "factor", factor)
    scale = raw.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    lists = []
    for key in ("short_factor", "long_factor"):
        values = raw.get(key)
        if not isinstance(values, (list, tuple)) or len(values) != rope.dims // 2:
            raise ConfigError(
                f"{name}.{key}={values!r:.60} must be a list of {rope.dims // 2} numbers"
            )
        lists.append(tuple(_number(name, key, v) for v in values))
    return RopeConfig(
        rope.type,
        rope.theta,
        rope.dims,
        factor,
        original,
        attention_factor=_number(name, "attention_factor", scale),
        short=lists[0],
        long=lists[1],
    )


_SCALINGS = {
    "linear": _linear,
    "dynamic": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _original(name: str, raw: Mapping[str, Any], max_position: int) -> int:
    value = raw.get("original_max_position_embeddings")
    return int(_number(name, "original_max_position_embeddings", value or max_position))


def _number(name: str, key: str, value: Any) -> float:
    bad = isinstance(value, bool) or not isinstance(value, (int, float))
    if bad or not 0 < value <= LARGEST:
        raise ConfigError(f"{name}.{key}={value!r:.80} must be a number in (0, {LARGEST:g}]")
    return float(value)
