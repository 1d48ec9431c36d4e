"""The delta rule and linear attention in one canonical form, bitwise the same however tokens arrive.

The state is kept at multiples of EXACT tokens, together with the raw inputs of the tokens since then. Every
call lays all of them at their canonical places and runs the chunk form of that one block, with shapes that
depend on neither the number of rows nor that of new tokens. Called by recurrent.py.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels import recurrent_reference as reference

EXACT = 64  # tokens of a canonical block
_Carry = tuple[jax.Array, jax.Array]  # state at the block's start, inputs since then


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
    """See recurrent.delta_exact."""
    rows, count = q.shape[:2]
    real = reference.real_tokens(length, count)
    inputs = [k, v, g] if beta is None else [k, v, g, beta]
    flat = [x.reshape(rows, count, -1).astype(jnp.float32) for x in (q, *inputs)]
    queries, new = flat[0], jnp.concatenate(flat[1:], axis=-1)
    shapes = [x.shape[2:] for x in (q, *inputs)]
    place = start % EXACT

    def body(carry: _Carry, x: tuple[jax.Array, ...]) -> tuple[_Carry, tuple[jax.Array, ...]]:
        query, new, held_state, held, goes_on, at, tokens = x
        state, kept = jnp.where(goes_on, carry[0], held_state), jnp.where(goes_on, carry[1], held)
        kept = jnp.where(jnp.arange(EXACT)[:, None] < at, kept, 0.0)
        kept, query = _laid(kept, new, at), _laid(jnp.zeros((EXACT, query.shape[1])), query, at)
        after, out = _canonical(state, query, kept, shapes)
        out = jnp.pad(out, [(0, count), (0, 0), (0, 0)])
        out = jax.lax.dynamic_slice_in_dim(out, at, count)
        state = jnp.where(at + tokens == EXACT, after, state)
        return (state, kept), (state, kept, out)

    queries, new = reference.masked(queries, real), reference.masked(new, real)
    held, kept = reference.held_states(pool, read), reference.held_states(pending, read)
    blocks = (queries, new, held, kept, read < 0, place, length)
    first = jnp.zeros_like(held[0]), jnp.zeros_like(kept[0])
    _, (states, kept, out) = jax.lax.scan(body, first, blocks)
    out = reference.masked(out, real).astype(q.dtype)
    return reference.kept(pool, write, states), reference.kept(pending, write, kept), out


def _laid(line: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
    """line [EXACT, width] with the tokens `new` [C, width] from place `at` on."""
    room = jnp.pad(line, [(0, new.shape[0]), (0, 0)])
    return jax.lax.dynamic_update_slice_in_dim(room, new, at, axis=0)[:EXACT]


def _canonical(
    state: jax.Array, query: jax.Array, kept: jax.Array, shapes: list[tuple[int, ...]]
) -> tuple[jax.Array, jax.Array]:
    """State after the block and outputs [EXACT, heads, dv]; the compiler fuses nothing across its rim."""
    state, query, kept = jax.lax.optimization_barrier((state, query, kept))
    arrays, at = [query.reshape(EXACT, *shapes[0])], 0
    for shape in shapes[1:]:
        size = math.prod(shape)
        arrays.append(kept[:, at : at + size].reshape(EXACT, *shape))
        at += size
    q, k, v, g, *rest = arrays
    wide = reference.widened(reference.Inputs(q, k, v, g, rest[0] if rest else None))
    part = reference.block(jax.tree.map(lambda x: x.swapaxes(0, 1), wide))
    after, out = reference.advance(state, part)
    return jax.lax.optimization_barrier((after, out.swapaxes(0, 1)))
