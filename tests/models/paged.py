"""Drives a model family by hand: pages, tables and Batches for a few sequences, one compiled shape.

An independent, slow-and-plain twin of the step's packing, so that the models can be tested without the
engine. Also loads weight rules from tensors in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.spec import CacheSpec, Scope
from jaxinfer.layers.batch import CONTINUE, Batch, KindBatch, StateBatch
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import get_family
from jaxinfer.params import AXES, ParamSpec, WeightRule
from jaxinfer.step.state import cache_shapes

PAGE, PAGES_PER_ROW, BLOCK = 16, 12, 16


def load(
    config: ModelConfig, tensors: dict[str, np.ndarray], dtype: str = "float32"
) -> dict[str, Any]:
    """The parameter tree of `tensors`, all of which must be used exactly once or be ignored."""
    family, unused = get_family(config), set(tensors)

    def leaf(spec: ParamSpec, rule: WeightRule) -> jax.Array:
        rule = rule.for_file(tensors)
        unused.difference_update(rule.sources)
        entries = [rule.entry(i) for i in range(rule.stack)]
        value = np.stack([joined(e) for e in entries]) if entries else joined(rule)
        assert value.shape == spec.shape, (rule, value.shape, spec.shape)
        assert len(spec.axes) == len(spec.shape) and {*spec.axes} <= {*AXES, None}
        return jnp.asarray(value, spec.dtype or dtype)

    def joined(rule: WeightRule) -> np.ndarray:
        parts = [tensors[name] for name in rule.sources]
        parts = [np.squeeze(part) for part in parts] if rule.squeeze else parts
        value = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=rule.concat)
        value = value[slice(*rule.rows)] if rule.rows else value
        return np.swapaxes(value, -1, -2) if rule.transpose else value

    is_leaf = lambda x: isinstance(x, (ParamSpec, WeightRule))  # noqa: E731
    params = jax.tree.map(
        leaf, family.param_specs(config), family.weight_rules(config), is_leaf=is_leaf
    )
    patterns = family.ignored_tensors(config)
    assert not [n for n in unused if not any(p.fullmatch(n) for p in patterns)]
    return params


@dataclass
class Sequence:
    """Tokens of one request; `done` of them are in the cache. rope_length fixes dynamic rope."""

    index: int
    tokens: list[int]
    rope_length: int
    done: int = 0
    logits: list[np.ndarray] = field(default_factory=list)


class Driver:
    """Runs steps of one shape: up to `rows` decode tokens and `blocks` blocks of prefill."""

    def __init__(
        self,
        config: ModelConfig,
        params: dict[str, Any],
        rows: int,
        blocks: int,
        sequences: int = 8,
        dtype: str = "float32",
        block: int = BLOCK,
    ) -> None:
        self.config, self.params, self.rows, self.blocks = config, params, rows, blocks
        self.block = block
        self.specs = get_family(config).cache_specs(config, dtype)
        counts = [
            1 + sequences * (1 if spec.scope is Scope.STATE else PAGES_PER_ROW)
            for spec in self.specs
        ]
        shapes = cache_shapes(self.specs, tuple(counts), PAGE, config.num_layers)
        self.caches = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        self.taps: dict[str, np.ndarray] = {}
        self._run = jax.jit(partial(run, config), donate_argnums=1)

    def step(self, decode: list[Sequence], prefill: list[tuple[Sequence, int]]) -> None:
        """Feed one token of each decode sequence and `n` tokens of each (sequence, n)."""
        batch, places = self.batch(decode, prefill)
        self.caches, logits, taps = self._run(self.params, self.caches, batch)
        self.taps = {name: np.asarray(value) for name, value in taps.items()}
        logits = np.asarray(logits)
        for sequence, token_places in places:
            sequence.logits.extend(logits[token_places])
            sequence.done += len(token_places)

    def batch(
        self, decode: list[Sequence], prefill: list[tuple[Sequence, int]]
    ) -> tuple[Batch, list[tuple[Sequence, list[int]]]]:
        assert len(decode) <= self.rows
        count = self.rows + self.blocks * self.block
        owner: list[Sequence | None] = [None] * count
        tokens, positions, lengths = (np.zeros(count, np.int32) for _ in range(3))
        row_of: list[Sequence | None] = [None] * (self.rows + self.blocks)
        block_row, block_start, block_length = (np.zeros(self.blocks, np.int32) for _ in range(3))
        block_row[:] = self.rows + self.blocks - 1
        places = []
        for i, sequence in enumerate(decode):
            row_of[i] = owner[i] = sequence
            tokens[i], positions[i] = sequence.tokens[sequence.done], sequence.done
            places.append((sequence, [i]))
        block = 0
        for i, (sequence, n) in enumerate(prefill):
            row_of[self.rows + i], mine = sequence, []
            for j in range(n):
                # Exact replay: blocks end at multiples of their size.
                at = j if self.config.replay == "tolerant" else sequence.done + j
                if j == 0 or at % self.block == 0:
                    block_row[block], block_start[block] = self.rows + i, sequence.done + j
                    block += 1
                place = self.rows + (block - 1) * self.block + block_length[block - 1]
                block_length[block - 1] += 1
                owner[place] = sequence
                tokens[place] = sequence.tokens[sequence.done + j]
                positions[place] = sequence.done + j
                mine.append(place)
            places.append((sequence, mine))
        for place, sequence in enumerate(owner):
            lengths[place] = sequence.rope_length if sequence else 0
        blocks = block_row, block_start, block_length
        kinds = tuple(
            self._slots(row_of, *blocks)
            if spec.scope is Scope.STATE
            else self._kind(spec, row_of, owner, positions)
            for spec in self.specs
        )
        tokens, positions, lengths = (jnp.asarray(a) for a in (tokens, positions, lengths))
        row, start, length = (jnp.asarray(a) for a in blocks)
        shape = (self.rows, self.blocks, self.block)
        return Batch(tokens, positions, lengths, row, start, length, kinds, *shape), places

    def fork(self, sequence: Sequence, index: int) -> Sequence:
        """A sequence that has everything of `sequence` so far, in pages and slots of its own."""
        for spec in self.specs:
            slots = 1 if spec.scope is Scope.STATE else PAGES_PER_ROW
            old, new = (slice(1 + i * slots, 1 + (i + 1) * slots) for i in (sequence.index, index))
            for layer, item in product(spec.layers, spec.fields):
                pool = self.caches[layer][item.name]
                self.caches[layer][item.name] = pool.at[new].set(pool[old])
        return replace(sequence, index=index, logits=list(sequence.logits))

    def _slots(
        self,
        row_of: list[Sequence | None],
        block_row: np.ndarray,
        block_start: np.ndarray,
        block_length: np.ndarray,
    ) -> StateBatch:
        """Every sequence reads and writes slot 1 + index."""
        rows = [0 if s is None else 1 + s.index for s in row_of]
        read = [slot if s and s.done else 0 for slot, s in zip(rows, row_of, strict=True)]
        block_read, block_write = np.zeros((2, self.blocks), np.int32)
        for i in np.flatnonzero(block_length):
            again = i > 0 and block_row[i] == block_row[i - 1]
            block_read[i] = CONTINUE if again else read[block_row[i]]
            more = i + 1 < self.blocks and block_row[i + 1] == block_row[i] and block_length[i + 1]
            block_write[i] = 0 if more else rows[block_row[i]]
        arrays = (read[: self.rows], rows[: self.rows], block_read, block_write)
        return StateBatch(*(jnp.asarray(a, jnp.int32) for a in arrays))

    def _kind(
        self,
        spec: CacheSpec,
        row_of: list[Sequence | None],
        owner: list[Sequence | None],
        positions: np.ndarray,
    ) -> KindBatch:
        tables = np.zeros((len(row_of), PAGES_PER_ROW), np.int32)
        base = np.zeros(len(row_of), np.int32)
        for i, sequence in enumerate(row_of):
            if sequence is not None:
                # Pages that no query of this step can see have been given back.
                first = max(0, sequence.done - spec.window + 1) // PAGE if spec.window else 0
                base[i] = first
                pages = [_page(sequence, p) for p in range(first, PAGES_PER_ROW)]
                tables[i, : len(pages)] = pages
        write = [_page(s, p // PAGE) if s else 0 for s, p in zip(owner, positions, strict=True)]
        write = np.asarray(write, np.int32)
        arrays = [jnp.asarray(a) for a in (tables, base, write, positions % PAGE)]
        return KindBatch(*arrays)


def _page(sequence: Sequence, page: int) -> int:
    # Neighbouring pages of a sequence are apart in the pool, and in descending order.
    return 1 + sequence.index * PAGES_PER_ROW + (PAGES_PER_ROW - 1 - page)


def run(
    config: ModelConfig, params: dict[str, Any], caches: list[Any], batch: Batch
) -> tuple[list[Any], jax.Array, dict[str, jax.Array]]:
    family, seen = get_family(config), {}

    def tap(name: str, value: jax.Array) -> jax.Array:
        seen[name] = value
        return value

    caches, hidden = family.forward(params, config, caches, batch, tap)
    return caches, family.logits(params, config, hidden), seen
