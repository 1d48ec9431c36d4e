"""DeviceState: everything that lives on the device between steps, one pytree donated as one argument.

Only the engine core may hold one. Slot 0 and page 0 belong to padding rows: written, never read for real.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.cache.spec import CacheSpec

# Bits of `counts`: the low bits count how often the token was generated.
PROMPT_BIT = 1 << 30
BAN_BIT = 1 << 29
OUTPUT_MASK = BAN_BIT - 1


@struct.dataclass
class DeviceState:
    """Caches and per-slot sampling state.

    Attributes:
        caches: for each model layer, its arrays by field name: [num_pages, heads, page_size, head_dim].
        last_token: i32[slots + 1] token that a decode row feeds next.
        counts: i32[slots + 1, vocab] PROMPT_BIT, BAN_BIT and the number of times generated.
        bias: f32[slots + 1, vocab] added to the logits of rows flagged BIAS.
    """

    caches: list[dict[str, jax.Array]]
    last_token: jax.Array
    counts: jax.Array
    bias: jax.Array


def cache_shapes(
    specs: tuple[CacheSpec, ...], num_pages: tuple[int, ...], page_size: int
) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """Shapes of the cache arrays, one dict for each model layer."""
    by_layer: dict[int, dict[str, jax.ShapeDtypeStruct]] = {}
    for spec, pages in zip(specs, num_pages, strict=True):
        for layer in spec.layers:
            by_layer[layer] = {
                f.name: jax.ShapeDtypeStruct(
                    (pages, f.shape[0], page_size // spec.unit, *f.shape[1:]), jnp.dtype(f.dtype)
                )
                for f in spec.fields
            }
    return [by_layer[i] for i in sorted(by_layer)]


def create_state(
    specs: tuple[CacheSpec, ...],
    num_pages: tuple[int, ...],
    page_size: int,
    slots: int,
    vocab_size: int,
) -> DeviceState:
    """A fresh state, all zeros."""
    shapes = cache_shapes(specs, num_pages, page_size)
    return DeviceState(
        caches=jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
        last_token=jnp.zeros((slots + 1,), jnp.int32),
        counts=jnp.zeros((slots + 1, vocab_size), jnp.int32),
        bias=jnp.zeros((slots + 1, vocab_size), jnp.float32),
    )
