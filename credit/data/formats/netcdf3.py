"""Length that a classic netCDF file (CDF-1, 2, 5) must have, computed from its header.

The netCDF library reads values beyond the end of a truncated classic file as zeros, without an error. Truncated HDF5
files, on the other hand, cannot be opened. Layout: NetCDF Classic Format Specification, Unidata.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO

# Code of a type in the header -> bytes of a value.
_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 4, 6: 8, 7: 1, 8: 2, 9: 4, 10: 8, 11: 8}


def count_missing_bytes(path: Path) -> int:
    """Return the number of bytes that are missing at the end of a classic netCDF file; 0 for any other file.

    Raises:
        EOFError: if the header itself is truncated.
    """
    with open(path, "rb") as file:
        magic = file.read(4)
        if magic[:3] != b"CDF" or magic[3:] not in (b"\x01", b"\x02", b"\x05"):
            return 0
        expected_bytes = _Header(file, magic[3]).expected_bytes()
    return max(0, expected_bytes - path.stat().st_size)


class _Header:
    """Reader of the lists of a header, which follow each other in the file."""

    def __init__(self, file: BinaryIO, version: int) -> None:
        self._file = file
        self._count_bytes = 8 if version == 5 else 4
        self._offset_bytes = 4 if version == 1 else 8

    def expected_bytes(self) -> int:
        """Return the end of the last value of the last variable."""
        num_records = self._number(self._count_bytes)
        if num_records == 256**self._count_bytes - 1:
            # The file is still being written, and the number of records is not known.
            num_records = 0
        dimensions = [self._dimension() for _ in range(self._list_length())]
        self._skip_attributes()
        ends = [0]
        record_variables = []
        for _ in range(self._list_length()):
            shape, value_bytes, begin = self._variable(dimensions)
            if shape and shape[0] == 0:
                record_bytes = math.prod(shape[1:]) * value_bytes
                record_variables.append((begin, record_bytes))
            else:
                ends.append(begin + math.prod(shape) * value_bytes)
        # The records of several variables alternate, each padded to four bytes; those of a single one are not padded.
        if len(record_variables) == 1:
            _, stride = record_variables[0]
        else:
            stride = sum(_pad(record_bytes) for _, record_bytes in record_variables)
        if num_records:
            for begin, record_bytes in record_variables:
                ends.append(begin + (num_records - 1) * stride + record_bytes)
        return max(ends)

    def _number(self, size: int) -> int:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("the header is truncated")
        return struct.unpack(">Q" if size == 8 else ">I", data)[0]

    def _list_length(self) -> int:
        self._number(4)
        return self._number(self._count_bytes)

    def _skip(self, size: int) -> None:
        self._file.seek(_pad(size), 1)

    def _skip_name(self) -> None:
        self._skip(self._number(self._count_bytes))

    def _dimension(self) -> int:
        self._skip_name()
        return self._number(self._count_bytes)

    def _skip_attributes(self) -> None:
        for _ in range(self._list_length()):
            self._skip_name()
            type_code = self._number(4)
            self._skip(self._number(self._count_bytes) * _TYPE_BYTES[type_code])

    def _variable(self, dimensions: list[int]) -> tuple[list[int], int, int]:
        """Return shape (0 for the record dimension), bytes of a value, and offset of the first value."""
        self._skip_name()
        rank = self._number(self._count_bytes)
        shape = [dimensions[self._number(self._count_bytes)] for _ in range(rank)]
        self._skip_attributes()
        value_bytes = _TYPE_BYTES[self._number(4)]
        # The size of the variable follows. It overflows for large variables, so it is not used.
        self._number(self._count_bytes)
        return shape, value_bytes, self._number(self._offset_bytes)


def _pad(size: int) -> int:
    """Return a number of bytes rounded up to a multiple of four."""
    return -(-size // 4) * 4
