"""Checks of the bytes of a GRIB 2 message, before it is decoded.

A message has a header of 16 bytes (section 0), sections that begin with their length in 4 bytes and their number in
one, and the end ``7777``; WMO, Manual on Codes (WMO-No. 306), volume I.2. It has no checksum.
"""

from __future__ import annotations

from collections.abc import Iterator

from credit.errors import DataError

# Length of section 0, which has the length of the message in bytes 8 to 15.
HEADER_LENGTH = 16
_START = b"GRIB"
_END = b"7777"
_EDITION = 2
_DATA_SECTION = 7
_SECTION_HEADER_LENGTH = 5
# No field has more bytes: 2**28 are 64 million cells in single precision. A damaged length must not fetch a whole file.
_MAX_LENGTH = 2**28
# Packed zeros stand for the smallest value of a field. So many zero bytes in a row, which are at least 85 cells, are a
# hole in a file that was not completely written, unless the smallest value is a natural bound.
_HOLE = bytes(256)


def parse_length(header: bytes) -> int | None:
    """Return the length of a message in bytes from its header, None if the header cannot be one of GRIB 2."""
    if len(header) < HEADER_LENGTH or not header.startswith(_START) or header[7] != _EDITION:
        return None
    length = int.from_bytes(header[8:16], "big")
    return length if length <= _MAX_LENGTH else None


def require_message(content: bytes) -> None:
    """Require that bytes are one complete GRIB 2 message.

    Raises:
        DataError: naming the rule that they break.
    """
    if not content.startswith(_START):
        raise DataError("the record does not begin with GRIB; the index is not that of this file")
    length = parse_length(content)
    if length is None:
        raise DataError("the record does not begin with a header of GRIB edition 2")
    if length != len(content):
        raise DataError(f"the record has {len(content)} bytes, but its header says {length}")
    if not content.endswith(_END):
        raise DataError("the record does not end with 7777")
    if not list(_iterate_sections(content)):
        raise DataError("the record has no sections")


def has_hole(content: bytes) -> bool:
    """Return True if the packed values of a message have a long run of zero bytes.

    Args:
        content: a message that `require_message` accepts.
    """
    return any(number == _DATA_SECTION and _HOLE in section for number, section in _iterate_sections(content))


def _iterate_sections(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each section between the header and the end.

    Raises:
        DataError: if the lengths of the sections do not add up to that of the message.
    """
    position = HEADER_LENGTH
    end = len(content) - len(_END)
    while position < end:
        length = int.from_bytes(content[position : position + 4], "big")
        if length < _SECTION_HEADER_LENGTH or position + length > end:
            raise DataError("the lengths of the sections do not add up to that of the record")
        yield content[position + 4], content[position : position + length]
        position += length
