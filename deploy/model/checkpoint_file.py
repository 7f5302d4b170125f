"""Reading and writing safetensors files of bfloat16 tensors, one tensor in memory at a time.

A safetensors file is a little-endian u64 with the length of a JSON header, the header, then the tensors' bytes.
Values travel here as uint16 arrays that hold the upper halves of float32 numbers: numpy has no bfloat16.
"""

import json
import struct
from pathlib import Path
from typing import Callable

import numpy as np

# name -> (shape, a function that gives the uint16 values when they are due to be written)
LazyTensors = dict[str, tuple[tuple[int, ...], Callable[[], np.ndarray]]]


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16, to the nearest, ties to even. Finite values only: weights have no others."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    ties_to_even = (bits >> 16) & 1
    return ((bits.astype("<u8") + 0x7FFF + ties_to_even) >> 16).astype("<u2")


def widen(bf16: np.ndarray) -> np.ndarray:
    """bfloat16 to float32, exactly."""
    return (bf16.astype("<u4") << 16).view("<f4")


def write(path: Path, tensors: LazyTensors) -> None:
    """Writes the tensors in name order, so that the same weights always give the same bytes."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(tensors):
        shape, _ = tensors[name]
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8, where they can be mapped in place
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(tensors):
            shape, values = tensors[name]
            bf16 = values()
            if bf16.dtype != np.uint16 or bf16.shape != tuple(shape):
                raise ValueError(f"{name}: announced {shape}, got {bf16.dtype} {bf16.shape}")
            file.write(np.ascontiguousarray(bf16).tobytes())


def read(path: Path) -> dict[str, np.ndarray]:
    """Maps a bfloat16 safetensors file; nothing is read until an array is used."""
    with path.open("rb") as file:
        (header_len,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_len))
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{path}: {name} is {entry['dtype']}, expected BF16")
        offset, shape = 8 + header_len + entry["data_offsets"][0], tuple(entry["shape"])
        tensors[name] = np.memmap(path, dtype="<u2", mode="r", offset=offset, shape=shape)
    return tensors
