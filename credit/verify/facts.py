"""What a report says beside the scores: training, data, notices."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import xarray as xr

from credit.config.schema_data import DataConfig
from credit.data.files import expand_paths
from credit.errors import CreditError

_DATA_ATTRIBUTES = ("title", "source", "institution", "comment")


@dataclass(frozen=True)
class TrainingLog:
    """What metrics.jsonl tells.

    Attributes:
        train: (step, loss) of each training row.
        valid: (step, loss) of each validation row with a loss.
        last: the last training row.
    """

    train: list[tuple[int, float]]
    valid: list[tuple[int, float]]
    last: dict


def read_training_log(path: Path) -> TrainingLog | None:
    """Return what ``metrics.jsonl`` tells, None where there is none; a torn last line is left out."""
    if not path.exists():
        return None
    train, valid, last = [], [], {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "loss" in row:
            train.append((row["step"], row["loss"]))
            last = row
        if "loss" in row.get("valid", {}):
            valid.append((row["step"], row["valid"]["loss"]))
    return TrainingLog(train, valid, last) if train else None


def describe_data(conf: DataConfig) -> list[str]:
    """Return what the sources' files say of themselves (title, source, comment), each once.

    Sources that are not at hand, because training reads a store, say nothing.
    """
    said: dict[str, None] = {}
    for number, source in enumerate(conf.sources):
        try:
            path = expand_paths(source, f"data.sources.{number}")[0]
            opener = xr.open_zarr if path.is_dir() else xr.open_dataset
            with opener(path, decode_times=False) as dataset:
                said |= dict.fromkeys(str(dataset.attrs[k]) for k in _DATA_ATTRIBUTES if dataset.attrs.get(k))
        except (CreditError, OSError, ValueError):
            continue
    return list(said)


def prescribed_forcing(conf: DataConfig) -> list[str]:
    """Return the forcing variables that a forecast reads from the future (``in_forecast: observed``)."""
    group = conf.variables.dynamic_forcing
    return [name for name in group.vars_3D + group.vars_2D if conf.field(name).in_forecast == "observed"]
