"""Safetensors folders: values, slices, and every way in which shards can be wrong (R-WLD-01)."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxinfer.errors import WeightsError
from jaxinfer.weights.tensors import open_safetensors

A = np.arange(12, dtype=np.float32).reshape(4, 3)
B = np.arange(5, dtype=np.float16)
C = np.ones((2, 2), np.int32)
INDEX = "model.safetensors.index.json"


def write_shards(folder: Path) -> Path:
    """Three shards and their index."""
    weight_map = {}
    for i, (name, value) in enumerate({"a": A, "b": B, "c": C}.items(), 1):
        file = f"model-0000{i}-of-00003.safetensors"
        save_file({name: value}, folder / file)
        weight_map[name] = file
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_values_of_shards_and_of_a_single_file(tmp_path: Path) -> None:
    sharded = open_safetensors(write_shards(tmp_path))
    assert sorted(sharded.names()) == ["a", "b", "c"]
    single_path = tmp_path / "single.safetensors"
    bf16 = A.astype(ml_dtypes.bfloat16)
    save_file({"a": A, "bf": bf16, "s": np.array(3, np.float32)}, single_path)
    single = open_safetensors(single_path)
    for source in (sharded, single):
        assert source.shape("a") == (4, 3) and source.dtype("a") == np.float32
        assert np.array_equal(source.read("a"), A)
    assert np.array_equal(single.read("bf"), bf16) and single.dtype("bf") == ml_dtypes.bfloat16
    assert single.read("s").shape == () and single.read("s") == 3


@given(rows=st.tuples(st.integers(0, 5), st.integers(0, 5)), first=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_slices(
    rows: tuple[int, int], first: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "slices.safetensors"
    if not path.exists():
        save_file({"a": A}, path)
    index = (slice(*rows), slice(first, None))
    assert np.array_equal(open_safetensors(path).read("a", index), A[index])


def test_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no tensor 'z'"):
        open_safetensors(write_shards(tmp_path)).read("z")


def test_missing_shard(tmp_path: Path) -> None:
    (write_shards(tmp_path) / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-00003\.safetensors"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
def test_truncated_shard(keep: int, tmp_path: Path) -> None:
    path = write_shards(tmp_path) / "model-00001-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model-00001-of-00003\.safetensors.*truncated"):
        open_safetensors(tmp_path)


def test_a_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    path = write_shards(tmp_path) / "model-00001-of-00003.safetensors"
    source = open_safetensors(tmp_path)
    with path.open("r+b") as handle:
        handle.truncate(path.stat().st_size - 4)
    with pytest.raises(WeightsError, match=r"model-00001.*truncated"):
        source.read("a")


def test_index_that_names_a_tensor_the_shard_lacks(tmp_path: Path) -> None:
    index = json.loads((write_shards(tmp_path) / INDEX).read_text())
    index["weight_map"]["ghost"] = "model-00003-of-00003.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"model-00003-of-00003\.safetensors.*'ghost'"):
        open_safetensors(tmp_path)


def test_duplicate_tensor_in_two_shards(tmp_path: Path) -> None:
    save_file({"b": B, "a": A}, write_shards(tmp_path) / "model-00002-of-00003.safetensors")
    with pytest.raises(WeightsError, match=r"two files: a \(model-00001.*model-00002"):
        open_safetensors(tmp_path)


def test_index_must_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(WeightsError, match="outside its folder"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_broken_index(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(WeightsError, match=INDEX):
        open_safetensors(tmp_path)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no .safetensors file"):
        open_safetensors(tmp_path)


def test_folder_called_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(WeightsError, match=r"x\.safetensors is not a regular file"):
        open_safetensors(tmp_path)
    with pytest.raises(WeightsError, match=r"x\.safetensors is not a regular file"):
        open_safetensors(tmp_path / "x.safetensors")


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin.*only safetensors, GGUF and Orbax"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}, "do not hold"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 16]}}, "do not hold"),
        ({"a": {"dtype": "Q9", "shape": [4], "data_offsets": [0, 16]}}, "'Q9'"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "broken header"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}, "truncated"),
        ({"a": 3}, "broken header"),
        ([], "broken header"),
    ],
)
def test_headers_that_lie(header: object, message: str, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    with pytest.raises(WeightsError, match=message):
        open_safetensors(path)


def test_a_name_twice_in_one_header(tmp_path: Path) -> None:
    entry = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    text = f"{{{entry},{entry}}}".encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(WeightsError, match="twice"):
        open_safetensors(path)
