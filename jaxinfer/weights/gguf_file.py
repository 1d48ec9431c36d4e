"""A GGUF file: metadata, and tensors as they are stored, dequantized row by row on demand.

Parses the header itself (the file is input from outside, and big vocabularies take seconds through
the package's reader); block formats are decoded by `gguf.quants`. Knows no architecture: names and
permutations are in gguf_arch.py. Called by gguf_arch.py and gguf_tokenizer.py.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxinfer.errors import WeightsError
from jaxinfer.weights.tensors import TensorFile

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_PLAIN = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_BLOCKS = {
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q2_K,
    GGMLQuantizationType.Q3_K,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
}
_HEADER_STEP = 1 << 22


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file has it: `shape` in numpy order (rows first), `offset` in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    row_bytes: int

    @property
    def dtype(self) -> np.dtype:
        """Dtype that rows are read in: the stored one, or float32 for block formats."""
        return _PLAIN.get(self.kind, np.dtype(np.float32))


class GGUFFile:
    """Header of a GGUF file (version 2 or 3, little endian), and its tensors.

    Attributes:
        metadata: every key with its value (numbers, strings, lists of either).
        tensors: what is stored, by name, in file order.

    Raises WeightsError naming the file: not GGUF, truncated, unsupported block format, doubles.
    """

    def __init__(self, path: Path) -> None:
        self._file = TensorFile(path)
        self.path = path
        try:
            self._parse(_Cursor(self._file))
        except (struct.error, KeyError, ValueError, TypeError, ArithmeticError) as error:
            if isinstance(error, WeightsError):
                raise
            raise WeightsError(f"GGUF file {path} has a broken header: {error!r}") from error

    def _parse(self, cursor: _Cursor) -> None:
        if cursor.take(4) != b"GGUF":
            raise WeightsError(f"{self.path} is not a GGUF file")
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise WeightsError(f"GGUF file {self.path} has version {version}; 2 and 3 are read")
        tensor_count, key_count = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        if self.metadata.get("split.count", 1) > 1:
            raise WeightsError(
                f"GGUF file {self.path} is one of {self.metadata['split.count']} parts; join them "
                "first (llama-gguf-split --merge)"
            )
        raw = [cursor.tensor() for _ in range(tensor_count)]
        align = int(self.metadata.get("general.alignment", 32))
        base = -(-cursor.offset // align) * align
        self.tensors: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in raw:
            if name in self.tensors:
                raise WeightsError(f"GGUF file {self.path} holds the tensor {name!r} twice")
            self.tensors[name] = self._stored(name, shape, kind, base + offset)

    def _stored(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
        known = [k for k in (*_PLAIN, *sorted(_BLOCKS)) if k == kind]
        if not known:
            names = {int(k): k.name for k in GGMLQuantizationType}
            raise WeightsError(
                f"tensor {name!r} in {self.path} has the format {names.get(kind, kind)}; "
                f"known are {', '.join(k.name for k in (*_PLAIN, *sorted(_BLOCKS)))}"
            )
        block, size = GGML_QUANT_SIZES[known[0]]
        if shape[-1] % block:
            raise WeightsError(f"tensor {name!r} in {self.path}: {shape} has no whole blocks")
        row_bytes = shape[-1] // block * size
        end = offset + math.prod(shape[:-1]) * row_bytes
        if end > self._file.size:
            raise WeightsError(
                f"GGUF file {self.path} is truncated: tensor {name!r} ends at byte {end} of "
                f"{self._file.size}; download it again"
            )
        return StoredTensor(name, shape, known[0], offset, row_bytes)

    def rows(self, tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of axis 0 (of a vector: its elements), dequantized."""
        if len(tensor.shape) == 1:
            return self._decode(tensor, self._file.read(tensor.offset, tensor.row_bytes))[
                0, start:stop
            ]
        inner = math.prod(tensor.shape[1:-1])
        step = inner * tensor.row_bytes
        data = self._file.read(tensor.offset + start * step, (stop - start) * step)
        return self._decode(tensor, data).reshape(stop - start, *tensor.shape[1:])

    def _decode(self, tensor: StoredTensor, data: np.ndarray) -> np.ndarray:
        if tensor.kind in _PLAIN:
            out = data.view(_PLAIN[tensor.kind])
        else:
            # As one long row: the package works through rows in small groups, which costs more.
            out = gguf.quants.dequantize(data.reshape(1, -1), tensor.kind)
        return out.reshape(-1, tensor.shape[-1])


class _Cursor:
    """Reads the header front to back, fetching the file in steps."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file
        self._buffer = b""
        self.offset = 0  # of the next byte in the file
        self._at = 0  # of the next byte in the buffer

    def take(self, nbytes: int) -> bytes:
        if self._at + nbytes > len(self._buffer):
            if self.offset + nbytes > self._file.size:
                raise WeightsError(
                    f"GGUF file {self._file.path} is truncated: its header is longer than its "
                    f"{self._file.size} bytes; download it again"
                )
            step = min(max(nbytes, _HEADER_STEP), self._file.size - self.offset)
            self._buffer, self._at = self._file.read(self.offset, step).tobytes(), 0
        out = self._buffer[self._at : self._at + nbytes]
        self._at += nbytes
        self.offset += nbytes
        return out

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if inner == _STRING:
                return [self.string() for _ in range(count)]
            dtype = np.dtype("<" + _SCALARS[inner])
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        out = self.scalar(_SCALARS[kind])
        # Shortest decimal of a float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(out))) if _SCALARS[kind] == "f" else out

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        dims = [self.scalar("Q") for _ in range(self.scalar("I"))]
        return name, tuple(reversed(dims)) or (1,), self.scalar("I"), self.scalar("Q")
