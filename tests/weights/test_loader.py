"""load_params against plain numpy, its errors, and its bound on host memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxinfer.errors import ConfigError, WeightsError
from jaxinfer.params import ParamSpec, WeightRule
from jaxinfer.weights import loader
from jaxinfer.weights.loader import load_params, read_shard
from jaxinfer.weights.tensors import Index


class ArraySource:
    """Tensors in memory."""

    def __init__(self, **arrays: np.ndarray) -> None:
        self.arrays = arrays
        self.reads: list[tuple[str, Index | None]] = []

    def names(self) -> Iterable[str]:
        return self.arrays.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self.arrays[name].dtype

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        self.reads.append((name, index))
        return self.arrays[name][index or ()].copy()


def spec(*shape: int, dtype: str | None = None) -> ParamSpec:
    return ParamSpec(shape, (None,) * len(shape), dtype)


@st.composite
def leaves(draw: st.DrawFn) -> tuple[WeightRule, dict[str, np.ndarray], np.ndarray, Index]:
    """A rule, its tensors, the leaf that numpy makes of them, and a part of it."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    rank, count = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    concat = draw(st.integers(0, rank - 1))
    shape = [draw(st.integers(1, 5)) for _ in range(rank)]
    arrays: dict[str, np.ndarray] = {}
    for i in range(count):
        shape[concat] = draw(st.integers(1, 5))
        arrays[f"t{i}"] = rng.standard_normal(shape).astype(np.float32)
    whole = np.concatenate(list(arrays.values()), concat)
    rows = None
    if count == 1 and draw(st.booleans()):
        start = draw(st.integers(0, len(whole) - 1))
        rows = (start, draw(st.integers(start + 1, len(whole))))
        whole = whole[slice(*rows)]
    transpose = draw(st.booleans())
    if transpose and rank >= 2:
        whole = whole.swapaxes(-1, -2)
    index = []
    for size in whole.shape:
        low = draw(st.integers(0, size))
        index.append(slice(low, draw(st.integers(low, size))))
    return WeightRule(tuple(arrays), concat, transpose, rows), arrays, whole, tuple(index)


@given(leaf=leaves(), block=st.sampled_from([1, 4, 1 << 19]))
@settings(max_examples=150, deadline=None)
def test_any_part_of_any_leaf(
    leaf: tuple[WeightRule, dict[str, np.ndarray], np.ndarray, Index], block: int
) -> None:
    rule, arrays, whole, index = leaf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "_BLOCK", block)
        got = read_shard(rule, ArraySource(**arrays), index, np.dtype(np.float32))
    assert np.array_equal(got, whole[index])
    params = load_params(spec(*whole.shape), rule, ArraySource(**arrays), "float32")
    assert np.array_equal(params, whole)


def test_tree_dtypes_and_progress() -> None:
    weights = {"a": np.ones((2, 3), np.float64), "b": np.full(4, 1 / 3, np.float32)}
    weights["c"] = np.array(2.5, np.float16)
    specs = {"x": [spec(3, 2), spec(4, dtype="float32")], "y": spec()}
    rules = {"x": [WeightRule(("a",), transpose=True), WeightRule(("b",))], "y": WeightRule(("c",))}
    seen: list[tuple[str, int, int]] = []
    params = load_params(
        specs, rules, ArraySource(**weights), "bfloat16", progress=lambda *x: seen.append(x)
    )
    assert params["x"][0].dtype == ml_dtypes.bfloat16 and params["x"][0].shape == (3, 2)
    assert params["x"][1].dtype == np.float32 and np.array_equal(params["x"][1], weights["b"])
    assert params["y"] == 2.5
    assert seen == [("loading weights", n, 30) for n in (12, 28, 30)]


def test_nan_and_inf_are_loaded_as_they_are() -> None:
    value = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
    got = load_params(spec(4), WeightRule(("a",)), ArraySource(a=value), "float32")
    assert np.array_equal(got, value, equal_nan=True)


def test_all_missing_unused_and_misshaped_tensors_are_listed() -> None:
    """R-WLD-02: every tensor of the file is loaded, tied, known to be idle, or an error."""
    source = ArraySource(a=np.ones((2, 3)), b=np.ones(3), extra=np.ones(1), rotary=np.ones(1))
    source.arrays["other"] = np.ones(1)
    specs = [spec(2, 4), spec(9), spec(1), spec(1)]
    rules = [WeightRule((n,)) for n in ("a", "b", "gone", "lost")]
    with pytest.raises(WeightsError) as caught:
        load_params(specs, rules, source, "float32", ignored=[re.compile("rot.*")])
    message = str(caught.value)
    assert "missing tensors: gone, lost" in message
    assert "nothing uses: extra, other" in message and "rotary" not in message
    assert "a (2, 3) where (2, 4)" in message and "b (3,) where (9,)" in message
    assert not source.reads, "nothing is read before the checkpoint is known to fit"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (WeightRule(("a",), rows=(1, 9)), r"rows 1\.\.9"),
        (WeightRule(("a", "b")), r"^mis-shaped: b \(4,\) cannot be joined on axis 0 to \(4, 2\)$"),
        (WeightRule(("c", "a"), concat=0), r"^mis-shaped: c \(4, 3\) cannot be joined"),
        (
            WeightRule(("i",)),
            "i has the dtype int8.*float32, bfloat16, float16, float64.*only GGUF",
        ),
    ],
)
def test_rules_that_do_not_fit(rule: WeightRule, message: str) -> None:
    source = ArraySource(
        a=np.ones((4, 2)), b=np.ones(4), c=np.ones((4, 3)), i=np.ones((4, 2), np.int8)
    )
    with pytest.raises(WeightsError, match=message):
        load_params(spec(4, 2), rule, source, "float32", ignored=[re.compile(".")])


def test_unknown_dtype() -> None:
    with pytest.raises(ConfigError, match="dtype='int4'"):
        load_params(spec(1), WeightRule(("a",)), ArraySource(a=np.ones(1)), "int4")


@pytest.mark.multi
def test_shards_on_four_devices(run_python: Callable[..., str]) -> None:
    code = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxinfer.params import ParamSpec, WeightRule
from jaxinfer.weights.loader import load_params
from tests.weights.test_loader import ArraySource
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
source = ArraySource(a=np.arange(48.0).reshape(8, 6), b=np.arange(24.0).reshape(4, 6), n=np.arange(3.0))
specs = {"w": ParamSpec((6, 12), ("x", "y")), "n": ParamSpec((3,), (None,))}
rules = {"w": WeightRule(("a", "b"), transpose=True), "n": WeightRule(("n",))}
place = lambda spec: NamedSharding(mesh, P(*spec.axes))
params = load_params(specs, rules, source, "float32", sharding_for=place)
want = np.concatenate([source.arrays["a"], source.arrays["b"]]).T
assert params["w"].sharding == NamedSharding(mesh, P("x", "y"))
assert [s.data.shape for s in params["w"].addressable_shards] == [(3, 6)] * 4
assert np.array_equal(params["w"], want) and np.array_equal(params["n"], np.arange(3.0))
assert len([r for r in source.reads if r[0] == "n"]) == 1, "replicas share one read"
print("ok")
"""
    assert run_python(code, devices=4).strip() == "ok"


MEMORY_CODE = """
import sys
from pathlib import Path
import jax, numpy as np
from jaxinfer.params import ParamSpec, WeightRule
from jaxinfer.weights.loader import load_params
from jaxinfer.weights.tensors import open_safetensors

def status(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024

source = open_safetensors(Path(sys.argv[1] if len(sys.argv) > 1 else PATH))
specs = {n: ParamSpec(source.shape(n)[::-1], (None, None)) for n in source.names()}
rules = {n: WeightRule((n,), transpose=True) for n in specs}
load_params({"s": ParamSpec((8, 64), (None, None))}, {"s": WeightRule(("small",), transpose=True)},
            source, "float32", ignored=[__import__("re").compile("leaf.*")])
before = status("VmRSS:")
params = load_params(specs, rules, source, "float32")
weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
print(status("VmHWM:") - before, weights, largest)
"""


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_peak_host_memory(dtype: type, tmp_path: Path, run_python: Callable[..., str]) -> None:
    """Peak <= weights on the device + the largest leaf + a small constant, for 300 MB of weights."""
    tensors = {f"leaf{i}": np.ones((1024, 8192), dtype) for i in range(7)}
    tensors |= {"leaf_large": np.ones((2048, 8192), dtype), "small": np.ones((64, 8), dtype)}
    save_file(tensors, tmp_path / "m.safetensors")
    code = f"PATH = {str(tmp_path / 'm.safetensors')!r}\n{MEMORY_CODE}"
    peak, weights, largest = map(int, run_python(code).split())
    assert weights > 280e6
    assert peak <= weights + largest + 32e6, f"{peak / 1e6:.0f} MB for {weights / 1e6:.0f} MB"


def test_a_leaf_lands_on_the_default_device() -> None:
    got = load_params(spec(3), WeightRule(("a",)), ArraySource(a=np.ones(3)), "float32")
    assert got.devices() == {jax.devices()[0]}
