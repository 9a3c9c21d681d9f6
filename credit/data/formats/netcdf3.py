"""Detection of truncated classic netCDF files (CDF-1, 2, 5), by comparing the file size with the header.

The netCDF library reads values beyond the end of a truncated classic file as zeros, without an error. In contrast,
truncated HDF5 files cannot be opened. Unidata's NetCDF Classic Format Specification describes the layout.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO

# Code of a data type in the header -> number of bytes of a value.
_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 4, 6: 8, 7: 1, 8: 2, 9: 4, 10: 8, 11: 8}


def count_missing_bytes(path: Path) -> int:
    """Return the number of bytes that are missing at the end of a classic netCDF file; 0 for any other file.

    Raises:
        EOFError: if the header itself is truncated.
        KeyError: if the header is damaged and contains an undefined type code.
        IndexError: if the header is damaged and a variable refers to an undefined dimension.
        OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:
        # A classic file begins with the letters CDF and the version number of its format.
        magic = file.read(4)
        if magic[:3] != b"CDF" or magic[3:] not in (b"\x01", b"\x02", b"\x05"):
            return 0
        expected_bytes = _Header(file, magic[3]).compute_expected_bytes()
    return max(0, expected_bytes - path.stat().st_size)


class _Header:
    """Sequential reader of the header of a classic netCDF file. Each method reads the next item of the header.

    Args:
        file: the open file, positioned after its first 4 bytes.
        version: version of the format, 1, 2 or 5.
    """

    def __init__(self, file: BinaryIO, version: int) -> None:
        self._file = file
        # Version 2 has 8-byte file positions. Version 5 also has 8-byte counts and lengths.
        self._count_bytes = 8 if version == 5 else 4
        self._offset_bytes = 4 if version == 1 else 8

    def compute_expected_bytes(self) -> int:
        """Return the size in bytes that the complete file must have: the position after its last value."""
        num_records = self._read_number(self._count_bytes)
        if num_records == 256**self._count_bytes - 1:
            # The file is still being written, and the number of records is unknown.
            num_records = 0
        # The header lists the dimensions, the attributes of the file, and the variables.
        dimensions = [self._read_dimension() for _ in range(self._read_list_length())]
        self._skip_attributes()
        # Variables with a record dimension are stored record by record after all other variables.
        ends = [0]
        record_variables = []
        for _ in range(self._read_list_length()):
            shape, value_bytes, begin = self._read_variable(dimensions)
            # The record dimension is always the first dimension and has the length 0 in the header.
            if shape and shape[0] == 0:
                record_bytes = math.prod(shape[1:]) * value_bytes
                record_variables.append((begin, record_bytes))
            else:
                ends.append(begin + math.prod(shape) * value_bytes)
        # The records of several variables alternate and are padded to four bytes. A single variable is not padded.
        if len(record_variables) == 1:
            _, stride = record_variables[0]
        else:
            stride = sum(_round_up_to_four(record_bytes) for _, record_bytes in record_variables)
        if num_records:
            for begin, record_bytes in record_variables:
                ends.append(begin + (num_records - 1) * stride + record_bytes)
        return max(ends)

    def _read_number(self, num_bytes: int) -> int:
        """Return the next integer of the header, which is `num_bytes` (4 or 8) bytes long.

        Raises:
            EOFError: if the file ends before the integer is complete.
        """
        data = self._file.read(num_bytes)
        if len(data) < num_bytes:
            raise EOFError("the header is truncated")
        # Big-endian unsigned integer of 8 or 4 bytes.
        code = ">Q" if num_bytes == 8 else ">I"
        return struct.unpack(code, data)[0]

    def _read_list_length(self) -> int:
        """Skip the tag of a list (4 bytes), and return the number of items in the list."""
        self._read_number(4)
        return self._read_number(self._count_bytes)

    def _skip(self, num_bytes: int) -> None:
        """Skip values of `num_bytes` bytes, and the padding after them to a multiple of four bytes."""
        self._file.seek(_round_up_to_four(num_bytes), 1)

    def _skip_name(self) -> None:
        """Skip a name, which is preceded by its length."""
        self._skip(self._read_number(self._count_bytes))

    def _read_dimension(self) -> int:
        """Read the entry of the next dimension, and return its length; 0 for the record dimension."""
        self._skip_name()
        return self._read_number(self._count_bytes)

    def _skip_attributes(self) -> None:
        """Skip a list of attributes."""
        for _ in range(self._read_list_length()):
            self._skip_name()
            type_code = self._read_number(4)
            self._skip(self._read_number(self._count_bytes) * _TYPE_BYTES[type_code])

    def _read_variable(self, dimensions: list[int]) -> tuple[list[int], int, int]:
        """Read the entry of the next variable.

        Args:
            dimensions: lengths of the dimensions of the file; 0 for the record dimension.

        Returns:
            Shape (0 for the record dimension), bytes per value, and position of the first value in the file in bytes.
        """
        self._skip_name()
        rank = self._read_number(self._count_bytes)
        shape = [dimensions[self._read_number(self._count_bytes)] for _ in range(rank)]
        self._skip_attributes()
        value_bytes = _TYPE_BYTES[self._read_number(4)]
        # Skip the size of the variable. The size is not used, because it overflows for large variables.
        self._read_number(self._count_bytes)
        return shape, value_bytes, self._read_number(self._offset_bytes)


def _round_up_to_four(num_bytes: int) -> int:
    """Return a number of bytes rounded up to a multiple of four."""
    # The two signs make the integer division round up.
    return -(-num_bytes // 4) * 4
