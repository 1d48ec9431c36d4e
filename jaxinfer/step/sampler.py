"""From logits to tokens: penalties, masks, filters, one seeded draw, log-probabilities. Pure functions.

Order: penalties -> bias -> min_tokens mask -> [log-probabilities] -> temperature -> top_k -> top_p -> min_p ->
draw. A row's result depends on its own logits, parameters, seed and output position, never on its
neighbours. Filters are thresholds, found among the best candidates or by bisection, never by a full sort.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.layout import RowField, RowFlag
from jaxinfer.step.pack import Rows
from jaxinfer.step.state import BAN_BIT, OUTPUT_MASK, PROMPT_BIT, DeviceState
from jaxinfer.types import MAX_LOGPROBS

NEG_INF = -jnp.inf
CANDIDATES = 64  # best tokens among which thresholds are sought before the whole vocabulary
LANES = 128  # width of the inner level of the two-level cumulative sum


class Sampled(NamedTuple):
    """i32[R] tokens (-1 for rows whose logits are not finite), and their log-probabilities.

    logprobs f32[R], ranks i32[R] (1 = most likely), top_ids i32[R, 20], top_logprobs f32[R, 20]
    are zeros unless a row of the step asked for log-probabilities.
    """

    tokens: jax.Array
    logprobs: jax.Array
    ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def sample(logits: jax.Array, state: DeviceState, rows: Rows) -> Sampled:
    """Draw one token a row from f32[R, V] logits."""
    logits = _adjust(logits, state, rows)
    greedy = _first_best(logits)
    tokens = _cond(rows, RowFlag.RANDOM, lambda: _draw(logits, rows, greedy), lambda: greedy)
    finite = jnp.isfinite(jnp.max(logits, axis=-1))
    n = logits.shape[0]
    nothing = (
        jnp.zeros((n,), jnp.float32),
        jnp.zeros((n,), jnp.int32),
        jnp.zeros((n, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((n, MAX_LOGPROBS), jnp.float32),
    )
    scores = _cond(rows, RowFlag.LOGPROBS, lambda: token_logprobs(logits, tokens), lambda: nothing)
    return Sampled(jnp.where(finite, tokens, -1), *scores)


def _first_best(logits: jax.Array) -> jax.Array:
    """i32[R]: argmax; as two plain reductions, which XLA's CPU backend runs many times faster than its argmax."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    first = jnp.min(jnp.where(logits == best, index, logits.shape[-1]), axis=-1)
    return jnp.minimum(first, logits.shape[-1] - 1)  # a row of NaN has no best


def token_logprobs(
    logits: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Log-probability and rank of `tokens` i32[R] under f32[R, V] logits, and the 20 best."""
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    ranks = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    k = min(MAX_LOGPROBS, logits.shape[-1])
    top, ids = jax.lax.top_k(logits, k)
    pad = ((0, 0), (0, MAX_LOGPROBS - k))
    ids = jnp.pad(ids.astype(jnp.int32), pad, constant_values=-1)
    top = jnp.pad(top - total, pad, constant_values=NEG_INF)
    return (chosen - total)[:, 0], ranks, ids, top


def _cond(rows: Rows, flag: RowFlag, then, otherwise):
    """Run `then` only if some row of the step has the flag."""
    return jax.lax.cond((rows.any_flags & int(flag)) != 0, then, otherwise)


def _adjust(logits: jax.Array, state: DeviceState, rows: Rows) -> jax.Array:
    slots = rows[RowField.SLOT]

    def with_counts() -> jax.Array:
        return _penalize(logits, state.counts[slots], rows)

    logits = _cond(rows, RowFlag.COUNTS, with_counts, lambda: logits)
    unbiased = logits

    def with_bias() -> jax.Array:
        biased = unbiased + state.bias[slots]
        return jnp.where(rows.flag(RowFlag.BIAS)[:, None], biased, unbiased)

    return _cond(rows, RowFlag.BIAS, with_bias, lambda: unbiased)


def _penalize(logits: jax.Array, counts: jax.Array, rows: Rows) -> jax.Array:
    """Repetition counts prompt and output tokens; presence and frequency count output tokens only."""
    used = rows.flag(RowFlag.COUNTS)[:, None]
    output = counts & OUTPUT_MASK
    seen = ((counts & PROMPT_BIT) != 0) | (output > 0)
    repetition = rows[RowField.REPETITION][:, None]
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    out = jnp.where(seen, scaled, logits)
    out = out - rows[RowField.FREQUENCY][:, None] * output.astype(jnp.float32)
    out = out - rows[RowField.PRESENCE][:, None] * (output > 0).astype(jnp.float32)
    banned = rows.flag(RowFlag.MIN_TOKENS)[:, None] & ((counts & BAN_BIT) != 0)
    return jnp.where(used, jnp.where(banned, NEG_INF, out), logits)


def _draw(logits: jax.Array, rows: Rows, greedy: jax.Array) -> jax.Array:
    random = rows.flag(RowFlag.RANDOM)
    # The maximum is taken off first: a tiny temperature can then only underflow to zero weight.
    scale = jnp.where(random, jnp.maximum(rows[RowField.TEMPERATURE], 1e-30), 1.0)[:, None]
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / scale
    scaled = _cond(rows, RowFlag.FILTER, lambda: filter_logits(scaled, rows), lambda: scaled)
    drawn = inverse_cdf(jnp.exp(scaled), uniforms(rows))
    return jnp.where(random, drawn, greedy)


def filter_logits(scaled: jax.Array, rows: Rows) -> jax.Array:
    """Set what top_k, top_p and min_p cut to -inf. `scaled` f32[R, V] has row maximum 0.

    top_k keeps everything tied with the k-th best; top_p keeps the smallest set of most likely tokens whose
    mass reaches top_p, with ties; min_p keeps tokens at least min_p times as likely as the best.
    Each is a threshold on the logits; the highest one counts, and the most likely tokens always survive.
    """
    vocab = scaled.shape[-1]
    top_k = rows[RowField.TOP_K]
    top_k = jnp.where((top_k <= 0) | (top_k >= vocab), vocab, top_k)[:, None]
    top_p = rows[RowField.TOP_P][:, None]
    best = jax.lax.top_k(scaled, min(CANDIDATES, vocab))[0]

    known = (top_k <= best.shape[1]) | (top_k == vocab)
    kth = jnp.take_along_axis(best, jnp.minimum(top_k, best.shape[1]) - 1, axis=-1)
    kth = jnp.where(top_k == vocab, NEG_INF, kth)
    kth = _or_search(known, kth, lambda: _kth_best(scaled, top_k))

    mass = jnp.where(scaled >= kth, jnp.exp(scaled), 0.0)
    wanted = top_p * jnp.sum(mass, axis=-1, keepdims=True)
    reached = jnp.cumsum(jnp.where(best >= kth, jnp.exp(best), 0.0), axis=-1) >= wanted
    known = jnp.any(reached, axis=-1, keepdims=True) | (top_p >= 1.0)
    nucleus = jnp.take_along_axis(best, jnp.argmax(reached, axis=-1)[:, None], axis=-1)
    nucleus = _or_search(known, nucleus, lambda: _nucleus(scaled, mass, wanted))
    nucleus = jnp.where(top_p >= 1.0, NEG_INF, nucleus)

    likely = jnp.log(rows[RowField.MIN_P])[:, None]
    threshold = jnp.minimum(jnp.maximum(jnp.maximum(kth, nucleus), likely), 0.0)
    return jnp.where(scaled >= threshold, scaled, NEG_INF)


def _or_search(known: jax.Array, threshold: jax.Array, search) -> jax.Array:
    """`threshold` where it is known; else, row by row, what a search over the whole vocabulary finds."""

    def searched() -> jax.Array:
        return jnp.where(known, threshold, search())

    return jax.lax.cond(jnp.all(known), lambda: threshold, searched)


def _kth_best(scaled: jax.Array, k: jax.Array) -> jax.Array:
    return _bisect(scaled, lambda keep: jnp.sum(keep, -1, keepdims=True, dtype=jnp.int32) >= k)


def _nucleus(scaled: jax.Array, mass: jax.Array, wanted: jax.Array) -> jax.Array:
    return _bisect(
        scaled, lambda keep: jnp.sum(jnp.where(keep, mass, 0.0), -1, keepdims=True) >= wanted
    )


def _bisect(x: jax.Array, enough) -> jax.Array:
    """Largest f32[R, 1] t for which `enough(x >= t)` holds, built bit by bit in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    keys = jnp.where(bits >= sign, ~bits, bits | sign)

    def body(i: jax.Array, t: jax.Array) -> jax.Array:
        candidate = t | (sign >> i.astype(jnp.uint32))
        return jnp.where(enough(keys >= candidate), candidate, t)

    t = jax.lax.fori_loop(0, 32, body, jnp.zeros((x.shape[0], 1), jnp.uint32))
    return jax.lax.bitcast_convert_type(jnp.where(t >= sign, t ^ sign, ~t), jnp.float32)


def uniforms(rows: Rows) -> jax.Array:
    """f32[R] in [0, 1): one draw for each (seed, output position)."""
    words = jnp.stack([rows[RowField.SEED_HIGH], rows[RowField.SEED_LOW]], axis=-1)
    keys = jax.random.wrap_key_data(words.astype(jnp.uint32), impl="threefry2x32")

    def draw(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(key, position), (), jnp.float32)

    return jax.vmap(draw)(keys, rows[RowField.OUT_POS])


def inverse_cdf(weights: jax.Array, u: jax.Array) -> jax.Array:
    """i32[R]: the first index at which the running sum of f32[R, V] weights exceeds u * total.

    Two levels (blocks of LANES) keep the sums short and their order fixed. An index of weight zero
    is never returned while the row has any weight.
    """
    rows, vocab = weights.shape
    padded = jnp.pad(weights, ((0, 0), (0, -vocab % LANES))).reshape(rows, -1, LANES)
    sums = jnp.sum(padded, axis=-1)
    running = jnp.cumsum(sums, axis=-1)
    target = (u * running[:, -1])[:, None]
    block = _first(running > target, sums > 0.0)
    before = jnp.take_along_axis(running - sums, block[:, None], axis=-1)
    inner = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
    index = _first(before + jnp.cumsum(inner, axis=-1) > target, inner > 0.0)
    return block * LANES + index


def _first(reached: jax.Array, allowed: jax.Array) -> jax.Array:
    """First allowed index that reached the target; if rounding left none, the last allowed one."""
    hit = reached & allowed
    size = hit.shape[-1]
    last = size - 1 - jnp.argmax(allowed[:, ::-1], axis=-1)
    return jnp.where(jnp.any(hit, axis=-1), jnp.argmax(hit, axis=-1), last).astype(jnp.int32)
