"""The public ops. Each checks its shapes, asks dispatch for a form, and calls it.

Layers call these inside jit. An op never changes its arguments' layout and never copies a pool or a
weight: pools are updated in place when the caller donates them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import native, reference
from pallas_kernels.dispatch import Impl, choose


def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    tables: jax.Array,
    base: jax.Array,
    start: jax.Array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    impl: Impl = "auto",
) -> jax.Array:
    """Causal attention of query blocks over paged keys and values, softmax in float32.

    Query i of row n stands at position pos = start[n] + i and sees the keys j with
    max(0, pos - window + 1) <= j <= pos. Key j lives in page tables[n, j // page - base[n]] at
    offset j % page. Keys outside the table or on page 0 ("no page") are not seen; a query without
    keys yields zeros. What unseen places hold, NaN included, never matters.

    Args:
        q: [N, C, H, hd]. k_pool, v_pool: [pages, Hk, page, hd], H a multiple of Hk.
        tables: i32[N, P]. base: i32[N]. start: i32[N].
        scale: factor on q.k. window: visible keys including the query's own (0: all).
        softcap: s -> softcap * tanh(s / softcap) (0: off).
    Returns:
        [N, C, H, hd] in q's dtype.
    Raises:
        ValueError: shapes that do not fit, or an unknown impl.
    """
    rows, _, heads, dim = q.shape
    if k_pool.shape != v_pool.shape or k_pool.shape[3] != dim or heads % k_pool.shape[1]:
        raise ValueError(
            f"q{q.shape}, k_pool{k_pool.shape} and v_pool{v_pool.shape} do not fit: pools are "
            "[pages, kv_heads, page, head_dim] and heads must be a multiple of kv_heads"
        )
    if tables.shape[0] != rows or base.shape != (rows,) or start.shape != (rows,):
        raise ValueError(
            f"tables{tables.shape}, base{base.shape} and start{start.shape} need q's {rows} rows"
        )
    form = native if choose("paged_attention", impl, q, k_pool, v_pool) == "native" else reference
    return form.paged_attention(
        q, k_pool, v_pool, tables, base, start, scale=scale, window=window, softcap=softcap
    )


def kv_write(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page: jax.Array,
    offset: jax.Array,
    *,
    impl: Impl = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Write the entries of T tokens to their pages; in place where the pools are donated.

    Args:
        k_pool, v_pool: [pages, Hk, page, hd]. k, v: [T, Hk, hd].
        page, offset: i32[T]; page 0 is the trash page that padding writes to.
    Returns:
        The two pools.
    """
    if k.shape != v.shape or k.shape[1:] != (k_pool.shape[1], k_pool.shape[3]):
        raise ValueError(
            f"k{k.shape} and v{v.shape} do not fit the pools {k_pool.shape}: "
            "k and v are [tokens, kv_heads, head_dim]"
        )
    form = native if choose("kv_write", impl, k_pool, v_pool, k, v) == "native" else reference
    return form.kv_write(k_pool, v_pool, k, v, page, offset)


def matmul(
    x: jax.Array, w: jax.Array, *, out_dtype: DTypeLike | None = None, impl: Impl = "auto"
) -> jax.Array:
    """x[M, K] @ w[K, N] with sums in float32, in `out_dtype` (default: x's dtype)."""
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"x{x.shape} @ w{w.shape} does not fit: give x[M, K] and w[K, N]")
    dtype = jnp.dtype(out_dtype or x.dtype)
    if choose("matmul", impl, x, w) == "native":
        return native.matmul(x, w).astype(dtype)
    return reference.matmul(x, w, dtype)


def matmul_t(
    x: jax.Array, w: jax.Array, *, out_dtype: DTypeLike | None = None, impl: Impl = "auto"
) -> jax.Array:
    """x[M, D] @ w[V, D].T (tied heads), sums in float32, in `out_dtype` (default: x's dtype)."""
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x{x.shape} @ w{w.shape}.T does not fit: give x[M, D] and w[V, D]")
    dtype = jnp.dtype(out_dtype or x.dtype)
    if choose("matmul_t", impl, x, w) == "native":
        return native.matmul_t(x, w).astype(dtype)
    return reference.matmul_t(x, w, dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, impl: Impl = "auto") -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32, cast to x's dtype.

    Args:
        x: [..., D]. weight: [D].
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight{weight.shape} does not fit x{x.shape}: it needs x's last axis")
    if choose("rms_norm", impl, x, weight) == "native":
        return native.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).reshape(x.shape)
    return reference.rms_norm(x, weight, eps)
