"""The choice between the forms of an op: the only place that looks at the platform.

CPUs want the native form, GPUs the Mosaic form of the ops that have one. A form that is wanted but
cannot be had falls back to the reference, which is logged once and counted: never silently. The ops
call `choose` while they are traced.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Literal

import jax

from pallas_kernels import native

Impl = Literal["auto", "reference", "native", "mosaic"]
Form = Literal["reference", "native", "mosaic"]

_IMPLS = ("auto", "reference", "native", "mosaic")
_MOSAIC = ("paged_attention",)  # the ops with a Mosaic form
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


def choose(
    op: str, impl: Impl, *arrays: jax.Array, mosaic: Callable[[], str] | None = None
) -> Form:
    """The form of `op` to trace for these (float) arrays. Raises ValueError for an unknown impl.

    `mosaic` says why the op's Mosaic form cannot take this call ("" when it can); None: it has none.
    """
    impl, platform = _checked(impl), _platform()
    wanted = _default if impl == "auto" else impl
    if wanted == "auto":
        wanted = {"cpu": "native", "gpu": "mosaic" if mosaic else "reference"}.get(platform)
    if wanted == "native":
        reason = _not_native(platform, arrays)
    elif wanted == "mosaic":
        reason = _not_mosaic(platform, mosaic)
    else:
        return "reference"
    if reason:
        _fall_back(op, reason)
        return "reference"
    return wanted


def _platform() -> str:
    """What the trace is for: the abstract device's platform, if there is one, or this process's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _not_native(platform: str, arrays: tuple[jax.Array, ...]) -> str:
    """Why the native form cannot be had; "" when it can."""
    if platform != "cpu":
        return f"the native kernels are for CPUs, not {platform}"
    dtypes = {str(array.dtype) for array in arrays}
    if dtypes != {"float32"}:
        return f"the native kernels take float32, not {', '.join(sorted(dtypes))}"
    return _missing()


def _not_mosaic(platform: str, mosaic: Callable[[], str] | None) -> str:
    """Why the Mosaic form cannot be had; "" when it can."""
    if mosaic is None:
        return "this op has no Mosaic kernel"
    if platform != "gpu":
        from pallas_kernels.gpu import compat  # imports Mosaic: only where it is asked for

        if platform != "cpu" or not compat.interpreted():
            return f"the Mosaic kernels are for GPUs, not {platform}"
    return mosaic()


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
    """How often each op was traced as the reference although another form was wanted."""
    return dict(_fallbacks)


def describe() -> dict[str, str]:
    """What `jaxinfer doctor` prints: the platform, the switch and the state of the kernels."""
    platform = jax.default_backend()
    unused = "not used on this platform"
    return {
        "platform": platform,
        "impl": _default,
        "native": (_missing() or native.load()) if platform == "cpu" else unused,
        "mosaic": ", ".join(_MOSAIC) if platform == "gpu" else unused,
        "fallbacks": ", ".join(f"{op}: {n}" for op, n in sorted(_fallbacks.items())) or "none",
    }


def _checked(impl: str) -> Impl:
    if impl not in _IMPLS:
        raise ValueError(f"impl={impl!r} is unknown; use one of {', '.join(_IMPLS)}")
    return impl  # type: ignore[return-value]
