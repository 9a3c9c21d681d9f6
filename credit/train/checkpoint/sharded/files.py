"""Safetensors files that several ranks write together, each its own ranges of bytes, and their checksums.

A safetensors file begins with the length of a JSON header, which names the arrays and their ranges of bytes; the arrays
follow without gaps (https://github.com/huggingface/safetensors#format).

CRC-32 is linear: the checksum of a file is the exclusive or of the contributions of its ranges. A rank computes the
contribution of its ranges while it writes them, and no rank has to read the file again.
"""

from __future__ import annotations

import functools
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from credit.utils.atomic import flush_to_disk

# Keys that DCP's reader looks for: in the metadata of a file, and in the entry of an array there.
_SHARDING_KEY = "DCP_SHARDING_INFO"
_OFFSETS_KEY = "saved_offsets"
# The polynomial of CRC-32 with its bits reversed: the highest bit of a number stands for x^0.
_CRC_POLYNOMIAL = 0xEDB88320
_CRC_ONE = 1 << 31


@dataclass(frozen=True)
class ArrayEntry:
    """Array in a safetensors file.

    Attributes:
        name: name of the tensor.
        dtype_name: name of the dtype in safetensors files, such as ``F32``.
        shape: shape of the array.
        saved_offsets: index of its first element in the whole tensor.
        num_bytes: size of the array.
    """

    name: str
    dtype_name: str
    shape: Sequence[int]
    saved_offsets: Sequence[int]
    num_bytes: int


def encode_header(arrays: Iterable[ArrayEntry]) -> bytes:
    """Return everything before the first array of a safetensors file, whose arrays follow in this order."""
    offsets = {}
    entries = {}
    begin = 0
    for array in arrays:
        end = begin + array.num_bytes
        entries[array.name] = {"dtype": array.dtype_name, "shape": array.shape, "data_offsets": [begin, end]}
        offsets[array.name] = {_OFFSETS_KEY: array.saved_offsets}
        begin = end
    header = {"__metadata__": {_SHARDING_KEY: json.dumps(offsets)}, **entries}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # The arrays begin at a multiple of 8 bytes, so that a reader can map them into memory.
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def view_bytes(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a contiguous tensor on the CPU without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def write_ranges(path: Path, ranges: Iterable[tuple[int, np.ndarray]], file_size: int) -> int:
    """Write ranges of bytes into a file, which other processes may write at the same time, and flush it to the disk.

    Args:
        path: the file, which is created if it does not exist.
        ranges: (offset in the file, bytes) in ascending order.
        file_size: size of the complete file in bytes.

    Returns:
        The contribution of the ranges to the CRC-32 of the complete file.
    """
    checksum = 0
    position = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        for offset, content in ranges:
            _write_at(descriptor, content, offset)
            stop = offset + len(content)
            checksum = shift_checksum(checksum, stop - position) ^ zlib.crc32(content)
            position = stop
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return shift_checksum(checksum, file_size - position)


def _write_at(descriptor: int, content: np.ndarray, offset: int) -> None:
    """Write all bytes of `content` at an offset of a file; the system may write fewer at a time."""
    remaining = memoryview(content)
    while remaining:
        num_written = os.pwrite(descriptor, remaining, offset)
        remaining = remaining[num_written:]
        offset += num_written


def shift_checksum(checksum: int, num_bytes: int) -> int:
    """Return the contribution of bytes with this CRC-32 to the checksum of a file in which `num_bytes` bytes follow.

    zlib's ``crc32_combine`` joins two checksums in this way: the contribution is the checksum times x^(8 num_bytes) in
    the ring of polynomials modulo that of CRC-32.
    """
    return _multiply(checksum, _power_of_x(num_bytes))


@functools.lru_cache(maxsize=4096)
def _power_of_x(num_bytes: int) -> int:
    """Return x^(8 num_bytes) modulo the polynomial of CRC-32."""
    power = _CRC_ONE
    # x^8, x^16, x^32, ... by repeated squaring.
    square = 1 << (31 - 8)
    while num_bytes:
        if num_bytes & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        num_bytes >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials modulo that of CRC-32."""
    product = 0
    while a:
        if a & _CRC_ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _CRC_POLYNOMIAL if b & 1 else b >> 1
    return product


def compute_checksum(path: Path, start: int = 0, stop: int | None = None) -> int:
    """Return the CRC-32 of the bytes of a file from `start` to `stop` (None for its end), read in blocks of 4 MiB."""
    value = 0
    with path.open("rb") as file:
        file.seek(start)
        remaining = stop - start if stop is not None else -1
        while remaining and (block := file.read(1 << 22 if remaining < 0 else min(1 << 22, remaining))):
            value = zlib.crc32(block, value)
            if remaining > 0:
                remaining -= len(block)
    return value


def fsync_and_checksum(path: Path) -> dict[str, int]:
    """Flush a complete file to the disk, give it its folder's read and write permissions, and return its checksum.

    Returns:
        The entry of the manifest: ``size`` in bytes and ``crc32``.
    """
    # safetensors creates files that only the owner can read. The mode of the folder takes account of the umask.
    path.chmod(path.parent.stat().st_mode & 0o666)
    flush_to_disk(path)
    return {"size": path.stat().st_size, "crc32": compute_checksum(path)}
