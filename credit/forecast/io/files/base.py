"""Base classes of the formats of forecast files.

Shape suffixes: C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from credit.forecast.io.files.names import FilePart


class OpenFile(ABC):
    """Forecast file that is being written, under a temporary name."""

    @abstractmethod
    def put(self, lead_index: int, member: int, fields_CHW: np.ndarray) -> None:
        """Write one lead time of one member, in any order.

        Args:
            lead_index: index of the lead time in ``lead_minutes`` of the schema.
            member: number of the member; 0 for a single forecast.
            fields_CHW: float32 in physical units, NaN where missing.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the file; nothing can be written afterwards. A second call has no effect."""

    @abstractmethod
    def publish(self, path: Path) -> None:
        """Rename the complete and closed file to its final name, replacing an older file."""

    @abstractmethod
    def discard(self) -> None:
        """Close the file and remove everything that was written under temporary names."""


class FileFormat(ABC):
    """Format of forecast files.

    Attributes:
        extension: extension of the file names, for example ``.nc``.
    """

    extension: ClassVar[str]

    @abstractmethod
    def create(self, path: Path, initial_minutes: int, part: FilePart, attributes: Mapping[str, str | int]) -> OpenFile:
        """Create a file.

        Args:
            path: temporary path of the file.
            initial_minutes: initial time in minutes.
            part: lead times and members of the file.
            attributes: global attributes.
        """

    @abstractmethod
    def read_matching_attributes(self, path: Path, initial_minutes: int, part: FilePart) -> dict[str, object] | None:
        """Return the global attributes of an existing file, if it has the content of `part`.

        Args:
            path: path of the file.
            initial_minutes: initial time in minutes.
            part: lead times and members that the file should have.

        Returns:
            The attributes; None if the content differs, or if the file cannot be read.
        """

    def remove(self, path: Path) -> None:
        """Remove a published file (see `OpenFile.publish`), if it exists."""
        path.unlink(missing_ok=True)


def move(source: Path, target: Path) -> None:
    """Flush a file to disk and rename it.

    Even after a power failure, only a complete file has the final name.
    """
    with open(source, "rb") as handle:
        os.fsync(handle.fileno())
    os.replace(source, target)
