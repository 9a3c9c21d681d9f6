"""Checks of the data by ``credit check``: files, variables, levels, units, times, splits and the store."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.cli.check.report import CheckReport
from credit.cli.check.store import check_store
from credit.config.sections.data import DataConfig
from credit.data.error_collector import ErrorCollector
from credit.data.formats.files import OpenFiles
from credit.data.formats.unit_checks import describe_implausible_variables
from credit.data.reader import FieldReader
from credit.data.samples.frames import FrameReader
from credit.data.sources.contributions import Contribution, list_contributions
from credit.data.sources.source_index import SourceIndex, scan_sources
from credit.data.sources.source_reader import SourceReader, open_sources
from credit.data.sources.value_check import check_sampled_values
from credit.data.splits import Split, build_splits, describe_coverage, describe_missing_times, require_samples
from credit.data.store.repair import MAX_BAD_FRACTION
from credit.grid import LatLonGrid

# Higher than every pressure ever measured at the ground, so a larger level in hPa must be an error.
_HIGHEST_HPA = 1100.0


@dataclass(frozen=True)
class DataSummary:
    """Metadata of the data. An attribute is empty if it could not be read or is invalid.

    The class has the metadata attributes of a `FieldReader`, so other functions accept an instance in place of a
    reader.

    Attributes:
        channels: channels of the config.
        grid: grid of the files or of the store, H rows and W columns.
        calendar: calendar of the files or of the store.
        times: (N,) int64 times of the data, minutes since 1900-01-01 00:00 UTC; empty if a file cannot be read.
        attributes: variable name -> its units, standard_name and long_name; empty if the sources have errors.
        masks: variable name -> (H, W) bool mask, True in missing cells, for each variable with missing cells; empty if
            the sources have errors.
        splits: split name (train, valid, test) -> split; empty if the splits have errors.
        samples: split name -> (M,) int64 initial times of its samples in minutes; splits without samples are left out.
        reader: reader of the fields; None if the sources have errors.
    """

    channels: ChannelMap
    grid: LatLonGrid
    calendar: Calendar
    times: np.ndarray
    attributes: dict[str, dict]
    masks: dict[str, np.ndarray]
    splits: dict[str, Split]
    samples: dict[str, np.ndarray]
    reader: FieldReader | None


def inspect_data(conf: DataConfig, report: CheckReport, deep: bool = False) -> DataSummary | None:
    """Check the data section and all data that it describes, and summarise the data.

    Args:
        conf: the data section.
        report: receives errors and notes.
        deep: True to read every field of the store and compare checksums.

    Returns:
        The summary; None if the grid of the data cannot be determined.
    """
    _check_level_units(conf, report)
    reader = _open_reader(conf, report, deep)
    attributes: dict[str, dict] = {}
    masks: dict[str, np.ndarray] = {}
    if reader is not None:
        grid = reader.grid
        calendar = reader.calendar
        times = reader.times
        attributes = reader.attributes
        masks = reader.masks
    else:
        # The errors of the sources are already in the report, so this scan collects them separately and ignores them.
        # The later checks use the grid and the times of the files.
        source_index = scan_sources(conf, OpenFiles(conf.sources), ErrorCollector())
        if source_index is None:
            # The splits can be checked even if no file can be read.
            _build_splits(conf, Calendar(), report)
            return None
        grid = source_index.grid
        calendar = source_index.calendar
        times = _find_most_complete_times(source_index)
        _report_contributions(list_contributions(conf, source_index), conf, calendar, report)
    splits = _build_splits(conf, calendar, report)
    samples = {}
    if len(times):
        samples = _find_samples(conf, calendar, times, splits, report)
    if reader is not None:
        _check_values(conf, reader, splits, samples, report)
    return DataSummary(
        channels=conf.channel_map(),
        grid=grid,
        calendar=calendar,
        times=times,
        attributes=attributes,
        masks=masks,
        splits=splits,
        samples=samples,
        reader=reader,
    )


def _check_level_units(conf: DataConfig, report: CheckReport) -> None:
    """Report levels that are too large to be in hPa.

    If the files have the same wrong unit, only this check finds the error.
    """
    if conf.level_units != "hPa":
        return
    channels = conf.channel_map()
    for channel in channels.time_varying_stored + channels.static_stored:
        # A channel of a variable without levels has the level None.
        level = channel.level or 0.0
        if level > _HIGHEST_HPA:
            report.add(
                f"data.levels: {level:g} hPa is higher than any pressure on Earth; "
                "set data.level_units: Pa, or write hPa"
            )
            return


def _open_reader(conf: DataConfig, report: CheckReport, deep: bool) -> FieldReader | None:
    """Open the training store if it exists and is valid; otherwise open the sources.

    Args:
        conf: the data section.
        report: receives errors, and notes on the variables, units and times of the data.
        deep: True to read every field of the store and compare checksums.

    Returns:
        The reader of the store or of the sources; None if the sources have errors.
    """
    # The errors of the store are reported, and the sources are checked instead of the store.
    reader: FieldReader | None = None
    if conf.store is not None and Path(conf.store).exists():
        with report.collect():
            reader = check_store(conf, report, deep)
    if reader is None:
        with report.collect():
            reader = open_sources(conf)
    if isinstance(reader, SourceReader):
        _report_contributions(reader.list_contributions(conf), conf, reader.calendar, report)
    if reader is None:
        return None

    # Describe the data that could be opened.
    variables_without_units = []
    for name, attributes in reader.attributes.items():
        if not attributes.get("units"):
            variables_without_units.append(name)
    if variables_without_units:
        names = ", ".join(variables_without_units)
        report.add_note(f"units: the files state none for {names}, so no unit limits their values")
    height, width = reader.grid.shape
    channels = reader.channels.time_varying_stored + reader.channels.static_stored
    names = ", ".join(channel.name for channel in channels)
    report.add_note(
        f"data: {len(reader.times)} times, calendar {reader.calendar.name}, {height} x {width} cells; {names}"
    )
    return reader


def _report_contributions(
    contributions: list[Contribution], conf: DataConfig, calendar: Calendar, report: CheckReport
) -> None:
    """Add a note for each source with the variables and times that it contributes."""
    for contribution in contributions:
        report.add_note(contribution.describe(conf, calendar))


def _find_most_complete_times(source_index: SourceIndex) -> np.ndarray:
    """Return the times of the variable with the most times. This function is used if the sources have errors.

    The times are (N,) int64 minutes in ascending order. The result is empty if a file could not be read, because the
    times would be incomplete.

    Args:
        source_index: index of the source files.
    """
    # Each item belongs to one variable: a list with one entry for each file.
    variables = [*source_index.file_variables.values(), *source_index.inputs.values()]
    file_variables = list(itertools.chain.from_iterable(variables))
    timed_sources = set()
    for file_variable in file_variables:
        if file_variable.times is not None:
            timed_sources.add(file_variable.source_number)
    # Collect the files that could be read. In a source of time-dependent fields, a file without times could not be
    # read.
    complete_paths = {path for _, path in source_index.unused_files}
    for file_variable in file_variables:
        if file_variable.times is not None or file_variable.source_number not in timed_sources:
            complete_paths.add(file_variable.path)
    unread_paths = set(source_index.paths) - complete_paths
    if not timed_sources or unread_paths:
        return np.empty(0, dtype=np.int64)
    # The variable with the most times is the most likely to have no errors.
    longest_times = np.empty(0, dtype=np.int64)
    for files_of_variable in variables:
        find_indices_covering_files = [file.times for file in files_of_variable if file.times is not None]
        if find_indices_covering_files:
            times = np.unique(np.concatenate(find_indices_covering_files))
            if len(times) > len(longest_times):
                longest_times = times
    return longest_times


def _build_splits(conf: DataConfig, calendar: Calendar, report: CheckReport) -> dict[str, Split]:
    """Return a dict of split name -> split; empty if the splits have errors, which are added to the report."""
    splits: dict[str, Split] = {}
    with report.collect():
        splits = build_splits(conf, calendar)
    return splits


def _find_samples(
    conf: DataConfig, calendar: Calendar, times: np.ndarray, splits: dict[str, Split], report: CheckReport
) -> dict[str, np.ndarray]:
    """Return the samples of each split, and report their number and the missing times.

    Args:
        conf: the data section.
        calendar: calendar of the data.
        times: (N,) times of the data in minutes.
        splits: split name -> split.
        report: receives an error for a split without samples, and notes.

    Returns:
        Split name -> (M,) initial times of its samples in minutes. Splits without samples are left out.
    """
    samples = {}
    forecast_lengths = _count_steps_by_split(conf)
    for name, split in splits.items():
        # Collect the error of each split separately, so that the errors of all splits are reported.
        with report.collect():
            initial_times = require_samples(times, split, calendar, conf, forecast_lengths[name])
            samples[name] = initial_times
            split_times = times[(times >= split.first) & (times <= split.last)]
            missing_times = describe_missing_times(split_times, calendar, conf.step_minutes)
            coverage = describe_coverage(times, split, calendar, conf.step_minutes)
            text = f"{len(split_times)} times, {len(initial_times)} samples; {missing_times}"
            if coverage:
                text = f"{coverage}: {text}"
            report.add_note(f"{split.describe(calendar)}: {text}")
            if (np.diff(split_times) > conf.step_minutes).any():
                report.add_warning(f"{split.describe(calendar)}: {missing_times}; no sample includes a missing time")
    return samples


def _count_steps_by_split(conf: DataConfig) -> dict[str, int]:
    """Return a dict of split name -> number of forecast steps in a sample of the split.

    A sample of the test split has only one step here. `check_forecasts` reports which forecasts of the full length can
    be scored.
    """
    return {"train": conf.forecast_len, "valid": conf.valid_forecast_len, "test": 1}


def _check_values(
    conf: DataConfig,
    reader: FieldReader,
    splits: dict[str, Split],
    samples: dict[str, np.ndarray],
    report: CheckReport,
) -> None:
    """Check the values at some times of every source file, then the values of some samples.

    Args:
        conf: the data section.
        reader: reader of the store or of the sources.
        splits: split name -> split.
        samples: split name -> (M,) initial times of its samples in minutes.
        report: receives errors and notes.
    """
    # The list contains one message for each time that has bad values.
    bad_times: list[str] = []
    if isinstance(reader, SourceReader) and splits:
        first = min(split.first for split in splits.values())
        last = max(split.last for split in splits.values())
        checked = check_sampled_values(reader, first, last)
        bad_times = checked.problems
        scope = ""
        if checked.num_checked != checked.num_times:
            scope = ", at least one of each file; preprocessing checks all"
        report.add_note(f"values: {checked.num_checked} of {checked.num_times} times checked{scope}")
        share = f"{len(bad_times)} of these times are bad"
        # Preprocessing leaves out at most MAX_BAD_FRACTION of all times. If only one of the checked times is bad, it
        # may be the only bad time of the data. It is therefore allowed if one bad time among all times is allowed.
        max_bad = max(MAX_BAD_FRACTION * checked.num_checked, min(1.0, MAX_BAD_FRACTION * checked.num_times))
        if bad_times and conf.on_bad_time == "skip" and len(bad_times) <= max_bad:
            report.add_note(f"values: {share} and will be left out (data.on_bad_time: skip); the first: {bad_times[0]}")
        elif len(bad_times) == 1:
            report.add(bad_times[0])
        elif bad_times:
            report.add(f"{bad_times[0]} ({share}; this is the first)")
    # The samples are not read after an error, because each of them would report the same bad values again.
    if not bad_times:
        _check_sample_values(conf, reader, samples, report)


def _check_sample_values(
    conf: DataConfig, reader: FieldReader, samples: dict[str, np.ndarray], report: CheckReport
) -> None:
    """Read some samples of each split and report problems with their values.

    Read the fields at the initial times of the first, the middle and the last sample, and the forcing at the last input
    time of the last sample. If there are no samples, read the first time of the data.

    Args:
        conf: the data section.
        reader: reader of the store or of the sources.
        samples: split name -> (M,) initial times of its samples in minutes.
        report: receives errors.
    """
    if not samples:
        with report.collect():
            reader.read(0)
    forecast_lengths = _count_steps_by_split(conf)
    # Smallest and largest value of each channel: one (C,) array for each time of the training period that is read.
    minima: list[np.ndarray] = []
    maxima: list[np.ndarray] = []
    for name, initial_times in samples.items():
        # The set removes duplicates if a split has fewer than three samples.
        sampled_positions = sorted({0, len(initial_times) // 2, len(initial_times) - 1})
        with report.collect():
            for minutes in initial_times[sampled_positions]:
                fields_CHW = reader.read(reader.index_of(int(minutes)))
                # Only the training period is used to find implausible units and constant channels.
                if name != "train":
                    continue
                if not minima and not isinstance(reader, SourceReader):
                    # Early versions of the package wrote stores without checking the values.
                    time_text = reader.calendar.format(minutes)
                    for message in describe_implausible_variables(fields_CHW, reader, conf, time_text):
                        report.add(message)
                minima.append(np.nanmin(fields_CHW, axis=(1, 2)))
                maxima.append(np.nanmax(fields_CHW, axis=(1, 2)))
            last_input_time = int(initial_times[-1]) + (forecast_lengths[name] - 1) * conf.step_minutes
            # A forcing that is averaged beyond the last input time needs data after the end of the sample.
            FrameReader(reader, conf, None).forcing(last_input_time)
    if minima:
        minimum_C = np.stack(minima).min(axis=0)
        maximum_C = np.stack(maxima).max(axis=0)
        _report_constant_outputs(reader.channels, minimum_C, maximum_C, report)


def _report_constant_outputs(
    channels: ChannelMap, minimum_C: np.ndarray, maximum_C: np.ndarray, report: CheckReport
) -> None:
    """Report output channels that have the same value in all cells at all times that were read, as an error.

    Args:
        channels: channels of the data.
        minimum_C: (C,) smallest value of each channel that is read from data and varies in time; the output channels
            come first.
        maximum_C: (C,) largest value of the same channels.
        report: receives the error.
    """
    constant_names = []
    # Forcing channels come after the output channels and may be constant.
    for channel, minimum, maximum in zip(channels.output, minimum_C, maximum_C, strict=False):
        if minimum == maximum:
            constant_names.append(channel.name)
    if constant_names:
        report.add(
            f"{', '.join(constant_names)}: one value everywhere at the sampled times of data.splits.train; there is "
            "nothing to learn: remove it from data.variables, or check the files"
        )
