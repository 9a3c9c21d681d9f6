"""GRIB2 format of forecast files.

Shape suffixes: C output channels, L levels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from credit.errors import DataError
from credit.forecast.io.files.base import FileFormat, OpenFile, flush_and_rename
from credit.forecast.io.files.coordinates import build_coordinates, build_field_attributes, build_file_schema
from credit.forecast.io.files.names import EXTENSIONS, PREFIX, FilePart
from credit.forecast.io.grib.fields import build_half_level_coefficients
from credit.forecast.io.grib.index import GribIndex, build_index_path, load_index, to_json_values
from credit.forecast.io.grib.messages import MessageEncoder
from credit.forecast.io.grib.options import GribOptions
from credit.forecast.io.schema import ForecastSchema
from credit.utils.temporary import temporary_path


class GribFormat(FileFormat):
    """Format of forecast files: GRIB2, with an index file for each file in the same folder.

    Args:
        schema: content of each forecast.
        options: settings of GRIB2 files.

    Raises:
        ConfigError: if GRIB2 cannot represent a variable, the grid or the calendar, or if a setting is wrong.
        DataError: if ecCodes is not installed.
    """

    extension = EXTENSIONS["grib2"]

    def __init__(self, schema: ForecastSchema, options: GribOptions) -> None:
        self._options = options
        self._encoder = MessageEncoder(schema, options)

    def create(self, path: Path, initial_minutes: int, part: FilePart, attributes: Mapping[str, str | int]) -> OpenFile:
        """Create a GRIB2 file that contains no messages yet; see `FileFormat.create`."""
        content = self._describe_content(initial_minutes, part)
        return _GribFile(path, self._encoder, initial_minutes, part, attributes, content)

    def read_matching_attributes(self, path: Path, initial_minutes: int, part: FilePart) -> dict[str, object] | None:
        """Return the global attributes of a GRIB2 file if its index describes the content that would be written.

        The result is None if the content differs. See `FileFormat.read_matching_attributes` for the arguments.
        """
        try:
            index = load_index(path)
        except DataError:
            return None
        if index.content != self._describe_content(initial_minutes, part):
            return None
        return dict(index.attributes)

    def remove(self, path: Path) -> None:
        """Remove a GRIB2 file and its index, if they exist."""
        build_index_path(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def _describe_content(self, initial_minutes: int, part: FilePart) -> dict[str, dict]:
        """Return the description of a file for its index: coordinates, fields and settings of the messages."""
        schema = build_file_schema(self._encoder.schema, part)
        coordinates = {}
        for name, coordinate in build_coordinates(schema, initial_minutes, part).items():
            coordinates[name] = {
                "dims": coordinate.dims,
                "values": coordinate.values.tolist(),
                "attributes": coordinate.attributes,
            }
        fields = {}
        for plan in self._encoder.plans:
            fields[plan.variable.name] = {
                "dims": schema.dims(plan.variable, "time"),
                "attributes": build_field_attributes(schema, plan.variable, part),
                "grib": plan.describe(),
            }
        settings = self._options.conf.model_dump(exclude={"parameters", "precision"})
        half_levels = build_half_level_coefficients(self._options)
        settings["half_levels"] = None if half_levels is None else half_levels.tolist()
        settings["control"] = self._options.has_control
        return to_json_values({"coordinates": coordinates, "fields": fields, "settings": settings})


class _GribFile(OpenFile):
    """GRIB2 file that is being written.

    Messages are appended in the order of the calls of `put`. `close` sorts the messages of a complete file by lead
    time, member, variable and level.

    Args:
        path: temporary path of the file.
        encoder: encoder of the messages.
        initial_minutes: initial time in minutes.
        part: lead times and members of the file.
        attributes: global attributes.
        content: description of the file's content for its index.
    """

    def __init__(
        self,
        path: Path,
        encoder: MessageEncoder,
        initial_minutes: int,
        part: FilePart,
        attributes: Mapping[str, str | int],
        content: dict[str, dict],
    ) -> None:
        self._path = path
        self._encoder = encoder
        self._initial_minutes = initial_minutes
        self._part = part
        self._attributes = attributes
        self._content = content
        self._members = [part.member]
        if part.member is None:
            self._members = list(range(encoder.schema.members or 1))
        # (lead index, member) -> (offset, length) of each message, by variable and level; None for a message that does
        # not exist.
        self._positions: dict[tuple[int, int], list[tuple[int, int] | None]] = {}
        self._temporary_paths = [path]
        self._file = open(path, "wb")  # noqa: SIM115

    def put(self, lead_index: int, member: int, fields_CHW: np.ndarray) -> None:
        """Append the messages of one lead time of one member; see `OpenFile.put`."""
        schema = self._encoder.schema
        lead = int(schema.lead_minutes[lead_index])
        positions: list[tuple[int, int] | None] = []
        for plan in self._encoder.plans:
            fields_LHW = schema.select(plan.variable, fields_CHW).reshape(-1, *schema.grid.shape)
            for level_index, field_HW in enumerate(fields_LHW):
                message = self._encoder.encode(plan, level_index, self._initial_minutes, lead, member, field_HW)
                if message is None:
                    positions.append(None)
                    continue
                positions.append((self._file.tell(), len(message)))
                self._file.write(message)
        self._file.flush()
        self._positions[lead_index, member] = positions

    def close(self) -> None:
        """Close the GRIB2 file, and sort its messages if the file is complete."""
        if self._file.closed:
            return
        self._file.close()
        steps = [(lead_index, member) for lead_index in self._part.lead_indices for member in self._members]
        if any(step not in self._positions for step in steps):
            return
        self._sort_messages(steps)

    def _sort_messages(self, steps: list[tuple[int, int]]) -> None:
        """Sort the messages in the file in the order of `steps`, pairs (lead index, member), without gaps."""
        old_positions: list[tuple[int, int]] = []
        sorted_positions: dict[tuple[int, int], list[tuple[int, int] | None]] = {}
        offset = 0
        for step in steps:
            sorted_positions[step] = []
            for position in self._positions[step]:
                if position is None:
                    sorted_positions[step].append(None)
                    continue
                _, length = position
                old_positions.append(position)
                sorted_positions[step].append((offset, length))
                offset += length
        # If a step was written twice, the file contains messages to which no position refers.
        is_sorted = self._positions == sorted_positions and self._path.stat().st_size == offset
        self._positions = sorted_positions
        if is_sorted:
            return
        # The name ends like the names of all temporary files, so the file is recognised if the process is killed.
        sorted_path = self._path.with_name(f"{PREFIX}sorted_{self._path.name}")
        self._temporary_paths.append(sorted_path)
        with open(self._path, "rb") as source, open(sorted_path, "wb") as target:
            for old_offset, length in old_positions:
                source.seek(old_offset)
                target.write(source.read(length))
        os.replace(sorted_path, self._path)

    def publish(self, path: Path) -> None:
        """Rename the GRIB2 file and its index to their final names.

        The old index is removed first, so that it never describes the new file. A file without an index is treated as
        incomplete.
        """
        index = GribIndex(dict(self._attributes), self._content, self._path.stat().st_size, self._list_offsets())
        final_index = build_index_path(path)
        temporary_index = temporary_path(final_index)
        self._temporary_paths.append(temporary_index)
        temporary_index.write_text(index.to_json(), encoding="utf-8")
        final_index.unlink(missing_ok=True)
        flush_and_rename(self._path, path)
        flush_and_rename(temporary_index, final_index)

    def _list_offsets(self) -> dict[str, list[list[list[int]]]]:
        """Return the offset of each message in bytes, in the structure of `GribIndex.messages`."""
        offsets: dict[str, list[list[list[int]]]] = {}
        first = 0
        for plan in self._encoder.plans:
            last = first + len(plan.surfaces)
            offsets[plan.variable.name] = []
            for lead_index in self._part.lead_indices:
                by_member = []
                for member in self._members:
                    positions = self._positions[lead_index, member][first:last]
                    by_member.append([-1 if position is None else position[0] for position in positions])
                offsets[plan.variable.name].append(by_member)
            first = last
        return offsets

    def discard(self) -> None:
        """Close the GRIB2 file, and remove all files that were written under temporary names."""
        with suppress(OSError):
            self._file.close()
        for path in self._temporary_paths:
            with suppress(OSError):
                path.unlink(missing_ok=True)
