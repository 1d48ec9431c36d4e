"""Families of models behind one contract: how the engine gets at a model without knowing which.

A family is a set of pure functions. Called by the step builder, the loader and research code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxinfer.cache.spec import CacheSpec
from jaxinfer.model_config import ModelConfig
from jaxinfer.models import decoder


@dataclass(frozen=True, slots=True)
class Family:
    """Functions of one model family; trees are nested dicts and lists, equal in structure.

    Attributes:
        cache_specs: (config, dtype) -> the cache kinds, in the order of Batch.kinds.
        param_specs, weight_rules: config -> tree of ParamSpec, of WeightRule.
        forward: (params, config, caches, batch, tap=None) -> (caches, hidden[T, D]), final norm applied.
            caches: one dict of arrays for every model layer, see CacheSpec.fields.
        logits: (params, config, hidden[N, D]) -> f32[N, vocab].
        ignored_tensors: config -> patterns of checkpoint tensors that are skipped on purpose.
    """

    cache_specs: Callable[[ModelConfig, str], tuple[CacheSpec, ...]]
    param_specs: Callable[[ModelConfig], dict[str, Any]]
    weight_rules: Callable[[ModelConfig], dict[str, Any]]
    forward: Callable[..., Any]
    logits: Callable[..., Any]
    ignored_tensors: Callable[[ModelConfig], list[re.Pattern[str]]]


_DECODER = Family(
    decoder.cache_specs,
    decoder.param_specs,
    decoder.weight_rules,
    decoder.forward,
    decoder.logits,
    decoder.ignored_tensors,
)


def get_family(_config: ModelConfig) -> Family:
    """The family of a model; every ModelConfig of today is one forward pass over layers."""
    return _DECODER
