"""The recurrent ops as native CPU kernels, token by token: bitwise the same for chunks and single steps.

All float arrays are float32, the shapes are checked. Derivatives are those of the reference.
Called by recurrent.py.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import recurrent_reference as reference


@jax.custom_jvp
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
    call = jax.ffi.ffi_call(
        "jaxinfer_delta",
        (_like(pool), _like(v)),
        vmap_method="sequential",
        input_output_aliases={5: 0},
    )
    factor = jnp.zeros(0) if beta is None else beta
    pool, out = call(q, k, v, g, factor, pool, read, write, length, rule=beta is not None)
    return pool, out


@jax.custom_jvp
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
    q, k, v, g = (x[:, None] for x in (q, k, v, g))
    beta = None if beta is None else beta[:, None]
    pool, out = delta_chunk(q, k, v, g, beta, pool, read, write, jnp.ones_like(read))
    return pool, out[:, 0]


@jax.custom_jvp
def conv_chunk(
    x: jax.Array,
    w: jax.Array,
    pool: jax.Array,
    read: jax.Array,
    write: jax.Array,
    length: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See recurrent.conv_chunk."""
    call = jax.ffi.ffi_call(
        "jaxinfer_conv",
        (_like(pool), _like(x)),
        vmap_method="sequential",
        input_output_aliases={2: 0},
    )
    pool, out = call(x, w, pool, read, write, length)
    return pool, out


@jax.custom_jvp
def conv_step(
    x: jax.Array, w: jax.Array, pool: jax.Array, read: jax.Array, write: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See recurrent.conv_step."""
    pool, out = conv_chunk(x[:, None], w, pool, read, write, jnp.ones_like(read))
    return pool, out[:, 0]


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.float32)


delta_chunk.defjvp(partial(jax.jvp, reference.delta_chunk))
delta_step.defjvp(partial(jax.jvp, reference.delta_step))
conv_chunk.defjvp(partial(jax.jvp, reference.conv_chunk))
conv_step.defjvp(partial(jax.jvp, reference.conv_step))
