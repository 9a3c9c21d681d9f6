"""Published weights in, one of our checkpoints out; and our weights out as one safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from credit.channels import Channel, ChannelMap
from credit.config import Config, build_config
from credit.data.store.statistics import Statistics
from credit.errors import CheckpointError, ConfigError, DataError, did_you_mean
from credit.grid import AxisOrder, LatLonGrid
from credit.models.registry import model_class
from credit.parallel.mesh import DeviceGrid
from credit.train.assets import ModelAssets, find_run_layers
from credit.train.build_model import build_network
from credit.train.checkpoint import checkpoint
from credit.train.checkpoint.async_writer import AsyncCheckpointer
from credit.train.checkpoint.external_weights import read_state_file
from credit.train.checkpoint.resume import prepare_folder, write_config
from credit.train.checkpoint.train_state import TrainState, checkpoint_meta
from credit.train.fine_tuning import load_forecast_network
from credit.train.optim import build_optimizer, optimizer_tensors
from credit.utils.atomic import atomic_write

# the name of solar radiation in the published statistics
DEFAULT_RENAME = {"toa_incident_solar_radiation": "tsi"}


@dataclass(frozen=True)
class PublishedFiles:
    """The files beside published weights.

    Attributes:
        weights: a torch or safetensors file, as `read_state_file` takes it.
        mean: netCDF with the mean of each variable, by level where it has levels.
        std: netCDF with what the deviation from the mean is divided by.
        static: netCDF with the static fields on the model's grid. They are taken as normalised already, as the
            published ones are, unless `mean` and `std` have them.
        rename: our variable -> its name in these files.
    """

    weights: Path
    mean: Path
    std: Path
    static: Path
    rename: Mapping[str, str]


def import_checkpoint(config: Config, files: PublishedFiles) -> Path:
    """Write step 0 of the run: published weights with everything that a forecast needs.

    Returns:
        The checkpoint; ``credit_rollout`` forecasts with it and ``credit_train`` goes on from it.

    Raises:
        CheckpointError: if the run has checkpoints already, or the weights are not those of the config's model.
        DataError: if a file lacks a variable or a level.
    """
    run_folder = Path(config.save_loc)
    prepare_folder(run_folder)
    folder = run_folder / "checkpoints"
    if checkpoint.list_checkpoints(folder):
        raise CheckpointError(f"{folder}: has checkpoints already; choose another save_loc")
    channels = config.data.channel_map()
    with open_netcdf(files.static) as static:
        grid, orientation = _read_grid(static, files.static)
        fields = [_static_field(static, channel, orientation, grid, files) for channel in channels.group("static")]
    static_CHW = np.stack(fields) if fields else np.zeros((0, *grid.shape), dtype=np.float32)
    statistics = read_statistics(channels, files)
    layers = find_run_layers(config)
    assets = ModelAssets(channels, grid, statistics, {}, static_CHW, masks={}, climatology=None, layers=layers)
    model = build_network(config, channels, grid, assets.attributes)
    published = read_state_file(files.weights)
    state = model_class(config.model.type).convert_published_state(published, config.model)
    checkpoint.load_state(model, state, files.weights)
    weights = model.state_dict()
    optimizer = optimizer_tensors(model, build_optimizer(model, config.trainer))
    tensors = {"model": weights, "forecast": weights, "optimizer": optimizer}
    meta = checkpoint_meta(config, assets, TrainState(saved=0), "standard", data_ranks=1)
    with AsyncCheckpointer(folder) as store:
        target = store.save(0, tensors, assets.tensors(), meta, links=("latest", "best"))
    write_config(config, run_folder)
    return target


def export_weights(config: Config, which: str, target: Path) -> Path:
    """Write the weights that forecast as one safetensors file, with config, channels and statistics as metadata.

    Raises:
        CreditError: if it cannot be written; an old file stays.
    """
    path = checkpoint.resolve_checkpoint(Path(config.save_loc) / "checkpoints", which, "--checkpoint")
    meta = (path / "meta.json").read_text(encoding="utf-8")
    weights = _forecast_weights(config, path)
    return atomic_write(target, lambda beside: _save(weights, meta, beside))


def _save(weights: Mapping[str, Tensor], meta: str, path: Path) -> None:
    try:
        save_file(dict(weights), path, metadata={"credit": meta})
    except SafetensorError as error:  # what it makes of the system's errors
        raise OSError(str(error)) from error


def _forecast_weights(config: Config, path: Path) -> dict[str, Tensor]:
    """Return the weights that forecast; adapters come merged into their base."""
    meta = checkpoint.load_meta(path)
    if "base" not in meta:
        return checkpoint.load_tensors(path, "forecast")
    trained = build_config(meta["config"], origin=str(path / "meta.json"))
    assets = ModelAssets.load(meta, checkpoint.load_tensors(path, "assets"))
    config = trained.model_copy(update={"trainer": config.trainer})
    network = load_forecast_network(config, trained.trainer.lora, assets, path, torch.device("cpu"), DeviceGrid())
    return network.state_dict()


def read_statistics(channels: ChannelMap, files: PublishedFiles) -> Statistics:
    """Return the statistics of every input and output channel."""
    wanted = [*channels.stored, *channels.group("static")]
    wanted += [c for c in channels.group("dynamic_forcing") if c.source == "computed"]
    names, mean, std = [], [], []
    with open_netcdf(files.mean) as means, open_netcdf(files.std) as stds:
        for channel in wanted:
            theirs = files.rename.get(channel.variable, channel.variable)
            if theirs not in means and channel.group == "static":
                pair = (0.0, 1.0)
            elif theirs not in means and channel.source == "computed":
                continue
            else:
                pair = tuple(
                    _value(data, theirs, channel, path) for data, path in ((means, files.mean), (stds, files.std))
                )
            names.append(channel.name)
            mean.append(pair[0])
            std.append(pair[1])
    unknown = np.full(len(names), np.nan)
    # published files tell nothing of tendencies: the state's own deviation stands in, which model.residual does not use
    return Statistics(
        tuple(names), np.array(mean), np.array(std), unknown, unknown, np.zeros(len(names)), np.array(std), unknown * 0
    )


def open_netcdf(path: Path) -> xr.Dataset:
    """Open a netCDF file of a published model."""
    try:
        return xr.open_dataset(path, decode_times=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as netCDF ({error})") from error


def _value(data: xr.Dataset, name: str, channel: Channel, path: Path) -> float:
    """Return one number: the variable's own, or that of the channel's level, matched exactly."""
    if name not in data:
        raise DataError(f"{path}: no variable {name}{did_you_mean(name, map(str, data.data_vars))}; see --rename")
    array = data[name].squeeze()
    if channel.level is not None and array.ndim == 1:
        levels = np.asarray(data[array.dims[0]].values, dtype=np.float64)
        rows = np.flatnonzero(levels == channel.level)
        if len(rows) != 1:
            shown = ", ".join(f"{value:g}" for value in levels)
            raise DataError(f"{path}: {name} has no level {channel.level:g}; it has {shown}")
        array = array[int(rows[0])]
    if array.ndim:
        raise DataError(f"{path}: {name} has shape {array.shape}; one number a channel is needed")
    return float(array)


def _read_grid(static: xr.Dataset, path: Path) -> tuple[LatLonGrid, AxisOrder]:
    coordinates = []
    for choices in (("latitude", "lat"), ("longitude", "lon")):
        found = [name for name in choices if name in static.variables]
        if not found:
            raise DataError(f"{path}: has no coordinate {choices[0]}")
        coordinates.append(static[found[0]].values)
    return LatLonGrid.from_coords(*coordinates, origin=str(path))


def _static_field(
    static: xr.Dataset, channel: Channel, orientation: AxisOrder, grid: LatLonGrid, files: PublishedFiles
) -> np.ndarray:
    if channel.source != "data":
        raise ConfigError(f"data.variables.static: {channel.name} is computed or a mask; published models have none")
    name = files.rename.get(channel.variable, channel.variable)
    if name not in static:
        raise DataError(f"{files.static}: no variable {name}{did_you_mean(name, map(str, static.data_vars))}")
    field = orientation.apply(np.asarray(static[name].squeeze().values, dtype=np.float32))
    if field.shape != grid.shape or not np.isfinite(field).all():
        raise DataError(f"{files.static}: {name} has shape {field.shape} or missing values; expected {grid.shape}")
    return field
