"""Import of published weights as a checkpoint, and export of a checkpoint's weights as one safetensors file."""

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
from credit.train.build.assets import ModelAssets, build_budget_layers
from credit.train.build.fine_tuning import load_forecast_network
from credit.train.build.model import build_network
from credit.train.checkpoint import checkpoint
from credit.train.checkpoint.async_writer import AsyncCheckpointer
from credit.train.checkpoint.external_weights import (
    ASSET_PREFIX,
    WEIGHTS_CHECKSUM,
    initialise_missing_noise,
    read_state_file,
)
from credit.train.checkpoint.resume import create_run_folder, write_config
from credit.train.checkpoint.train_state import TrainState, build_checkpoint_meta
from credit.train.learning_rates import freeze_weights
from credit.train.optim import build_optimizer, optimizer_tensors
from credit.utils.atomic import atomic_write

# Variable -> its name in the published statistics, for solar radiation.
DEFAULT_RENAME = {"toa_incident_solar_radiation": "tsi"}


@dataclass(frozen=True)
class PublishedFiles:
    """Files of a published model: weights, statistics and static fields.

    Attributes:
        weights: torch or safetensors file that `read_state_file` can read.
        mean: netCDF file with the mean of each variable, for each level if the variable has levels.
        std: netCDF file of the same form with the scale of each variable; normalised value = (value - mean) / scale.
        static: netCDF file with the static fields on the model's grid. Static fields without an entry in the files
            `mean` and `std` are treated as already normalised.
        rename: variable of the config -> name of the variable in the published files.
        static_is_normalised: True if all static fields are treated as already normalised, even if the files `mean` and
            `std` contain entries for them.
    """

    weights: Path
    mean: Path
    std: Path
    static: Path
    rename: Mapping[str, str]
    static_is_normalised: bool = False


def import_checkpoint(config: Config, files: PublishedFiles) -> Path:
    """Write published weights and the assets for forecasts as the checkpoint of step 0 of a run.

    Args:
        config: the config of the run; its model must be the published model.
        files: the published files.

    Returns:
        The folder of the checkpoint. ``credit rollout`` can make forecasts with the checkpoint, and ``credit train``
        can continue from it.

    Raises:
        CheckpointError: if the run already has checkpoints, or the weights do not fit the config's model.
        ConfigError: if the config has static fields that are computed.
        DataError: if a file lacks a variable or a level.
    """
    run_folder = Path(config.save_loc)
    create_run_folder(run_folder)
    folder = run_folder / "checkpoints"
    if checkpoint.list_checkpoints(folder):
        raise CheckpointError(f"{folder}: already contains checkpoints; choose a different save_loc")

    assets = _read_published_assets(config, files)
    model = build_network(config, assets.channels, assets.grid, assets.attributes)
    published_state = read_state_file(files.weights)
    state = model_class(config.model.type).convert_published_state(published_state, config.model)
    # Noise that the config adds to the published model does not change its output at first.
    added_values = initialise_missing_noise(model, state.keys(), config.seed)
    checkpoint.copy_complete_tensors(model, {**state, **added_values}, files.weights)

    # The optimizer is new and there is no moving average, so training and forecasts use the same weights.
    weights = model.state_dict()
    freeze_weights(model, config.trainer.learning_rate_factors)
    optimizer = optimizer_tensors(model, build_optimizer(model, config.trainer))
    tensors = {"model": weights, "forecast": weights, "optimizer": optimizer}
    meta = build_checkpoint_meta(config, assets, TrainState(saved=0), "standard", num_sample_ranks=1)
    with AsyncCheckpointer(folder) as checkpointer:
        target = checkpointer.save(0, tensors, assets.to_tensors(), meta, links=("latest", "best"))
    write_config(config, run_folder)
    return target


def _read_published_assets(config: Config, files: PublishedFiles) -> ModelAssets:
    """Return the assets of a published model; they contain neither masks nor a climatology of the forcing."""
    channels = config.data.channel_map()
    static_fields = []
    with open_netcdf(files.static) as static:
        grid, axis_order = _read_grid(static, files.static)
        for channel in channels.group("static"):
            static_fields.append(_read_static_field(static, channel, axis_order, grid, files))
    # For a model without static fields the list is empty, which `np.stack` does not accept.
    static_CHW = np.zeros((0, *grid.shape), dtype=np.float32)
    if static_fields:
        static_CHW = np.stack(static_fields)
    return ModelAssets(
        channels=channels,
        grid=grid,
        statistics=read_statistics(channels, files),
        attributes={},
        static_CHW=static_CHW,
        masks={},
        climatology=None,
        layers=build_budget_layers(config),
    )


def export_weights(config: Config, name_or_path: str, target: Path) -> Path:
    """Write the forecast weights of a checkpoint as one safetensors file.

    The file also contains the checkpoint's meta.json as metadata, and the fields that a forecast needs, such as static
    fields (`ModelAssets.to_tensors`). So `credit.load` can make forecasts with only this file.

    Args:
        config: the config of the run.
        name_or_path: the checkpoint: ``best``, ``latest`` or a path.
        target: file to write.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: if the checkpoint does not exist or is damaged.
        CreditError: if the file cannot be written; an existing file is then not changed.
    """
    path = checkpoint.resolve_checkpoint(Path(config.save_loc) / "checkpoints", name_or_path, "--checkpoint")
    meta = (path / "meta.json").read_text(encoding="utf-8")
    checksum = checkpoint.read_weights_checksum(path, "forecast")
    tensors = dict(_load_forecast_weights(config, path))
    for name, tensor in checkpoint.load_tensors(path, "assets").items():
        tensors[f"{ASSET_PREFIX}{name}"] = tensor

    def save(temporary: Path) -> None:
        try:
            save_file(tensors, temporary, metadata={"credit": meta, WEIGHTS_CHECKSUM: checksum})
        except SafetensorError as error:
            # safetensors converts errors of the system to SafetensorError, which `atomic_write` does not handle.
            raise OSError(str(error)) from error

    return atomic_write(target, save)


def _load_forecast_weights(config: Config, path: Path) -> dict[str, Tensor]:
    """Return the forecast weights of a checkpoint, with merged LoRA adapters: name -> complete weight on the CPU."""
    meta = checkpoint.load_meta(path)
    # Without adapters, the stored weights are complete, so no network has to be built.
    if "base" not in meta:
        return checkpoint.load_tensors(path, "forecast")
    trained = build_config(meta["config"], origin=str(path / "meta.json"))
    assets = ModelAssets.from_stored(meta, checkpoint.load_tensors(path, "assets"))
    # The trainer section of the current config contains the new path of a base that was moved (``trainer.resume``).
    config = trained.model_copy(update={"trainer": config.trainer})
    network = load_forecast_network(config, trained.trainer.lora, assets, path, torch.device("cpu"), DeviceGrid())
    return network.state_dict()


def read_statistics(channels: ChannelMap, files: PublishedFiles) -> Statistics:
    """Return the statistics of every input and output channel, in the units that the network was trained in.

    Minimum, maximum and count are NaN, because published files do not contain them.

    Args:
        channels: the channels of the model.
        files: the published files.

    Raises:
        DataError: if a file lacks a variable or a level, or does not have one finite number for each channel.
    """
    # The files also contain computed forcing, because published models normalise it like any other channel.
    required_channels = [*channels.time_varying_stored, *channels.group("static")]
    for channel in channels.group("dynamic_forcing"):
        if channel.source == "computed":
            required_channels.append(channel)
    names = []
    means = []
    stds = []
    with open_netcdf(files.mean) as mean_file, open_netcdf(files.std) as std_file:
        for channel in required_channels:
            name = files.rename.get(channel.variable, channel.variable)
            may_be_absent = channel.group == "static" or channel.source == "computed"
            has_statistics = name in mean_file
            if channel.group == "static" and files.static_is_normalised:
                has_statistics = False
            if has_statistics or not may_be_absent:
                mean = _read_statistic(mean_file, name, channel, files.mean)
                std = _read_statistic(std_file, name, channel, files.std)
            elif channel.group == "static":
                # Published static fields without statistics are already normalised.
                mean = 0.0
                std = 1.0
            else:
                # Other computed channels have fixed statistics, see `build_normalizer`.
                continue
            names.append(channel.name)
            means.append(mean)
            stds.append(std)
    # NaN marks an unknown statistic.
    unknown_C = np.full(len(names), np.nan)
    # Published files contain no statistics of the tendencies. The standard deviation of the state is stored instead of
    # the standard deviation of the tendencies, which is used only if model.residual is set.
    return Statistics(
        names=tuple(names),
        mean=np.array(means),
        std=np.array(stds),
        minimum=unknown_C,
        maximum=unknown_C,
        tendency_mean=np.zeros(len(names)),
        tendency_std=np.array(stds),
        count=unknown_C,
    )


def open_netcdf(path: Path) -> xr.Dataset:
    """Open a netCDF file of a published model, without decoding its times.

    Raises:
        DataError: if the file cannot be read as netCDF.
    """
    try:
        return xr.open_dataset(path, decode_times=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as netCDF ({error})") from error


def _read_statistic(data: xr.Dataset, name: str, channel: Channel, path: Path) -> float:
    """Return the value of a statistic for one channel: the single value of the variable, or the value at its level.

    The file must contain the exact level.

    Args:
        data: the statistic, such as the mean, of all variables of a published model.
        name: name of the variable in `data`.
        channel: channel of the variable.
        path: path of `data`, for messages.

    Raises:
        DataError: if the variable or the level is missing, or the variable does not have one finite number for the
            channel.
    """
    if name not in data:
        raise DataError(f"{path}: no variable {name}{did_you_mean(name, map(str, data.data_vars))}; see --rename")
    # A variable with levels has one value for each level, any other variable a single value.
    array = data[name].squeeze()
    if channel.level is not None and array.ndim == 1:
        levels = np.asarray(data[array.dims[0]].values, dtype=np.float64)
        rows = np.flatnonzero(levels == channel.level)
        if len(rows) != 1:
            available_levels = ", ".join(f"{value:g}" for value in levels)
            raise DataError(f"{path}: {name} has no level {channel.level:g}; it has {available_levels}")
        array = array[int(rows[0])]
    if array.ndim:
        raise DataError(f"{path}: {name} has shape {array.shape}; each channel needs one number")
    # With NaN, the normaliser would treat every value of the channel as missing and replace it with the mean.
    if not np.isfinite(array):
        raise DataError(f"{path}: the value of {name} for channel {channel.name} is {float(array)}; correct the file")
    return float(array)


def _read_grid(static: xr.Dataset, path: Path) -> tuple[LatLonGrid, AxisOrder]:
    """Return the grid of the static fields and the order of rows and columns in their file.

    Raises:
        DataError: if a coordinate is missing, or the coordinates do not form a global grid.
    """
    coordinates = []
    for long_name, short_name in (("latitude", "lat"), ("longitude", "lon")):
        if long_name in static.variables:
            name = long_name
        elif short_name in static.variables:
            name = short_name
        else:
            raise DataError(f"{path}: has no coordinate {long_name}")
        coordinates.append(static[name].values)
    lat, lon = coordinates
    return LatLonGrid.from_coords(lat, lon, origin=str(path))


def _read_static_field(
    static: xr.Dataset, channel: Channel, axis_order: AxisOrder, grid: LatLonGrid, files: PublishedFiles
) -> np.ndarray:
    """Return the field of a static channel, (H, W) float32: H latitude rows and W longitude columns of the grid.

    Raises:
        ConfigError: if the channel is not read from data.
        DataError: if the variable of the channel is missing in the file, or the field has a wrong shape or missing
            values.
    """
    if channel.source != "data":
        raise ConfigError(
            f"data.variables.static: {channel.name} is computed or a mask; published models do not support these fields"
        )
    name = files.rename.get(channel.variable, channel.variable)
    if name not in static:
        raise DataError(f"{files.static}: no variable {name}{did_you_mean(name, map(str, static.data_vars))}")
    field_HW = axis_order.apply(np.asarray(static[name].squeeze().values, dtype=np.float32))
    if field_HW.shape != grid.shape or not np.isfinite(field_HW).all():
        raise DataError(f"{files.static}: {name} has shape {field_HW.shape} or missing values; expected {grid.shape}")
    return field_HW
