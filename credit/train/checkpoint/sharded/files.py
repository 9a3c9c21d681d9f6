"""Safetensors files that several ranks write together, with separate byte ranges, and the checksums of these files.

A safetensors file begins with the length of a JSON header. The header contains the names and the byte ranges of the
arrays, which follow without gaps (https://github.com/huggingface/safetensors#format).

CRC-32 is linear: the checksum of a file is the exclusive or of the contributions of its byte ranges. Each rank computes
the contribution of its ranges while it writes them, so no rank has to read the file again.
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

# Keys that DCP's reader requires: in the metadata of a file, and in the entry of each array in this metadata.
_SHARDING_KEY = "DCP_SHARDING_INFO"
_OFFSETS_KEY = "saved_offsets"
# Polynomial of CRC-32 with reversed bits: the highest bit of a number is the coefficient of x^0.
_CRC_POLYNOMIAL = 0xEDB88320
_CRC_ONE = 1 << 31


@dataclass(frozen=True)
class ArrayEntry:
    """Array in a safetensors file.

    Attributes:
        name: name of the tensor.
        dtype_name: name of the dtype in safetensors files, such as ``F32``.
        shape: shape of the array.
        saved_offsets: index of the first element of the array in the complete tensor.
        num_bytes: size of the array in bytes.
    """

    name: str
    dtype_name: str
    shape: Sequence[int]
    saved_offsets: Sequence[int]
    num_bytes: int


def encode_header(arrays: Iterable[ArrayEntry]) -> bytes:
    """Return the bytes of a safetensors file before its first array: the length of the header and the header.

    Args:
        arrays: the arrays of the file, in their order in the file.
    """
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
    # The header is padded, so that the arrays begin at a multiple of 8 bytes and can be mapped into memory.
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def view_bytes(tensor: Tensor) -> np.ndarray:
    """Return a view of a contiguous CPU tensor as an array of bytes, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def write_ranges(path: Path, ranges: Iterable[tuple[int, np.ndarray]], file_size: int) -> int:
    """Write byte ranges into a file and flush it to the disk; other processes may write the file at the same time.

    Args:
        path: path of the file, which is created if it does not exist.
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
    """Write all bytes of `content` at an offset of a file; each system call may write only some of the bytes."""
    remaining = memoryview(content)
    while remaining:
        num_written = os.pwrite(descriptor, remaining, offset)
        remaining = remaining[num_written:]
        offset += num_written


def shift_checksum(checksum: int, num_bytes: int) -> int:
    """Return the contribution of a byte range to the CRC-32 of a file.

    The contribution is the checksum times x^(8 num_bytes), modulo the polynomial of CRC-32. zlib's ``crc32_combine``
    uses the same formula.

    Args:
        checksum: CRC-32 of the byte range.
        num_bytes: number of bytes in the file after the byte range.
    """
    return _multiply(checksum, _power_of_x(num_bytes))


@functools.lru_cache(maxsize=4096)
def _power_of_x(num_bytes: int) -> int:
    """Return x^(8 num_bytes) modulo the polynomial of CRC-32."""
    power = _CRC_ONE
    # Repeated squaring gives x^8, x^16, x^32, ...
    square = 1 << (31 - 8)
    while num_bytes:
        if num_bytes & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        num_bytes >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the polynomial of CRC-32."""
    product = 0
    while a:
        if a & _CRC_ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _CRC_POLYNOMIAL if b & 1 else b >> 1
    return product


def compute_checksum(path: Path, start: int = 0, stop: int | None = None) -> int:
    """Return the CRC-32 of the bytes of a file from `start` to `stop`; None for the end of the file."""
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
    """Flush a complete file to the disk and return its manifest entry.

    The file also gets the read and write permissions of its folder.

    Returns:
        The entry of the file in the manifest: ``size`` in bytes and ``crc32``.
    """
    # safetensors creates files that only the owner can read. The permissions of the folder depend on the umask.
    path.chmod(path.parent.stat().st_mode & 0o666)
    flush_to_disk(path)
    return {"size": path.stat().st_size, "crc32": compute_checksum(path)}
