"""The public ops. Each checks its shapes, asks dispatch for a form, and calls it.

Layers call these inside jit. An op never changes its arguments' layout and never copies a pool or a
weight: pools are updated in place when the caller donates them.
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import native, reference, sparse
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
    sinks: jax.Array | None = None,
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
        sinks: [H], a logit of each head that takes its share of the softmax and yields nothing.
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
    _check_rows(rows, tables, base, start)
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks{sinks.shape} do not fit: q{q.shape} needs one of each head")
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    pools = (k_pool, v_pool)
    form = choose(
        "paged_attention", impl, q, *pools, mosaic=lambda: _decode().unsupported(q, *pools)
    )
    module = {"reference": reference, "native": native}.get(form) or _decode()
    return module.paged_attention(
        q, k_pool, v_pool, tables, base, start, sinks, scale=scale, window=window, softcap=softcap
    )


def _decode() -> ModuleType:
    """The GPU's decode kernel; imported where it is wanted, for it brings Mosaic along."""
    from pallas_kernels.gpu import decode

    return decode


def latent_attention(
    q: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    base: jax.Array,
    start: jax.Array,
    *,
    value_dim: int,
    scale: float,
    impl: Impl = "auto",
) -> jax.Array:
    """`paged_attention` where an entry is the key of every head, and its beginning the value.

    Args:
        q: [N, C, H, D]. pool: [pages, 1, page, D].
        tables: i32[N, P]. base: i32[N]. start: i32[N].
        value_dim: how many of an entry's first places are the value. scale: factor on q.k.
    Returns:
        [N, C, H, value_dim] in q's dtype.
    Raises:
        ValueError: shapes that do not fit, or an unknown impl.
    """
    _check_entries(q, pool, value_dim)
    _check_rows(q.shape[0], tables, base, start)
    form = native if choose("latent_attention", impl, q, pool) == "native" else reference
    return form.latent_attention(q, pool, tables, base, start, value_dim=value_dim, scale=scale)


def index_select(
    q: jax.Array,
    w: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    base: jax.Array,
    start: jax.Array,
    *,
    topk: int,
    scale: float,
    impl: Impl = "auto",
) -> jax.Array:
    """The positions of the keys that score highest: sum_h w_h * relu(q_h . k * scale), in float32.

    Query i of row n sees the keys at positions up to start[n] + i, as in `paged_attention`. The
    lower position wins a tie; a score that is NaN wins over all. Has no derivative.

    Args:
        q: [N, C, Hi, di]. w: f32[N, C, Hi]. pool: [pages, 1, page, di].
        tables: i32[N, P]. base: i32[N]. start: i32[N].
        topk: how many positions of each query. scale: factor on q.k.
    Returns:
        i32[N, C, topk]: positions in ascending order, then -1 where fewer keys are seen.
    Raises:
        ValueError: shapes that do not fit, or an unknown impl.
    """
    _check_entries(q, pool, 1)
    _check_rows(q.shape[0], tables, base, start)
    if w.shape != q.shape[:3] or topk < 1:
        raise ValueError(f"w{w.shape} and topk={topk}: give w{q.shape[:3]} and a topk of 1 or more")
    q, w, pool = (jax.lax.stop_gradient(x) for x in (q, w, pool))
    native_form = choose("index_select", impl, q, w, pool) == "native"
    select = native.index_select if native_form else sparse.index_select
    return select(q, w, pool, tables, base, start, topk=topk, scale=scale)


def selected_attention(
    q: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    base: jax.Array,
    chosen: jax.Array,
    *,
    value_dim: int,
    scale: float,
    impl: Impl = "auto",
) -> jax.Array:
    """`latent_attention` over the listed positions only, summed in the order of the list.

    Args:
        q: [N, C, H, D]. pool: [pages, 1, page, D]. tables: i32[N, P]. base: i32[N].
        chosen: i32[N, C, topk] positions that the query may see; -1, or a place on no page: none.
        value_dim: how many of an entry's first places are the value. scale: factor on q.k.
    Returns:
        [N, C, H, value_dim] in q's dtype; a query without keys yields zeros.
    Raises:
        ValueError: shapes that do not fit, or an unknown impl.
    """
    _check_entries(q, pool, value_dim)
    _check_rows(q.shape[0], tables, base, base)
    if chosen.shape[:2] != q.shape[:2] or chosen.ndim != 3:
        raise ValueError(f"chosen{chosen.shape} does not fit q{q.shape}: it is [N, C, topk]")
    native_form = choose("selected_attention", impl, q, pool) == "native"
    attend = native.selected_attention if native_form else sparse.selected_attention
    return attend(q, pool, tables, base, chosen, value_dim=value_dim, scale=scale)


def _check_rows(rows: int, tables: jax.Array, base: jax.Array, start: jax.Array) -> None:
    if tables.shape[0] != rows or base.shape != (rows,) or start.shape != (rows,):
        raise ValueError(
            f"tables{tables.shape}, base{base.shape} and start{start.shape} need q's {rows} rows"
        )


def _check_entries(q: jax.Array, pool: jax.Array, value_dim: int) -> None:
    if pool.ndim != 4 or pool.shape[1] != 1 or pool.shape[3] != q.shape[3]:
        raise ValueError(
            f"q{q.shape} and pool{pool.shape} do not fit: pools are [pages, 1, page, D]"
        )
    if not 1 <= value_dim <= pool.shape[3]:
        raise ValueError(f"value_dim={value_dim} must be 1 to {pool.shape[3]}, an entry's places")


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


def page_write(
    pool: jax.Array, x: jax.Array, page: jax.Array, offset: jax.Array, *, impl: Impl = "auto"
) -> jax.Array:
    """`kv_write` for one pool: pool[pages, Hk, page, hd], x[T, Hk, hd], page and offset i32[T]."""
    if x.ndim != 3 or x.shape[1:] != (pool.shape[1], pool.shape[3]):
        raise ValueError(
            f"x{x.shape} does not fit the pool {pool.shape}: it is [tokens, kv_heads, head_dim]"
        )
    form = native if choose("page_write", impl, pool, x) == "native" else reference
    return form.page_write(pool, x, page, offset)


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


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    out_dtype: DTypeLike | None = None,
    impl: Impl = "auto",
) -> jax.Array:
    """Row i of x[M, K] @ the weight of its group, w[E, K, N], sums in float32.

    Args:
        sizes: i32[E]; the first sizes[0] rows are group 0's, and so on; their sum is M.
    Returns:
        [M, N] in `out_dtype` (default: x's dtype). In the native form a row has the bits of `matmul`'s.
    """
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or sizes.shape != w.shape[:1]:
        raise ValueError(
            f"x{x.shape}, w{w.shape} and sizes{sizes.shape} do not fit: "
            "give x[M, K], w[E, K, N] and sizes[E]"
        )
    dtype = jnp.dtype(out_dtype or x.dtype)
    if choose("grouped_matmul", impl, x, w) == "native":
        return native.grouped_matmul(x, w, sizes).astype(dtype)
    return reference.grouped_matmul(x, w, sizes, dtype)


def head_matmul(x: jax.Array, w: jax.Array, *, impl: Impl = "auto") -> jax.Array:
    """[T, H, N]: head h of x[T, H, K] @ w[h] of w[H, K, N], sums in float32, in x's dtype."""
    if x.ndim != 3 or w.ndim != 3 or x.shape[1:] != w.shape[:2]:
        raise ValueError(f"x{x.shape} and w{w.shape} do not fit: give x[T, H, K] and w[H, K, N]")
    if choose("head_matmul", impl, x, w) == "reference":
        return reference.head_matmul(x, w)
    tokens, heads, dim = x.shape
    sizes = jnp.full(heads, tokens, jnp.int32)
    out = native.grouped_matmul(x.swapaxes(0, 1).reshape(-1, dim), w, sizes)
    return out.reshape(heads, tokens, -1).swapaxes(0, 1)


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
