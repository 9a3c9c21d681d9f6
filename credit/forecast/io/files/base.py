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
    """Base class of a forecast file that is being written under a temporary name."""

    @abstractmethod
    def put(self, lead_index: int, member: int, fields_CHW: np.ndarray) -> None:
        """Write one lead time of one member; the lead times and members may be written in any order.

        Args:
            lead_index: index of the lead time in ``lead_minutes`` of the schema.
            member: number of the member; 0 for a single forecast.
            fields_CHW: float32 in physical units, NaN where missing.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the file, so that nothing more can be written. A second call has no effect."""

    @abstractmethod
    def publish(self, path: Path) -> None:
        """Rename the complete, closed file to its final name `path`; an existing file with this name is replaced."""

    @abstractmethod
    def discard(self) -> None:
        """Close the file, and remove all files that were written under temporary names."""


class FileFormat(ABC):
    """Base class of the formats of forecast files.

    Attributes:
        extension: extension of the file names, for example ``.nc``.
    """

    extension: ClassVar[str]

    @abstractmethod
    def create(self, path: Path, initial_minutes: int, part: FilePart, attributes: Mapping[str, str | int]) -> OpenFile:
        """Create a forecast file under a temporary name, and return the open file.

        Args:
            path: temporary path of the file.
            initial_minutes: initial time in minutes.
            part: lead times and members of the file.
            attributes: global attributes.
        """

    @abstractmethod
    def read_matching_attributes(self, path: Path, initial_minutes: int, part: FilePart) -> dict[str, object] | None:
        """Return the global attributes of an existing file; None if its content differs from the content to write.

        Args:
            path: path of the file.
            initial_minutes: initial time in minutes.
            part: lead times and members that the file should have.

        Returns:
            The attributes; None if the content differs from `part`, or if the file cannot be read.
        """

    def remove(self, path: Path) -> None:
        """Remove a file that has its final name (see `OpenFile.publish`), if it exists."""
        path.unlink(missing_ok=True)


def flush_and_rename(source: Path, target: Path) -> None:
    """Flush the file `source` to disk, and rename it to `target`.

    The flush ensures that even after a power failure, only a complete file has the final name.
    """
    with open(source, "rb") as handle:
        os.fsync(handle.fileno())
    os.replace(source, target)
