"""Metadata for reports and scores.nc: training log, data, grid and attributes of the forecasts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from credit.config.sections.data import DataConfig
from credit.config.sections.verification import BASELINES
from credit.data.formats.files import expand_paths, open_file
from credit.errors import CreditError
from credit.grid import LatLonGrid

# Values of the forcing attributes if no forcing was read, and if the forecast files do not contain them.
_NONE = "none"
_UNKNOWN = "unknown"
# Attributes of forecasts that become variables of scores.nc, and attributes of source files that the report shows.
_FORECAST_ATTRIBUTES = ("ensemble", "experiment", "checkpoint_step", "weights", "seen_periods")
_DATA_ATTRIBUTES = ("title", "comment", "source", "institution")


@dataclass(frozen=True)
class TrainingLog:
    """Losses of a training run, read from its ``metrics.jsonl``.

    Attributes:
        train: (optimizer step, training loss) of each row of the log with a finite training loss.
        valid: (optimizer step, validation loss) of each row with a finite validation loss.
    """

    train: list[tuple[int, float]]
    valid: list[tuple[int, float]]


def read_training_log(path: Path) -> TrainingLog | None:
    """Return the losses in a ``metrics.jsonl``; None if the file does not exist or has no finite training loss.

    Incomplete lines are ignored, because the last line of an active run may be incomplete.

    Args:
        path: path of the file.

    Raises:
        OSError: if the file exists and cannot be read.
    """
    if not path.exists():
        return None
    train = []
    valid = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            # The last line of an active or killed run may be incomplete.
            continue
        # A row has the training loss at its top level and, after a validation, the validation loss in "valid".
        for metrics, losses in ((row, train), (row.get("valid", {}), valid)):
            loss = metrics.get("loss")
            # The log contains null for a loss that was not finite.
            if loss is not None and math.isfinite(loss):
                losses.append((row["step"], loss))
    if not train:
        return None
    return TrainingLog(train, valid)


def describe_data(config: DataConfig) -> list[str]:
    """Return the values of the attributes title, comment, source and institution of the source files, each value once.

    Sources that cannot be read are skipped, because the source files are not needed if training reads a store.
    """
    # A dict keeps the order and contains a value of several sources only once.
    texts: dict[str, None] = {}
    for number, source in enumerate(config.sources):
        # All files of a source are assumed to have the attributes of the first file.
        try:
            path = expand_paths(source, f"data.sources.{number}")[0]
            with open_file(path, source) as dataset:
                for attribute in _DATA_ATTRIBUTES:
                    if dataset.attrs.get(attribute):
                        texts[str(dataset.attrs[attribute])] = None
        except CreditError:
            continue
    return list(texts)


def describe_truth(config: DataConfig) -> str:
    """Return a string with the path of each data source, or with the type of a source from a plugin."""
    names = []
    for source in config.sources:
        name = source.type or source.path
        # A source may have a list of paths.
        if isinstance(name, str):
            names.append(name)
        else:
            names += name
    return "; ".join(names)


def describe_grid(grid: LatLonGrid) -> str:
    """Return a string with the shape of a grid, its spacing, and the latitudes of its first and last row in degrees."""
    rows, columns = grid.shape
    return f"{rows} x {columns}, {360.0 / columns:.4g} degrees, rows from {grid.lat[0]:.6g} to {grid.lat[-1]:.6g}"


def describe_forecasts(
    members: Mapping[str, int], attributes: Mapping[str, Mapping[str, object]]
) -> dict[str, list[str] | list[int]]:
    """Return the variables of scores.nc that describe the forecasts.

    Args:
        members: name of every forecast and baseline -> number of members.
        attributes: name of each forecast, without the baselines -> global attributes of the forecast files.

    Returns:
        Variable name -> one value for each forecast and baseline, in the order of `members`. The variables are
        ``members``, ``forcing``, ``prescribed_forcing`` and the attributes ``ensemble``, ``experiment``,
        ``checkpoint_step``, ``weights`` and ``seen_periods``. If the files do not have an attribute, its value is ""
        or, for the two forcing variables, "unknown".
    """
    forecasts = []
    for name in members:
        # Baselines have no files and need no forcing.
        default = {}
        if name in BASELINES:
            default = {"forcing": _NONE}
        forecasts.append(attributes.get(name, default))
    described: dict[str, list] = {
        "members": list(members.values()),
        "forcing": [str(forecast.get("forcing", _UNKNOWN)) for forecast in forecasts],
        "prescribed_forcing": [_list_prescribed_forcing(forecast.get("forcing")) for forecast in forecasts],
    }
    for attribute in _FORECAST_ATTRIBUTES:
        described[attribute] = [str(forecast.get(attribute, "")) for forecast in forecasts]
    return described


def has_prescribed_forcing(forcing: str) -> bool:
    """Return True if a value of ``prescribed_forcing`` (see `describe_forecasts`) contains the name of a variable."""
    return forcing not in (_NONE, _UNKNOWN)


def _list_prescribed_forcing(forcing: object) -> str:
    """Return the names of the forcing variables whose observed values a forecast used after its initial time.

    Args:
        forcing: attribute ``forcing`` of the forecast, such as "sst: observed; sin_year: computed"; None if the files
            do not have it.

    Returns:
        The names, such as "sst"; "none" if there is no such variable, and "unknown" if `forcing` is None.
    """
    if forcing is None:
        return _UNKNOWN
    observed = []
    for entry in str(forcing).split("; "):
        # An entry is the name of a variable and its origin.
        words = entry.split(": ")
        if words[-1] == "observed":
            observed.append(words[0])
    return ", ".join(observed) or _NONE
