"""What belongs to a model besides its weights: channels, grid, statistics, static fields, masks, climatology."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from credit.calendar import Calendar
from credit.channels import Channel, ChannelMap
from credit.config import Config
from credit.config.schema_data import DataConfig
from credit.config.schema_verification import ClimatologyConfig
from credit.data.climatology.climatology import Climatology
from credit.data.climatology.stored import load_or_fit_climatology
from credit.data.formats import cf
from credit.data.formats.units import find_conversion, plain
from credit.data.reader import FieldReader
from credit.data.samples.frames import FrameReader
from credit.data.sources.value_check import look_at_values
from credit.data.sources.vertical_layers import VerticalLayers, build_layers
from credit.data.splits import Split, build_splits
from credit.data.store.statistics import Statistics, fit_statistics
from credit.errors import CheckpointError, ConfigError, DataError
from credit.grid import LatLonGrid
from credit.models.base import ModelSpec

logger = logging.getLogger(__name__)

# a harmonic year cannot be told from less than about a year of data
LEAST_CLIMATOLOGY_MINUTES = 350 * 1440
_FORCING_CLIMATOLOGY = ClimatologyConfig(method="harmonic", harmonics=1, by_hour=False)


@dataclass(frozen=True)
class ModelAssets:
    """What belongs to a model besides its weights; carried by every checkpoint.

    Attributes:
        channels: the model's channels.
        grid: the grid that its inputs and outputs lie on.
        statistics: of every channel read from data; components of vectors have the mean 0.
        attributes: variable -> units, standard_name, long_name.
        static_CHW: static channels in physical units, float32.
        masks: variable -> (H, W) bool, True where missing.
        climatology: of the dynamic forcing read from data, None where the training period is too short.
        layers: that budgets of the air are summed over, None where the run has none.
        seen: (first, last) of the periods that the weights were trained or selected on, also before this run, in
            text; what imported weights have seen is not known.
    """

    channels: ChannelMap
    grid: LatLonGrid
    statistics: Statistics
    attributes: Mapping[str, Mapping[str, str]]
    static_CHW: np.ndarray
    masks: Mapping[str, np.ndarray]
    climatology: Climatology | None
    layers: VerticalLayers | None = None
    seen: tuple[tuple[str, str], ...] = ()

    def after(self, splits: Iterable[Split], calendar: Calendar) -> ModelAssets:
        """Return those of weights that are trained or selected on the periods of `splits`, too."""
        own = [(calendar.format(split.first), calendar.format(split.last)) for split in splits]
        return replace(self, seen=tuple(dict.fromkeys([*self.seen, *own])))

    @property
    def static_stored_CHW(self) -> np.ndarray:
        """Those of the static channels that were read from data."""
        return self.static_CHW[[c.source == "data" for c in self.channels.group("static")]]

    def meta(self) -> dict[str, Any]:
        """Return the JSON part."""
        return {
            "channels": self.channels.to_dict(),
            "grid": self.grid.to_dict(),
            "statistics": self.statistics.to_dict(),
            "attributes": {name: dict(value) for name, value in self.attributes.items()},
            "climatology": self.climatology is not None,
            "layers": self.layers.to_dict() if self.layers is not None else None,
            "seen": [list(period) for period in self.seen],
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the arrays."""
        named = {"static": torch.from_numpy(np.ascontiguousarray(self.static_CHW))}
        named |= {f"mask/{name}": torch.from_numpy(mask) for name, mask in self.masks.items()}
        if self.climatology is not None:
            named |= {
                f"climatology/{name}": torch.from_numpy(np.array(array))
                for name, array in self.climatology.to_dict().items()
            }
        return named

    @classmethod
    def load(cls, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> ModelAssets:
        """Inverse of `meta` and `tensors`."""

        def below(prefix: str) -> dict[str, np.ndarray]:
            return {k.removeprefix(prefix): v.numpy() for k, v in tensors.items() if k.startswith(prefix)}

        return cls(
            channels=ChannelMap.from_dict(meta["channels"]),
            grid=LatLonGrid.from_dict(meta["grid"]),
            statistics=Statistics.from_dict(meta["statistics"]),
            attributes=meta["attributes"],
            static_CHW=tensors["static"].numpy(),
            masks=below("mask/"),
            climatology=Climatology.from_dict(below("climatology/")) if meta["climatology"] else None,
            # checkpoints of before there were budgets do not mention any
            layers=VerticalLayers.from_dict(meta["layers"]) if meta.get("layers") else None,
            seen=read_seen(meta),
        )


def read_seen(meta: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return `ModelAssets.seen` of a checkpoint's meta.json.

    A checkpoint of an earlier version tells its own run's periods alone.
    """
    before = [meta["config"]["data"]["splits"][name] for name in ("train", "valid")] if meta.get("step") else []
    return tuple((first, last) for first, last in meta.get("seen", before))


def fit_assets(config: Config, reader: FieldReader, train: Split) -> ModelAssets:
    """Return the assets of a new run: statistics and the forcing's climatology, the store's or fitted."""
    statistics = getattr(reader, "statistics", None)
    if statistics is None:
        packing = getattr(reader, "packing_steps", None)
        accepted = [name for name, field in config.data.variable_options.items() if field.valid_range is not None]
        statistics = fit_statistics(
            reader, train.first, train.last, config.data.step_minutes, packing, True, config.data.transforms, accepted
        )
    if hasattr(reader, "times_of_files"):
        # the training period has just been read; validation would meet its own only after an epoch
        valid = build_splits(config.data, reader.calendar)["valid"]
        bad = look_at_values(reader, valid.first, valid.last).bad
        if bad:
            raise DataError(bad[0])
    statistics = zero_mean_vectors(statistics, config.data, reader)
    climatology = None
    forcing = [c.name for c in reader.channels.group("dynamic_forcing") if c.source == "data"]
    if forcing and train.last - train.first >= LEAST_CLIMATOLOGY_MINUTES:
        climatology = load_or_fit_climatology(reader, forcing, train, _FORCING_CLIMATOLOGY)
    elif forcing:
        logger.info("the training period is under a year: %s persist unchanged in forecasts", ", ".join(forcing))
    static = FrameReader(reader, config.data, None).static()
    return ModelAssets(
        reader.channels,
        reader.grid,
        statistics,
        reader.attributes,
        static,
        reader.masks,
        climatology,
        find_run_layers(config),
    )


def find_run_layers(config: Config) -> VerticalLayers | None:
    """Return the layers that the post-processes of the run sum over, None where none does.

    Raises:
        ConfigError: if the run's levels do not make up whole columns.
    """
    entries = config.model.postprocess_entries | config.inference.postprocess_entries
    return build_layers(config.data) if any(entry.needs_whole_columns for entry in entries.values()) else None


def zero_mean_vectors(statistics: Statistics, conf: DataConfig, reader: FieldReader) -> Statistics:
    """Give vector components the mean 0, so that they are only scaled and 0 is no wind on either side of a pole."""
    still = {c.name for c in reader.channels.stored if is_vector_component(conf, c, reader.attributes)}
    mean = np.array([0.0 if n in still else m for n, m in zip(statistics.names, statistics.mean, strict=True)])
    return replace(statistics, mean=mean)


def build_model_spec(
    conf: DataConfig, channels: ChannelMap, grid: LatLonGrid, attributes: Mapping[str, Mapping[str, str]]
) -> ModelSpec:
    """Return everything about the data that a model is built from."""
    vector_channels = []
    eastward: dict[tuple[str, float | None], int] = {}
    northward: dict[tuple[str, float | None], int] = {}
    for row, channel in enumerate(channels.input):
        if not is_vector_component(conf, channel, attributes):
            continue
        vector_channels.append(row)
        name = attributes.get(channel.variable, {}).get("standard_name", "")
        if "eastward" in name:
            eastward[name.replace("eastward", ""), channel.level] = row
        elif "northward" in name:
            northward[name.replace("northward", ""), channel.level] = row
    pairs = tuple((row, northward[vector]) for vector, row in eastward.items() if vector in northward)
    return ModelSpec(
        channels=channels,
        grid=grid,
        input_frames=conf.history_len,
        output_frames=1,
        timestep_minutes=conf.step_minutes,
        vector_channels=tuple(vector_channels),
        vector_pairs=pairs,
    )


def is_vector_component(conf: DataConfig, channel: Channel, attributes: Mapping[str, Mapping[str, str]]) -> bool:
    """Return whether a channel is a component of a vector, which changes its sign across a pole."""
    name = attributes.get(channel.variable, {}).get("standard_name", "")
    return cf.is_vector_component(conf.field(channel.variable).vector, name)


def require_same_fields(
    assets: ModelAssets, reader: FieldReader, path: Path, channels: ChannelMap | None = None
) -> None:
    """Refuse data whose channels, grid or units are not the checkpoint's.

    Args:
        assets: of the checkpoint.
        reader: of the data; units of variables that it does not have are not compared.
        path: the checkpoint.
        channels: of the config, where the reader has a part of them; default: the reader's.
    """
    difference = assets.channels.describe_mismatch(channels or reader.channels)
    if difference:
        raise CheckpointError(f"{path}: trained on other channels than data.variables asks for: {difference}")
    difference = assets.grid.describe_mismatch(reader.grid)
    if difference:
        raise DataError(f"{path}: trained on another grid than the data have: {difference}")
    for name, attributes in assets.attributes.items():
        ours, theirs = attributes.get("units"), reader.attributes.get(name, {}).get("units")
        if ours and theirs and plain(ours) != plain(theirs):
            raise DataError(
                f"{name}: the data are in {theirs}, the checkpoint {path} was trained on {ours}; "
                + _describe_way_out(name, theirs, ours)
            )


def _describe_way_out(name: str, theirs: str, ours: str) -> str:
    """Return what helps where a variable is in other units than the checkpoint's."""
    try:
        find_conversion(theirs, ours, name, "the data")
    except DataError:
        return (
            "these units measure different quantities: correct the units in the file, or read the quantity that was "
            "trained on (data.sources.N.rename)"
        )
    except ConfigError:
        pass  # without UDUNITS it is not known
    return f'data.variable_options.{name}.units: "{ours}" converts them'
