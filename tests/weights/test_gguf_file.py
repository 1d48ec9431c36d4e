"""GGUF files: every block format against a dequantizer written from the format's description,
slices, and files that are broken or unknown."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.errors import WeightsError
from jaxinfer.weights.gguf_file import GGUFFile
from tests.weights.gguf_files import write_gguf

ROWS, COLUMNS = 6, 512
BLOCK_FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def half(block: bytes, at: int) -> float:
    return struct.unpack_from("<e", block, at)[0]


def nibbles(data: bytes) -> list[int]:
    """Low nibbles of all bytes, then the high ones: the order of the 32-element formats."""
    return [b & 15 for b in data] + [b >> 4 for b in data]


def fifth_bits(word: bytes) -> list[int]:
    return [int.from_bytes(word, "little") >> i & 1 for i in range(32)]


def scale_min_k4(j: int, packed: bytes) -> tuple[int, int]:
    """The 6-bit scale and minimum of sub-block j of a Q4_K or Q5_K block."""
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return (
        (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4,
        (packed[j + 4] >> 4) | (packed[j] >> 6) << 4,
    )


def decode_block(kind: str, b: bytes) -> list[float]:
    """One block, element by element, in plain Python."""
    if kind == "Q8_0":
        return [half(b, 0) * x for x in struct.unpack_from("<32b", b, 2)]
    if kind == "Q4_0":
        return [half(b, 0) * (q - 8) for q in nibbles(b[2:])]
    if kind == "Q4_1":
        return [half(b, 0) * q + half(b, 2) for q in nibbles(b[4:])]
    if kind in ("Q5_0", "Q5_1"):
        at = 2 if kind == "Q5_0" else 4
        fives = zip(nibbles(b[at + 4 :]), fifth_bits(b[at : at + 4]), strict=True)
        quants = [q + 16 * bit for q, bit in fives]
        if kind == "Q5_0":
            return [half(b, 0) * (q - 16) for q in quants]
        return [half(b, 0) * q + half(b, 2) for q in quants]
    if kind in ("Q4_K", "Q5_K"):
        d, low, packed, out = half(b, 0), half(b, 2), b[4:16], []
        high, quants = (b[16:48], b[48:]) if kind == "Q5_K" else (bytes(32), b[16:])
        for j in range(8):
            scale, minimum = scale_min_k4(j, packed)
            for i in range(32):
                byte = quants[j // 2 * 32 + i]
                q = (byte >> 4 * (j % 2) & 15) + 16 * (high[i] >> j & 1)
                out.append(d * scale * q - low * minimum)
        return out
    assert kind == "Q6_K"
    low, high, scales = b[:128], b[128:192], struct.unpack_from("<16b", b, 192)
    out = [0.0] * 256
    for i in range(256):
        n, r = divmod(i, 128)
        part, at = divmod(r, 32)
        nibble = low[n * 64 + at + 32 * (part % 2)] >> 4 * (part // 2) & 15
        two = high[n * 32 + at] >> 2 * part & 3
        out[i] = half(b, 208) * scales[n * 8 + r // 16] * ((nibble | two << 4) - 32)
    return out


def random_blocks(kind: str, seed: int = 0) -> np.ndarray:
    """uint8[ROWS, bytes] of random blocks whose float16 scales are small and finite."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (ROWS, COLUMNS // block, size), np.uint8)
    halves = {"Q8_0": [0], "Q4_0": [0], "Q5_0": [0], "Q3_K": [108], "Q6_K": [208]}
    starts = {"Q2_K": [80, 82]} | dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), [0, 2]) | halves
    for at in starts[kind]:
        scale = rng.uniform(-0.1, 0.1, data.shape[:2]).astype(np.float16)
        data[..., at : at + 2] = scale[..., None].view(np.uint8)
    return data.reshape(ROWS, -1)


def one_tensor(tmp_path: Path, value: object) -> GGUFFile:
    return GGUFFile(write_gguf(tmp_path / "x.gguf", "llama", {}, {"w": value}))  # type: ignore[dict-item]


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_block_formats(kind: str, tmp_path: Path) -> None:
    data = random_blocks(kind)
    file = one_tensor(tmp_path, (data, GGMLQuantizationType[kind]))
    got = file.rows(file.tensors["w"], 0, ROWS)
    assert got.shape == (ROWS, COLUMNS) and got.dtype == np.float32
    assert np.array_equal(got, gguf.quants.dequantize(data, GGMLQuantizationType[kind]))
    assert np.array_equal(file.rows(file.tensors["w"], 2, 5), got[2:5])
    if kind not in ("Q2_K", "Q3_K"):
        size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
        blocks = data.tobytes()
        want = [
            x
            for at in range(0, len(blocks), size)
            for x in decode_block(kind, blocks[at : at + size])
        ]
        np.testing.assert_allclose(got.ravel(), want, rtol=1e-5, atol=1e-5)


def test_plain_formats(tmp_path: Path) -> None:
    value = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
    f32 = one_tensor(tmp_path, value)
    assert np.array_equal(f32.rows(f32.tensors["w"], 1, 3), value[1:3])
    f16 = one_tensor(tmp_path, (value.astype(np.float16), GGMLQuantizationType.F16))
    assert np.array_equal(f16.rows(f16.tensors["w"], 0, 4), value.astype(np.float16))
    bf16 = value.astype(ml_dtypes.bfloat16)
    file = one_tensor(tmp_path, (bf16.view(np.uint8), GGMLQuantizationType.BF16))
    assert file.tensors["w"].shape == (4, 8)
    assert np.array_equal(file.rows(file.tensors["w"], 0, 4), bf16)


def test_vectors_and_three_axes(tmp_path: Path) -> None:
    value = np.arange(24, dtype=np.float32)
    vector = one_tensor(tmp_path, value)
    assert np.array_equal(vector.rows(vector.tensors["w"], 3, 7), value[3:7])
    cube = one_tensor(tmp_path, value.reshape(4, 3, 2))
    assert np.array_equal(cube.rows(cube.tensors["w"], 1, 3), value.reshape(4, 3, 2)[1:3])


def test_metadata_of_every_type(tmp_path: Path) -> None:
    meta = {"a": 7, "b": 1e-5, "c": "é中", "d": True, "e": ["x", ""], "f": [1, -2], "g": [0.5]}
    file = GGUFFile(write_gguf(tmp_path / "x.gguf", "llama", meta, {}))
    assert {k: file.metadata[k] for k in meta} == meta


@given(cut=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_a_cut_file_is_refused_by_name(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("cut")
    value = np.ones((8, 32), np.float32)
    path = write_gguf(folder / "whole.gguf", "llama", {"k": "v", "l": [1, 2]}, {"w": value})
    data = path.read_bytes()
    end = data.rindex(b"\0\0\x80\x3f") + 4  # the writer pads after the last tensor
    short = folder / "short.gguf"
    short.write_bytes(data[: cut % end])
    with pytest.raises(WeightsError, match=r"short\.gguf"):
        GGUFFile(short)


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ((0, b"GGML"), "is not a GGUF file"),
        ((4, struct.pack("<I", 1)), "version 1"),
        ((8, struct.pack("<Q", 1 << 60)), "truncated|broken"),
        ((16, struct.pack("<Q", 1 << 60)), "truncated|broken"),
        ((24, struct.pack("<Q", 1 << 62)), "truncated"),
    ],
)
def test_broken_headers(patch: tuple[int, bytes], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", "llama", {"k": 1}, {"w": np.ones((1, 32), np.float32)})
    data = bytearray(path.read_bytes())
    data[patch[0] : patch[0] + len(patch[1])] = patch[1]
    path.write_bytes(bytes(data))
    with pytest.raises(WeightsError, match=message):
        GGUFFile(path)


def test_unknown_block_format_is_refused_by_name(tmp_path: Path) -> None:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType.IQ4_NL]
    data = np.zeros((2, 64 // block * size), np.uint8)
    with pytest.raises(WeightsError, match=r"'w'.*IQ4_NL"):
        one_tensor(tmp_path, (data, GGMLQuantizationType.IQ4_NL))


@given(at=st.integers(0, 600), byte=st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_a_changed_byte_never_crashes(
    at: int, byte: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A damaged header is read as something else, or refused with a WeightsError."""
    base = tmp_path_factory.getbasetemp() / "whole.gguf"
    if not base.exists():
        meta = {"a": [1, 2], "b": ["x", "y"], "c": 1.5, "d": "text", "e": True}
        tensors = {"w": np.ones((2, 32), np.float32), "v": np.ones(4, np.float32)}
        write_gguf(base, "llama", meta, tensors)
    data = bytearray(base.read_bytes())
    data[at % len(data)] = byte
    damaged = base.with_name("damaged.gguf")
    damaged.write_bytes(bytes(data))
    try:
        file = GGUFFile(damaged)
        for tensor in file.tensors.values():
            file.rows(tensor, 0, tensor.shape[0])
    except WeightsError as error:
        assert "damaged.gguf" in str(error)
