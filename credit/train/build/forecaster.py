"""Builder of a forecaster: a trained model from a checkpoint, and the reader of initial states and forcing."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from credit.config import Config, build_config
from credit.config.registry import NOISES
from credit.config.sections.data import VariableOptions
from credit.config.sections.postprocess import replace_entries, require_order
from credit.data.reader import FieldReader
from credit.data.samples.frames import FrameReader
from credit.errors import CheckpointError, ConfigError
from credit.forecast.ensemble.perturbations import describe_ensemble
from credit.forecast.io.diagnostics import OutputDiagnostics
from credit.forecast.io.schema import SEEN_PERIODS
from credit.forecast.stepper import Stepper
from credit.models.inference import prepare_for_inference
from credit.parallel.domain.domain import Domain
from credit.parallel.mesh import DeviceGrid
from credit.parallel.object_collectives import run_on_rank0
from credit.parallel.process_info import ProcessInfo
from credit.train.build.assets import ModelAssets, build_budget_layers
from credit.train.build.fine_tuning import load_forecast_network
from credit.train.build.initial_condition_checks import find_cells_missing_in_training
from credit.train.build.model import choose_device
from credit.train.build.open_data import build_frame_reader
from credit.train.build.stepper import build_stepper, select_domain_part
from credit.train.checkpoint import checkpoint
from credit.train.checkpoint.config_changes import warn_of_ignored_changes
from credit.train.checkpoint.trained_fields import require_same_fields
from credit.utils.malloc import retain_freed_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Forecaster:
    """Trained model that is ready to forecast.

    Attributes:
        config: the config of the run, with the model section that the weights were trained with.
        assets: the assets of the checkpoint.
        stepper: stepper of the network, which is in eval mode.
        frames: reader of initial states and forcing, on this rank's part of the grid.
        full_grid_frames: reader of initial states and forcing on the complete grid; the same object as `frames` unless
            ranks divide the fields.
        trained_steps: number of optimizer steps that the weights were trained for.
        path: path of the checkpoint.
        weights: checksum of the weights.
    """

    config: Config
    assets: ModelAssets
    stepper: Stepper
    frames: FrameReader
    full_grid_frames: FrameReader
    trained_steps: int
    path: Path
    weights: str


def assemble_forecaster(
    config: Config,
    reader: FieldReader,
    name_or_path: str,
    process_info: ProcessInfo | None = None,
    mesh: DeviceGrid | None = None,
) -> Forecaster:
    """Collective over `mesh`: return the forecaster of a checkpoint, which starts from the data of the run.

    Args:
        config: the config of the run.
        reader: the reader of the run's data; it may contain only the variables that a forecast reads.
        name_or_path: the checkpoint: ``best``, ``latest`` or a path.
        process_info: rank of this process on its host, which determines its GPU; by default the first GPU is used.
        mesh: output of `credit.train.build.model.build_forecast_mesh`; by default only this process.

    Raises:
        CheckpointError: if the checkpoint is missing or damaged, or if its channels, time step or number of input
            frames differ from the config.
        DataError: if the grid or the units of the data differ from the checkpoint, or if the data are missing in cells
            where the checkpoint was trained with values.
        ConfigError: if the path does not exist, or ``inference.postprocess`` does not fit the model.
    """
    # Load the checkpoint's assets and compare them with the data and the config.
    path = checkpoint.resolve_checkpoint(Path(config.save_loc) / "checkpoints", name_or_path, "inference.checkpoint")
    meta, stored_assets = run_on_rank0(lambda: (checkpoint.load_meta(path), checkpoint.load_tensors(path, "assets")))
    assets = ModelAssets.from_stored(meta, stored_assets)
    require_same_fields(assets, reader, path, config.data.channel_map())
    masked_cells = find_cells_missing_in_training(assets, reader, path)
    # Even if channels and grid agree, the time step or the number of input frames may differ.
    trained = build_config(meta["config"], origin=str(path / "meta.json"))
    if trained.data.step_minutes != config.data.step_minutes or trained.data.history_len != config.data.history_len:
        raise CheckpointError(
            f"{path}: trained with data.timestep {trained.data.timestep} and history_len {trained.data.history_len}, "
            f"but the config has {config.data.timestep} and {config.data.history_len}"
        )
    warn_of_ignored_changes(config, meta["config"], path)
    config = apply_trained_settings(config, trained)
    # If only the forecast uses a budget fixer, the checkpoint contains no layers, so they are built here.
    layers = build_budget_layers(config) if assets.layers is None else assets.layers
    # The units of the checkpoint take precedence, because the outputs of the network have these units.
    assets = replace(assets, attributes={**reader.attributes, **assets.attributes}, layers=layers)
    # Build the network with its weights on this rank's device.
    local_rank = process_info.local_rank if process_info is not None else 0
    device = choose_device(config.trainer.device, local_rank)
    retain_freed_memory(device)
    mesh = mesh or DeviceGrid()
    model = load_forecast_network(config, trained.trainer.lora, assets, path, device, mesh)
    # Weights can only be fused as complete tensors, so a network whose weights are split over ranks is not changed.
    if not config.inference.parallelism.splits_weights or mesh.device_mesh is None:
        autocast_dtype = torch.bfloat16 if config.inference.amp else None
        prepare_for_inference(model, autocast_dtype)
    stepper = build_stepper(config, assets, model, device, config.inference.amp)
    full_grid_frames = build_frame_reader(config, reader, assets, None, masked_cells)
    frames = full_grid_frames
    if stepper.domain is not None:
        frames = build_frame_reader(config, reader, assets, stepper.domain, masked_cells)
    weights = run_on_rank0(lambda: checkpoint.read_weights_checksum(path, "forecast"))
    return Forecaster(config, assets, stepper, frames, full_grid_frames, meta["step"], path, weights)


def build_output_diagnostics(forecaster: Forecaster, last_lead: int, domain: Domain | None = None) -> OutputDiagnostics:
    """Return the object that interpolates forecasts to pressure levels and computes derived variables.

    Args:
        forecaster: the forecaster; its outputs are the inputs of the diagnostics.
        last_lead: longest lead time in minutes.
        domain: the group of ranks that divide the fields, if each rank computes the diagnostics of its part; None for
            complete fields.

    Raises:
        ConfigError: if a variable cannot be derived from the outputs.
    """
    config = forecaster.config
    assets = forecaster.assets
    return OutputDiagnostics(
        config.inference,
        config.data,
        assets.channels,
        assets.attributes,
        select_domain_part(assets.static_from_data_CHW, domain),
        last_lead,
        assets.masks,
    )


def apply_trained_settings(config: Config, trained: Config) -> Config:
    """Return a copy of `config` with the settings of `trained` that the weights depend on.

    The model, the options of variables, solar radiation and transforms come from `trained`. Data sources, the treatment
    of forcing in a forecast and the inference section come from `config`.

    Args:
        config: the config of the forecasts.
        trained: the config of the checkpoint.

    Raises:
        ConfigError: if the entries of ``inference.postprocess``, together with the entries of the trained model, cannot
            be put into the required order.
    """
    # A variable without options in the trained config was trained with the default options.
    variables = trained.data.variable_options.keys() | config.data.variable_options.keys()
    options = {name: trained.data.options_of(name) for name in variables}
    # The options for forcing that is not known in advance come from the config of the forecast.
    forcing = config.data.variables.dynamic_forcing
    forcing_names = {*forcing.vars_3D, *forcing.vars_2D}
    for name in options.keys() & forcing_names:
        forecast_options = config.data.options_of(name)
        update = {
            "in_forecast": forecast_options.in_forecast,
            "minimum": forecast_options.minimum,
            "maximum": forecast_options.maximum,
        }
        options[name] = options[name].model_copy(update=update)
    data = config.data.model_copy(
        update={"variable_options": options, "solar": trained.data.solar, "transforms": trained.data.transforms}
    )

    # Entries of inference.postprocess replace trained entries of the same kind, or are added in the required order.
    entries = replace_entries(trained.model.postprocess_entries, config.inference.postprocess_entries)
    try:
        require_order(entries, "inference.postprocess, with the entries that the weights were trained with")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.inference.postprocess:
        kinds = ", ".join(entry.kind for entry in entries.values())
        logger.info("inference.postprocess changes the post-processing of the forecasts; its entries are now %s", kinds)
    # The shorthand `hyperdiffusion` is already one of the entries.
    model = trained.model.model_copy(update={"hyperdiffusion": None, "postprocess": list(entries.values()) or None})
    return config.model_copy(update={"model": model, "data": data})


def build_run_attributes(forecaster: Forecaster) -> dict[str, str | int]:
    """Return the global attributes of the files that a forecaster writes: name -> value.

    The attributes identify the run. A file with different attributes is not treated as a forecast of this run.
    """
    config = forecaster.config
    assets = forecaster.assets
    # The origin of each forcing: computed, observed, persisted or from the climatology.
    forcing = []
    for channel in assets.channels.group("dynamic_forcing"):
        source = "computed"
        if channel.source == "data":
            source = _describe_forcing(config.data.options_of(channel.variable))
        forcing.append(f"{channel.name}: {source}")
    # Hyperdiffusion is described with its parameters, and other post-processes only with their kinds.
    hyperdiffusion = "none"
    other_kinds: list[str] = []
    for entry in config.model.postprocess_entries.values():
        if entry.kind == "hyperdiffusion":
            hyperdiffusion = f"{entry.time}, order {entry.order}"
        elif entry.kind not in other_kinds:
            other_kinds.append(entry.kind)
    num_parameters = sum(parameter.numel() for parameter in forecaster.stepper.model.parameters())
    trained_periods = ["/".join(period) for period in assets.trained_periods]

    # Attributes that every file has; attributes for settings that are not the default follow.
    attributes: dict[str, str | int] = {
        "title": f"Forecasts of {config.experiment}",
        "experiment": config.experiment,
        "model": config.model.type,
        "parameters": num_parameters,
        "checkpoint_step": forecaster.trained_steps,
        "weights": forecaster.weights,
        SEEN_PERIODS: ", ".join(trained_periods) or "unknown",
        "forcing": "; ".join(forcing) or "none",
        "hyperdiffusion": hyperdiffusion,
    }
    if config.inference.ensemble is not None:
        attributes["ensemble"] = describe_ensemble(config.inference.ensemble)
        for noise in config.model.noise:
            attributes["ensemble"] += f"; {noise.kind} noise inside the network, memory {', '.join(noise.memory)}"
            if config.inference.ensemble.control:
                attributes["ensemble"] += ", member 0 without it"
        if any(NOISES.find_class(noise.kind).can_be_scaled for noise in config.model.noise):
            noise_config = config.inference.ensemble.model_noise
            attributes["ensemble"] += f"; amplitude of the noise {noise_config.amplitude}"
            if noise_config.pairs:
                attributes["ensemble"] += ", opposite in pairs of members"
    if config.inference.amp:
        attributes["precision"] = "bfloat16"
    if other_kinds:
        attributes["post"] = ", ".join(other_kinds)
    if config.inference.postprocess:
        replaced = [entry.model_dump(mode="json") for entry in config.inference.postprocess]
        attributes["inference_postprocess"] = json.dumps(replaced)
    return attributes


def _describe_forcing(options: VariableOptions) -> str:
    """Return the method that sets a forcing in a forecast, with its bounds, such as "persist, at least 0"."""
    text = options.in_forecast
    if options.in_forecast == "observed":
        return text
    if options.minimum is not None:
        text += f", at least {options.minimum:g}"
    if options.maximum is not None:
        text += f", at most {options.maximum:g}"
    return text
