"""The engine's error types, one for each layer that can refuse something.

Every message names the field, the value and the allowed range, and says what to do.
All of them are ValueErrors, so scripts may catch that; servers map each to a status.
"""

from __future__ import annotations


class JaxinferError(ValueError):
    """Base of every error that the engine raises on purpose."""


class ConfigError(JaxinferError):
    """A model or engine configuration that cannot work."""


class WeightsError(JaxinferError):
    """A checkpoint with missing, unused, duplicate, truncated or mis-shaped tensors."""


class InvalidRequest(JaxinferError):
    """A request that is out of range; it never reaches the step loop."""


class CapacityError(JaxinferError):
    """A request, or a configuration, that the memory at hand can never hold."""


class Overloaded(JaxinferError):
    """Too much is waiting already; the same request may be taken later."""


class Unavailable(JaxinferError):
    """The engine takes no requests now: it starts, drains, or is closed."""


def check_range(field: str, value: float, low: float, high: float, hint: str = "") -> None:
    """Raise InvalidRequest unless `low <= value <= high` (NaN never passes)."""
    if not low <= value <= high:
        hint = f"; {hint}" if hint else ""
        raise InvalidRequest(f"{field}={value!r} is out of range [{low}, {high}]{hint}")
