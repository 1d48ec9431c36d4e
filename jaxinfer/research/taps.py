"""Named activations: which ones a model has, choosing them by pattern, recording and replacing them.

The names are those that the model's forward pass gives to its `tap`; nothing is listed twice. Called by
the other files of this package.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxinfer.errors import InvalidRequest
from jaxinfer.loading import LoadedModel
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import get_family
from jaxinfer.params import ParamSpec
from jaxinfer.research.batching import PAGE, make_batch
from jaxinfer.step.state import cache_shapes

Hook = Callable[[jax.Array], jax.Array]
Interventions = Mapping[str, Hook | ArrayLike]


def activation_shapes(model: LoadedModel) -> dict[str, tuple[int, ...]]:
    """Names that taps and interventions know, in the order of the forward pass.

    Returns:
        name -> shape of one token's activation; a tap of T tokens is [T, *shape].
    """
    return dict(_activations(model.config, model.dtype))


@lru_cache(maxsize=16)
def _activations(config: ModelConfig, dtype: str) -> dict[str, tuple[int, ...]]:
    """Traces the forward pass on shapes alone; computes and compiles nothing."""
    family, found = get_family(config), {}
    specs = family.cache_specs(config, dtype)
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(s.dtype or dtype)),
        family.param_specs(config),
        is_leaf=lambda x: isinstance(x, ParamSpec),
    )

    def note(name: str, value: jax.Array) -> jax.Array:
        found[name] = value.shape[1:]
        return value

    def run(params, caches) -> jax.Array:
        one = jnp.ones((1,), jnp.int32)
        batch = make_batch(specs, one[None], 0 * one, one, one, pages=1)
        return family.forward(params, config, caches, batch, tap=note)[1]

    jax.eval_shape(run, params, cache_shapes(specs, (2,) * len(specs), PAGE, config.num_layers))
    return found


def select(model: LoadedModel, patterns: Iterable[str] | None, what: str) -> tuple[str, ...]:
    """Names that match any of `patterns` (globs), in forward order.

    Raises InvalidRequest for a pattern that matches nothing, with the nearest names.
    """
    names = _activations(model.config, model.dtype)
    if isinstance(patterns, str):
        patterns = [patterns]
    wanted: set[str] = set()
    for pattern in patterns or ():
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.5) or list(names)[:10]
            raise InvalidRequest(
                f"{what} {pattern!r} names no activation of this model; near ones: {', '.join(near)} "
                "(activation_shapes(model) lists all)"
            )
        wanted.update(matched)
    return tuple(name for name in names if name in wanted)


def split_interventions(
    model: LoadedModel, interventions: Interventions | None, count: int
) -> tuple[dict[str, Hook], dict[str, jax.Array]]:
    """Functions and values by name: values are broadcast to [count, *shape] of the activation."""
    shapes = _activations(model.config, model.dtype)
    hooks: dict[str, Hook] = {}
    values: dict[str, jax.Array] = {}
    for pattern, item in (interventions or {}).items():
        for name in select(model, [pattern], "intervention"):
            if name in hooks or name in values:
                raise InvalidRequest(f"intervention {pattern!r} meets {name} a second time")
            if callable(item):
                hooks[name] = item
            else:
                values[name] = _broadcast(name, item, (count, *shapes[name]))
    return hooks, values


def _broadcast(name: str, value: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    array = jnp.asarray(value)
    try:
        return jnp.broadcast_to(array, shape)
    except ValueError:
        raise InvalidRequest(
            f"intervention {name!r} has shape {array.shape}, which does not broadcast to {shape}"
        ) from None


class Probe:
    """A `tap` that replaces what it was told to and keeps the (replaced) values that are wanted."""

    def __init__(
        self, wanted: Iterable[str], hooks: Mapping[str, Hook], values: Mapping[str, jax.Array]
    ) -> None:
        self.found: dict[str, jax.Array] = {}
        self._wanted, self._hooks, self._values = frozenset(wanted), hooks, values

    def __call__(self, name: str, value: jax.Array) -> jax.Array:
        if name in self._values:
            value = self._values[name].astype(value.dtype)
        elif name in self._hooks:
            value = _checked(name, value, self._hooks[name](value))
        if name in self._wanted:
            self.found[name] = value
        return value


def _checked(name: str, before: jax.Array, after: jax.Array) -> jax.Array:
    if np.shape(after) != before.shape:
        raise InvalidRequest(
            f"intervention {name!r} turned shape {before.shape} into {np.shape(after)}; keep the shape"
        )
    return jnp.asarray(after, before.dtype)
