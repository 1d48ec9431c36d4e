"""Rotary embeddings: angles for a step's tokens, and the turn of q and k, of halves or of pairs.

Frequencies are made in float64 on the host; only length-dependent types (dynamic, longrope) choose
among them on the device, by the length that fixes the token's request (Batch.rope_length).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.rope_config import RopeConfig


def frequencies(rope: RopeConfig, *, extended: bool = False) -> np.ndarray:
    """float64[dims / 2] radians a position; longrope's `extended` ones are for long requests."""
    index = np.arange(0, rope.dims, 2, dtype=np.float64) / rope.dims
    inv = rope.theta**-index
    if rope.type == "linear":
        return inv / rope.factor
    if rope.type == "llama3":
        turns = rope.original * inv / (2 * math.pi)
        smooth = np.clip((turns - rope.low_freq) / (rope.high_freq - rope.low_freq), 0.0, 1.0)
        return inv * ((1 - smooth) / rope.factor + smooth)
    if rope.type == "yarn":
        low, high = rope.ramp
        ramp = np.clip((np.arange(rope.dims // 2) - low) / (high - low), 0.0, 1.0)
        return inv * ((1 - ramp) + ramp / rope.factor)
    if rope.type == "longrope":
        return inv / np.asarray(rope.long if extended else rope.short)
    return inv


def rope_table(
    rope: RopeConfig, positions: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) f32[T, dims / 2] for positions i32[T] of requests with lengths i32[T]."""
    inv = jnp.asarray(frequencies(rope), jnp.float32)
    if rope.type == "dynamic":
        # theta grows by g^(dims / (dims - 2)), so frequency i shrinks by g^(-2i / (dims - 2)).
        ratio = jnp.maximum(lengths, rope.original).astype(jnp.float32) / rope.original
        growth = rope.factor * ratio - (rope.factor - 1.0)
        power = np.arange(0, rope.dims, 2) / max(rope.dims - 2, 1)
        inv = inv * jnp.exp(-jnp.log(growth)[:, None] * jnp.asarray(power, jnp.float32))
    elif rope.type == "longrope":
        extended = jnp.asarray(frequencies(rope, extended=True), jnp.float32)
        inv = jnp.where((lengths > rope.original)[:, None], extended, inv)
    angles = positions.astype(jnp.float32)[:, None] * inv
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def apply_rope(
    x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False
) -> jax.Array:
    """Turn the first 2 * cos.shape[-1] dims of x[T, H, head_dim]; float32 inside, x's dtype out.

    interleaved: dims 2i and 2i + 1 turn together, not i and i + half. They come out as all even dims and then
    all odd ones: the product of a turned q and a turned k is the same in either order.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    x32 = x[..., : 2 * half].astype(jnp.float32)
    a, b = (x32[..., ::2], x32[..., 1::2]) if interleaved else jnp.split(x32, 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return turned if 2 * half == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * half :]], -1)
