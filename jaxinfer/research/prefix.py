"""State, prefill and extend: run a model over the tokens of one sequence and keep what it remembers.

A State is a value: extend yields a new one and leaves the old one as it was, so nothing is donated.
Lengths are padded to a short ladder, so a few executables serve every length; padding never shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxinfer.errors import InvalidRequest
from jaxinfer.loading import LoadedModel
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import get_family
from jaxinfer.research.batching import (
    capacity,
    checked_tokens,
    empty_caches,
    make_batch,
    pages_of,
    with_pages,
)
from jaxinfer.research.taps import Interventions, Probe, select, split_interventions
from jaxinfer.step.compile import ensure_compile_cache

RUNGS = (1, 16, 64, 256)  # tokens that one run of the model takes


@struct.dataclass
class State:
    """What the model remembers of one sequence: an immutable value, and a pytree.

    Attributes:
        caches: one dict of arrays for each layer: paged kinds [1 + pages, kv_heads, page, head_dim], of which page
            1 + i holds positions i * page and on; STATE kinds [2, ...], of which slot 1 is the sequence's. Page
            and slot 0 are for padding.
        tokens: i32[length] fed so far. logits: f32[vocab] for the token that comes next.
        rope_length: i32[] length that fixes length-dependent rope (dynamic, longrope).
    """

    caches: list[dict[str, jax.Array]]
    tokens: np.ndarray
    logits: jax.Array
    rope_length: np.ndarray

    @property
    def length(self) -> int:
        return len(self.tokens)

    def fork(self, n: int = 1) -> tuple[State, ...]:
        """n States that start from this one. They share its arrays, and none can change another."""
        if n < 1:
            raise InvalidRequest(f"n={n} must be at least 1")
        return tuple(replace(self, caches=[dict(c) for c in self.caches]) for _ in range(n))


@struct.dataclass
class Output:
    """What the model said about the T tokens of one call.

    Attributes:
        logits: f32[T, vocab]; row t is about the token after token t.
        taps: name -> activations [T, ...], with interventions applied.
    """

    logits: jax.Array
    taps: dict[str, jax.Array]

    @property
    def logprobs(self) -> jax.Array:
        """f32[T, vocab] natural log-probabilities."""
        return jax.nn.log_softmax(self.logits, axis=-1)


def prefill(
    model: LoadedModel,
    tokens: Iterable[int],
    *,
    taps: Iterable[str] | None = None,
    interventions: Interventions | None = None,
    max_len: int | None = None,
    rope_length: int | None = None,
) -> tuple[State, Output]:
    """Feed the first tokens of a sequence.

    Args:
        tokens: ids. taps: names or globs of activations to return ("layers.*.out").
        interventions: name or glob -> a value that replaces the activation (broadcast to [T, ...]), or a
            function of it. A function sees all T tokens at once and is traced anew at each call.
        max_len: room to make at once, in tokens; caches grow by themselves when it is passed.
        rope_length: what length-dependent rope counts as the prompt's length; default: these tokens'.
    Raises:
        InvalidRequest: unknown tokens or names, values that do not fit, more tokens than the model takes.
    """
    fed = checked_tokens(model.config, tokens)
    limit = model.config.max_length
    for name, value in (("max_len", max_len), ("rope_length", rope_length)):
        if value is not None and not len(fed) <= value <= limit:
            raise InvalidRequest(f"{name}={value} is out of range [{len(fed)}, {limit}]")
    specs = get_family(model.config).cache_specs(model.config, model.dtype)
    pages = capacity(max_len or len(fed), limit)
    caches = empty_caches(specs, 1, pages, model.config.num_layers)
    empty = State(
        caches,
        np.zeros((0,), np.int32),
        jnp.zeros((model.config.vocab_size,), jnp.float32),
        np.asarray(rope_length or len(fed), np.int32),
    )
    return extend(model, empty, fed, taps=taps, interventions=interventions)


def extend(
    model: LoadedModel,
    state: State,
    tokens: Iterable[int],
    *,
    taps: Iterable[str] | None = None,
    interventions: Interventions | None = None,
) -> tuple[State, Output]:
    """Feed more tokens to a sequence; `state` itself stays as it is. See prefill."""
    ensure_compile_cache()
    fed = checked_tokens(model.config, tokens, before=state.length)
    names = select(model, taps, "tap")
    hooks, values = split_interventions(model, interventions, len(fed))
    specs = get_family(model.config).cache_specs(model.config, model.dtype)
    room = capacity(state.length + len(fed), model.config.max_length)
    caches = with_pages(specs, state.caches, room)
    run, lengths = _run, RUNGS
    if (
        hooks
    ):  # functions may look across tokens: no padding, no chunks, and nothing remembered of them
        run, lengths = (
            jax.jit(partial(_forward, hooks=hooks), static_argnums=(0, 1, 2)),
            (len(fed),),
        )
    logits, found = [], []
    for start, stop, padded in _chunks(len(fed), lengths):
        size = stop - start
        part = jax.tree.map(lambda v: _padded(v[start:stop], padded), (fed, values))  # noqa: B023
        places = np.asarray([state.length + start, size, state.rope_length], np.int32)
        caches, scores, seen = run(
            model.config, model.dtype, names, model.params, caches, *part, places
        )
        logits.append(scores[:size])
        found.append({name: seen[name][:size] for name in names})
    joined = _joined(logits)
    output = Output(joined, {name: _joined([f[name] for f in found]) for name in names})
    tokens = np.concatenate([state.tokens, fed])
    return replace(state, caches=caches, tokens=tokens, logits=joined[-1]), output


def _forward(
    config: ModelConfig,
    dtype: str,
    names: tuple[str, ...],
    params: Any,
    caches: list[dict[str, jax.Array]],
    tokens: jax.Array,
    values: dict[str, jax.Array],
    places: jax.Array,
    *,
    hooks: dict[str, Callable[[jax.Array], jax.Array]],
) -> tuple[list[dict[str, jax.Array]], jax.Array, dict[str, jax.Array]]:
    """One run over tokens[T] (padded): caches, logits f32[T, vocab], taps. places: start, count, rope length."""
    family = get_family(config)
    specs = family.cache_specs(config, dtype)
    pages = pages_of(specs, caches)
    probe = Probe(names, hooks, values)
    start, count, rope_length = (places[i : i + 1] for i in range(3))
    batch = make_batch(specs, tokens[None], start, count, rope_length, pages=pages)
    caches, hidden = family.forward(params, config, caches, batch, tap=probe)
    return caches, family.logits(params, config, hidden), probe.found


_run = jax.jit(partial(_forward, hooks={}), static_argnums=(0, 1, 2))


def _chunks(count: int, lengths: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(start, stop, padded length) of each run that together cover `count` tokens."""
    out, start = [], 0
    while start < count:
        left = count - start
        padded = next((n for n in lengths if n >= left), lengths[-1])
        out.append((start, min(count, start + padded), padded))
        start += padded
    return out


def _padded(value: Any, length: int) -> Any:
    """`value` with zeros after its first axis's end, up to `length`."""
    library = np if isinstance(value, np.ndarray) else jnp
    return library.pad(value, [(0, length - len(value))] + [(0, 0)] * (value.ndim - 1))


def _joined(parts: list[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
