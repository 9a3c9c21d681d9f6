"""Builders of the objects around a network: normaliser, stepper, loss and cell weights.

Training, forecasts and dry runs use the same functions, so that all of them treat the fields in the same way.

Shape suffixes: B samples of a batch, C channels, T time frames, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from credit.channels import Channel
from credit.config import Config
from credit.data.normalize import Normalizer
from credit.data.samples.forcing import get_fixed_statistics
from credit.forecast.objectives.base import ObjectiveContext
from credit.forecast.postprocess.base import PostprocessContext, build_postprocess
from credit.forecast.stepper import Stepper
from credit.losses.base import Loss, LossContext
from credit.losses.build import build_loss_context, build_loss_from_context
from credit.losses.domain_loss import build_domain_loss
from credit.losses.member_loss import LossPart
from credit.models.noise.base import NoiseGenerator
from credit.parallel.blocks.cuda_graphs import CUDA_GRAPHS
from credit.parallel.domain.domain import Domain
from credit.parallel.mesh import DeviceGrid
from credit.train.build.assets import ModelAssets, build_model_spec


def build_normalizer(config: Config, assets: ModelAssets) -> Normalizer:
    """Return the normaliser of a run, on the CPU.

    Channels that are read from data are normalised with the statistics in the assets. Computed channels have fixed
    statistics, and masks stay 0 or 1.

    Args:
        config: the config of the run; its data section has the time step and the transforms.
        assets: channels and statistics of the model.
    """
    # name -> (mean, standard deviation)
    fixed: dict[str, tuple[float, float]] = {}
    for channel in assets.channels.input:
        if channel.source == "mask":
            fixed[channel.name] = (0.0, 1.0)
        elif channel.source == "computed":
            fixed[channel.name] = get_fixed_statistics(channel.name, config.data.step_minutes, config.data.solar)
    return Normalizer(assets.channels, assets.statistics, fixed, config.data.transforms)


def build_stepper(config: Config, assets: ModelAssets, model: nn.Module, device: torch.device, amp: bool) -> Stepper:
    """Return the stepper of a network that is already on `device`.

    Args:
        config: the config of the run.
        assets: channels, statistics, static fields and masks of the model.
        model: the network, which maps an input (B, C_in, T, H, W) to an output (B, C_out, 1, H, W).
        device: the device of the network.
        amp: True if the stepper runs the network under bfloat16 autocast.

    Raises:
        ConfigError: if an entry of ``model.postprocess`` does not fit the channels, units or grid.
    """
    normalizer = build_normalizer(config, assets).to(device)
    domain = getattr(model, "domain", None)
    static_CHW = select_domain_part(assets.static_CHW, domain)
    # The stepper keeps cells that are always missing at the mean. Without missing cells, no multiplication is needed.
    valid_CHW = None
    is_valid_CHW = select_domain_part(find_valid_cells(assets, assets.channels.group("prognostic")), domain)
    if not is_valid_CHW.all():
        valid_CHW = torch.from_numpy(is_valid_CHW).to(device)
    context = PostprocessContext(
        data=config.data,
        channels=assets.channels,
        grid=assets.grid,
        attributes=assets.attributes,
        masks=assets.masks,
        static_CHW=static_CHW,
        layers=assets.layers,
        normalizer=normalizer,
        device=device,
        domain=domain,
    )
    stepper = Stepper(
        model,
        assets.channels,
        normalizer,
        torch.from_numpy(static_CHW).to(device),
        config.model.residual,
        valid_CHW,
        amp,
        build_postprocess(config.model.postprocess_entries, context),
    )
    stepper.uses_cuda_graphs = config.trainer.compile == CUDA_GRAPHS
    return stepper


def select_domain_part(array: np.ndarray, domain: Domain | None) -> np.ndarray:
    """Return this rank's rows and columns of an array (..., H, W) as a contiguous array.

    If `domain` is None, return all rows and columns.
    """
    if domain is not None:
        array = array[(..., *domain.part.slices)]
    return np.ascontiguousarray(array)


def build_run_loss(config: Config, assets: ModelAssets, device: torch.device, domain: Domain | None = None) -> Loss:
    """Return the training loss of ``loss`` on `device`.

    Args:
        config: the config of the run.
        assets: channels, grid, statistics and masks of the model.
        device: the device of the network.
        domain: the group of ranks that divide the fields; None if this rank has complete fields.

    Raises:
        ConfigError: if the section ``loss`` does not fit the channels.
    """
    context = build_run_loss_context(config, assets)
    build = functools.partial(build_loss_from_context, config.loss)
    loss = build(context) if domain is None else build_domain_loss(context, build, domain)
    return loss.to(device)


def build_part_losses(
    config: Config,
    assets: ModelAssets,
    device: torch.device,
    domain: Domain | None,
    parts: Sequence[LossPart],
) -> list[Loss]:
    """Return the losses of parts of this rank's output fields, on `device`; see `build_run_loss`.

    Args:
        config: the config of the run.
        assets: channels, grid, statistics and masks of the model.
        device: the device of the network.
        domain: the group of ranks that divide the fields; None if this rank has complete fields.
        parts: parts of the output fields: slices of channels and latitude rows.

    Returns:
        The loss of each part, in the order of `parts`.
    """
    context = build_run_loss_context(config, assets)
    build = functools.partial(build_loss_from_context, config.loss)
    losses = []
    for part in parts:
        if domain is None:
            loss = build(context.select(part.channels, part.rows))
        else:
            loss = build_domain_loss(context, build, domain, part)
        losses.append(loss.to(device))
    return losses


def build_run_loss_context(config: Config, assets: ModelAssets) -> LossContext:
    """Return the weights and scales that the training loss is built from."""
    tendency_scale_C = build_normalizer(config, assets).tendency_scale_C.numpy()
    return build_loss_context(config.loss, assets.channels, assets.grid, tendency_scale_C, assets.masks)


def find_valid_cells(assets: ModelAssets, channels: Sequence[Channel]) -> np.ndarray:
    """Return a mask of the valid cells of `channels`, (C, H, W) bool: False where a channel is always missing."""
    no_missing_cells_HW = np.zeros(assets.grid.shape, dtype=bool)
    valid_cells = []
    for channel in channels:
        is_missing_HW = assets.masks.get(channel.variable, no_missing_cells_HW)
        valid_cells.append(~is_missing_HW)
    return np.stack(valid_cells)


def compute_cell_weights(assets: ModelAssets, device: torch.device, domain: Domain | None = None) -> torch.Tensor:
    """Return the area weights (C_out, H, W) for metrics of the output channels, float64, on `device`.

    The weights of a channel sum to 1 over the cells where the channel has values, and are 0 in all other cells. If the
    ranks of a domain group divide the fields, the weights of this rank's part are multiplied by the number of ranks.
    The mean of a weighted sum over the ranks is then the weighted sum over the complete field.
    """
    is_valid_CHW = find_valid_cells(assets, assets.channels.output)
    weight_CHW = select_domain_part(assets.grid.masked_area_weights(is_valid_CHW), domain)
    if domain is not None:
        weight_CHW = weight_CHW * domain.num_ranks
    return torch.from_numpy(weight_CHW).to(device)


def build_objective_context(
    config: Config, assets: ModelAssets, stepper: Stepper, loss: Loss, mesh: DeviceGrid | None = None
) -> ObjectiveContext:
    """Return the context that the training objective is built from: stepper, loss, noise and numbers of members.

    Args:
        config: the config of the run.
        assets: the assets of the model.
        stepper: stepper of the network.
        loss: the training loss, on the device of the network.
        mesh: position of this rank in the device mesh; None for a single rank that computes all members.
    """
    spec = build_model_spec(config.data, assets.channels, assets.grid, assets.attributes)
    trainer = config.trainer
    ensemble_group = mesh.ensemble_group if mesh is not None else None
    # The ensemble objective calls `build_losses` after it has determined its parts of the fields.
    device = stepper.normalizer.tendency_scale_C.device
    domain = stepper.domain
    build_losses = functools.partial(build_part_losses, config, assets, device, domain)
    grid_shape = assets.grid.shape if domain is None else domain.part.shape
    return ObjectiveContext(
        stepper=stepper,
        loss=loss,
        recompute=trainer.recompute_steps,
        noise=NoiseGenerator(spec, config.model),
        seed=config.seed,
        members=trainer.members,
        members_at_once=trainer.members_at_once,
        valid_members=trainer.valid_members,
        field_shape=(len(assets.channels.output), *grid_shape),
        build_part_losses=build_losses,
        ensemble_group=ensemble_group,
    )
