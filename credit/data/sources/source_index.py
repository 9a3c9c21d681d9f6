"""Index of the source files: the variables in each file, and their layout, grid and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from credit.calendar import Calendar
from credit.config.sections.data import DataConfig
from credit.data.error_collector import ErrorCollector
from credit.data.formats.files import OpenFiles, expand_paths
from credit.data.formats.run_grid import load_grid
from credit.data.sources.file_scanner import FileScanner, FileVariable
from credit.data.sources.levels.level_mapping import LevelResolver
from credit.data.sources.required_variables import (
    FIELD,
    VariableRequest,
    describe_no_match,
    find_source_requests,
    list_variable_requests,
    match_requests,
    report_missing_variables,
)
from credit.data.sources.shared_coordinates import SharedCoordinates
from credit.grid import LatLonGrid
from credit.utils.progress import ProgressBar

# Smallest number of files for which the scan shows a progress bar.
_FILES_WITH_BAR = 50


@dataclass(frozen=True)
class SourceIndex:
    """Contents of the sources.

    Attributes:
        grid: grid of the run.
        calendar: calendar that all files share.
        file_variables: mapping from the name of each variable of the run to the variable in each of its files, in the
            order of the config. For a derived variable, the values describe its first input in each file.
        inputs: mapping from the pair (derived variable, input) to the input in each of its files, for all inputs except
            the first. For surface fields, the name of the derived variable is empty.
        files: for each source, the list of its files.
        coefficient_files: files with the coefficients of hybrid levels.
        unused_files: files that have none of the required variables, as a mapping from the pair (index of the source,
            file) to the reason why nothing is read from the file.
    """

    grid: LatLonGrid
    calendar: Calendar
    file_variables: dict[str, list[FileVariable]]
    inputs: dict[tuple[str, str], list[FileVariable]]
    files: list[list[Path | str]]
    coefficient_files: list[Path]
    unused_files: dict[tuple[int, Path | str], str]

    @property
    def paths(self) -> dict[Path | str, int]:
        """Mapping from each file to the index of the first source that contains the file."""
        first_source: dict[Path | str, int] = {}
        for number, files in enumerate(self.files):
            for path in files:
                first_source.setdefault(path, number)
        return first_source


def scan_sources(conf: DataConfig, files: OpenFiles, problems: ErrorCollector) -> SourceIndex | None:
    """Scan all files of all sources, and return the index of their contents.

    Args:
        conf: the ``data`` section of the config.
        files: cache that opens the files.
        problems: collector to which the problems of all files are added; this function does not raise them.

    Returns:
        The index, which may be incomplete if there are problems; None if no file has a grid, or no file has a time.
    """
    # Without the levels of the run, no file can be scanned.
    grid = None
    level_resolver = None
    with problems.collect():
        if conf.grid is not None:
            grid = load_grid(conf.grid)
        level_resolver = LevelResolver(conf)
    if level_resolver is None:
        return None
    scanner = _SourceScanner(conf, files, problems, SharedCoordinates(grid), level_resolver)
    for number in range(len(conf.sources)):
        scanner.scan_source(number)
    scanner.report_missing()
    return scanner.build_index()


class _SourceScanner:
    """Scanner of all sources, which collects the contents of the `SourceIndex`.

    Args:
        conf: the ``data`` section of the config.
        files: cache that opens the files.
        problems: collector to which the problems of all files are added.
        shared: grid and calendar that all files share.
        level_resolver: finder of the mapping from the levels of files to those of the run.
    """

    def __init__(
        self,
        conf: DataConfig,
        files: OpenFiles,
        problems: ErrorCollector,
        shared: SharedCoordinates,
        level_resolver: LevelResolver,
    ) -> None:
        self._conf = conf
        self._open_files = files
        self._problems = problems
        self._shared = shared
        self._level_resolver = level_resolver
        self._requests = list_variable_requests(conf)
        # Every request has an entry; the entry is empty if no file has the variable.
        self._file_variables: dict[str, list[FileVariable]] = {}
        self._inputs: dict[tuple[str, str], list[FileVariable]] = {}
        for request in self._requests:
            if request.target_variable:
                self._file_variables[request.target_variable] = []
            self._inputs[request.target_variable, request.name] = []
        # For each source: its files, the names of the variables in them, and the unusable variables with the reasons.
        self._files: list[list[Path | str]] = [[] for _ in conf.sources]
        self._names: list[set[str]] = [set() for _ in conf.sources]
        self._unusable: list[dict[str, str]] = [{} for _ in conf.sources]
        self._unused_files: dict[tuple[int, Path | str], str] = {}
        self._faulty_requests: set[VariableRequest] = set()
        # Number of files that could not be read, plus the number of sources without files.
        self._num_unread = 0

    def scan_source(self, source_number: int) -> None:
        """Scan the files of ``data.sources[source_number]``; errors are collected and not raised."""
        source = self._conf.sources[source_number]
        with self._problems.collect():
            self._files[source_number] = expand_paths(source, f"data.sources.{source_number}")
        paths = self._files[source_number]
        if not paths:
            self._num_unread += 1
        source_requests = list(find_source_requests(source, self._requests))
        # With None, the bar is shown only on a terminal.
        is_bar_hidden = len(paths) < _FILES_WITH_BAR or None
        for path in ProgressBar(paths, "scanning files", unit="file", disable=is_bar_hidden):
            self._scan_file(path, source_number, source_requests)

    def _scan_file(
        self, path: Path | str, source_number: int, source_requests: Sequence[tuple[VariableRequest, list[str]]]
    ) -> None:
        """Scan one file of a source; errors are collected and not raised.

        Args:
            path: the file.
            source_number: index of the source of the file in ``data.sources``.
            source_requests: requests that the source may serve, with the possible names of the variables.
        """
        scanner = None
        with self._problems.collect():
            dataset = self._open_files.get(path, source_number)
            scanner = FileScanner(path, dataset, source_number, self._conf, self._shared, self._level_resolver)
        if scanner is None:
            self._num_unread += 1
            return
        self._names[source_number] |= scanner.names
        self._unusable[source_number] |= scanner.unusable_variables
        name_of_request = match_requests(source_requests, scanner.names)
        if not name_of_request:
            self._unused_files[source_number, path] = describe_no_match(source_requests, scanner.names)
        for request, name_in_file in name_of_request.items():
            # A problem in one file usually occurs in all files, so it is reported once.
            if request in self._faulty_requests:
                continue
            # The request is treated as faulty until its variable in this file has been described without an error.
            self._faulty_requests.add(request)
            with self._problems.collect():
                file_variable = scanner.build_file_variable(request, name_in_file)
                if request.role == FIELD:
                    self._file_variables[request.target_variable].append(file_variable)
                else:
                    self._inputs[request.target_variable, request.name].append(file_variable)
                # After an error, this line is not reached.
                self._faulty_requests.discard(request)

    def report_missing(self) -> None:
        """Add problems for variables that no file has, and for a missing time axis if no file has a time axis."""
        # A file that could not be read may have the variables that are missing.
        if not self._num_unread:
            report_missing_variables(self._conf, self._requests, self._names, self._unusable, self._problems)
        if self._shared.calendar is None and not self._problems.messages:
            self._problems.add(
                f"no file of data.sources has a time axis (standard_name time), not even {self._files[0][0]}; "
                "prognostic variables need times: add a time axis, for example with cdo "
                "settaxis,2000-01-01,00:00,6hour IN OUT"
            )

    def build_index(self) -> SourceIndex | None:
        """Return the index of the files scanned so far; None if no file had a grid, or no file had a time."""
        if self._shared.grid is None or self._shared.calendar is None:
            return None
        return SourceIndex(
            grid=self._shared.grid,
            calendar=self._shared.calendar,
            file_variables=self._file_variables,
            inputs=self._inputs,
            files=self._files,
            coefficient_files=self._level_resolver.paths,
            unused_files=self._unused_files,
        )
