"""Contents of a checkpoint other than weights: channels, grid, statistics, static fields, climatology.

Shape suffixes: C channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from credit.calendar import Calendar
from credit.channels import Channel, ChannelMap
from credit.config import Config
from credit.config.sections.data import DataConfig
from credit.config.sections.verification import ClimatologyConfig
from credit.data.climatology.climatology import Climatology
from credit.data.climatology.stored import load_or_fit_climatology
from credit.data.formats import cf
from credit.data.reader import FieldReader
from credit.data.samples.frames import FrameReader
from credit.data.sources.levels.vertical_layers import VerticalLayers, build_layers
from credit.data.sources.value_check import check_sampled_values
from credit.data.splits import Split, build_splits
from credit.data.store.statistics import Statistics, fit_statistics
from credit.errors import DataError
from credit.grid import LatLonGrid
from credit.models.base import ModelSpec

logger = logging.getLogger(__name__)

# The annual harmonic cannot be fitted to less than about a year of data.
MIN_CLIMATOLOGY_MINUTES = 350 * 1440
_FORCING_CLIMATOLOGY = ClimatologyConfig(method="harmonic", harmonics=1, by_hour=False)


@dataclass(frozen=True)
class ModelAssets:
    """Contents of a checkpoint that forecasts need in addition to the weights.

    Attributes:
        channels: the channels of the model.
        grid: the grid of the model's inputs and outputs.
        statistics: mean and standard deviations of every channel read from data, in physical units; components of
            vectors have the mean 0.
        attributes: variable -> its attributes units, standard_name and long_name.
        static_CHW: static channels, (C_static, H, W) float32 in physical units.
        masks: variable -> (H, W) bool, True where the variable is missing; only variables with missing cells.
        climatology: climatology of the dynamic forcing that is read from data; None if the training period is too short
            or no forcing is read from data.
        layers: vertical layers for sums over columns in budgets such as mass and energy; None without a budget.
        trained_periods: (first time, last time), as strings, of each period on which the weights were trained or
            selected, in this run and in earlier runs. The periods of imported weights are unknown and not listed.
    """

    channels: ChannelMap
    grid: LatLonGrid
    statistics: Statistics
    attributes: Mapping[str, Mapping[str, str]]
    static_CHW: np.ndarray
    masks: Mapping[str, np.ndarray]
    climatology: Climatology | None
    layers: VerticalLayers | None = None
    trained_periods: tuple[tuple[str, str], ...] = ()

    def with_trained_periods(self, splits: Iterable[Split], calendar: Calendar) -> ModelAssets:
        """Return a copy of the assets with the periods of `splits` added to `trained_periods`, without repetitions.

        Args:
            splits: periods that weights are trained or selected on.
            calendar: calendar of the splits.
        """
        periods = list(self.trained_periods)
        for split in splits:
            periods.append((calendar.format(split.first), calendar.format(split.last)))
        # `dict.fromkeys` removes repetitions and keeps the order.
        return replace(self, trained_periods=tuple(dict.fromkeys(periods)))

    @property
    def static_from_data_CHW(self) -> np.ndarray:
        """Static channels that were read from data, (C_static_from_data, H, W) float32 in physical units."""
        is_stored_C = [channel.source == "data" for channel in self.channels.group("static")]
        return self.static_CHW[is_stored_C]

    def to_meta(self) -> dict[str, Any]:
        """Return the part of the assets that meta.json contains, as values that JSON can express."""
        return {
            "channels": self.channels.to_dict(),
            "grid": self.grid.to_dict(),
            "statistics": self.statistics.to_dict(),
            "attributes": {name: dict(value) for name, value in self.attributes.items()},
            "climatology": self.climatology is not None,
            "layers": self.layers.to_dict() if self.layers is not None else None,
            "seen": [list(period) for period in self.trained_periods],
        }

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Return the arrays of the assets as CPU tensors.

        Returns:
            Name -> tensor: ``static`` (C_static, H, W) float32, ``mask/VARIABLE`` (H, W) bool,
            and ``climatology/NAME`` for each array of `Climatology.to_dict`.
        """
        tensors = {"static": torch.from_numpy(np.ascontiguousarray(self.static_CHW))}
        for variable, mask_HW in self.masks.items():
            tensors[f"mask/{variable}"] = torch.from_numpy(mask_HW)
        if self.climatology is not None:
            for name, array in self.climatology.to_dict().items():
                tensors[f"climatology/{name}"] = torch.from_numpy(np.array(array))
        return tensors

    @classmethod
    def from_stored(cls, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> ModelAssets:
        """Return the assets of a checkpoint.

        Args:
            meta: the output of `to_meta`, read from JSON.
            tensors: the output of `to_tensors`.

        Raises:
            KeyError: if a key is missing in `meta` or `tensors`.
        """

        def select_arrays(prefix: str) -> dict[str, np.ndarray]:
            """Return the tensors whose names begin with `prefix` as arrays: name without the prefix -> array."""
            arrays = {}
            for name, tensor in tensors.items():
                if name.startswith(prefix):
                    arrays[name.removeprefix(prefix)] = tensor.numpy()
            return arrays

        climatology = None
        if meta["climatology"]:
            climatology = Climatology.from_dict(select_arrays("climatology/"))
        # Checkpoints of versions without budgets do not contain the key "layers".
        layers = None
        if meta.get("layers"):
            layers = VerticalLayers.from_dict(meta["layers"])
        return cls(
            channels=ChannelMap.from_dict(meta["channels"]),
            grid=LatLonGrid.from_dict(meta["grid"]),
            statistics=Statistics.from_dict(meta["statistics"]),
            attributes=meta["attributes"],
            static_CHW=tensors["static"].numpy(),
            masks=select_arrays("mask/"),
            climatology=climatology,
            layers=layers,
            trained_periods=read_trained_periods(meta),
        )


def read_trained_periods(meta: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the value of `ModelAssets.trained_periods` from the contents of a checkpoint's meta.json.

    Checkpoints of earlier versions do not list the periods; then the splits in the config of the checkpoint are used.
    """
    if "seen" in meta:
        periods = meta["seen"]
    elif meta.get("step"):
        splits = meta["config"]["data"]["splits"]
        periods = [splits["train"], splits["valid"]]
    else:
        # Nothing was trained before the first step.
        periods = []
    return tuple((start, end) for start, end in periods)


def fit_assets(config: Config, reader: FieldReader, train: Split) -> ModelAssets:
    """Return the assets of a new run.

    Statistics and the climatology of the forcing are read from the training store if the store contains them. Otherwise
    they are computed from the training period.

    Args:
        config: the config of the run.
        reader: the reader of the data.
        train: the training period.

    Raises:
        ConfigError: if budgets are configured and the levels of the run do not form complete columns.
        DataError: if values of the data are not plausible.
    """
    # Only a training store contains statistics. For source files, the complete training period is read.
    statistics = getattr(reader, "statistics", None)
    if statistics is None:
        statistics = _fit_run_statistics(config, reader, train)
    # The values of a store were checked when the store was written. For source files, only the training period has been
    # checked so far. Bad values in the validation period would stop the run only at its first validation.
    if hasattr(reader, "find_indices_covering_files"):
        valid = build_splits(config.data, reader.calendar)["valid"]
        bad_values = check_sampled_values(reader, valid.first, valid.last).problems
        if bad_values:
            raise DataError(bad_values[0])
    return ModelAssets(
        channels=reader.channels,
        grid=reader.grid,
        statistics=zero_vector_means(statistics, config.data, reader),
        attributes=reader.attributes,
        static_CHW=FrameReader(reader, config.data, None).static(),
        masks=reader.masks,
        climatology=_fit_forcing_climatology(reader, train),
        layers=build_budget_layers(config),
    )


def _fit_run_statistics(config: Config, reader: FieldReader, train: Split) -> Statistics:
    """Compute the statistics of the training period, for a run that reads source files instead of a training store."""
    # With a declared range, values outside are treated as missing and values inside are accepted. So there is no search
    # for outliers in these variables.
    variables_with_valid_range = []
    for variable, options in config.data.variable_options.items():
        if options.valid_range is not None:
            variables_with_valid_range.append(variable)
    return fit_statistics(
        reader,
        train.first,
        train.last,
        config.data.step_minutes,
        packing_steps=getattr(reader, "packing_steps", None),
        progress=True,
        transforms=config.data.transforms,
        unchecked_variables=variables_with_valid_range,
    )


def _fit_forcing_climatology(reader: FieldReader, train: Split) -> Climatology | None:
    """Return the climatology of the dynamic forcing that is read from data.

    In forecasts, the climatology replaces unknown values of the forcing.

    Returns:
        The climatology; None if the model reads no forcing from data, or if the training period is too short.
    """
    forcing_names = []
    for channel in reader.channels.group("dynamic_forcing"):
        if channel.source == "data":
            forcing_names.append(channel.name)
    if not forcing_names:
        return None
    if train.last - train.first < MIN_CLIMATOLOGY_MINUTES:
        logger.info(
            "the training period is shorter than a year: %s persist unchanged in forecasts", ", ".join(forcing_names)
        )
        return None
    return load_or_fit_climatology(reader, forcing_names, train, _FORCING_CLIMATOLOGY)


def build_budget_layers(config: Config) -> VerticalLayers | None:
    """Return the vertical layers for sums over columns in budgets; None if no post-process computes column sums.

    Raises:
        ConfigError: if the levels of the run do not form complete columns.
    """
    entries = config.model.postprocess_entries | config.inference.postprocess_entries
    if not any(entry.needs_whole_columns for entry in entries.values()):
        return None
    return build_layers(config.data)


def zero_vector_means(statistics: Statistics, conf: DataConfig, reader: FieldReader) -> Statistics:
    """Return a copy of the statistics in which the components of vectors have the mean 0.

    Normalization then only scales these components. Models change the sign of vector components across a pole. For
    normalised values, this is correct only if the normalised value 0 means no wind.

    Args:
        statistics: the statistics of all channels read from data.
        conf: the data section of the config.
        reader: reader of the data; only its channels and attributes are used.
    """
    component_names = set()
    for channel in reader.channels.time_varying_stored:
        if is_vector_component(conf, channel, reader.attributes):
            component_names.add(channel.name)
    mean_C = np.array(statistics.mean, dtype=np.float64)
    for channel_index, name in enumerate(statistics.names):
        if name in component_names:
            mean_C[channel_index] = 0.0
    return replace(statistics, mean=mean_C)


def build_model_spec(
    conf: DataConfig, channels: ChannelMap, grid: LatLonGrid, attributes: Mapping[str, Mapping[str, str]]
) -> ModelSpec:
    """Return the `ModelSpec` that a model is built from, with channels, grid, frames and vector channels.

    The components of a vector are matched by ``standard_name``: eastward_wind and northward_wind at a level are a pair.

    Args:
        conf: the data section of the config.
        channels: the channels of the model.
        grid: the grid of inputs and outputs.
        attributes: variable -> its attributes units, standard_name and long_name.
    """
    vector_channels = []
    # (standard_name without the direction, level) -> index of the input channel
    eastward: dict[tuple[str, float | None], int] = {}
    northward: dict[tuple[str, float | None], int] = {}
    for channel_index, channel in enumerate(channels.input):
        if not is_vector_component(conf, channel, attributes):
            continue
        vector_channels.append(channel_index)
        standard_name = attributes.get(channel.variable, {}).get("standard_name", "")
        if "eastward" in standard_name:
            eastward[standard_name.replace("eastward", ""), channel.level] = channel_index
        elif "northward" in standard_name:
            northward[standard_name.replace("northward", ""), channel.level] = channel_index
    # A component without a matching second component is in `vector_channels`, but not in `vector_pairs`.
    vector_pairs = []
    for vector, eastward_index in eastward.items():
        if vector in northward:
            vector_pairs.append((eastward_index, northward[vector]))
    return ModelSpec(
        channels=channels,
        grid=grid,
        input_frames=conf.history_len,
        output_frames=1,
        timestep_minutes=conf.step_minutes,
        vector_channels=tuple(vector_channels),
        vector_pairs=tuple(vector_pairs),
    )


def is_vector_component(conf: DataConfig, channel: Channel, attributes: Mapping[str, Mapping[str, str]]) -> bool:
    """Return True if a channel is a component of a vector, which changes its sign across a pole.

    Args:
        conf: the data section of the config; ``variable_options.NAME.vector`` takes precedence over the attributes.
        channel: the channel.
        attributes: variable -> its attributes units, standard_name and long_name.
    """
    standard_name = attributes.get(channel.variable, {}).get("standard_name", "")
    return cf.is_vector_component(conf.options_of(channel.variable).vector, standard_name)
