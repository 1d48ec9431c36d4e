"""The shapes that the GPU kernels are lowered and compiled for without a GPU.

NAMED are the attention layers of models; EVERY is what the kernel's code can differ by.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels


@dataclass(frozen=True)
class Config:
    """One decode step's attention: `rows` sequences of up to `keys` keys."""

    heads: int
    kv_heads: int
    dim: int
    page: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    rows: int = 32
    keys: int = 4096

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of the op's arguments: q, both pools, tables, base, start and, if it has them, sinks."""
        pages = -(-self.keys // self.page)
        pool = (self.rows * pages + 1, self.kv_heads, self.page, self.dim)
        floats = [(self.rows, 1, self.heads, self.dim), pool, pool]
        ints = [(self.rows, pages), (self.rows,), (self.rows,)]
        out = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in floats]
        out += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ints]
        return out + [jax.ShapeDtypeStruct((self.heads,), jnp.bfloat16)] * self.sinks

    def call(self, *arrays: Any) -> jax.Array:
        return pallas_kernels.paged_attention(
            *arrays[:6],
            scale=self.dim**-0.5,
            window=self.window,
            softcap=self.softcap,
            sinks=arrays[6] if self.sinks else None,
        )


NAMED = {
    "Llama 3 8B, pages of 16": Config(32, 8, 128, 16),
    "Llama 3 8B, pages of 64": Config(32, 8, 128, 64),
    "Llama 3.2 1B": Config(32, 8, 64, 16),
    "SmolLM2 135M": Config(9, 3, 64, 16),
    "Gemma 2 9B, window": Config(16, 8, 256, 16, window=4096, softcap=50.0),
    "Gemma 3 1B, pages of 64": Config(4, 1, 256, 64, window=512),
    "gpt-oss 20B, window": Config(64, 8, 64, 16, window=128, sinks=True),
    "Qwen3 8B, pages of 128": Config(32, 8, 128, 128),
}
EVERY = [
    Config(16, 8, dim, page, window=window, softcap=softcap, sinks=bool(window))
    for dim, page, (window, softcap) in product(
        (64, 128, 256), (16, 32, 64, 128), ((0, 0.0), (1024, 30.0))
    )
] + [Config(group * 2, 2, 128, 16) for group in (1, 9, 64)]
