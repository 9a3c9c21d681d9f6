"""What a report says beside the scores: training, data, notices."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from credit.config.schema_data import DataConfig
from credit.config.schema_verification import BASELINES
from credit.data.formats.files import expand_paths, open_file
from credit.errors import CreditError
from credit.grid import LatLonGrid

_NONE, _UNKNOWN = "none", "unknown"  # forcing; files of other programs need not tell theirs
_TOLD = ("ensemble", "experiment", "checkpoint_step", "weights", "seen_periods")
_DATA_ATTRIBUTES = ("title", "comment", "source", "institution")


@dataclass(frozen=True)
class TrainingLog:
    """What metrics.jsonl tells.

    Attributes:
        train: (step, loss) of each training row whose loss is finite.
        valid: (step, loss) of each such validation row.
    """

    train: list[tuple[int, float]]
    valid: list[tuple[int, float]]


def read_training_log(path: Path) -> TrainingLog | None:
    """Return what ``metrics.jsonl`` tells, None where there is none; a torn last line is left out."""
    if not path.exists():
        return None
    train, valid = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        for own, losses in ((row, train), (row.get("valid", {}), valid)):
            loss = own.get("loss")
            if loss is not None and math.isfinite(loss):
                losses.append((row["step"], loss))
    return TrainingLog(train, valid) if train else None


def describe_data(conf: DataConfig) -> list[str]:
    """Return what the sources' files say of themselves (title, source, comment), each once.

    Sources that are not at hand, because training reads a store, say nothing.
    """
    said: dict[str, None] = {}
    for number, source in enumerate(conf.sources):
        try:
            path = expand_paths(source, f"data.sources.{number}")[0]
            with open_file(path, source) as dataset:
                said |= dict.fromkeys(str(dataset.attrs[k]) for k in _DATA_ATTRIBUTES if dataset.attrs.get(k))
        except CreditError:
            continue
    return list(said)


def describe_truth(conf: DataConfig) -> str:
    """Return the paths of the sources, and the types of those of plugins, as the config has them."""
    named = [source.type or source.path for source in conf.sources]
    paths = [[one] if isinstance(one, str) else one for one in named]
    return "; ".join(path for own in paths for path in own)


def describe_grid(grid: LatLonGrid) -> str:
    """Return size, spacing and outermost rows of a grid."""
    rows, columns = grid.shape
    return f"{rows} x {columns}, {360.0 / columns:.4g} degrees, rows from {grid.lat[0]:.6g} to {grid.lat[-1]:.6g}"


def describe_forecasts(
    members: Mapping[str, int], attributes: Mapping[str, Mapping[str, object]]
) -> dict[str, list[str] | list[int]]:
    """Return what is told of each forecast, in the order of `members`, by the names of scores.nc.

    Args:
        members: name of every forecast and baseline -> number of members.
        attributes: name -> global attributes, of the forecasts that are no baselines.
    """
    said = [attributes.get(name, {"forcing": _NONE} if name in BASELINES else {}) for name in members]
    return {
        "members": list(members.values()),
        "forcing": [str(own.get("forcing", _UNKNOWN)) for own in said],
        "prescribed_forcing": [_prescribed(own.get("forcing")) for own in said],
        **{name: [str(own.get(name, "")) for own in said] for name in _TOLD},
    }


def is_prescribed(forcing: str) -> bool:
    """Return whether a ``prescribed_forcing`` of `describe_forecasts` names any."""
    return forcing not in (_NONE, _UNKNOWN)


def _prescribed(forcing: object) -> str:
    """Return the forcing that was read from the future, of ``sst: observed; sin_year: computed``."""
    if forcing is None:
        return _UNKNOWN
    parts = [part.split(": ") for part in str(forcing).split("; ")]
    return ", ".join(part[0] for part in parts if part[-1] == "observed") or _NONE
