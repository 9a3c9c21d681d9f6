"""Adapters and the checkpoint that they adapt: found, checked, loaded, merged.

A checkpoint of adapters holds them alone. Its meta.json names the base by path and by a checksum of its weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from credit.config import Config
from credit.config.schema_trainer import LoraConfig
from credit.errors import CheckpointError, ConfigError
from credit.models.lora import apply_lora, base_state_dict, checkpoint_state_dict, initial_adapters, merge_adapters
from credit.parallel.mesh import DeviceGrid
from credit.parallel.object_collectives import run_on_rank0
from credit.parallel.parallelize import parallelize
from credit.parallel.state.materialise import allocate_, fill_, require_filled
from credit.train.assets import ModelAssets
from credit.train.build_model import build_network, set_tf32
from credit.train.checkpoint import checkpoint

logger = logging.getLogger(__name__)


def find_base(config: Config, origin: Path | None) -> Path | None:
    """Collective: return the checkpoint that ``trainer.lora`` adapts, None where all weights train.

    Args:
        config: of the run.
        origin: what `find_checkpoint` has found: the run's own adapters, which know their base, or the base.

    Raises:
        ConfigError: if there is none, or it lies where the adapters are to be saved.
        CheckpointError: if the base of adapters is not where it was.
    """
    if config.trainer.lora is None:
        return None
    if origin is None:
        raise ConfigError("trainer.lora: adapts a trained model; give one of its checkpoints as trainer.resume: PATH")
    meta = checkpoint.load_meta(origin)
    if "base" in meta:
        return locate_base(meta["base"], config.trainer.resume, origin)
    if origin.resolve().parent == (Path(config.save_loc) / "checkpoints").resolve():
        raise ConfigError(
            f"trainer.lora: {origin} holds all weights, in the folder of this run; take another save_loc for the "
            f"adapters and give trainer.resume: {origin}"
        )
    logger.info("adapters of %s, which has to stay: their checkpoints hold nothing else", origin)
    return origin.resolve()


def describe_base(base: Path) -> dict[str, str]:
    """Return what checkpoints of adapters say of their base."""
    return {"path": str(base), "weights": checkpoint.fingerprint(base, "forecast")}


def locate_base(recorded: Mapping[str, str], resume: str, origin: Path) -> Path:
    """Collective: return the base of the adapters in `origin`, where it was or where it has been moved to.

    Args:
        recorded: what `describe_base` said.
        resume: ``trainer.resume``, whose path tells where a base is that was moved.
        origin: a checkpoint of adapters.

    Raises:
        CheckpointError: if neither is the base, or it is damaged.
    """

    def look() -> Path:
        for path in (Path(recorded["path"]), Path(resume).resolve()):
            if path.is_dir() and describe_base(path)["weights"] == recorded["weights"]:
                return path
        raise CheckpointError(
            f"{origin}: holds adapters of {recorded['path']}, which is not there or holds other weights than it did "
            f"(checksum {recorded['weights']}); put it back, or give its new place as trainer.resume"
        )

    base = run_on_rank0(look)
    return checkpoint.resolve_checkpoint(base.parent, str(base), "trainer.resume")


def load_base(model: nn.Module, base: Path, seed: int) -> None:
    """Collective: fill an adapted model with the weights that forecast in `base`, and its adapters from `seed`."""
    checkpoint.load_into(base, "forecast", base_state_dict(model))
    fill_(model, initial_adapters(model, seed))


def load_forecast_network(
    config: Config, lora: LoraConfig | None, assets: ModelAssets, path: Path, device: torch.device, mesh: DeviceGrid
) -> nn.Module:
    """Return the network of a checkpoint with the weights that forecast; collective where it is spread over ranks.

    On one process, adapters are merged into their base.

    Args:
        config: with the model and data sections that the weights were trained with.
        lora: what they were trained with.
        assets: of the checkpoint.
        path: the checkpoint.
        device: for the network.
        mesh: from `credit.train.build_model.build_forecast_mesh`.
    """
    with torch.device("meta"):
        model = build_network(config, assets.channels, assets.grid, assets.attributes)
    if lora is not None:
        apply_lora(model, lora.targets, lora.rank, lora.alpha)
    set_tf32(config.trainer.tf32, device)
    parallelize(model, mesh.device_mesh, shard=config.inference.parallelism.shard)
    allocate_(model, device)
    if lora is not None:
        base = locate_base(checkpoint.load_meta(path)["base"], config.trainer.resume, path)
        checkpoint.load_into(base, "forecast", base_state_dict(model))
    checkpoint.load_into(path, "forecast", checkpoint_state_dict(model))
    require_filled(model)
    return (merge_adapters(model) if mesh.device_mesh is None else model).eval()
