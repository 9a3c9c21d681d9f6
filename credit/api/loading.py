"""Function `load`, which opens a run, a checkpoint or an exported file as a model that makes forecasts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from credit.api.arguments import check_overrides, find_device
from credit.api.model import Model
from credit.api.prepared_forecast import LoadedModel
from credit.config import Config, build_config
from credit.config.load import apply_overrides
from credit.errors import CheckpointError, ConfigError
from credit.models.inference import prepare_for_inference
from credit.parallel.mesh import DeviceGrid
from credit.parallel.state.materialise import allocate_
from credit.train.build.assets import ModelAssets, build_budget_layers
from credit.train.build.fine_tuning import load_forecast_network
from credit.train.build.forecaster import apply_trained_settings
from credit.train.build.model import build_network
from credit.train.checkpoint.checkpoint import load_meta, load_tensors, read_weights_checksum, resolve_checkpoint
from credit.train.checkpoint.external_weights import load_weights_file, read_exported_assets, read_exported_meta


def load(
    path: str | os.PathLike,
    *,
    checkpoint: str | None = None,
    device: str = "auto",
    overrides: Iterable[str] = (),
) -> Model:
    """Return the trained model of a run, of a checkpoint, or of an exported file.

    Args:
        path: folder of a run, folder of a checkpoint, or a file that ``credit convert --export`` wrote.
        checkpoint: checkpoint of the run: ``best`` (default), ``latest`` or a path. Only for the folder of a run.
        device: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` for the GPU if there is one.
        overrides: changes of the config as on the command line, such as ``["inference.amp=true"]``. Allowed are the
            keys of section ``inference``, and units, valid_range, in_forecast, minimum and maximum of
            ``data.variable_options``.

    Raises:
        CheckpointError: if there is no checkpoint, or the checkpoint is damaged.
        ConfigError: if the path does not exist, or an override is invalid or changes a setting that must be the same as
            in training.

    Example:
        >>> model = credit.load("runs/quickstart")
        >>> forecast = model.forecast(analysis, "10d")
    """
    stored_model = _read_stored_model(Path(path).expanduser(), checkpoint)
    trained_config = build_config(stored_model.meta["config"], origin=str(stored_model.path))
    raw_config = apply_overrides(stored_model.meta["config"], check_overrides(overrides))
    # Remove the settings for parallel jobs, because a forecast in memory is made by one process.
    inference = raw_config.get("inference") or {}
    raw_config["inference"] = {key: value for key, value in inference.items() if key not in ("parallelism", "split")}
    config = apply_trained_settings(build_config(raw_config, origin=str(stored_model.path)), trained_config)
    assets = stored_model.assets
    if assets.layers is None:
        # If a budget is set only for the forecast, the checkpoint does not contain the layers of the vertical column.
        assets = replace(assets, layers=build_budget_layers(config))

    def build_loaded_network(complete_assets: ModelAssets, torch_device: torch.device) -> nn.Module:
        if stored_model.path.is_dir():
            lora = trained_config.trainer.lora
            network = load_forecast_network(
                config, lora, complete_assets, stored_model.path, torch_device, DeviceGrid()
            )
        else:
            network = _load_exported_network(config, complete_assets, stored_model.path, torch_device)
        return prepare_for_inference(network, torch.bfloat16 if config.inference.amp else None)

    loaded = LoadedModel(
        assets=assets,
        build_network=build_loaded_network,
        path=stored_model.path,
        trained_steps=stored_model.meta["step"],
        weights_checksum=stored_model.weights_checksum,
        device=find_device(device),
    )
    return Model(loaded, raw_config, trained_config)


@dataclass(frozen=True)
class _StoredModel:
    """Description of a model on disk.

    Attributes:
        path: folder of a checkpoint, or exported file.
        meta: content of meta.json of the checkpoint or exported file.
        assets: assets of the model.
        weights_checksum: checksum of the weights.
    """

    path: Path
    meta: Mapping[str, Any]
    assets: ModelAssets
    weights_checksum: str


def _read_stored_model(path: Path, name: str | None) -> _StoredModel:
    """Return the description of the model in the folder of a run, the folder of a checkpoint, or an exported file.

    Args:
        path: the folder or file.
        name: name of the checkpoint in the folder of a run; None for the best checkpoint.

    Raises:
        CheckpointError: if there is no checkpoint, or the checkpoint is damaged.
        ConfigError: if the path does not exist, or `name` is given and the path is not a run.
    """
    is_run = path.is_dir() and not (path / "meta.json").exists()
    if name is not None and path.exists() and not is_run:
        raise ConfigError(f'checkpoint: "{name}" selects a checkpoint of a run, but {path} is a single model')
    if path.is_file():
        meta = read_exported_meta(path)
        tensors, checksum = read_exported_assets(path)
        if meta is None or not tensors:
            raise CheckpointError(
                f"{path}: has no description of the model; write the file with credit convert CONFIG --export FILE, "
                "with version 0.19 or later"
            )
        return _StoredModel(path, meta, ModelAssets.from_stored(meta, tensors), checksum)
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist; give the folder of a run, of a checkpoint, or an exported file")
    if is_run:
        folder = resolve_checkpoint(path / "checkpoints", name or "best", "checkpoint")
    else:
        folder = resolve_checkpoint(path.parent, str(path), "path")
    meta = load_meta(folder)
    assets = ModelAssets.from_stored(meta, load_tensors(folder, "assets"))
    return _StoredModel(folder, meta, assets, read_weights_checksum(folder, "forecast"))


def _load_exported_network(config: Config, assets: ModelAssets, path: Path, device: torch.device) -> nn.Module:
    """Return the network with the weights of an exported file, in eval mode.

    Args:
        config: config whose sections ``model`` and ``data`` are those of training.
        assets: assets of the model.
        path: the exported file.
        device: device of the network.
    """
    # Build the network on the meta device, without memory, because the file contains all weights.
    with torch.device("meta"):
        network = build_network(config, assets.channels, assets.grid, assets.attributes)
    allocate_(network, device)
    load_weights_file(network, path, seed=0)
    return network.eval()
