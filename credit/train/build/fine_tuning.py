"""Fine-tuning: selection and loading of the base checkpoint, and merging of LoRA adapters for forecasts.

The base is the checkpoint whose forecast weights a new run starts with. A checkpoint of adapters contains only the
adapters. Its meta.json contains the path of the base and a checksum of the base weights.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from credit.config import Config
from credit.config.sections.trainer import LoraConfig
from credit.errors import CheckpointError, ConfigError
from credit.models.lora import apply_lora, base_state_dict, checkpoint_state_dict, initial_adapters, merge_adapters
from credit.parallel.domain.split import split_domain
from credit.parallel.mesh import DeviceGrid
from credit.parallel.object_collectives import run_on_rank0
from credit.parallel.parallelize import parallelize
from credit.parallel.state.materialise import allocate_, fill_, named_tensors, require_filled
from credit.parallel.tensor.dropout import remove_dropout
from credit.train.build.assets import ModelAssets
from credit.train.build.model import build_network, set_tf32
from credit.train.checkpoint import checkpoint
from credit.train.checkpoint.external_weights import describe_added_tensors, initialise_missing_noise
from credit.train.checkpoint.resume import starts_from_run_folder
from credit.train.checkpoint.trained_fields import (
    adapt_weights,
    add_grid_advice,
    describe_adaptation,
    find_tensors_to_adapt,
)

logger = logging.getLogger(__name__)


def choose_base_checkpoint(config: Config, origin: Path | None) -> Path | None:
    """Collective: return the base checkpoint of the run, whose forecast weights the run starts with.

    Args:
        config: the config of the run.
        origin: the checkpoint from `credit.train.checkpoint.resume.choose_checkpoint`: a checkpoint of this run's
            adapters, whose meta.json contains the path of the base, or the base itself.

    Returns:
        The base of the adapters, or the checkpoint of a different run in ``trainer.resume``; None without a base.

    Raises:
        ConfigError: if adapters have no checkpoint to start from, or if their base is in the folder of this run.
        CheckpointError: if the base of adapters is missing or has changed, or if the base contains only adapters.
    """
    # Only a checkpoint of adapters has the key "base" in its meta.json.
    starts_from_run = starts_from_run_folder(config, origin)
    if starts_from_run and "base" in run_on_rank0(lambda: checkpoint.load_meta(origin)):
        raise CheckpointError(
            f"trainer.resume: {origin} contains only adapters. To train all weights, merge them with credit convert "
            "CONFIG --export FILE, and set trainer.resume to this file. To train new adapters, set trainer.resume to "
            "the run that these adapters started from"
        )
    if config.trainer.lora is None:
        return origin.resolve() if starts_from_run else None

    # A run with adapters either continues to train its adapters, or starts new adapters from a trained model.
    if origin is None:
        raise ConfigError(
            "trainer.lora: adapters need a trained model; set trainer.resume to the folder of the trained run, or to a "
            "checkpoint of the trained run"
        )
    meta = run_on_rank0(lambda: checkpoint.load_meta(origin))
    if "base" in meta:
        return locate_recorded_base(meta["base"], config.trainer.resume, origin)
    if origin.resolve().parent == (Path(config.save_loc) / "checkpoints").resolve():
        raise ConfigError(
            f"trainer.lora: {origin} contains all weights and is in the folder of this run; set a different save_loc "
            f"for the adapters, and trainer.resume: {origin}"
        )
    logger.info(
        "training adapters of %s; keep it, because the checkpoints of this run contain only the adapters", origin
    )
    return origin.resolve()


def describe_base(base: Path) -> dict[str, str]:
    """Return the description of a base for meta.json: its ``path``, and ``weights``, the checksum of its weights."""
    return {"path": str(base), "weights": checkpoint.read_weights_checksum(base, "forecast")}


def locate_recorded_base(recorded: Mapping[str, str], resume: str, origin: Path) -> Path:
    """Collective: return the path of the base of adapters, from their meta.json or from ``trainer.resume``.

    Args:
        recorded: the output of `describe_base` when the adapters were saved.
        resume: value of ``trainer.resume``: the new path of a base that was moved, or the new path of its run folder.
        origin: the checkpoint of adapters.

    Raises:
        CheckpointError: if no checkpoint at these paths has the weights of the base, or if the base is damaged.
    """

    def find_path() -> Path:
        recorded_path = Path(recorded["path"])
        candidates = [recorded_path]
        # The new path may be the path of the checkpoint, or the path of the run folder.
        for name in ("", f"checkpoints/{recorded_path.name}", "checkpoints/best"):
            candidates.append((Path(resume) / name).resolve())
        for candidate in candidates:
            if candidate.is_dir() and describe_base(candidate)["weights"] == recorded["weights"]:
                return candidate
        raise CheckpointError(
            f"{origin}: contains adapters of {recorded['path']}. This base does not exist, or its weights have changed "
            f"since the training of the adapters (checksum {recorded['weights']}); restore it, or set trainer.resume "
            "to its new path"
        )

    base = run_on_rank0(find_path)
    # `find_path` has only read the checksum in the manifest. This call compares the files with the manifest.
    return checkpoint.resolve_checkpoint(base.parent, str(base), "trainer.resume")


def load_base(model: nn.Module, base: Path, seed: int) -> None:
    """Collective: load the forecast weights of a base into a model, and initialise the adapters of the model.

    Noise parameters that are missing in the base get initial values that do not change the output of the model. If the
    channels or the grid of the model differ from the base, the weights that depend on them are adapted, see
    `credit.train.checkpoint.trained_fields.adapt_weights`.

    Args:
        model: the model, whose parameters have allocated memory but no values.
        base: the base checkpoint.
        seed: the seed of the initial values of adapters and noise parameters.

    Raises:
        CheckpointError: on every rank, if the names or shapes of the weights differ between the base and the model.
    """
    meta = run_on_rank0(lambda: checkpoint.load_meta(base))
    adapted_names = find_tensors_to_adapt(model, meta)
    with add_grid_advice(model, meta):
        stored_names = _load_base_weights(model, base, adapted_names)
    if adapted_names:
        # The adapted tensors are small, so every rank gets complete tensors.
        stored = run_on_rank0(lambda: checkpoint.load_tensors(base, "forecast", adapted_names))
        adapted = adapt_weights(model, stored, meta)
        model_state = {name: tensor for name, tensor in named_tensors(model).items() if name in adapted_names}
        shapes = {name: value.shape for name, value in adapted.items()}
        checkpoint.require_same_tensors(model_state, shapes, base)
        fill_(model, adapted.items())
    adaptation = describe_adaptation(model, meta)
    if adaptation:
        logger.info("%s: %s", base, adaptation)
    # The product of a new adapter is zero, so the initial output of the model is the output of its base.
    fill_(model, initial_adapters(model, seed))
    added_values = initialise_missing_noise(model, stored_names, seed)
    if added_values:
        logger.info("%s: %s", base, describe_added_tensors(stored_names, added_values.keys()))
    fill_(model, added_values.items())


def _load_base_weights(model: nn.Module, base: Path, skipped_names: Collection[str] = ()) -> set[str]:
    """Collective: load the forecast weights of a base into a model, and return the names of the stored tensors.

    Args:
        model: the model; its adapters are not loaded.
        base: the base checkpoint.
        skipped_names: names of further tensors that are not loaded.
    """
    stored_names = run_on_rank0(lambda: set(checkpoint.read_stored_shapes(base, "forecast")))
    state = base_state_dict(model, stored_names)
    loaded = {name: tensor for name, tensor in state.items() if name not in skipped_names}
    checkpoint.load_into(base, "forecast", loaded, skipped_names)
    return stored_names


def load_forecast_network(
    config: Config, lora: LoraConfig | None, assets: ModelAssets, path: Path, device: torch.device, mesh: DeviceGrid
) -> nn.Module:
    """Collective over the mesh: return the network of a checkpoint with its forecast weights, in eval mode.

    If this rank has all weights, adapters are merged into the base weights.

    Args:
        config: a config with the model and data sections that the weights were trained with.
        lora: the settings of the adapters in training; None if all weights were trained.
        assets: the assets of the checkpoint.
        path: the checkpoint.
        device: the device of this rank.
        mesh: device mesh of the ranks that share the network, from `credit.train.build.model.build_forecast_mesh`.

    Raises:
        ConfigError: if the network cannot be split over these ranks.
        CheckpointError: if the checkpoint or the base of its adapters is missing, damaged or of a different model.
    """
    # The network is built on the meta device, so that a rank allocates only memory for its part.
    with torch.device("meta"):
        model = build_network(config, assets.channels, assets.grid, assets.attributes)
    if lora is not None:
        apply_lora(model, lora.targets, lora.rank, lora.alpha)
    set_tf32(config.trainer.tf32, device)
    parallelism = config.inference.parallelism
    # Dropout is not active in these forecasts, but a network with torch's dropout cannot be divided.
    if mesh.degrees.domain > 1:
        remove_dropout(model)
        split_domain(model, mesh.domain_group, parallelism.domain_parts)
    parallelize(model, mesh.device_mesh, shard=parallelism.shard)
    allocate_(model, device)
    # A checkpoint of adapters contains only the adapters and the noise parameters. Other weights come from the base.
    if lora is not None:
        recorded = run_on_rank0(lambda: checkpoint.load_meta(path)["base"])
        base = locate_recorded_base(recorded, config.trainer.resume, path)
        _load_base_weights(model, base)
    checkpoint.load_into(path, "forecast", checkpoint_state_dict(model))
    require_filled(model)
    # Adapters cannot be merged into weights that are split over ranks, so the adapters are then kept.
    if not parallelism.splits_weights or mesh.device_mesh is None:
        model = merge_adapters(model)
    return model.eval()
