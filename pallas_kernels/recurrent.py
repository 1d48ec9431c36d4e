"""The public recurrent ops: delta rule, linear attention and short convolutions over pools of states.

Each checks its shapes, asks dispatch for a form, and calls it. Pools are updated in place when the
caller donates them. Slot 0 is never read and holds nothing of value. Layers call these inside jit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import recurrent_exact
from pallas_kernels import recurrent_native as native
from pallas_kernels import recurrent_reference as reference
from pallas_kernels.dispatch import Impl, choose

EXACT = recurrent_exact.EXACT  # positions of a canonical block of delta_exact
_F32 = jnp.dtype(jnp.float32)


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
    *,
    impl: Impl = "auto",
) -> tuple[jax.Array, jax.Array]:
    """The recurrence S <- e^g S; S <- S + k (beta (v - S^T k))^T; o = S^T q over blocks of tokens.

    Everything is computed in float32. Tokens from length[n] on are padding: they leave the state as it
    is and yield zeros, whatever they hold. All reads see the pool before the call.

    Args:
        q, k: [N, C, Hk, dk], q scaled already. v: [N, C, Hv, dv]; value head h uses key head
            h // (Hv // Hk).
        g: logarithm of the decay, <= 0: [N, C, Hv], or [N, C, Hv, dk] for one of each key channel.
        beta: [N, C, Hv], or None: plain linear attention, S <- e^g S + k v^T.
        pool: [slots, Hv, dk, dv].
        read: i32[N]; 0: start from zeros, -1: go on from the end of block n - 1, else a slot.
        write: i32[N]; the slot that keeps the state after the block, 0: none. No slot twice.
        length: i32[N], 0 to C real tokens.
    Returns:
        The pool, and o [N, C, Hv, dv] in q's dtype.
    Raises:
        ValueError: shapes that do not fit, or an unknown impl.
    """
    _check_delta(q, k, v, g, beta, pool)
    _check_places(q.shape[0], read=read, write=write, length=length)
    floats = [x for x in (q, k, v, g, beta, pool) if x is not None]
    form = native if choose("delta_chunk", impl, *floats) == "native" else reference
    return form.delta_chunk(q, k, v, g, beta, pool, read, write, length)


def delta_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array | None,
    pool: jax.Array,
    read: jax.Array,
    write: jax.Array,
    *,
    impl: Impl = "auto",
) -> tuple[jax.Array, jax.Array]:
    """delta_chunk for one token of each row: q, k [R, Hk, dk], v [R, Hv, dv], g [R, Hv] or [R, Hv, dk],
    beta [R, Hv] or None, read and write i32[R] without -1. Returns the pool and o [R, Hv, dv].
    """
    _check_delta(q, k, v, g, beta, pool)
    _check_places(q.shape[0], read=read, write=write)
    floats = [x for x in (q, k, v, g, beta, pool) if x is not None]
    form = native if choose("delta_step", impl, *floats) == "native" else reference
    return form.delta_step(q, k, v, g, beta, pool, read, write)


def delta_exact(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array | None,
    pool: jax.Array,
    pending: jax.Array,
    read: jax.Array,
    write: jax.Array,
    start: jax.Array,
    length: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """delta_chunk whose results are bitwise the same however a sequence is cut into calls and blocks.

    Every call recomputes the canonical block of EXACT positions that its tokens fall into, one row after
    another: the price of a decode step is that of EXACT tokens of prefill. There is one form.

    Args:
        q, k, v, g, beta, read, write: as in delta_chunk. C = 1 for decode.
        pool: f32[slots, Hv, dk, dv], the state at the last multiple of EXACT.
        pending: f32[slots, EXACT, pending_width(...)], the inputs of the tokens since then.
        start: i32[N], position of the block's first token in its sequence.
        length: i32[N], real tokens, with start % EXACT + length <= EXACT.
    Returns:
        The two pools, and o [N, C, Hv, dv] in q's dtype.
    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check_delta(q, k, v, g, beta, pool)
    _check_places(q.shape[0], read=read, write=write, start=start, length=length)
    (key_heads, dk), (heads, dv) = k.shape[2:], v.shape[2:]
    width = pending_width(key_heads, dk, heads, dv, g.ndim == v.ndim, rule=beta is not None)
    if pending.shape != (pool.shape[0], EXACT, width) or {pool.dtype, pending.dtype} != {_F32}:
        raise ValueError(
            f"pool {pool.dtype}{pool.shape} and pending {pending.dtype}{pending.shape} do not fit: "
            f"both are float32, and pending is [slots, {EXACT}, {width}]"
        )
    return recurrent_exact.delta_exact(q, k, v, g, beta, pool, pending, read, write, start, length)


def pending_width(
    key_heads: int, dk: int, heads: int, dv: int, by_channel: bool, *, rule: bool
) -> int:
    """Floats that delta_exact keeps of a token: k, v, g (by_channel: one a channel), and beta (rule)."""
    return key_heads * dk + heads * (dv + (dk if by_channel else 1) + rule)


def conv_chunk(
    x: jax.Array,
    w: jax.Array,
    pool: jax.Array,
    read: jax.Array,
    write: jax.Array,
    length: jax.Array,
    *,
    impl: Impl = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Causal convolution of each channel: y_t = sum_j w[:, j] x_{t - K + 1 + j}, oldest input first.

    No bias, no activation, sums in float32. Padding and slots as in delta_chunk; the state is the last
    K - 1 inputs, oldest first.

    Args:
        x: [N, C, channels]. w: [channels, K]. pool: [slots, K - 1, channels].
        read, write, length: i32[N], see delta_chunk.
    Returns:
        The pool, and y [N, C, channels] in x's dtype.
    Raises:
        ValueError: shapes that do not fit, or an unknown impl.
    """
    _check_conv(x, w, pool)
    _check_places(x.shape[0], read=read, write=write, length=length)
    form = native if choose("conv_chunk", impl, x, w, pool) == "native" else reference
    return form.conv_chunk(x, w, pool, read, write, length)


def conv_step(
    x: jax.Array,
    w: jax.Array,
    pool: jax.Array,
    read: jax.Array,
    write: jax.Array,
    *,
    impl: Impl = "auto",
) -> tuple[jax.Array, jax.Array]:
    """conv_chunk for one token of each row: x [R, channels]; returns the pool and y [R, channels]."""
    _check_conv(x, w, pool)
    _check_places(x.shape[0], read=read, write=write)
    form = native if choose("conv_step", impl, x, w, pool) == "native" else reference
    return form.conv_step(x, w, pool, read, write)


def _check_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array | None,
    pool: jax.Array,
) -> None:
    *lead, key_heads, dk = k.shape
    heads, dv = v.shape[-2:]
    fits = q.shape == k.shape and list(v.shape[:-2]) == lead and heads % key_heads == 0
    if not fits or pool.ndim != 4 or pool.shape[1:] != (heads, dk, dv):
        raise ValueError(
            f"q{q.shape}, k{k.shape}, v{v.shape} and pool{pool.shape} do not fit: q and k are "
            "[..., key_heads, dk], v is [..., heads, dv], heads a multiple of key_heads, and the pool "
            "is [slots, heads, dk, dv]"
        )
    if list(g.shape) not in ([*lead, heads], [*lead, heads, dk]):
        raise ValueError(
            f"g{g.shape} does not fit v{v.shape}: give [..., {heads}], or [..., {heads}, {dk}]"
        )
    if beta is not None and list(beta.shape) != [*lead, heads]:
        raise ValueError(f"beta{beta.shape} does not fit v{v.shape}: give [..., {heads}], or None")


def _check_conv(x: jax.Array, w: jax.Array, pool: jax.Array) -> None:
    channels = x.shape[-1]
    fits = w.ndim == 2 and w.shape[0] == channels and w.shape[1] >= 2
    if not fits or pool.ndim != 3 or pool.shape[1:] != (w.shape[1] - 1, channels):
        raise ValueError(
            f"x{x.shape}, w{w.shape} and pool{pool.shape} do not fit: x is [..., channels], w is "
            "[channels, K] with K >= 2, and the pool is [slots, K - 1, channels]"
        )


def _check_places(count: int, **places: jax.Array) -> None:
    for name, place in places.items():
        if place.shape != (count,):
            raise ValueError(f"{name}{place.shape} does not fit: it needs one entry of {count}")
