"""Fine-tuning of another run: choice and loading of the base checkpoint, and merging of LoRA adapters for forecasts.

The base is the checkpoint whose forecast weights a new run begins with. A checkpoint of adapters contains only the
adapters. Its meta.json identifies the base by its path and by a checksum of its weights.
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
from credit.train.checkpoint.external_weights import describe_added_tensors, find_added_tensors
from credit.train.checkpoint.resume import starts_from_run_folder
from credit.train.checkpoint.trained_fields import (
    adapt_weights,
    advise_on_grid,
    describe_adaptation,
    find_adapted_names,
)

logger = logging.getLogger(__name__)


def choose_base_checkpoint(config: Config, origin: Path | None) -> Path | None:
    """Collective: return the base of the run's adapters, or the best checkpoint of another run; None without a base.

    Args:
        config: the config of the run.
        origin: the checkpoint that the run starts from, see `credit.train.checkpoint.resume.choose_checkpoint`: either
            adapters of this run, whose meta.json names their base, or the base itself.

    Raises:
        ConfigError: if adapters have no checkpoint to start from, or their base lies in the folder of this run.
        CheckpointError: if the base of adapters is missing or has changed, or a base contains only adapters.
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

    # With adapters: the run either continues adapters of its own, or begins new ones from a trained model.
    if origin is None:
        raise ConfigError(
            "trainer.lora: adapters need a trained model; set trainer.resume to the folder of its run, or to one of "
            "its checkpoints"
        )
    meta = run_on_rank0(lambda: checkpoint.load_meta(origin))
    if "base" in meta:
        return locate_recorded_base(meta["base"], config.trainer.resume, origin)
    if origin.resolve().parent == (Path(config.save_loc) / "checkpoints").resolve():
        raise ConfigError(
            f"trainer.lora: {origin} contains all weights and lies in the folder of this run; set another save_loc for "
            f"the adapters, and trainer.resume: {origin}"
        )
    logger.info(
        "training adapters of %s; keep it, because the checkpoints of this run contain only the adapters", origin
    )
    return origin.resolve()


def describe_base(base: Path) -> dict[str, str]:
    """Return the entry for a base in the meta.json of adapters: ``path``, and ``weights``, a checksum of weights."""
    return {"path": str(base), "weights": checkpoint.weights_fingerprint(base, "forecast")}


def locate_recorded_base(recorded: Mapping[str, str], resume: str, origin: Path) -> Path:
    """Collective: return the base of the adapters in `origin`, at its recorded path or at ``trainer.resume``.

    Args:
        recorded: the output of `describe_base` when the adapters were saved.
        resume: ``trainer.resume``, which has the new path of a base that has been moved.
        origin: the checkpoint of adapters.

    Raises:
        CheckpointError: if neither path has a checkpoint with the weights of the base, or the base is damaged.
    """

    def find_path() -> Path:
        recorded_path = Path(recorded["path"])
        candidates = [recorded_path]
        # The new path may be that of the checkpoint itself, or the folder of its run.
        for name in ("", f"checkpoints/{recorded_path.name}", "checkpoints/best"):
            candidates.append((Path(resume) / name).resolve())
        for candidate in candidates:
            if candidate.is_dir() and describe_base(candidate)["weights"] == recorded["weights"]:
                return candidate
        raise CheckpointError(
            f"{origin}: contains adapters of {recorded['path']}, which does not exist or has other weights than when "
            f"they were trained (checksum {recorded['weights']}); restore it, or set trainer.resume to its new path"
        )

    base = run_on_rank0(find_path)
    # The checksum above is the one in the manifest; this call compares the files with it.
    return checkpoint.resolve_checkpoint(base.parent, str(base), "trainer.resume")


def load_base(model: nn.Module, base: Path, seed: int) -> None:
    """Collective: load the forecast weights of `base` into a model, and initialise its adapters, if it has any.

    Noise parameters that the base lacks get their initial values, with which the model computes what the base computes.
    If the model has other channels or another grid, the weights that depend on them are adapted, see
    `credit.train.checkpoint.trained_fields.adapt_weights`.

    Args:
        model: the model, with memory and without values.
        base: the base checkpoint.
        seed: the seed of the initial values of adapters and noise parameters.

    Raises:
        CheckpointError: on every rank, if the base has other weights than the model.
    """
    meta = run_on_rank0(lambda: checkpoint.load_meta(base))
    adapted_names = find_adapted_names(model, meta)
    with advise_on_grid(model, meta):
        stored_names = _load_base_weights(model, base, adapted_names)
    if adapted_names:
        # These tensors are small, so every rank gets them whole.
        stored = run_on_rank0(lambda: checkpoint.load_tensors(base, "forecast", adapted_names))
        adapted = adapt_weights(model, stored, meta)
        model_state = {name: tensor for name, tensor in named_tensors(model).items() if name in adapted_names}
        shapes = {name: value.shape for name, value in adapted.items()}
        checkpoint.require_same_tensors(model_state, shapes, base)
        fill_(model, adapted.items())
    adaptation = describe_adaptation(model, meta)
    if adaptation:
        logger.info("%s: %s", base, adaptation)
    # The product of a new adapter is zero, so the model begins as its base.
    fill_(model, initial_adapters(model, seed))
    added_values = find_added_tensors(model, stored_names, seed)
    if added_values:
        logger.info("%s: %s", base, describe_added_tensors(stored_names, added_values.keys()))
    fill_(model, added_values.items())


def _load_base_weights(model: nn.Module, base: Path, skipped_names: Collection[str] = ()) -> set[str]:
    """Collective: load the forecast weights of a base into a model, and return the names of the stored tensors.

    Args:
        model: the model, whose adapters are left out.
        base: the base checkpoint.
        skipped_names: names of tensors that are not loaded.
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

    If this rank has all weights, adapters are merged into their base.

    Args:
        config: a config with the model and data sections that the weights were trained with.
        lora: the settings of the adapters in training, None if all weights were trained.
        assets: the assets of the checkpoint.
        path: the checkpoint.
        device: the device of this rank.
        mesh: the ranks that share the network, from `credit.train.build.model.build_forecast_mesh`.

    Raises:
        ConfigError: if the network cannot be split over these ranks.
        CheckpointError: if the checkpoint or the base of its adapters is missing, damaged or of another model.
    """
    # Built without memory, so that a rank allocates no more than its own part.
    with torch.device("meta"):
        model = build_network(config, assets.channels, assets.grid, assets.attributes)
    if lora is not None:
        apply_lora(model, lora.targets, lora.rank, lora.alpha)
    set_tf32(config.trainer.tf32, device)
    parallelism = config.inference.parallelism
    # Dropout is not active in these forecasts, but a network with torch's dropout refuses to be divided.
    if mesh.degrees.domain > 1:
        remove_dropout(model)
        split_domain(model, mesh.domain_group, parallelism.domain_parts)
    parallelize(model, mesh.device_mesh, shard=parallelism.shard)
    allocate_(model, device)
    # A checkpoint of adapters contains only these and the parameters of noise; the other weights come from the base.
    if lora is not None:
        recorded = run_on_rank0(lambda: checkpoint.load_meta(path)["base"])
        base = locate_recorded_base(recorded, config.trainer.resume, path)
        _load_base_weights(model, base)
    checkpoint.load_into(path, "forecast", checkpoint_state_dict(model))
    require_filled(model)
    # Parts of weights on several ranks cannot be merged, so there the adapters stay.
    if not parallelism.splits_weights or mesh.device_mesh is None:
        model = merge_adapters(model)
    return model.eval()
