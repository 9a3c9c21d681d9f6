"""How long a classic netCDF file (CDF-1, 2, 5) must be, from its header.

The netCDF library reads what lies beyond the end of a truncated classic file as zeros without a word; HDF5 files, on
the other hand, say so when they are opened. Layout: NetCDF Classic Format Specification, Unidata.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO

_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 4, 6: 8, 7: 1, 8: 2, 9: 4, 10: 8, 11: 8}


def missing_bytes(path: Path) -> int:
    """Return how many bytes a classic netCDF file lacks at its end; 0 for any other file.

    Raises:
        EOFError: if the header itself is cut.
    """
    with open(path, "rb") as file:
        magic = file.read(4)
        if magic[:3] != b"CDF" or magic[3:] not in (b"\x01", b"\x02", b"\x05"):
            return 0
        needed = _Header(file, magic[3]).needed_bytes()
    return max(0, needed - path.stat().st_size)


class _Header:
    """Reads a header's lists one after the other."""

    def __init__(self, file: BinaryIO, version: int) -> None:
        self._file = file
        self._count_bytes = 8 if version == 5 else 4
        self._offset_bytes = 4 if version == 1 else 8

    def needed_bytes(self) -> int:
        """Return the end of the last value of the last variable."""
        records = self._number(self._count_bytes)
        if records == 256**self._count_bytes - 1:  # still being streamed: the number of records is not known
            records = 0
        dimensions = [self._dimension() for _ in range(self._list_length())]
        self._skip_attributes()
        fixed_ends, growing = [0], []
        for _ in range(self._list_length()):
            shape, size, begin = self._variable(dimensions)
            if shape and shape[0] == 0:
                growing.append((begin, math.prod(shape[1:]) * size))
            else:
                fixed_ends.append(begin + math.prod(shape) * size)
        # the records of several variables alternate, each padded to four bytes
        stride = growing[0][1] if len(growing) == 1 else sum(-(-size // 4) * 4 for _, size in growing)
        ends = [begin + (records - 1) * stride + size for begin, size in growing] if records else []
        return max(fixed_ends + ends)

    def _number(self, size: int) -> int:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("the header is cut")
        return struct.unpack(">Q" if size == 8 else ">I", data)[0]

    def _list_length(self) -> int:
        self._number(4)
        return self._number(self._count_bytes)

    def _skip(self, size: int) -> None:
        self._file.seek(-(-size // 4) * 4, 1)

    def _skip_name(self) -> None:
        self._skip(self._number(self._count_bytes))

    def _dimension(self) -> int:
        self._skip_name()
        return self._number(self._count_bytes)

    def _skip_attributes(self) -> None:
        for _ in range(self._list_length()):
            self._skip_name()
            kind = self._number(4)
            self._skip(self._number(self._count_bytes) * _TYPE_BYTES[kind])

    def _variable(self, dimensions: list[int]) -> tuple[list[int], int, int]:
        """Return shape (0 for the record dimension), bytes of a value, and where the values begin."""
        self._skip_name()
        rank = self._number(self._count_bytes)
        shape = [dimensions[self._number(self._count_bytes)] for _ in range(rank)]
        self._skip_attributes()
        size = _TYPE_BYTES[self._number(4)]
        self._number(self._count_bytes)
        return shape, size, self._number(self._offset_bytes)
