"""Paged attention in float64 numpy, one query at a time, and cases with poisoned unseen places.

Shares nothing with the kernels: it first collects the keys a query may see, then applies a softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """Arguments of paged_attention, the options, and how many queries of each row are real."""

    arrays: tuple[Any, ...]
    options: dict[str, Any]
    lengths: np.ndarray  # real queries of each row; the rest is padding whose result is free


def attention(case: Case) -> np.ndarray:
    """float64 [N, C, H, v_pool's hd]: zeros for queries that see nothing, and for padding."""
    q, k_pool, v_pool, tables, base, start = case.arrays
    out = np.zeros((*q.shape[:3], v_pool.shape[3]))
    kv_heads, page = k_pool.shape[1:3]
    group = q.shape[2] // kv_heads
    for n, i, h in np.ndindex(*q.shape[:3]):
        if i >= case.lengths[n]:
            continue
        pos, window = start[n] + i, case.options["window"]
        first = max(0, pos - window + 1) if window else 0
        index = np.arange(first, pos + 1)
        entry = index // page - base[n]
        listed = (entry >= 0) & (entry < tables.shape[1])
        index, ids = index[listed], tables[n, entry[listed]]
        index, ids = index[ids > 0], ids[ids > 0]
        if not len(index):
            continue
        keys = k_pool[ids, h // group, index % page].astype(np.float64)
        values = v_pool[ids, h // group, index % page].astype(np.float64)
        score = keys @ q[n, i, h].astype(np.float64) * case.options["scale"]
        if cap := case.options["softcap"]:
            score = cap * np.tanh(score / cap)
        if (sinks := case.options.get("sinks")) is not None:
            score = np.append(score, sinks[h])  # one more column of the softmax, that is dropped
        weight = np.exp(score - score.max())
        out[n, i, h] = (weight / weight.sum())[: len(values)] @ values
    return out


def make_case(
    seed: int,
    *,
    rows: int,
    queries: int,
    kv_heads: int,
    group: int,
    dim: int,
    page: int,
    pages: int,
    window: int = 0,
    softcap: float = 0.0,
) -> Case:
    """A case with permuted tables; every place that no real query sees holds NaN or infinity."""
    rng = np.random.default_rng(seed)
    total = rows * pages + 2
    shape = (total, kv_heads, page, dim)
    k_pool = rng.choice([np.nan, np.inf, -np.inf], shape).astype(np.float32)
    v_pool = rng.choice([np.nan, np.inf, -np.inf], shape).astype(np.float32)
    q = rng.normal(size=(rows, queries, kv_heads * group, dim)).astype(np.float32)
    lengths = rng.integers(0, min(queries, page * pages) + 1, rows)
    lengths[0] = min(queries, page * pages)
    room = page * pages - lengths  # real queries stay inside the table
    start = np.array(
        [rng.integers(0, r + 1) if w else 0 for r, w in zip(room, lengths, strict=True)]
    )
    if window:  # a sequence that has grown past its table: pages before the window are gone
        start = start + rng.integers(0, 3 * page, rows)
    ends = start + lengths
    base = np.maximum(-(-ends // page) - pages, 0)
    ids = rng.permutation(np.arange(1, total - 1)).reshape(rows, pages)
    for n in range(rows):
        oldest = max(0, start[n] - window + 1) if window else 0
        for j in range(max(oldest, base[n] * page), ends[n]):
            at = (ids[n, j // page - base[n]], slice(None), j % page)
            k_pool[at] = rng.normal(size=(kv_heads, dim))
            v_pool[at] = rng.normal(size=(kv_heads, dim))
        held = -(-ends[n] // page) - base[n]
        ids[n, max(held, 0) :] = 0
    tables, base, start = (a.astype(np.int32) for a in (ids, base, start))
    options = {"scale": float(dim) ** -0.5, "window": window, "softcap": softcap}
    return Case((q, k_pool, v_pool, tables, base, start), options, lengths)


def real(case: Case, out: np.ndarray) -> np.ndarray:
    """The results of the real queries only: [sum(lengths), H, hd]."""
    return np.concatenate([np.asarray(out)[n, :length] for n, length in enumerate(case.lengths)])
