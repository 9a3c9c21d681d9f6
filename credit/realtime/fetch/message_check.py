"""Checks of the bytes of a GRIB 2 message before it is decoded.

A message consists of a header of 16 bytes (section 0), further sections, and the end ``7777``. A section begins with
its length in 4 bytes and its number in 1 byte; see WMO, Manual on Codes (WMO-No. 306), volume I.2. A message has no
checksum.
"""

from __future__ import annotations

from collections.abc import Iterator

from credit.errors import DataError

# Length of section 0 in bytes; bytes 8 to 15 contain the length of the message.
HEADER_LENGTH = 16
_START = b"GRIB"
_END = b"7777"
_EDITION = 2
_DATA_SECTION = 7
_SECTION_HEADER_LENGTH = 5
# Largest plausible length of a message in bytes: 64 million cells in single precision. The limit ensures that a
# damaged length does not cause a complete file to be fetched.
_MAX_LENGTH = 2**28
# A packed zero represents the smallest value of a field. A sequence of 256 zero bytes (at least 85 cells) means a hole
# in a file that was not completely written, unless the smallest value is a natural minimum.
_HOLE = bytes(256)


def parse_length(header: bytes) -> int | None:
    """Return the length of a message in bytes from its header; None if `header` is not a GRIB 2 header."""
    if len(header) < HEADER_LENGTH or not header.startswith(_START) or header[7] != _EDITION:
        return None
    length = int.from_bytes(header[8:16], "big")
    return length if length <= _MAX_LENGTH else None


def require_complete_message(content: bytes) -> None:
    """Raise DataError if bytes are not a single complete GRIB 2 message.

    Raises:
        DataError: if `content` breaks a rule of the format; the message states the rule.
    """
    if not content.startswith(_START):
        raise DataError("the record does not begin with GRIB; the index does not belong to this file")
    length = parse_length(content)
    if length is None:
        raise DataError("the record does not begin with a header of GRIB edition 2")
    if length != len(content):
        raise DataError(f"the record has {len(content)} bytes, but its header states {length}")
    if not content.endswith(_END):
        raise DataError("the record does not end with 7777")
    if not list(_iterate_sections(content)):
        raise DataError("the record has no sections")


def has_zero_run(content: bytes) -> bool:
    """Return True if the packed values of a message contain 256 consecutive zero bytes.

    Args:
        content: a message that `require_complete_message` accepts.
    """
    return any(number == _DATA_SECTION and _HOLE in section for number, section in _iterate_sections(content))


def _iterate_sections(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each section between the header and the end of a message.

    Raises:
        DataError: if the lengths of the sections do not add up to the length of the message.
    """
    position = HEADER_LENGTH
    end = len(content) - len(_END)
    while position < end:
        length = int.from_bytes(content[position : position + 4], "big")
        if length < _SECTION_HEADER_LENGTH or position + length > end:
            raise DataError("the lengths of the sections do not add up to the length of the record")
        yield content[position + 4], content[position : position + length]
        position += length
