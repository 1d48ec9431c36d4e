"""Small steps that the readers of several families share: fields by other names, the kinds of layers.

Called by the modules of this package; imports no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.config_reader import LARGEST, Reader
from jaxinfer.errors import ConfigError


def renamed(raw: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """`raw` with the field names[x] called x; where the file has both, names[x] goes first."""
    out = dict(raw)
    for new, old in names.items():
        value = out.pop(old, None)
        if value is not None:
            out[new] = value
    return out


def without(raw: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """`raw` less the fields that the caller reads itself."""
    return {name: value for name, value in raw.items() if name not in names}


def only(reader: Reader, field: str, *values: Any) -> None:
    """Refuse any value of a field but those that are implemented; the first is the default."""
    given = reader.get(field)
    if given is not None and given not in values:
        allowed = " or ".join(repr(value) for value in values)
        raise ConfigError(f"config.json: {field}={given!r:.80} must be {allowed} here")


def inert(reader: Reader, *fields: str) -> None:
    """Fields that say nothing about the forward pass of this class."""
    for field in fields:
        reader.get(field)


def initial_time_steps(reader: Reader) -> None:
    """Fields of state spaces from which training starts, and how other engines run them."""
    inert(reader, "time_step_min", "time_step_max", "time_step_floor", "time_step_rank")
    inert(reader, "time_step_scale", "time_step_init_scheme", "use_mamba_kernels")


def layer_kinds(field: str, given: Any, count: int, known: Mapping[Any, str]) -> list[str]:
    """known[...] of each entry of the list `given`, the value of `field`; it must have `count`."""
    kinds = given if isinstance(given, list) else []
    if len(kinds) != count or not all(isinstance(x, (str, int)) and x in known for x in kinds):
        raise ConfigError(
            f"config.json: {field}={given!r:.80} must hold {count} of {', '.join(map(str, known))}"
        )
    return [known[x] for x in kinds]


def layer_numbers(reader: Reader, field: str, count: int) -> list[int] | None:
    """A list of layers, counted from 0; None if not given."""
    given = reader.typed(field, list)
    for i in given or ():
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count:
            raise ConfigError(f"config.json: {field} holds {i!r}; layers are 0 to {count - 1}")
    return given


def factors(reader: Reader, field: str, count: int) -> tuple[float, ...]:
    """A list of `count` multipliers; ones if not given."""
    given = reader.typed(field, list) or [1.0] * count
    if len(given) != count or not all(_finite(x) for x in given):
        raise ConfigError(
            f"config.json: {field}={given!r:.80} must hold {count} numbers in [-{LARGEST:g}, {LARGEST:g}]"
        )
    return tuple(float(x) for x in given)


def bounds(reader: Reader, field: str) -> tuple[float, float]:
    """[low, high] with 0 <= low < high; high may be infinite, in JSON also {"__float__": "Infinity"}."""
    given = reader.typed(field, list) or [0.0, math.inf]
    values = [math.inf if x == {"__float__": "Infinity"} else x for x in given]
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in values)
    if not numbers or len(values) != 2 or not 0 <= values[0] < values[1]:
        raise ConfigError(
            f"config.json: {field}={given!r:.80} must be [low, high] with 0 <= low < high"
        )
    return float(values[0]), float(values[1])


def _finite(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) <= LARGEST
