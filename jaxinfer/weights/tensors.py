"""Lazy handles on the tensors of a checkpoint: the TensorSource protocol and safetensors files.

Opening reads headers only. Reads go through pread into fresh buffers, never through mmap: mapped
pages would count twice against the memory bound of the loader, and a file that shrinks would kill
the process. Never pickle. Called by source.py; the loader and the converter read through it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from jaxinfer.errors import WeightsError

Index = tuple[slice, ...]

# Scalar types of the safetensors format that a weight may have here.
_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_LFS = b"version https://git-lfs"  # how a pointer file starts
_MAX_HEADER = 100_000_000  # the format's own limit
_INDEX_FILE = "model.safetensors.index.json"
ACCEPTED = "only safetensors, GGUF and Orbax checkpoints are read"


class TensorSource(Protocol):
    """Named tensors that are read on demand; nothing is cached."""

    def names(self) -> Iterable[str]:
        """Names of all tensors, in file order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, in the checkpoint's orientation; WeightsError if there is none."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """Dtype that `read` returns (float32 for quantized GGUF tensors)."""
        ...

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """A fresh array with the part `index` (slices of step 1, axis 0 first) of a tensor."""
        ...


class Squeezed:
    """Another source, seen without the axes of length 1 of its tensors."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.names, self.dtype = source.names, source.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(n for n in self._source.shape(name) if n != 1)

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        index = tuple(slice(0, n) for n in self.shape(name)) if index is None else index
        places, shape = iter(index), self._source.shape(name)
        part = tuple(slice(0, 1) if n == 1 else next(places) for n in shape)
        return self._source.read(name, part).reshape([s.stop - s.start for s in index])


def lfs_pointer(path: Path) -> str | None:
    """What is wrong with a file that Git left as a pointer to the real one; None for any other file."""
    with path.open("rb") as file:
        if file.read(len(_LFS)) != _LFS:
            return None
    return f"{path} is a Git LFS pointer, fetch the real file (`git lfs pull` in its folder)"


class TensorFile:
    """A file that is read by position; safe to share between threads."""

    def __init__(self, path: Path) -> None:
        try:
            self._handle = path.open("rb")
            self.size = os.fstat(self._handle.fileno()).st_size
        except OSError as error:
            raise WeightsError(f"weights file {path} cannot be read: {error.strerror}") from error
        self.path = path
        if problem := lfs_pointer(path):
            raise WeightsError(problem)

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """Bytes [offset, offset + nbytes) as a uint8 array; WeightsError when the file is shorter."""
        out = np.empty(nbytes, np.uint8)
        view, done = memoryview(out), 0
        while done < nbytes:
            got = os.preadv(self._handle.fileno(), [view[done:]], offset + done)
            if got == 0:
                raise WeightsError(
                    f"weights file {self.path} is truncated: bytes {offset}..{offset + nbytes} "
                    f"are wanted and it has {offset + done}; download it again"
                )
            done += got
        return out


def row_range(index: Index | None, shape: tuple[int, ...]) -> tuple[int, int, Index]:
    """(first row, row after the last, index of the other axes) of an index into `shape`."""
    slices = index or ()
    rows = slices[0] if slices else slice(None)
    start, stop, step = rows.indices(shape[0] if shape else 1)
    if step != 1:
        raise ValueError(f"only slices of step 1 can be read, not {rows}")
    return start, max(start, stop), slices[1:]


@dataclass(frozen=True, slots=True)
class _Entry:
    file: TensorFile
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype


class SafetensorsSource:
    """Tensors of one or several safetensors files (`files` in order; names must not repeat)."""

    def __init__(self, files: Iterable[Path], index: dict[str, str] | None = None) -> None:
        self._entries: dict[str, _Entry] = {}
        doubles: list[str] = []
        for path in files:
            for name, entry in _read_header(path).items():
                if name in self._entries:
                    doubles.append(f"{name} ({self._entries[name].file.path.name}, {path.name})")
                self._entries[name] = entry
        if doubles:
            raise WeightsError(f"tensors that stand in two files: {', '.join(sorted(doubles))}")
        for name, file in (index or {}).items():
            if name not in self._entries or self._entries[name].file.path.name != file:
                raise WeightsError(
                    f"{_INDEX_FILE} says that {file} holds the tensor {name!r}, and it does not"
                )

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        return self._entry(name).dtype

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        entry = self._entry(name)
        start, stop, rest = row_range(index, entry.shape)
        row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        data = entry.file.read(entry.offset + start * row, (stop - start) * row)
        out = data.view(entry.dtype)
        if not entry.shape:
            return out.reshape(())
        return out.reshape(stop - start, *entry.shape[1:])[(slice(None), *rest)]

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise WeightsError(f"the checkpoint has no tensor {name!r}")
        return self._entries[name]


def open_safetensors(path: Path) -> SafetensorsSource:
    """The tensors of a `.safetensors` file, or of a folder with one, several or an index.

    Raises WeightsError that names the file: none there, a missing shard, a truncated file, a folder
    called like a file, or formats that are refused (pickles).
    """
    if path.suffix == ".safetensors":
        return SafetensorsSource([_regular(path)])
    index_path = path / _INDEX_FILE
    if index_path.exists():
        index = _read_index(index_path)
        shards = [path / name for name in sorted(set(index.values()))]
        missing = [shard.name for shard in shards if not shard.exists()]
        if missing:
            raise WeightsError(
                f"{index_path} names shards that are not there: {', '.join(missing)}; "
                "download them into the same folder"
            )
        return SafetensorsSource([_regular(shard) for shard in shards], index)
    files = sorted(path.glob("*.safetensors"))
    single = path / "model.safetensors"
    if single in files:
        files = [single]
    if files:
        return SafetensorsSource([_regular(file) for file in files])
    pickles = sorted(p.name for s in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in path.glob(s))
    found = f"it has {', '.join(pickles)}, which are pickles; " if pickles else ""
    raise WeightsError(f"no .safetensors file in {path}: {found}{ACCEPTED}")


def _regular(path: Path) -> Path:
    if not path.is_file():
        raise WeightsError(f"weights file {path} is not a regular file")
    return path


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text("utf-8"))["weight_map"]
        items = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} is not an index with a `weight_map`: {error}") from error
    # The index is input from outside: a shard must not lead out of the checkpoint's folder.
    wild = sorted({file for file in items.values() if Path(file).name != file})
    if wild:
        raise WeightsError(f"{path} names shards outside its folder: {', '.join(wild)}")
    return items


def _read_header(path: Path) -> dict[str, _Entry]:
    """Entries of one file, each checked against the file's size."""
    file = TensorFile(path)
    if file.size < 8:
        raise WeightsError(f"weights file {path} is truncated: {file.size} bytes, no header")
    length = int(file.read(0, 8).view("<u8")[0])
    if length > min(_MAX_HEADER, file.size - 8):
        raise WeightsError(
            f"weights file {path} is truncated or no safetensors file: its header of {length} bytes "
            f"is longer than the file of {file.size}"
        )
    try:
        header = json.loads(file.read(8, length).tobytes(), object_pairs_hook=_no_doubles)
        header.pop("__metadata__", None)
        return {name: _entry(file, 8 + length, name, info) for name, info in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"weights file {path} has a broken header: {error}") from error


def _no_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name stands twice")
    return out


def _entry(file: TensorFile, base: int, name: str, info: dict) -> _Entry:
    if info["dtype"] not in _DTYPES:
        raise WeightsError(
            f"tensor {name!r} in {file.path} has the dtype {info['dtype']!r}; "
            f"known are {', '.join(_DTYPES)}"
        )
    dtype, shape = _DTYPES[info["dtype"]], tuple(int(n) for n in info["shape"])
    begin, end = info["data_offsets"]
    if min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize or begin < 0:
        raise WeightsError(
            f"tensor {name!r} in {file.path}: {end - begin} bytes do not hold {shape} {dtype}"
        )
    if base + end > file.size:
        raise WeightsError(
            f"weights file {file.path} is truncated: tensor {name!r} ends at byte {base + end} "
            f"of {file.size}; download it again"
        )
    return _Entry(file, base + begin, shape, dtype)
