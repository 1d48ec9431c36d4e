"""The recurrences in float64 numpy, one token at a time, and cases with poisoned unused places.

Shares nothing with the kernels: no chunk form, no masks. Used by the tests of the recurrent ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Places:
    """Where blocks come from and go to; rows are chains of blocks."""

    read: Any  # arrays i32[blocks], as the ops take them
    write: Any
    length: Any
    slots: int


def places_at(
    read: Sequence[int], write: Sequence[int], length: Sequence[int], slots: int
) -> Places:
    """Blocks that read, write and hold what the lists say."""
    return Places(np.array(read, "i4"), np.array(write, "i4"), np.array(length, "i4"), slots)


def make_places(rng: np.random.Generator, rows: int, blocks: int, count: int) -> Places:
    """`rows` chains of 1 to `blocks` blocks of 0 to `count` tokens, with checkpoints on their way."""
    slots = 1 + rows * (blocks + 2)
    free = rng.permutation(np.arange(1, slots)).tolist()
    read: list[int] = []
    write: list[int] = []
    length: list[int] = []
    for _ in range(rows):
        own, chain = free.pop(), int(rng.integers(1, blocks + 1))
        for i in range(chain):
            first = int(rng.choice([0, own, free.pop()])) if i == 0 else -1
            last = i == chain - 1
            read.append(first)
            write.append(own if last else int(rng.choice([0, free.pop()])))
            length.append(int(rng.choice([0, 1, count, int(rng.integers(0, count + 1))])))
    return places_at(read, write, length, slots)


def make_delta(
    seed: int,
    places: Places,
    *,
    count: int,
    key_heads: int = 1,
    ratio: int = 1,
    dk: int = 8,
    dv: int = 8,
    by_channel: bool = False,
    rule: bool = True,
    decay: str = "mixed",
    same_keys: bool = False,
) -> tuple[Any, ...]:
    """q, k, v, g, beta and the pool; padding and slots that nobody reads hold NaN."""
    rng = np.random.default_rng(seed)
    n, heads = len(places.read), key_heads * ratio
    keys = rng.normal(size=(n, count, key_heads, dk))
    if same_keys:
        keys = np.broadcast_to(keys[:1, :1], keys.shape)
    keys = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    q = rng.normal(size=keys.shape) * dk**-0.5
    v = rng.normal(size=(n, count, heads, dv))
    shape = (n, count, heads, dk) if by_channel else (n, count, heads)
    decays = {"none": [0.0], "strong": [-20.0], "mixed": [0.0, -0.01, -0.3, -2.0, -5.0, -20.0]}
    g = rng.choice(decays[decay], shape)
    beta = rng.uniform(0.97 if same_keys else 0.0, 1.0, (n, count, heads)) if rule else None
    padding = np.arange(count) >= places.length[:, None]
    arrays = [None if x is None else x.astype(np.float32) for x in (q, keys, v, g, beta)]
    for x in arrays:
        if x is not None:
            x[padding] = np.nan
    pool = np.full((places.slots, heads, dk, dv), np.nan, np.float32)
    used = np.unique(places.read[places.read > 0])
    pool[used] = rng.normal(size=(len(used), heads, dk, dv))
    return (*arrays, pool)


def delta(arrays: tuple[Any, ...], places: Places) -> tuple[np.ndarray, np.ndarray]:
    """float64 pool and outputs of delta_chunk."""
    q, k, v, g, beta, pool = arrays
    heads, ratio = v.shape[2], v.shape[2] // k.shape[2]
    after, out = pool.astype(np.float64), np.zeros(v.shape)
    state = np.zeros(pool.shape[1:])
    for n, source in enumerate(places.read):
        if source >= 0:
            state = pool[source].astype(np.float64) if source else np.zeros(pool.shape[1:])
        for t in range(places.length[n]):
            for h in range(heads):
                key, s = k[n, t, h // ratio].astype(np.float64), state[h]
                s = s * np.exp(g[n, t, h].astype(np.float64))[..., None]
                new = v[n, t, h]
                if beta is not None:
                    new = beta[n, t, h].astype(np.float64) * (new - key @ s)
                state[h] = s + np.outer(key, new)
                out[n, t, h] = q[n, t, h // ratio] @ state[h]
        if places.write[n]:
            after[places.write[n]] = state
    return after, out


def conv(
    x: np.ndarray, w: np.ndarray, pool: np.ndarray, places: Places
) -> tuple[np.ndarray, np.ndarray]:
    """float64 pool and outputs of conv_chunk."""
    taps, out, after = w.shape[1], np.zeros(x.shape), pool.astype(np.float64)
    line = np.zeros((taps - 1, x.shape[2]))
    for n, source in enumerate(places.read):
        if source >= 0:
            line = pool[source].astype(np.float64) if source else np.zeros((taps - 1, x.shape[2]))
        for t in range(places.length[n]):
            line = np.concatenate([line, x[n, t].astype(np.float64)[None]])
            out[n, t] = sum(w[:, j].astype(np.float64) * line[j] for j in range(taps))
            line = line[1:]
        if places.write[n]:
            after[places.write[n]] = line
    return after, out
