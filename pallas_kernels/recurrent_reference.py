"""The recurrent ops in plain jnp: the definition of right, and what runs where no faster form exists.

Delta rule and plain linear attention in chunk form, one step of them, and the short causal convolution;
their states live in pools of slots. Never forms exp of a positive sum of decays, so nothing overflows.
Everything can be differentiated. Called by recurrent.py.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

SUB = 16  # tokens whose decays per channel are compared pair by pair
_FORGOTTEN = -104.0  # exp of this is 0 in float32; a larger sum of decays would only cost digits


class Inputs(NamedTuple):
    """The arguments of the delta rule; beta is None for plain linear attention."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array | None


class Block(NamedTuple):
    """What a block of C tokens does to a state [H, dk, dv], whatever that state is."""

    q: jax.Array  # [..., H, C, dk] decayed from the block's start
    k: jax.Array  # [..., H, C, dk] decayed to the block's end
    u: jax.Array  # [..., H, C, dv] what is written when the state is zero
    w: jax.Array | None  # [..., H, C, dk] how much of the state is taken from u; None: nothing
    scores: jax.Array  # [..., H, C, C] q.k inside the block, causal and decayed
    fade: jax.Array  # [..., H, dk or 1, 1] the decay over the whole block


def delta_chunk(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array | None,
    pool: jax.Array,
    read: jax.Array,
    write: jax.Array,
    length: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See recurrent.delta_chunk."""
    real = real_tokens(length, q.shape[1])
    inputs = jax.tree.map(lambda x: masked(x, real), Inputs(q, k, v, g, beta))
    blocks = block(jax.tree.map(lambda x: x.swapaxes(1, 2), widened(inputs)))
    held = held_states(pool, read)

    def body(
        state: jax.Array, x: tuple[Block, jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        part, start, goes_on = x
        state, out = advance(jnp.where(goes_on, state, start), part)
        return state, (state, out)

    _, (ends, out) = jax.lax.scan(body, jnp.zeros_like(held[0]), (blocks, held, read < 0))
    out = masked(out.swapaxes(1, 2), real)
    return kept(pool, write, ends), out.astype(q.dtype)


def delta_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array | None,
    pool: jax.Array,
    read: jax.Array,
    write: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See recurrent.delta_step."""
    q32, k32, v32, g32, b32 = widened(Inputs(q, k, v, g, beta))
    state = held_states(pool, read) * jnp.exp(g32)[..., None]
    if b32 is not None:
        v32 = b32 * (v32 - _dot("rhd,rhde->rhe", k32, state))
    state = state + k32[..., None] * v32[..., None, :]
    out = _dot("rhd,rhde->rhe", q32, state)
    return kept(pool, write, state), out.astype(q.dtype)


def conv_chunk(
    x: jax.Array,
    w: jax.Array,
    pool: jax.Array,
    read: jax.Array,
    write: jax.Array,
    length: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See recurrent.conv_chunk."""
    count, taps = x.shape[1], w.shape[1]
    real = real_tokens(length, count)
    x32 = masked(x, real).astype(jnp.float32)

    def body(
        past: jax.Array, block: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        new, start, goes_on, tokens = block
        line = jnp.concatenate([jnp.where(goes_on, past, start), new])
        past = jax.lax.dynamic_slice_in_dim(line, tokens, taps - 1)
        return past, (past, line)

    held = held_states(pool, read)
    blocks = (x32, held, read < 0, length)
    _, (ends, lines) = jax.lax.scan(body, jnp.zeros_like(held[0]), blocks)
    out = _taps([lines[:, j : j + count] for j in range(taps)], w)
    return kept(pool, write, ends), masked(out, real).astype(x.dtype)


def conv_step(
    x: jax.Array, w: jax.Array, pool: jax.Array, read: jax.Array, write: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See recurrent.conv_step."""
    line = jnp.concatenate([held_states(pool, read), x.astype(jnp.float32)[:, None]], axis=1)
    out = _taps([line[:, j] for j in range(w.shape[1])], w)
    return kept(pool, write, line[:, 1:]), out.astype(x.dtype)


def block(inputs: Inputs) -> Block:
    """The chunk form of blocks in float32: q, k [..., H, C, dk], v [..., H, C, dv], g [..., H, C, dk or 1],
    beta [..., H, C, 1].
    """
    q, k, v, g, beta = inputs
    total = jnp.cumsum(g, axis=-2)
    scores = _scores if g.shape[-1] == 1 else _scores_by_channel
    inside, before = scores(q, k, total), jnp.exp(total)
    u, w = v, None
    if beta is not None:
        both = jnp.concatenate([beta * v, beta * before * k], axis=-1)
        both = _dot("...ij,...jd->...id", _inverse(beta * scores(k, k, total)), both)
        u, w = both[..., : v.shape[-1]], both[..., v.shape[-1] :]
    end = total[..., -1:, :]
    fade = jnp.exp(end).swapaxes(-1, -2)
    return Block(before * q, jnp.exp(end - total) * k, u, w, inside, fade)


def advance(state: jax.Array, part: Block) -> tuple[jax.Array, jax.Array]:
    """The state [H, dk, dv] after a block, and the block's outputs [H, C, dv]."""
    new = part.u if part.w is None else part.u - _dot("hcd,hde->hce", part.w, state)
    out = _dot("hcd,hde->hce", part.q, state) + _dot("hij,hje->hie", part.scores, new)
    return part.fade * state + _dot("hcd,hce->hde", part.k, new), out


def _inverse(a: jax.Array) -> jax.Array:
    """(I + the strictly lower part of a)^-1, a [..., C, C], by merging the inverses of diagonal blocks:
    [[X, 0], [B, Y]]^-1 = [[X^-1, 0], [-Y^-1 B X^-1, Y^-1]].

    Products of powers of a would be fewer steps, but explode on keys that resemble each other.
    """
    row, col = jnp.arange(a.shape[-1])[:, None], jnp.arange(a.shape[-1])
    out = jnp.broadcast_to(jnp.eye(a.shape[-1]), a.shape)
    size = 1
    while size < a.shape[-1]:
        below = (row // size % 2 == 1) & (col // size == row // size - 1)
        corner = jnp.where(below, a, 0.0)
        corner = _dot("...ij,...jk->...ik", _dot("...ij,...jk->...ik", out, corner), out)
        out, size = out - corner, 2 * size
    return out


def _scores(x: jax.Array, k: jax.Array, total: jax.Array) -> jax.Array:
    """x_i . k_j exp(total_i - total_j) for j <= i, else 0: [..., H, C, C] for one decay a head."""
    gap = total - total.swapaxes(-1, -2)
    causal = jnp.tri(x.shape[-2], dtype=bool)
    decay = jnp.exp(jnp.where(causal, gap, 0.0))
    return jnp.where(causal, _dot("...id,...jd->...ij", x, k) * decay, 0.0)


def _scores_by_channel(x: jax.Array, k: jax.Array, total: jax.Array) -> jax.Array:
    """The same with a decay for each channel: total [..., H, C, dk].

    Inside a sub-block the exponents are differences of pairs. Between sub-blocks both sides are taken
    relative to the start of the later one, so that no exponent is positive.
    """
    count, dim = x.shape[-2:]
    sub = min(SUB, count)
    wide, subs = -(-count // sub) * sub, -(-count // sub)
    grow = [(0, 0)] * (x.ndim - 2) + [(0, wide - count), (0, 0)]
    x, k, total = jnp.pad(x, grow), jnp.pad(k, grow), jnp.pad(total, grow, mode="edge")
    cut = (*x.shape[:-2], subs, sub, dim)
    xs, ks, totals = x.reshape(cut), k.reshape(cut), total.reshape(cut)
    start = jnp.pad(totals[..., :-1, -1:, :], [(0, 0)] * (x.ndim - 2) + [(1, 0), (0, 0), (0, 0)])
    earlier = (jnp.arange(wide) // sub < jnp.arange(subs)[:, None])[..., None]
    gap = jnp.where(earlier, start - total[..., None, :, :], 0.0)
    keys = jnp.where(earlier, k[..., None, :, :] * jnp.exp(gap), 0.0)
    far = _dot("...id,...jd->...ij", xs * jnp.exp(totals - start), keys)
    causal = jnp.tri(sub, dtype=bool)[..., None]
    gap = jnp.where(causal, totals[..., :, None, :] - totals[..., None, :, :], 0.0)
    pairs = xs[..., :, None, :] * ks[..., None, :, :] * jnp.exp(gap)
    near = jnp.where(causal, pairs, 0.0).sum(axis=-1)
    own = jnp.eye(subs, dtype=bool)[:, None, :, None]
    both = jnp.where(own, near[..., None, :], far.reshape(*far.shape[:-1], subs, sub))
    return both.reshape(*x.shape[:-2], wide, wide)[..., :count, :count]


def widened(inputs: Inputs) -> Inputs:
    """In float32, one key head for each value head, g and beta with an axis for the channels."""
    q, k, v, g, beta = inputs
    heads = v.shape[-2]
    q, k = (jnp.repeat(x.astype(jnp.float32), heads // x.shape[-2], axis=-2) for x in (q, k))
    g = jnp.maximum(g.astype(jnp.float32), _FORGOTTEN)
    g = g[..., None] if g.ndim < v.ndim else g
    beta = None if beta is None else beta.astype(jnp.float32)[..., None]
    return Inputs(q, k, v.astype(jnp.float32), g, beta)


def _taps(line: list[jax.Array], w: jax.Array) -> jax.Array:
    """sum_j w[:, j] line[j] in float32, from the oldest input to the newest."""
    w32 = w.astype(jnp.float32)
    out = line[0] * w32[:, 0]
    for j in range(1, len(line)):
        out = out + line[j] * w32[:, j]
    return out


def real_tokens(length: jax.Array, count: int) -> jax.Array:
    return jnp.arange(count) < length[:, None]


def masked(x: jax.Array, real: jax.Array) -> jax.Array:
    """Zeros in place of padding, whatever it holds."""
    return jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, 0)


def held_states(pool: jax.Array, read: jax.Array) -> jax.Array:
    """float32 states of the slots that are read; zeros for a fresh start (slot 0 may hold anything)."""
    # The barrier ends the read before a write may begin: without it XLA copies the pool for one row.
    state = jax.lax.optimization_barrier(pool[jnp.maximum(read, 0)]).astype(jnp.float32)
    return jnp.where((read > 0).reshape(-1, *[1] * (pool.ndim - 1)), state, 0.0)


def kept(pool: jax.Array, write: jax.Array, states: jax.Array) -> jax.Array:
    """The pool with the states in their slots; write 0 keeps nothing."""
    slot = jnp.where(write > 0, write, pool.shape[0])
    return pool.at[slot].set(states.astype(pool.dtype), mode="drop")


def _dot(dims: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(dims, a, b, precision=jax.lax.Precision.HIGHEST)
