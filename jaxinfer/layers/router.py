"""The router of a layer of experts: which experts a token takes, and what each weighs.

A token's choice depends on its own scores alone; of equal scores the expert with the lower number
comes first. Pure functions. Called by models/moe.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.configs.ffn import RouterConfig
from jaxinfer.layers.linear import linear


def route(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    correction: jax.Array | None,
    config: RouterConfig,
) -> tuple[jax.Array, jax.Array]:
    """(experts i32[T, chosen], weights f32[T, chosen]) of x[T, D]; a token's best expert comes first.

    weight: [D, experts], float32 where config.exact. bias: [experts], of the logits.
    correction: f32[experts], of the choice.
    """
    if config.exact:
        x = x.astype(jnp.float32)
    logits = linear(x, weight, bias).astype(jnp.float32)
    return choose(logits, correction, config)


def choose(
    logits: jax.Array, correction: jax.Array | None, config: RouterConfig
) -> tuple[jax.Array, jax.Array]:
    """`route` from the logits f32[T, experts]."""
    if config.score == "chosen":
        _, experts = jax.lax.top_k(logits, config.chosen)
        weights = jnp.take_along_axis(_exponentials(logits), experts, axis=-1)
        return experts, weights / _total(weights)
    scores = _sigmoid(logits) if config.score == "sigmoid" else _softmax(logits)
    # The barrier keeps one rounding of score + correction, whatever the choice is fused with.
    ranked = scores if correction is None else jax.lax.optimization_barrier(scores + correction)
    if config.kept_groups < config.groups:
        kept = _kept(ranked, config)
        scores = jnp.where(kept, scores, 0.0)
        # With a correction a score may be negative, and 0 would beat it.
        ranked = jnp.where(kept, ranked, -jnp.inf if config.group_pairs else 0.0)
    _, experts = jax.lax.top_k(ranked, config.chosen)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.renormalize:
        weights = weights / (_total(weights) + config.epsilon)
    return experts, weights if config.scale == 1.0 else weights * config.scale


def _kept(ranked: jax.Array, config: RouterConfig) -> jax.Array:
    """bool[T, experts]: those in the groups that a token takes, by their `ranked` f32[T, experts]."""
    grouped = ranked.reshape(len(ranked), config.groups, -1)
    best, _ = jax.lax.top_k(grouped, 1 + config.group_pairs)
    score = best[..., 0] + best[..., 1] if config.group_pairs else best[..., 0]
    _, groups = jax.lax.top_k(score, config.kept_groups)
    kept = (groups[:, :, None] == jnp.arange(config.groups)).any(axis=1)
    return jnp.repeat(kept, grouped.shape[2], axis=1)


# Elementwise functions of float32 are compiled by what they are fused with and by the number of
# elements. Alone, on rows of whole vectors, and summed in a fixed order, a row yields the same bits in
# every step.


def _exponentials(x: jax.Array) -> jax.Array:
    """exp(x - max) of x[T, n], then columns of 0 up to a power of two."""
    below = _filled(x - x.max(axis=-1, keepdims=True), -jnp.inf)
    return jax.lax.optimization_barrier(jnp.exp(below))


def _softmax(x: jax.Array) -> jax.Array:
    grown = _exponentials(x)
    total = grown
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return (grown / jax.lax.optimization_barrier(total))[:, : x.shape[1]]


def _sigmoid(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(jax.nn.sigmoid(_filled(x, 0.0)))[:, : x.shape[1]]


def _filled(x: jax.Array, value: float) -> jax.Array:
    """x[T, n] with columns of `value` up to a power of two of at least 16."""
    width = max(16, 1 << (x.shape[1] - 1).bit_length())
    wide = jnp.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=value)
    return jax.lax.optimization_barrier(wide)


def _total(x: jax.Array) -> jax.Array:
    """Sums [T, 1] of x[T, n], first to last."""
    total = x[:, :1]
    for i in range(1, x.shape[1]):
        total = total + x[:, i : i + 1]
    return jax.lax.optimization_barrier(total)
