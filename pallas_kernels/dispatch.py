"""The choice between the forms of an op: the only place that looks at the platform.

A native form that is wanted but cannot be had falls back to the reference, which is logged once and
counted: never silently. The ops call `choose` while they are traced.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Literal

import jax

from pallas_kernels import native

Impl = Literal["auto", "reference", "native"]

_IMPLS = ("auto", "reference", "native")
_log = logging.getLogger("jaxinfer.kernels")
_default: Impl = "auto"
_fallbacks: Counter[str] = Counter()
_logged: set[str] = set()


def set_impl(impl: Impl) -> None:
    """Set what impl="auto" means from the next trace on; "auto" lets the platform decide.

    Functions that are compiled already keep what they have.
    """
    global _default
    _default = _checked(impl)


def get_impl() -> Impl:
    """What impl="auto" means now: part of the key of whoever keeps traces."""
    return _default


def choose(op: str, impl: Impl, *arrays: jax.Array) -> Literal["reference", "native"]:
    """The form of `op` to trace for these (float) arrays. Raises ValueError for an unknown impl."""
    impl = _checked(impl)
    wanted = _default if impl == "auto" else impl
    if wanted == "reference":
        return "reference"
    if jax.default_backend() != "cpu":
        if wanted == "native":
            _fall_back(op, f"the native kernels are for CPUs, not {jax.default_backend()}")
        return "reference"
    dtypes = {str(array.dtype) for array in arrays}
    if dtypes != {"float32"}:
        _fall_back(op, f"the native kernels take float32, not {', '.join(sorted(dtypes))}")
        return "reference"
    if reason := _missing():
        _fall_back(op, reason)
        return "reference"
    return "native"


def _missing() -> str:
    """Why the native kernels cannot be had; "" when they can."""
    try:
        native.load()
    except native.BuildError as error:
        return str(error)
    return ""


def _fall_back(op: str, reason: str) -> None:
    _fallbacks[op] += 1
    if reason not in _logged:
        _logged.add(reason)
        _log.warning("%s and others run as plain XLA, which is slower: %s", op, reason)


def fallbacks() -> dict[str, int]:
    """How often each op was traced as the reference although its native form was wanted."""
    return dict(_fallbacks)


def describe() -> dict[str, str]:
    """What `jaxinfer doctor` prints: the platform, the switch and the native kernels' state."""
    platform = jax.default_backend()
    state = "not used on this platform" if platform != "cpu" else _missing() or native.load()
    return {
        "platform": platform,
        "impl": _default,
        "native": state,
        "fallbacks": ", ".join(f"{op}: {n}" for op, n in sorted(_fallbacks.items())) or "none",
    }


def _checked(impl: str) -> Impl:
    if impl not in _IMPLS:
        raise ValueError(f"impl={impl!r} is unknown; use one of {', '.join(_IMPLS)}")
    return impl  # type: ignore[return-value]
