"""ParamSpec: a weight described once; shapes, sharding, initial values and loading all follow from it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

# Logical axes. A "qkv" or "gate_up" joins several parts (of unequal widths), in which "heads" and "mlp" lie
# one after the other: a shard of it is cut out of each part.
AXES = ("vocab", "embed", "qkv", "heads", "gate_up", "mlp", "expert")


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One leaf of the parameter tree.

    Attributes:
        shape: shape on the device.
        axes: one of AXES (or None) for every dimension; ShardingRules map them to a mesh.
        dtype: None for the engine's dtype, or a fixed one ("float32") for leaves that must not be cast.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class WeightRule:
    """Where a leaf comes from: checkpoint tensors, read in the checkpoint's own orientation.

    Attributes:
        sources: tensor names; several are concatenated along `concat`.
        concat: axis of the concatenation, in the checkpoint's orientation.
        transpose: swap the last two axes after the concatenation.
        rows: (start, stop) on axis 0 of a single source, for fused checkpoints that must be split.
        stack: sources form so many groups of equal size, in order; each group is one entry of a new leading
            axis (one expert of many), to which the other fields apply. 0: no such axis.
        stride: entries of a stack share all sources, and entry i has `rows` moved on by i times this.
        squeeze: axes of length 1 of the tensors are dropped before all else.
        others: rules for other files of the same class that keep the leaf otherwise, see `for_file`.
    """

    sources: tuple[str, ...]
    concat: int = 0
    transpose: bool = False
    rows: tuple[int, int] | None = None
    stack: int = 0
    stride: int = 0
    squeeze: bool = False
    others: tuple[WeightRule, ...] = ()

    def for_file(self, names: Collection[str]) -> WeightRule:
        """The first of this rule and `others` whose tensors are all among `names`; this one if none is."""
        whole = (r for r in (self, *self.others) if all(s in names for s in r.sources))
        return next(whole, self)

    def entry(self, index: int) -> WeightRule:
        """The rule of one entry of a stacked leaf."""
        if self.rows and self.stride:
            start, stop = (row + index * self.stride for row in self.rows)
            return WeightRule(self.sources, self.concat, self.transpose, (start, stop))
        size = len(self.sources) // self.stack
        part = self.sources[index * size : (index + 1) * size]
        return WeightRule(part, self.concat, self.transpose, self.rows)
