"""The router of a layer of experts: which experts a token takes, and what each weighs.

A token's choice depends on its own scores alone; of equal scores the expert with the lower number
comes first. Pure functions. Called by models/moe.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.configs.ffn import RouterConfig
from jaxinfer.layers.elementwise import alone, exponentials, row_sum, softmax
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
        weights = jnp.take_along_axis(exponentials(logits), experts, axis=-1)
        return experts, weights / row_sum(weights)
    scores = alone(jax.nn.sigmoid, logits) if config.score == "sigmoid" else softmax(logits)
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
        weights = weights / (row_sum(weights) + config.epsilon)
    return experts, weights if config.scale == 1.0 else weights * config.scale


def _kept(ranked: jax.Array, config: RouterConfig) -> jax.Array:
    """bool[T, experts]: those in the groups that a token takes, by their `ranked` f32[T, experts]."""
    grouped = ranked.reshape(len(ranked), config.groups, -1)
    best, _ = jax.lax.top_k(grouped, 1 + config.group_pairs)
    score = best[..., 0] + best[..., 1] if config.group_pairs else best[..., 0]
    _, groups = jax.lax.top_k(score, config.kept_groups)
    kept = (groups[:, :, None] == jnp.arange(config.groups)).any(axis=1)
    return jnp.repeat(kept, grouped.shape[2], axis=1)
