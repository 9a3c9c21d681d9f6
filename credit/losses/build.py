"""Construction of the training loss of a run: weights and scales, then an object of the registered class."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from credit.channels import ChannelMap
from credit.config.registry import LOSSES
from credit.config.sections.loss import LossSection
from credit.errors import ConfigError, did_you_mean
from credit.grid import LatLonGrid
from credit.losses.base import Loss, LossContext


def build_loss(
    section: LossSection,
    channels: ChannelMap,
    grid: LatLonGrid,
    tendency_scale_C: np.ndarray,
    masks: Mapping[str, np.ndarray],
) -> Loss:
    """Build the training loss of a run.

    Args:
        section: the loss section of the config.
        channels: the channels of the run.
        grid: the grid of the fields.
        tendency_scale_C: (prognostic channels,) standard deviation of the change in one time step divided by the
            standard deviation of the state, dimensionless.
        masks: name of a variable with missing cells -> (H, W) bool mask, True in the missing cells.

    Raises:
        ConfigError: if ``loss.weights`` names a variable or channel that is not an output, or if the loss does not
            support a setting of the config.
    """
    context = build_loss_context(section, channels, grid, tendency_scale_C, masks)
    return build_loss_from_context(section, context)


def build_loss_context(
    section: LossSection,
    channels: ChannelMap,
    grid: LatLonGrid,
    tendency_scale_C: np.ndarray,
    masks: Mapping[str, np.ndarray],
) -> LossContext:
    """Return the weights, scales, channels and grid from which the loss of a run is built.

    Args:
        section: the loss section of the config.
        channels: the channels of the run.
        grid: the grid of the fields, (H, W).
        tendency_scale_C: (prognostic channels,) standard deviation of the change in one time step divided by the
            standard deviation of the state, dimensionless.
        masks: name of a variable with missing cells -> (H, W) bool mask, True in the missing cells.

    Raises:
        ConfigError: if ``loss.weights`` names a variable or channel that is not an output.
    """
    # Cells where a variable is missing have weight 0, and the weights of all other cells sum to 1.
    no_missing_cells_HW = np.zeros(grid.shape, dtype=bool)
    missing_masks = [masks.get(channel.variable, no_missing_cells_HW) for channel in channels.output]
    valid_CHW = ~np.stack(missing_masks)
    area_CHW = grid.masked_area_weights(valid_CHW)
    cell_weight_CHW = area_CHW
    if not section.latitude_weights:
        cell_weight_CHW = valid_CHW / valid_CHW.sum(axis=(1, 2), keepdims=True)

    # Errors are normalised by the standard deviation of the state. For prognostic channels, the factor replaces this
    # standard deviation with the standard deviation of the change in one step, which other channels do not have.
    error_scale_C = np.ones(len(channels.output))
    if section.scaling == "tendency":
        error_scale_C[channels.output_slice("prognostic")] = 1.0 / np.asarray(tendency_scale_C, dtype=np.float64)

    return LossContext(
        channels=channels,
        grid=grid,
        area_CHW=area_CHW,
        cell_weight_CHW=cell_weight_CHW,
        channel_weight_C=compute_channel_weights(section, channels),
        error_scale_C=error_scale_C,
        masks=masks,
    )


def build_loss_from_context(section: LossSection, context: LossContext) -> Loss:
    """Return a new loss of the class that is registered for ``section.kind``.

    Args:
        section: the loss section of the config.
        context: weights, scales and grid of the run.

    Raises:
        ConfigError: if the loss has trainable parameters, because the optimizer does not train parameters of a loss.
    """
    loss = LOSSES.find_class(section.kind)(context, section)
    parameter_names = [name for name, _ in loss.named_parameters()]
    if parameter_names:
        raise ConfigError(
            f"loss.kind: {section.kind} has trainable parameters ({', '.join(parameter_names)}), but no optimizer "
            "trains them; make them constants (register_constant) or keys of the loss section"
        )
    return loss


def compute_channel_weights(section: LossSection, channels: ChannelMap) -> np.ndarray:
    """Return the weight of each output channel from ``loss.weights`` and ``loss.level_weights``.

    Args:
        section: the loss section of the config.
        channels: the channels of the run.

    Returns:
        (C,) dimensionless weights, summing to 1, float64.

    Raises:
        ConfigError: if ``loss.weights`` names a variable or channel that is not an output.
    """
    output = channels.output
    names = {channel.name for channel in output} | {channel.variable for channel in output}
    for name in section.weights:
        if name not in names:
            raise ConfigError(f'loss.weights: "{name}" is not an output{did_you_mean(name, names)}')
    weight_C = np.ones(len(output))
    for channel_index, channel in enumerate(output):
        # The weight of a channel ("t850") takes precedence over the weight of its variable ("t").
        variable_weight = section.weights.get(channel.variable, 1.0)
        weight_C[channel_index] = section.weights.get(channel.name, variable_weight)
    if section.level_weights == "pressure":
        # Weights are proportional to pressure. Their mean over the levels of a variable is 1, so that the ratios of
        # weights between variables do not change.
        variables_on_levels = {channel.variable for channel in output if channel.level is not None}
        for variable in variables_on_levels:
            channel_indices = [index for index, channel in enumerate(output) if channel.variable == variable]
            levels = np.array([output[index].level for index in channel_indices])
            weight_C[channel_indices] *= levels / levels.mean()
    return weight_C / weight_C.sum()
