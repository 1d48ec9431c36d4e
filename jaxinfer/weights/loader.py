"""Places a checkpoint's tensors on devices as the parameter tree that the specs describe.

One shard of one leaf at a time, and within it a block of rows at a time, so that host memory
stays below the weights placed plus the largest leaf. Never casts on the device, never invents a
value: missing, unused and mis-shaped tensors are errors. Called by the engine and the converter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxinfer.errors import ConfigError, WeightsError
from jaxinfer.params import ParamSpec, WeightRule
from jaxinfer.weights.tensors import Index, Squeezed, TensorSource

# (what, done, total): bytes placed so far.
Progress = Callable[[str, int, int], None]
ShardingFor = Callable[[ParamSpec], jax.sharding.Sharding]

_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_READ = (*_DTYPES.values(), np.dtype(np.float64))
_ACCEPTED = ", ".join(str(dtype) for dtype in _READ)
# Elements read at once: bounds temporaries, and a transpose of such a block stays in the cache.
_BLOCK = 1 << 19


def load_params(
    specs_tree: Any,
    rules_tree: Any,
    tensors: TensorSource,
    dtype: str,
    *,
    sharding_for: ShardingFor | None = None,
    ignored: Sequence[re.Pattern[str]] = (),
    progress: Progress | None = None,
) -> Any:
    """The parameter tree of `specs_tree` with arrays as leaves.

    Args:
        specs_tree, rules_tree: equal trees of ParamSpec and WeightRule.
        dtype: dtype of the leaves whose spec has none: "float32", "bfloat16" or "float16".
        sharding_for: sharding of a leaf; None puts everything on the default device.
        ignored: names that fully match one of these may stay unread.

    Raises WeightsError listing every missing, unused and mis-shaped tensor.
    """
    specs, tree = jax.tree.flatten(specs_tree, is_leaf=lambda x: isinstance(x, ParamSpec))
    present = set(tensors.names())
    rules = [rule.for_file(present) for rule in tree.flatten_up_to(rules_tree)]
    _check(specs, rules, tensors, ignored)
    total = sum(math.prod(s.shape) * leaf_dtype(s, dtype).itemsize for s in specs)
    leaves, done = [], 0
    for spec, rule in zip(specs, rules, strict=True):
        leaf = _place(spec, rule, tensors, leaf_dtype(spec, dtype), sharding_for)
        leaves.append(leaf)
        done += leaf.nbytes
        if progress:
            progress("loading weights", done, total)
    return jax.tree.unflatten(tree, leaves)


def leaf_dtype(spec: ParamSpec, dtype: str) -> np.dtype:
    """Dtype of a leaf: the spec's own, else the engine's."""
    name = spec.dtype or dtype
    if name not in _DTYPES:
        raise ConfigError(f"dtype={name!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _check(
    specs: list[ParamSpec],
    rules: list[WeightRule],
    tensors: TensorSource,
    ignored: Sequence[re.Pattern[str]],
) -> None:
    """Compare the whole checkpoint with the rules before anything is read."""
    present = set(tensors.names())
    wanted = {source for rule in rules for source in rule.sources}
    problems: list[str] = []
    missing = sorted(wanted - present)
    if missing:
        problems.append(f"missing tensors: {', '.join(missing)}")
    unused = sorted(
        name for name in present - wanted if not any(p.fullmatch(name) for p in ignored)
    )
    if unused:
        problems.append(f"tensors that nothing uses: {', '.join(unused)}")
    for spec, rule in zip(specs, rules, strict=True):
        if present.issuperset(rule.sources):
            problems += _shape_problems(spec, rule, tensors)
    if problems:
        raise WeightsError("; ".join(problems))


def _shape_problems(spec: ParamSpec, rule: WeightRule, tensors: TensorSource) -> list[str]:
    tensors = Squeezed(tensors) if rule.squeeze else tensors
    if rule.stack:
        entry = ParamSpec(spec.shape[1:], spec.axes[1:], spec.dtype)
        entries = (rule.entry(i) for i in range(rule.stack))
        return [problem for part in entries for problem in _shape_problems(entry, part, tensors)]
    shapes = {name: tensors.shape(name) for name in rule.sources}
    described = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    odd = [
        f"{name} has the dtype {tensors.dtype(name)}, which holds no plain weights: read are {_ACCEPTED} "
        "(of quantized checkpoints only GGUF)"
        for name in shapes
        if tensors.dtype(name) not in _READ
    ]
    first, *others = shapes.values()
    want = spec.shape
    if rule.transpose and len(want) >= 2:
        want = (*want[:-2], want[-1], want[-2])
    # Rows that are cut out say nothing of how long the joined tensor is.
    fit = first if rule.rows else want
    wrong = {
        name: shape
        for name, shape in shapes.items()
        if len(shape) != len(fit) or _without(shape, rule) != _without(fit, rule)
    }
    if others and wrong:
        named = ", ".join(f"{name} {shape}" for name, shape in wrong.items())
        return [*odd, f"mis-shaped: {named} cannot be joined on axis {rule.concat} to {fit}"]
    got = list(first)
    if others:
        got[rule.concat] = sum(shape[rule.concat] for shape in shapes.values())
    if rule.rows:
        start, stop = rule.rows
        if not 0 <= start < stop <= got[0]:
            return [*odd, f"rows {start}..{stop} are wanted of {described}"]
        got[0] = stop - start
    if tuple(got) != want:
        return [*odd, f"mis-shaped: {described} where {want} is wanted"]
    return odd


def _without(shape: tuple[int, ...], rule: WeightRule) -> tuple[int, ...]:
    return shape[: rule.concat] + shape[rule.concat + 1 :]


def _place(
    spec: ParamSpec,
    rule: WeightRule,
    tensors: TensorSource,
    dtype: np.dtype,
    sharding_for: ShardingFor | None,
) -> jax.Array:
    whole = tuple(slice(0, n) for n in spec.shape)
    if sharding_for is None:
        return jax.device_put(read_shard(rule, tensors, whole, dtype)).block_until_ready()
    sharding = sharding_for(spec)
    # Devices that hold the same part share one read.
    parts: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
        bounds = [s.indices(n)[:2] for s, n in zip(index or (), spec.shape, strict=True)]
        parts.setdefault(tuple(bounds), []).append(device)
    placed: list[jax.Array] = []
    for bounds, devices in parts.items():
        shard = read_shard(rule, tensors, tuple(slice(*b) for b in bounds), dtype)
        # Waiting frees the host copy before the next shard is read.
        placed += jax.block_until_ready([jax.device_put(shard, device) for device in devices])
        del shard
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, placed)


def read_shard(
    rule: WeightRule, tensors: TensorSource, index: Index, dtype: np.dtype
) -> np.ndarray:
    """The part `index` (bounds in the leaf's own orientation) of a leaf, cast to `dtype`."""
    out = _aligned(tuple(s.stop - s.start for s in index), dtype)
    tensors = Squeezed(tensors) if rule.squeeze else tensors
    if rule.stack:
        for i in range(index[0].start, index[0].stop):
            _read_into(out[i - index[0].start], rule.entry(i), tensors, index[1:])
    else:
        _read_into(out, rule, tensors, index)
    return out


def _read_into(out: np.ndarray, rule: WeightRule, tensors: TensorSource, index: Index) -> None:
    view, want = out, list(index)
    if rule.transpose and len(want) >= 2:
        view = out.swapaxes(-1, -2)
        want[-2], want[-1] = want[-1], want[-2]
    if rule.rows:
        first = rule.rows[0]
        want[0] = slice(want[0].start + first, want[0].stop + first)
    if len(rule.sources) == 1:
        _fill(view, tensors, rule.sources[0], tuple(want))
        return
    offset, axis = 0, rule.concat
    for name in rule.sources:
        size = tensors.shape(name)[axis]
        low = max(want[axis].start, offset)
        high = min(want[axis].stop, offset + size)
        if low < high:
            inside = tuple(want[:axis]), tuple(want[axis + 1 :])
            place = slice(low - want[axis].start, high - want[axis].start)
            target = view[(slice(None),) * axis + (place,)]
            part = slice(low - offset, high - offset)
            _fill(target, tensors, name, (*inside[0], part, *inside[1]))
        offset += size


def _fill(out: np.ndarray, tensors: TensorSource, name: str, index: Index) -> None:
    """out[...] = the part `index` of a tensor, a block of rows at a time."""
    if not out.ndim:
        out[...] = tensors.read(name)
        return
    row = math.prod(tensors.shape(name)[1:])
    for start, stop in _blocks(index[0].start, index[0].stop, max(1, _BLOCK // max(1, row))):
        at = slice(start - index[0].start, stop - index[0].start)
        out[at] = tensors.read(name, (slice(start, stop), *index[1:]))


def _blocks(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    for low in range(start, stop, step):
        yield low, min(stop, low + step)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array on a 64-byte boundary: the CPU backend takes it over uncopied."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + nbytes].view(dtype).reshape(shape)
