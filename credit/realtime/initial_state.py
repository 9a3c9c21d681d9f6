"""Initial state of a forecast, which is read from analysis files and compared with the training data.

Shape suffixes: C channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from credit.calendar import Calendar
from credit.config import Config, build_config
from credit.config.sections.source import GridConfig, SourceConfig
from credit.data.analyses import open_analyses
from credit.data.samples.frames import FrameReader
from credit.realtime.fetch.records import require_realtime_section
from credit.train.build.assets import ModelAssets
from credit.train.build.forecaster import apply_trained_settings
from credit.train.build.initial_condition_checks import (
    MAX_SHIFT,
    compute_normalized_moments,
    find_cells_missing_in_training,
)
from credit.train.build.open_data import build_frame_reader
from credit.train.build.stepper import build_normalizer
from credit.train.checkpoint.checkpoint import load_meta, load_tensors, resolve_checkpoint
from credit.train.checkpoint.trained_fields import require_same_fields

# Smallest and largest standard deviation of a single field, as a multiple of the standard deviation over space and time
# in the training period. For geopotential height instead of geopotential, the ratio is 0.1; seasonal changes of the
# ratio are much smaller.
_SPREAD_RANGE = (0.15, 5.0)


@dataclass(frozen=True)
class CheckpointMetadata:
    """Contents of the checkpoint from which forecasts are made, without its weights.

    Attributes:
        path: path of the checkpoint.
        assets: channels, grid, statistics and masks of the model.
        config: config of the run, with the settings with which the weights were trained.
    """

    path: Path
    assets: ModelAssets
    config: Config


def load_checkpoint_metadata(config: Config) -> CheckpointMetadata:
    """Load the checkpoint that ``inference.checkpoint`` names, without its weights.

    Raises:
        ConfigError: if the checkpoint does not exist.
        CheckpointError: if the checkpoint cannot be read.
    """
    path = resolve_checkpoint(
        Path(config.save_loc) / "checkpoints", config.inference.checkpoint, "inference.checkpoint"
    )
    meta = load_meta(path)
    assets = ModelAssets.from_stored(meta, load_tensors(path, "assets"))
    trained_config = build_config(meta["config"], origin=str(path / "meta.json"))
    return CheckpointMetadata(path, assets, apply_trained_settings(config, trained_config))


def build_forecast_config(config: Config, analysis_paths: Sequence[Path], grid_path: Path, minutes: int) -> Config:
    """Return the config of a forecast from analysis files.

    Args:
        config: config of the run.
        analysis_paths: files of `credit.realtime.analysis`, in the order of their times.
        grid_path: file with the grid of the model.
        minutes: initial time in minutes since 1900.
    """
    # The analysis files also contain the derived variables, so no variable is derived when they are read.
    options = {}
    for name, variable_options in config.data.variable_options.items():
        options[name] = variable_options.model_copy(update={"derive": None, "inputs": {}})
    data = config.data.model_copy(
        update={
            "sources": [SourceConfig(path=[str(path) for path in analysis_paths])],
            "store": None,
            "cache": "none",
            "on_bad_time": "fail",
            "grid": GridConfig(like=str(grid_path)),
            "regrid": require_realtime_section(config).regrid,
            "variable_options": options,
        }
    )
    inference = config.inference.model_copy(update={"initial_times": [Calendar().format(minutes)]})
    return config.model_copy(update={"data": data, "inference": inference})


def open_initial_state(model: CheckpointMetadata, forecast_config: Config) -> FrameReader:
    """Return a reader of the initial fields of a forecast, on the grid and in the units of the model.

    Args:
        model: checkpoint of the forecast.
        forecast_config: config from `build_forecast_config`.

    Raises:
        CheckpointError: if the channels of the checkpoint differ from those of the config.
        DataError: if fields are missing or implausible, or their units differ from the units in training.
    """
    config = apply_trained_settings(forecast_config, model.config)
    reader = open_analyses(config.data, needs_truth=False)
    require_same_fields(model.assets, reader, model.path, config.data.channel_map())
    hidden = find_cells_missing_in_training(model.assets, reader, model.path)
    return build_frame_reader(config, reader, model.assets, None, hidden)


def describe_unusual_fields(model: CheckpointMetadata, frames: FrameReader, minutes: int) -> str:
    """Return a message about the fields whose mean or standard deviation differs strongly from the training data.

    The message is empty if there are no such fields. Prognostic variables and dynamic forcing from data are compared.

    Args:
        model: checkpoint with the statistics of training.
        frames: reader of the analysis.
        minutes: time of the analysis in minutes since 1900.

    Raises:
        DataError: if a field cannot be read or has impossible values.
    """
    normalizer = build_normalizer(model.config, model.assets)
    problems = []
    fields_of = {"prognostic": frames.prognostic(minutes), "dynamic_forcing": frames.forcing(minutes)}
    for group, fields_CHW in fields_of.items():
        mean_C, spread_C = compute_normalized_moments(model.assets, normalizer, fields_CHW, group)
        for channel, mean, spread in zip(model.assets.channels.group(group), mean_C, spread_C, strict=True):
            # Computed forcing, such as the time of day, may be constant in space.
            if channel.source != "data":
                continue
            if abs(mean) > MAX_SHIFT:
                problems.append(f"{channel.name}: mean {mean:+.3g} standard deviations from the training mean")
            elif not _SPREAD_RANGE[0] <= spread <= _SPREAD_RANGE[1]:
                problems.append(f"{channel.name}: standard deviation {spread:.3g} times the value in training")
    return "; ".join(problems)
