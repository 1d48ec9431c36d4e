"""Paged attention of one query a row on Hopper: split keys, TMA, wgmma, and a merge.

A row's keys are cut at multiples of SPLIT positions, so what a row yields depends on that row alone,
not on its neighbours nor on the width of the table. One warpgroup takes one row, kv head and split:
it keeps the pages of the next steps on their way by TMA and computes with wgmma; several of them
share a core, so that one computes while others wait. `_merge` joins the splits.
Never reads an entry of the table outside the table. Called by ops.py; the contract is its own.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import reference
from pallas_kernels.gpu import compat

SPLIT = 512  # keys of a split; fixed: it decides the order of the sums
BLOCK = 64  # keys of a step
ROWS = 64  # rows of a wgmma tile: the heads of a kv head, and rows that nobody reads
MERGE_COLUMNS = 32
STAGES = {64: 4, 128: 3, 256: 2}  # steps in flight, by head_dim
_LOWEST = -1e30  # a running maximum that is finite, so that exp2(m - m) is 1 and never NaN
_LOG2_E = math.log2(math.e)


class Spec(NamedTuple):
    """What a kernel is compiled for."""

    rows: int
    kv_heads: int
    group: int  # heads of a kv head, padded to 8
    dim: int
    page: int
    pages: int  # entries of a row's table
    scale: float
    window: int
    softcap: float

    @property
    def splits(self) -> int:
        """How many splits a row's keys can touch."""
        keys = self.pages * self.page
        return -(-(min(keys, self.window) if self.window else keys) // SPLIT) + 1

    @property
    def padded(self) -> int:
        """Rows of the partial results: the groups of all kv heads, padded to whole tiles."""
        return -(-self.kv_heads * self.group // ROWS) * ROWS


def unsupported(q: jax.Array, k_pool: jax.Array, v_pool: jax.Array) -> str:
    """Why the kernel cannot take this call; "" when it can."""
    queries, heads, dim = q.shape[1:]
    kv_heads, page = k_pool.shape[1:3]
    dtypes = {str(x.dtype) for x in (q, k_pool, v_pool)}
    if dtypes != {"bfloat16"}:
        return f"the Mosaic kernel takes bfloat16, not {', '.join(sorted(dtypes))}"
    if queries != 1:
        return "the Mosaic kernel is for decode: blocks of several queries run as the reference"
    if dim not in STAGES:
        return f"the Mosaic kernel takes head_dim {', '.join(map(str, STAGES))}, not {dim}"
    if page < 16 or page & (page - 1):
        return f"the Mosaic kernel takes a page_size that is a power of 2 from 16, not {page}"
    if heads // kv_heads > ROWS:
        return f"the Mosaic kernel takes up to {ROWS} heads a kv head, not {heads // kv_heads}"
    return ""


def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    tables: jax.Array,
    base: jax.Array,
    start: jax.Array,
    sinks: jax.Array | None,
    *,
    scale: float,
    window: int,
    softcap: float,
) -> jax.Array:
    """See ops.paged_attention; `unsupported` must be "". Derivatives are those of the reference."""
    return _attention(q, k_pool, v_pool, tables, base, start, sinks, scale, window, softcap)


@partial(jax.custom_jvp, nondiff_argnums=(7, 8, 9))
def _attention(q, k_pool, v_pool, tables, base, start, sinks, scale, window, softcap) -> jax.Array:
    rows, _, heads, dim = q.shape
    _, kv_heads, page, _ = k_pool.shape
    real = heads // kv_heads
    group = -(-real // 8) * 8
    spec = Spec(
        rows, kv_heads, group, dim, page, tables.shape[1], float(scale), window, float(softcap)
    )
    q = q.reshape(rows, kv_heads, real, dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, group - real), (0, 0)))
    partial_out, lse = _decode(spec)(q, k_pool, v_pool, tables, base, start)
    sink = [] if sinks is None else [_spread(sinks, spec)]
    out = _merge(spec, bool(sink))(partial_out, lse, base, start, *sink)
    out = out[:, : kv_heads * group].reshape(rows, kv_heads, group, dim)[:, :, :real]
    return out.reshape(rows, 1, heads, dim)


@_attention.defjvp
def _attention_jvp(scale, window, softcap, primals, tangents):
    options = {"scale": scale, "window": window, "softcap": softcap}
    _, tangent = jax.jvp(partial(reference.paged_attention, **options), primals, tangents)
    return _attention(*primals, scale, window, softcap), tangent


def _spread(sinks: jax.Array, spec: Spec) -> jax.Array:
    """f32[padded]: sinks[heads] where the partial results have their heads."""
    sinks = sinks.reshape(spec.kv_heads, -1)
    sinks = jnp.pad(sinks, ((0, 0), (0, spec.group - sinks.shape[1]))).reshape(-1)
    return jnp.pad(sinks, (0, spec.padded - sinks.size))


def _seen(spec: Spec, base: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The keys low <= j < high that the table lists and the query sees; high = 0: none."""
    low = jnp.maximum(base * spec.page, 0)
    if spec.window:
        low = jnp.maximum(low, start - spec.window + 1)
    high = jnp.minimum(start + 1, (base + spec.pages) * spec.page)
    return low, jnp.where(high > low, high, 0)


def _blocks(low: jax.Array, high: jax.Array, nth: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(first block, how many) of the nth split that the keys low <= j < high touch."""
    split = lax.div(low, SPLIT) + nth
    first = jnp.maximum(lax.div(low, BLOCK), split * (SPLIT // BLOCK))
    end = jnp.minimum(lax.div(high + BLOCK - 1, BLOCK), (split + 1) * (SPLIT // BLOCK))
    return first, jnp.maximum(end - first, 0)


def _splits(low: jax.Array, high: jax.Array) -> jax.Array:
    """How many splits the keys low <= j < high touch."""
    return jnp.maximum(lax.div(high + SPLIT - 1, SPLIT) - lax.div(low, SPLIT), 0)


def _decode(spec: Spec) -> Any:
    """(partial f32[rows, splits, padded, dim], base-2 log-sum-exp f32[rows, splits, padded]).

    Only the splits that a row touches and the rows of its groups are written.
    """
    stages, dim, bf16 = STAGES[spec.dim], spec.dim, jnp.bfloat16
    fetches = max(1, BLOCK // spec.page)
    results = [compat.tiled((ROWS, dim), jnp.float32), compat.SMEM((ROWS,), jnp.float32)]
    scratch = {
        "q_s": compat.tiled((ROWS, dim), bf16),
        # The results take the keys' place once they are used up: two blocks fit a core.
        "keys_or_results": compat.RefUnion(compat.tiled((stages, BLOCK, dim), bf16), results),
        "v_s": compat.tiled((stages, BLOCK, dim), bf16),
        "q_here": compat.Barrier(),
        "k_here": compat.Barrier(num_arrivals=fetches, num_barriers=stages),
        "v_here": compat.Barrier(num_arrivals=fetches, num_barriers=stages),
        "spare": [compat.tiled((ROWS, BLOCK), bf16)] if compat.interpreted() else [],
    }
    shape = (spec.rows, spec.splits, spec.padded)
    return compat.kernel(
        partial(_decode_body, spec),
        fast_math=not spec.softcap,  # the fast tanh is too coarse for scores
        out_type=[
            jax.ShapeDtypeStruct((*shape, dim), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        scratch_types=scratch,
        grid=(spec.rows, spec.kv_heads, spec.splits),
        grid_names=("row", "head", "split"),
        kernel_name="paged_decode",
    )


def _decode_body(
    spec: Spec, q, k_pool, v_pool, tables, base, start, out, lse, *, keys_or_results, **scratch
) -> None:
    row, head, nth = (lax.axis_index(name) for name in ("row", "head", "split"))
    low, high = _seen(spec, base[row], start[row])
    first, steps = _blocks(low, high, nth)
    k_s, (out_s, lse_s) = keys_or_results
    entries = partial(_entries, spec, tables, row, base[row])
    pools = (k_pool, k_s, scratch["k_here"]), (v_pool, scratch["v_s"], scratch["v_here"])
    fetch = partial(_fetch, spec, pools, head, first)

    @pl.when(steps > 0)
    def _() -> None:
        queries = scratch["q_s"].at[pl.ds(0, spec.group)]
        compat.copy_gmem_to_smem(q.at[row, head], queries, scratch["q_here"])
        for step in range(STAGES[spec.dim]):

            @pl.when(step < steps)
            def _(step: int = step) -> None:
                fetch(step, entries(first + step))

        compat.barrier_wait(scratch["q_here"])
        sums = _consume(spec, (first, steps), (low, high), entries, fetch, k_s, **scratch)
        places = pl.ds(pl.multiple_of(head * spec.group, 8), spec.group)
        _store(spec, sums, out_s, lse_s, out.at[row, nth, places], lse.at[row, nth, places])


def _entries(spec: Spec, tables, row, base, block) -> list[jax.Array]:
    """The pages of a block of keys; 0 where the table lists none."""
    pages = max(1, BLOCK // spec.page)
    places = [lax.div(block * BLOCK, spec.page) + i - base for i in range(pages)]
    return [
        jnp.where(
            (place >= 0) & (place < spec.pages),
            tables[row, jnp.clip(place, 0, spec.pages - 1)],
            0,
        )
        for place in places
    ]


def _fetch(spec: Spec, pools, head, first, step, pages) -> None:
    """Start the copies of a step's pages to its slot; page 0 stands in where there is none."""
    slot, rows = lax.rem(step, STAGES[spec.dim]), min(BLOCK, spec.page)
    offset = 0
    if spec.page > BLOCK:
        offset = pl.multiple_of(lax.rem((first + step) * BLOCK, spec.page), BLOCK)
    for pool, shared, here in pools:
        for i, page in enumerate(pages):
            source = pool.at[page, head, pl.ds(offset, rows)]
            to = shared.at[slot, pl.ds(i * rows, rows)]
            compat.copy_gmem_to_smem(source, to, here.at[slot])


def _consume(
    spec: Spec, span, keys, entries, fetch, k_s, *, q_s, v_s, k_here, v_here, spare, **_
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The online softmax over the steps: (weighted values[64, dim], maxima[64], totals[64])."""
    (first, steps), (low, high) = span, keys
    stages, spare = STAGES[spec.dim], spare[0] if spare else None

    def body(step, carry):
        acc, top, total = carry
        slot, begin = lax.rem(step, stages), (first + step) * BLOCK
        # Read before the wait, which hides how long the tables take.
        pages, later_pages = entries(first + step), entries(first + step + stages)
        whole = (begin >= low) & (begin + BLOCK <= high)
        for page in pages:
            whole &= page > 0
        compat.barrier_wait(k_here.at[slot])
        s = compat.matmul(q_s, k_s.at[slot].transpose((1, 0)), (ROWS, BLOCK)) * spec.scale
        if spec.softcap:
            s = spec.softcap * jnp.tanh(s / spec.softcap)
        s = lax.cond(
            whole,
            lambda: s * _LOG2_E,
            lambda: jnp.where(_mask(pages, begin, keys, s.shape, 1), s * _LOG2_E, _LOWEST),
        )
        new_top = jnp.maximum(top, s.max(axis=1))
        fade = jnp.exp2(top - new_top)
        p = jnp.exp2(s - lax.broadcast_in_dim(new_top, s.shape, [0]))
        total = total * fade + p.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
        compat.barrier_wait(v_here.at[slot])

        @pl.when(~whole)  # unseen places may hold NaN, and 0 * NaN is NaN
        def _() -> None:
            seen = _mask(pages, begin, keys, (BLOCK, BLOCK), 0)
            for column in range(0, spec.dim, BLOCK):  # in parts, for want of registers
                part = v_s.at[slot, :, pl.ds(column, BLOCK)]
                v = compat.load(part)
                part[...] = jnp.where(seen, v, jnp.zeros_like(v))
            compat.commit_smem()

        acc = compat.add_matmul(acc, p.astype(jnp.bfloat16), v_s.at[slot], spare)

        @pl.when(step + stages < steps)
        def _() -> None:
            fetch(step + stages, later_pages)

        return acc, new_top, total

    sums = compat.full((ROWS, spec.dim), 0), compat.full((ROWS,), _LOWEST), compat.full((ROWS,), 0)
    return lax.fori_loop(0, steps, body, sums)


def _mask(pages, begin, keys, shape, axis) -> jax.Array:
    """bool[shape]: which keys of the block at `begin`, counted along `axis`, are seen."""
    place, (low, high) = compat.iota(shape, axis), keys
    seen = (place + begin >= low) & (place + begin < high)
    for i, page in enumerate(pages):
        rows = BLOCK // len(pages)
        end = jnp.where(page > 0, 0, (i + 1) * rows)  # an absent page hides its own places
        seen &= (place < i * rows) | (place >= end)
    return seen


def _store(spec: Spec, sums, out_s, lse_s, out, lse) -> None:
    """Write a split's mean and log-sum-exp for the rows of the group."""
    acc, top, total = sums
    out_s[...] = acc / lax.broadcast_in_dim(total, acc.shape, [0])
    lse_s[...] = top + jnp.log2(total)
    compat.commit_smem()
    compat.copy_smem_to_gmem(out_s.at[pl.ds(0, spec.group)], out)
    compat.copy_smem_to_gmem(lse_s.at[pl.ds(0, spec.group)], lse)
    compat.wait_smem_to_gmem(0)


def _merge(spec: Spec, with_sinks: bool) -> Any:
    """bf16[rows, padded, dim] of the partial results, with the sinks' share of the softmax."""
    grid = (spec.rows, spec.padded // ROWS, spec.dim // MERGE_COLUMNS)
    return compat.kernel(
        partial(_merge_body, spec, with_sinks),
        fast_math=True,
        out_type=jax.ShapeDtypeStruct((spec.rows, spec.padded, spec.dim), jnp.bfloat16),
        grid=grid,
        grid_names=("row", "tile", "columns"),
        kernel_name="paged_decode_merge",
    )


def _merge_body(spec: Spec, with_sinks: bool, partial_out, lse, base, start, *refs) -> None:
    row, tile, column = (lax.axis_index(name) for name in ("row", "tile", "columns"))
    rows, columns = pl.ds(tile * ROWS, ROWS), pl.ds(column * MERGE_COLUMNS, MERGE_COLUMNS)
    low, high = _seen(spec, base[row], start[row])
    splits = _splits(low, high)

    def body(nth, carry):
        acc, top, total = carry
        term = compat.load(lse.at[row, nth, rows], compat.TILE_ROWS)
        new_top = jnp.maximum(top, term)
        fade, weight = jnp.exp2(top - new_top), jnp.exp2(term - new_top)
        mean = compat.load(partial_out.at[row, nth, rows, columns])
        acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
        acc += mean * lax.broadcast_in_dim(weight, acc.shape, [0])
        return acc, new_top, total * fade + weight

    if with_sinks:
        top = compat.load(refs[0].at[rows], compat.TILE_ROWS) * _LOG2_E
        total = compat.full((ROWS,), 1)
    else:
        top, total = compat.full((ROWS,), _LOWEST), compat.full((ROWS,), 0)
    acc = compat.full((ROWS, MERGE_COLUMNS), 0)
    acc, top, total = lax.fori_loop(0, splits, body, (acc, top, total))
    total = jnp.where(total == 0, 1.0, total)  # no keys: zeros
    out = (acc / lax.broadcast_in_dim(total, acc.shape, [0])).astype(jnp.bfloat16)
    compat.store(refs[-1].at[row, rows, columns], out)
