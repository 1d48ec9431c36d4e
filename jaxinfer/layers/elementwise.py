"""Elementwise functions and sums whose bits are a row's own, however many rows a step has.

A compiler builds exp and its like by what they are fused with and by the number of elements: the last
ones of an array may be computed otherwise than the vectors before them. Here they stand alone, on rows
of whole vectors. Called by layers whose rows are short (routers, gates of one number).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

_barrier = jax.lax.optimization_barrier


def alone(function: Callable[[jax.Array], jax.Array], x: jax.Array, fill: float = 0.0) -> jax.Array:
    """function(x) of x[T, n], elementwise. `fill` is what it is also computed of, to fill up rows."""
    return _barrier(function(widened(x, fill)))[:, : x.shape[1]]


def widened(x: jax.Array, fill: float) -> jax.Array:
    """x[T, n] with columns of `fill` up to a power of two of at least 16."""
    width = max(16, 1 << (x.shape[1] - 1).bit_length())
    wide = jnp.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=fill)
    return _barrier(wide)


def exponentials(x: jax.Array) -> jax.Array:
    """exp(x - max) of x[T, n], then columns of 0 up to the width of `widened`."""
    return _barrier(jnp.exp(widened(x - x.max(axis=-1, keepdims=True), -jnp.inf)))


def softmax(x: jax.Array) -> jax.Array:
    """softmax of x[T, n] along n."""
    grown = exponentials(x)
    total = grown
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return (grown / _barrier(total))[:, : x.shape[1]]


def row_sum(x: jax.Array) -> jax.Array:
    """Sums [T, 1] of x[T, n] for a small n, first to last."""
    total = x[:, :1]
    for i in range(1, x.shape[1]):
        total = total + x[:, i : i + 1]
    return _barrier(total)
