"""jaxinfer: LLM inference on JAX. The public names; importing this package imports no JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxinfer.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from jaxinfer.engine import Engine
    from jaxinfer.llm import LLM
    from jaxinfer.loading import load

__version__ = "0.1.0"
__all__ = ["LLM", "Engine", "RequestOutput", "SamplingParams", "load"]

_LAZY = {"LLM": "jaxinfer.llm", "Engine": "jaxinfer.engine", "load": "jaxinfer.loading"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
