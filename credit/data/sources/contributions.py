"""Contributions of the sources and their files to a run, so that files without effect are reported."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from credit.calendar import Calendar
from credit.config.sections.data import DataConfig
from credit.config.sections.source import SourceConfig
from credit.data.formats.select import listing
from credit.data.sources.derived_series import DerivedSeries
from credit.data.sources.series import JoinedSeries, VariableSeries
from credit.data.sources.source_index import FileVariable, SourceIndex

logger = logging.getLogger(__name__)

# A pattern that is too wide may match thousands of files; these are named, the others counted.
_MAX_NAMED_FILES = 5


@dataclass(frozen=True)
class Contribution:
    """Contribution of one source.

    Attributes:
        source: its number in the config.
        num_files: number of its files.
        variables: description of each variable that it gives, with the names in the files if they differ.
        times: (N,) distinct minutes of the time-varying variables.
        idle: file -> why nothing is read from it.
    """

    source: int
    num_files: int
    variables: list[str]
    times: np.ndarray
    idle: dict[Path | str, str]

    def describe(self, conf: DataConfig, calendar: Calendar) -> str:
        """Return a description in one line."""
        files = f"{self.num_files} file{'' if self.num_files == 1 else 's'}"
        if self.idle:
            files += f" ({len(self.idle)} of them give nothing)"
        span = "no time"
        if len(self.times):
            span = f"{calendar.format(self.times[0])}..{calendar.format(self.times[-1])}, {len(self.times)} times"
        variables = ", ".join(self.variables) or "nothing"
        return f"data.sources.{self.source} ({_address(conf.sources[self.source])}): {files}; {span}; {variables}"

    def describe_idle(self) -> list[str]:
        """Return a line for each file that gives nothing, or for the first ones if there are many."""
        lines = [f"{path} gives nothing: {reason}" for path, reason in self.idle.items()]
        num_more = len(lines) - _MAX_NAMED_FILES
        if num_more > 0:
            lines = [*lines[:_MAX_NAMED_FILES], f"{num_more} more files of data.sources.{self.source} give nothing"]
        return lines


def list_contributions(
    conf: DataConfig, scan: SourceIndex, series: Mapping[str, VariableSeries] | None = None
) -> list[Contribution]:
    """Return the contribution of each source.

    Args:
        conf: the data section.
        scan: contents of the files.
        series: variable -> its times and files, for time-varying variables; None if the sources have problems, so that
            it is not known which of two files with the same fields is read.
    """
    num_idle = [sum(source == number for source, _ in scan.idle) for number in range(len(scan.files))]
    static = {channel.variable for channel in conf.channel_map().static_stored}
    used_paths = None if series is None else _used_paths(scan, series)
    contributions = []
    for number, files in enumerate(scan.files):
        variables, times = [], [np.empty(0, dtype=np.int64)]
        variables_of_path: dict[Path | str, list[FileVariable]] = {}
        for label, file_variables in _labelled(conf, scan):
            source_variables = [file_variable for file_variable in file_variables if file_variable.source == number]
            for file_variable in source_variables:
                variables_of_path.setdefault(file_variable.path, []).append(file_variable)
            if source_variables:
                variables.append(_describe_variable(label, source_variables, len(files) - num_idle[number]))
                varying = [
                    file_variable.times
                    for file_variable in source_variables
                    if file_variable.times is not None and label[0] not in static
                ]
                times += varying
        idle = {path: reason for (source, path), reason in scan.idle.items() if source == number}
        if used_paths is not None:
            for path, file_variables in variables_of_path.items():
                if (number, path) not in used_paths:
                    idle[path] = _why_unused(file_variables, number)
        contributions.append(Contribution(number, len(files), variables, np.unique(np.concatenate(times)), idle))
    return contributions


def warn_of_idle_files(contributions: Sequence[Contribution]) -> None:
    """Log a warning for each file that gives nothing."""
    for contribution in contributions:
        for line in contribution.describe_idle():
            logger.warning("%s", line)


def _labelled(conf: DataConfig, scan: SourceIndex) -> list[tuple[tuple[str, str], list[FileVariable]]]:
    """Return the files of every variable that is read, with its name and, if it is an input, its purpose."""
    labelled = []
    for name, file_variables in scan.file_variables.items():
        purpose = "" if conf.field(name).derive is None else f"derived ({conf.field(name).derive})"
        labelled.append(((name, purpose), file_variables))
    for (serves, name), file_variables in scan.inputs.items():
        labelled.append(((name, f"for {serves}" if serves else "of the ground, for levels"), file_variables))
    return labelled


def _describe_variable(label: tuple[str, str], file_variables: list[FileVariable], num_files: int) -> str:
    """Return a description of a variable: its names in the files, if they differ, and how many files have it.

    Args:
        label: its name, and its purpose if it is an input of another.
        file_variables: its files.
        num_files: number of files that have any variable.
    """
    name, purpose = label
    notes = [purpose] if purpose else []
    names = dict.fromkeys(file_variable.layout.name for file_variable in file_variables)
    if list(names) != [name]:
        notes.append(f"named {' or '.join(names)} there")
    if len(file_variables) < num_files:
        notes.append(f"in {len(file_variables)} of {num_files} files")
    return f"{name} ({'; '.join(notes)})" if notes else name


def _used_paths(scan: SourceIndex, series: Mapping[str, VariableSeries]) -> set[tuple[int, Path | str]]:
    """Return the files that some field is read from, each with its source."""
    used = {
        (file_variable.source, file_variable.path)
        for file_variables in scan.inputs.values()
        for file_variable in file_variables
    }
    parts = list(series.values())
    while parts:
        part = parts.pop()
        if isinstance(part, JoinedSeries):
            parts += part.parts
            continue
        if isinstance(part, DerivedSeries):
            parts += [each for each, _ in part.inputs.values()]
        used |= {
            (part.file_variables[number].source, part.file_variables[number].path)
            for number in np.unique(part.file_index)
        }
    for name, file_variables in scan.file_variables.items():
        # Of a static field only the first file of each source is read.
        if name not in series:
            first_of_source = {file_variable.source: file_variable for file_variable in reversed(file_variables)}
            used |= {(file_variable.source, file_variable.path) for file_variable in first_of_source.values()}
    return used


def _why_unused(file_variables: list[FileVariable], number: int) -> str:
    counts = [len(file_variable.positions) for file_variable in file_variables if file_variable.positions is not None]
    if counts and not any(counts):
        return f"its times lie outside of data.sources.{number}.period"
    names = sorted({file_variable.layout.name for file_variable in file_variables})
    return f"other files have the same and come first ({listing(names)})"


def _address(source: SourceConfig) -> str:
    if source.type is not None:
        return source.type
    return source.path if isinstance(source.path, str) else listing(source.path)
