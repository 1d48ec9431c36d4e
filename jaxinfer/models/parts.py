"""What the files of this package share: a weight and its source in one value, norms by leaf name, and
what a mixer or a feed-forward part is.

Never looks at requests, devices or files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import struct

from jaxinfer.cache.spec import CacheSpec
from jaxinfer.layers.batch import Batch, KindBatch, StateBatch
from jaxinfer.layers.norm import rms_norm
from jaxinfer.model_config import ModelConfig
from jaxinfer.params import ParamSpec, WeightRule

Params = dict[str, Any]
Cache = dict[str, jax.Array]
Tap = Callable[[str, jax.Array], jax.Array]
Pair = tuple[ParamSpec, WeightRule]
Pairs = dict[str, Pair]
STATE = "state"  # name of the one STATE kind that a recurrent model has


@struct.dataclass
class View:
    """What a layer sees of the step beside its input.

    Attributes:
        batch: the step. kinds: its KindBatch or StateBatch by the name of the cache kind.
        rope: (cos, sin) of the layer's rope, f32[T, dims / 2], or None.
        shared: arrays that an earlier layer left for later ones of the same step (sparse selections).
    """

    batch: Batch
    kinds: dict[str, KindBatch | StateBatch]
    rope: tuple[jax.Array, jax.Array] | None
    shared: dict[str, jax.Array]

    def pages(self, name: str) -> KindBatch:
        """The paged kind of that name."""
        kind = self.kinds[name]
        assert isinstance(kind, KindBatch)
        return kind

    @property
    def slots(self) -> StateBatch:
        """The slots of the kind STATE."""
        kind = self.kinds[STATE]
        assert isinstance(kind, StateBatch)
        return kind


class Mixer(NamedTuple):
    """One way to mix the tokens of a layer: pure functions of its part of the configuration.

    Attributes:
        pairs: (config, layer, prefix of the layer's tensors) -> its weights, leaf by leaf.
        kinds: (config, layer, dtype) -> the cache kinds that a layer keeps; `layers` is filled in later.
        apply: (h[T, D] normed, weights, cache, layer, config, view, tap) -> (cache with this step's entries,
            out[T, D] before the post norm, shared).
    """

    pairs: Callable[..., Pairs]
    kinds: Callable[..., tuple[CacheSpec, ...]]
    apply: Callable[..., tuple[Cache, jax.Array, dict[str, jax.Array]]]


class Ffn(NamedTuple):
    """One kind of feed-forward part.

    Attributes:
        pairs: (config, layer, prefix of the layer's tensors) -> its weights, leaf by leaf.
        apply: (h[T, D] normed, weights, layer, config, view, tap) -> out[T, D].
    """

    pairs: Callable[..., Pairs]
    apply: Callable[..., jax.Array]


def pair(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *sources: str,
    transpose: bool | None = None,
    dtype: str | None = None,
    stack: int = 0,
    others: tuple[WeightRule, ...] = (),
) -> Pair:
    """A leaf and where it comes from.

    Checkpoints hold [out, in]: several sources are joined along `out` and then turned, which is the
    rule for leaves of two axes, and for those of three that are stacked (`stack` groups, one an expert).
    """
    turn = len(shape) == 2 + bool(stack) if transpose is None else transpose
    return ParamSpec(shape, axes, dtype), WeightRule(sources, 0, turn, stack=stack, others=others)


def norm(x: jax.Array, weights: Params, name: str, c: ModelConfig) -> jax.Array:
    """x normed by the leaf `name`, or x itself where the layer has no such norm. A residual stream may be
    wider than the layers, whose dtype the weight has."""
    weight = weights.get(name)
    return x if weight is None else rms_norm(x.astype(weight.dtype), weight, c.norm_eps, c.norm)
