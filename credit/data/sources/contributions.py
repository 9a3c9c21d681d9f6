"""Contributions of the sources to a run, and the report of files from which nothing is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from credit.calendar import Calendar
from credit.config.sections.data import DataConfig
from credit.config.sections.source import SourceConfig
from credit.data.formats.select import format_values
from credit.data.sources.derived_series import DerivedSeries
from credit.data.sources.file_scanner import FileVariable
from credit.data.sources.series import JoinedSeries, VariableSeries, group_by_source
from credit.data.sources.source_index import SourceIndex

logger = logging.getLogger(__name__)

# Largest number of files that are named in messages. A pattern that is too general may match thousands of files.
_MAX_NAMED_FILES = 5


@dataclass(frozen=True)
class _VariableLabel:
    """Label of a variable in the description of a source.

    Attributes:
        name: name of the variable.
        purpose: use of the variable, such as ``derived (wind_speed)`` or ``for relative_humidity``; empty for a
            variable that is read without a formula.
    """

    name: str
    purpose: str


@dataclass(frozen=True)
class Contribution:
    """Contribution of one source to the run.

    Attributes:
        source_number: index of the source in ``data.sources``.
        num_files: number of files of the source.
        variables: one description for each variable that is read from the source. The description contains the name in
            the files if this name differs from the name in the run.
        times: (N,) int64 minutes since 1900, increasing: all times at which a time-varying variable has values.
        unused_files: mapping from a file to the reason why nothing is read from it.
    """

    source_number: int
    num_files: int
    variables: list[str]
    times: np.ndarray
    unused_files: dict[Path | str, str]

    def describe(self, conf: DataConfig, calendar: Calendar) -> str:
        """Return a description in one line: config key, path, number of files, times and variables.

        Args:
            conf: the ``data`` section of the config that the sources were opened with.
            calendar: calendar of `times`.
        """
        files = "1 file" if self.num_files == 1 else f"{self.num_files} files"
        if self.unused_files:
            files += f" ({len(self.unused_files)} of them not used)"
        span = "no time"
        if len(self.times):
            span = f"{calendar.format(self.times[0])}..{calendar.format(self.times[-1])}, {len(self.times)} times"
        variables = ", ".join(self.variables) or "nothing"
        address = _describe_address(conf.sources[self.source_number])
        return f"data.sources.{self.source_number} ({address}): {files}; {span}; {variables}"

    def describe_unused_files(self) -> list[str]:
        """Return one line for each of the first 5 unused files, and one line with the number of the other ones."""
        lines = [f"{path} is not used: {reason}" for path, reason in self.unused_files.items()]
        num_more = len(lines) - _MAX_NAMED_FILES
        if num_more > 0:
            lines = [
                *lines[:_MAX_NAMED_FILES],
                f"{num_more} more files of data.sources.{self.source_number} are not used",
            ]
        return lines


def list_contributions(
    conf: DataConfig, source_index: SourceIndex, series: Mapping[str, VariableSeries] | None = None
) -> list[Contribution]:
    """Return the contribution of each source.

    Args:
        conf: the ``data`` section of the config.
        source_index: contents of the source files.
        series: mapping from the name of each time-varying variable to its times and files; None if the sources have
            problems. Without `series`, files whose fields are read from other files are not reported as unused.

    Returns:
        One contribution for each source, in the order of the config.
    """
    static_variables = {channel.variable for channel in conf.channel_map().static_stored}
    used_paths = None
    if series is not None:
        used_paths = _find_used_paths(source_index, series)
    labelled_variables = _label_variables(conf, source_index)
    contributions = []
    for number, files in enumerate(source_index.files):
        unused_files: dict[Path | str, str] = {}
        for (source_number, path), reason in source_index.unused_files.items():
            if source_number == number:
                unused_files[path] = reason
        # All other files have at least one required variable.
        num_matching_files = len(files) - len(unused_files)
        descriptions = []
        # With the empty array, a source without time-varying variables has no times.
        times = [np.empty(0, dtype=np.int64)]
        variables_of_path: dict[Path | str, list[FileVariable]] = {}
        for label, file_variables in labelled_variables:
            source_variables = [variable for variable in file_variables if variable.source_number == number]
            if not source_variables:
                continue
            descriptions.append(_describe_variable(label, source_variables, num_matching_files))
            for file_variable in source_variables:
                variables_of_path.setdefault(file_variable.path, []).append(file_variable)
                # A file of a static variable may have times, which are ignored.
                if file_variable.times is not None and label.name not in static_variables:
                    times.append(file_variable.times)
        # A file is also unused if all its variables are read from other files.
        if used_paths is not None:
            for path, file_variables in variables_of_path.items():
                if (number, path) not in used_paths:
                    unused_files[path] = _describe_unused_file(file_variables, number)
        distinct_times = np.unique(np.concatenate(times))
        contributions.append(Contribution(number, len(files), descriptions, distinct_times, unused_files))
    return contributions


def warn_of_unused_files(contributions: Sequence[Contribution]) -> None:
    """Log warnings about the files from which nothing is read."""
    for contribution in contributions:
        for line in contribution.describe_unused_files():
            logger.warning("%s", line)


def _label_variables(conf: DataConfig, source_index: SourceIndex) -> list[tuple[_VariableLabel, list[FileVariable]]]:
    """Return the label and the files of every variable that is read, including the inputs of derived variables."""
    labelled_variables = []
    for name, file_variables in source_index.file_variables.items():
        kind = conf.options_of(name).derive
        purpose = ""
        if kind is not None:
            purpose = f"derived ({kind})"
        labelled_variables.append((_VariableLabel(name, purpose), file_variables))
    for (target_variable, name), file_variables in source_index.inputs.items():
        purpose = f"for {target_variable}" if target_variable else "of the ground, for levels"
        labelled_variables.append((_VariableLabel(name, purpose), file_variables))
    return labelled_variables


def _describe_variable(label: _VariableLabel, file_variables: list[FileVariable], num_files: int) -> str:
    """Return a description of a variable in a source: its name, its names in the files, and the number of files.

    Args:
        label: name and purpose of the variable.
        file_variables: the variable in each file of the source that has it.
        num_files: number of files of the source that have any required variable.
    """
    notes = []
    if label.purpose:
        notes.append(label.purpose)
    names_in_files = dict.fromkeys(file_variable.layout.name for file_variable in file_variables)
    if list(names_in_files) != [label.name]:
        notes.append(f"named {' or '.join(names_in_files)} in the files")
    if len(file_variables) < num_files:
        notes.append(f"in {len(file_variables)} of {num_files} files")
    if not notes:
        return label.name
    return f"{label.name} ({'; '.join(notes)})"


def _find_used_paths(source_index: SourceIndex, series: Mapping[str, VariableSeries]) -> set[tuple[int, Path | str]]:
    """Return the pairs (index of the source, path) of all files from which at least one field is read."""
    used_variables: list[FileVariable] = []
    for file_variables in source_index.inputs.values():
        used_variables += file_variables
    # Joined and derived series contain other series, which are appended to the list and visited later.
    remaining_series = list(series.values())
    while remaining_series:
        variable_series = remaining_series.pop()
        if isinstance(variable_series, JoinedSeries):
            remaining_series += variable_series.source_series
            continue
        if isinstance(variable_series, DerivedSeries):
            for input_series, _ in variable_series.inputs.values():
                remaining_series.append(input_series)
        # If all times of a file are read from other files, the index of this file is not in `file_index`.
        for index in np.unique(variable_series.file_index):
            used_variables.append(variable_series.file_variables[index])
    # Variables without a series are static. For a static variable, only the first file of each source is read.
    for name, file_variables in source_index.file_variables.items():
        if name not in series:
            used_variables += [source_variables[0] for source_variables in group_by_source(file_variables)]
    return {(file_variable.source_number, file_variable.path) for file_variable in used_variables}


def _describe_unused_file(file_variables: list[FileVariable], source_number: int) -> str:
    """Return the reason why no field is read from a file.

    Args:
        file_variables: the variables of the file that the run could read.
        source_number: index of the source of the file.
    """
    counts = [len(file_variable.positions) for file_variable in file_variables if file_variable.positions is not None]
    if counts and not any(counts):
        return f"period and every of data.sources.{source_number} exclude all its times"
    names = sorted({file_variable.layout.name for file_variable in file_variables})
    return f"its variables are read from other files that come first ({format_values(names)})"


def _describe_address(source: SourceConfig) -> str:
    """Return the paths of a source as one string; for a source of a plugin, return its type."""
    if source.type is not None:
        return source.type
    return source.path if isinstance(source.path, str) else format_values(source.path)
