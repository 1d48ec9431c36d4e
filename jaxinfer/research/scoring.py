"""score: log-probabilities of given tokens as a pure function of the parameters, for jax.grad.

Runs the forward pass of service over fresh caches. Keeps no state, never samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.errors import InvalidRequest
from jaxinfer.loading import LoadedModel
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import get_family
from jaxinfer.research.batching import BLOCK, PAGE, checked_tokens, empty_caches, make_batch
from jaxinfer.research.taps import Interventions, Probe, split_interventions
from jaxinfer.step.compile import ensure_compile_cache


def score(
    params: Any,
    model: LoadedModel,
    tokens: Iterable[int],
    *,
    interventions: Interventions | None = None,
) -> jax.Array:
    """f32[T - 1]: natural log-probability of each token but the first, given all before it.

    Can be differentiated, in any mode, with respect to `params` (a tree like model.params) and to
    the values in `interventions` (see prefill); a function among them may close over traced values.
    Raises InvalidRequest for tokens or names that the model does not have.
    """
    ensure_compile_cache()
    fed = _scorable(model, tokens)
    hooks, values = split_interventions(model, interventions, len(fed))
    length = len(fed) if hooks else _rung(len(fed))
    padded = np.pad(fed, (0, length - len(fed)))[None]
    values = {
        name: jnp.pad(v, [(0, length - len(fed))] + [(0, 0)] * (v.ndim - 1))
        for name, v in values.items()
    }
    run = jax.jit(partial(_score, hooks=hooks), static_argnums=(0, 1)) if hooks else _run
    counts = np.asarray([len(fed)], np.int32)
    return run(model.config, model.dtype, params, values, padded, counts)[0, : len(fed) - 1]


def score_batch(params: Any, model: LoadedModel, sequences: Sequence[Iterable[int]]) -> jax.Array:
    """f32[B, T - 1] like score for B sequences, T tokens the longest; zeros behind a shorter one's end."""
    if not sequences:
        raise InvalidRequest("sequences is empty; give at least one list of tokens")
    ensure_compile_cache()
    fed = [_scorable(model, tokens) for tokens in sequences]
    longest = max(len(tokens) for tokens in fed)
    padded = np.stack([np.pad(tokens, (0, _rung(longest) - len(tokens))) for tokens in fed])
    counts = np.asarray([len(tokens) for tokens in fed], np.int32)
    return _run(model.config, model.dtype, params, {}, padded, counts)[:, : longest - 1]


def _scorable(model: LoadedModel, tokens: Iterable[int]) -> np.ndarray:
    fed = checked_tokens(model.config, tokens)
    if len(fed) < 2:
        raise InvalidRequest(f"tokens has {len(fed)} id; scoring needs at least 2")
    return fed


def _rung(length: int) -> int:
    """Padded lengths: powers of two from 16 on."""
    return max(16, 1 << (length - 1).bit_length())


def _score(
    config: ModelConfig,
    dtype: str,
    params: Any,
    values: dict[str, jax.Array],
    tokens: jax.Array,
    counts: jax.Array,
    *,
    hooks: dict[str, Callable[[jax.Array], jax.Array]],
) -> jax.Array:
    """f32[B, T - 1] of tokens i32[B, T], zero from counts[b] - 1 on."""
    family = get_family(config)
    specs = family.cache_specs(config, dtype)
    many, length = tokens.shape
    pages = -(-length // PAGE)
    caches = empty_caches(specs, many, pages, config.num_layers)
    batch = make_batch(specs, tokens, jnp.zeros_like(counts), counts, counts, pages=pages)
    _, hidden = family.forward(params, config, caches, batch, tap=Probe((), hooks, values))
    targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    found = _picked(partial(family.logits, params, config), hidden, targets.reshape(-1))
    inside = jnp.arange(1, length) < counts[:, None]
    return jnp.where(inside, found.reshape(many, length)[:, :-1], 0.0)


_run = jax.jit(partial(_score, hooks={}), static_argnums=(0, 1))


def _picked(
    logits: Callable[[jax.Array], jax.Array], hidden: jax.Array, targets: jax.Array
) -> jax.Array:
    """f32[N] log-probability of targets[N] after hidden[N, D]; holds the logits of one block at a time."""

    @jax.checkpoint  # a block's logits are computed again for the derivative instead of kept
    def one(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, wanted = block
        logprobs = jax.nn.log_softmax(logits(x), axis=-1)
        return jnp.take_along_axis(logprobs, wanted[:, None], axis=-1)[:, 0]

    size = min(BLOCK, len(targets))
    extra = -len(targets) % size
    x = jnp.pad(hidden, ((0, extra), (0, 0))).reshape(-1, size, hidden.shape[-1])
    wanted = jnp.pad(targets, (0, extra)).reshape(-1, size)
    return jax.lax.map(one, (x, wanted)).reshape(-1)[: len(targets)]
