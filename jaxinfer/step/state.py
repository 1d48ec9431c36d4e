"""DeviceState: everything that lives on the device between steps, one pytree donated as one argument.

Only the engine core may hold one. Row slot 0, page 0 and state slot 0 are for padding: written, never
read for real.
"""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.cache.spec import CacheSpec, Scope

# Bits of `counts`: the low bits count how often the token was generated.
PROMPT_BIT = 1 << 30
BAN_BIT = 1 << 29
OUTPUT_MASK = BAN_BIT - 1


@struct.dataclass
class DeviceState:
    """Caches and per-slot sampling state.

    Attributes:
        caches: for each model layer, its arrays by field name: [num_pages, heads, page_size / unit, head_dim]
            of paged kinds, [slots, ...] of STATE kinds.
        last_token: i32[rows + 1] token that a row slot's sequence feeds next.
        counts: i32[rows + 1, vocab] PROMPT_BIT, BAN_BIT and the number of times generated.
        bias: f32[rows + 1, vocab] added to the logits of rows flagged BIAS.
    """

    caches: list[dict[str, jax.Array]]
    last_token: jax.Array
    counts: jax.Array
    bias: jax.Array


def cache_shapes(
    specs: tuple[CacheSpec, ...], counts: tuple[int, ...], page_size: int, layers: int
) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """Shapes of the cache arrays, one dict for each model layer; counts: pages or slots of each kind."""
    out: list[dict[str, jax.ShapeDtypeStruct]] = [{} for _ in range(layers)]
    for spec, count in zip(specs, counts, strict=True):
        for layer, field in product(spec.layers, spec.fields):
            first, *rest = field.shape
            shape = (count, first, page_size // spec.unit, *rest)
            if spec.scope is Scope.STATE:
                shape = (count, first, *rest)
            out[layer][field.name] = jax.ShapeDtypeStruct(shape, jnp.dtype(field.dtype))
    return out


def create_state(
    specs: tuple[CacheSpec, ...],
    counts: tuple[int, ...],
    page_size: int,
    rows: int,
    vocab_size: int,
    layers: int,
) -> DeviceState:
    """A fresh state, all zeros; counts: pages or slots of each kind, rows: sequences that run at once."""
    shapes = cache_shapes(specs, counts, page_size, layers)
    return DeviceState(
        caches=jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
        last_token=jnp.zeros((rows + 1,), jnp.int32),
        counts=jnp.zeros((rows + 1, vocab_size), jnp.int32),
        bias=jnp.zeros((rows + 1, vocab_size), jnp.float32),
    )
