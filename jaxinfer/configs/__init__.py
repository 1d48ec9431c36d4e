"""Readers of config.json, one family of architectures a file; `read` picks by the class name.

A family's module has MODEL_TYPES (class name -> model_type) and read(name, raw). Adding a family means
adding its module to _FAMILIES. Called by ModelConfig.from_hf; imports no JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.configs import delta, dense, hybrids, latent, lightning, moe, shortconv, ssm
from jaxinfer.errors import ConfigError
from jaxinfer.model_config import ModelConfig

_FAMILIES = (dense, moe, delta, latent, ssm, hybrids, shortconv, lightning)
_BY_NAME = {name: module for module in _FAMILIES for name in module.MODEL_TYPES}
_BY_TYPE = {kind: name for module in _FAMILIES for name, kind in module.MODEL_TYPES.items()}


def read(raw: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a config.json. Raises ConfigError naming the field and the value."""
    name = _architecture(raw)
    return _BY_NAME[name].read(name, raw)


def supported() -> tuple[str, ...]:
    """Class names of every architecture that can be read."""
    return tuple(_BY_NAME)


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if not names:
        kind = raw.get("model_type")
        names = [_BY_TYPE[kind]] if isinstance(kind, str) and kind in _BY_TYPE else []
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name in _BY_NAME:
            return name
    raise ConfigError(
        f"config.json: architectures={raw.get('architectures')!r}, model_type={raw.get('model_type')!r} "
        f"is not supported; supported are {', '.join(_BY_NAME)}"
    )
