"""Checks that the initial fields of a forecast are similar to the fields that the weights were trained on.

Shape suffixes: C channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from credit.data.normalize import Normalizer
from credit.data.reader import FieldReader
from credit.errors import DataError
from credit.train.build.assets import ModelAssets

# Largest difference of a global mean that is not reported, in standard deviations over space and time. In the same
# climate, a global mean differs by at most one or two standard deviations.
MAX_SHIFT = 5.0
# Number of channels that a warning names.
_MAX_LISTED_CHANNELS = 5


def find_cells_missing_in_training(assets: ModelAssets, reader: FieldReader, path: Path) -> dict[str, np.ndarray]:
    """Return masks of the cells that have values in the data but were missing in training.

    A forecast must treat the values in these cells as missing. Only the variables that a forecast reads are compared:
    prognostic variables and dynamic forcing.

    Args:
        assets: the assets of the checkpoint.
        reader: the data that the forecast starts from.
        path: the checkpoint, for the message.

    Returns:
        variable -> (H, W) bool, True in cells that were missing in training. Only variables with data values in these
        cells are included. For example, an analysis may have values over land where the training data had none.

    Raises:
        DataError: if a variable is missing in cells where the checkpoint was trained on values.
    """
    no_missing_cells_HW = np.zeros(assets.grid.shape, dtype=bool)
    forecast_inputs = [*assets.channels.group("prognostic"), *assets.channels.group("dynamic_forcing")]
    masked_cells: dict[str, np.ndarray] = {}
    # All levels of a variable share its mask; `dict.fromkeys` lists each variable once and keeps the order.
    for variable in dict.fromkeys(channel.variable for channel in forecast_inputs):
        trained_mask_HW = assets.masks.get(variable, no_missing_cells_HW)
        data_mask_HW = reader.masks.get(variable, no_missing_cells_HW)
        num_lacking = int((data_mask_HW & ~trained_mask_HW).sum())
        if num_lacking:
            raise DataError(
                f"{variable}: the data are missing in {num_lacking} cells where the checkpoint {path} was trained on "
                "values; fill them beforehand (cdo setmisstonn)"
            )
        if (trained_mask_HW & ~data_mask_HW).any():
            masked_cells[variable] = trained_mask_HW
    return masked_cells


def compute_normalized_moments(
    assets: ModelAssets, normalizer: Normalizer, fields_CHW: np.ndarray, group: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the area-weighted means and standard deviations of fields in normalised units, (C,) float64 each.

    Over the complete training period, each channel has the mean 0 and the standard deviation 1. The channels are
    normalised one at a time to save memory.

    Args:
        assets: the assets of the checkpoint.
        normalizer: normaliser with the statistics of the checkpoint.
        fields_CHW: all channels of the group at one time, (C, H, W) in physical units, NaN where missing. For channels
            that are missing everywhere, mean and standard deviation are 0.
        group: ``prognostic`` or ``dynamic_forcing``.
    """
    area_HW = assets.grid.area_weights()
    device = normalizer.tendency_scale_C.device
    moments_C2 = np.zeros((len(fields_CHW), 2))
    for row, field_HW in enumerate(fields_CHW):
        values_BRHW = torch.from_numpy(np.ascontiguousarray(field_HW)).to(device)[None, None]
        normalized_HW = normalizer.encode_channels(values_BRHW, group, [row])[0, 0].cpu().numpy().astype(np.float64)
        is_valid_HW = ~np.isnan(normalized_HW)
        if is_valid_HW.any():
            weights = area_HW[is_valid_HW] / area_HW[is_valid_HW].sum()
            mean = (weights * normalized_HW[is_valid_HW]).sum()
            variance = (weights * (normalized_HW[is_valid_HW] - mean) ** 2).sum()
            moments_C2[row] = mean, np.sqrt(variance)
    return moments_C2[:, 0], moments_C2[:, 1]


def describe_distribution_shift(assets: ModelAssets, normalizer: Normalizer, fields_CHW: np.ndarray, time: str) -> str:
    """Return a warning if global means of the initial fields are far from the training means, else an empty string.

    Args:
        assets: the assets of the checkpoint.
        normalizer: normaliser with the statistics of the checkpoint.
        fields_CHW: the prognostic channels at one time, (C, H, W) in physical units, NaN where missing.
        time: the time as a string, for the warning.
    """
    mean_C, _ = compute_normalized_moments(assets, normalizer, fields_CHW, "prognostic")
    shifted_channels = []
    for channel, mean in zip(assets.channels.group("prognostic"), mean_C, strict=True):
        if abs(mean) > MAX_SHIFT:
            shifted_channels.append(f"{channel.name} {mean:+.3g}")
    if not shifted_channels:
        return ""
    listed = ", ".join(shifted_channels[:_MAX_LISTED_CHANNELS])
    if len(shifted_channels) > _MAX_LISTED_CHANNELS:
        listed += f" and {len(shifted_channels) - _MAX_LISTED_CHANNELS} others"
    return (
        f"the fields of {time} differ from the training fields: their global means differ from the means of the "
        f"training period by these numbers of standard deviations: {listed}; check that units and variables are the "
        "same (data.variable_options.NAME.units, data.sources.N.rename)"
    )


def describe_static_mismatch(assets: ModelAssets, static_CHW: np.ndarray) -> str:
    """Return a warning if the static fields of the data differ from the static fields of the checkpoint, else "".

    Cells that are missing in the data or in the checkpoint are not compared.

    Args:
        assets: the assets of the checkpoint.
        static_CHW: the static channels that are read from the data, (C_static_from_data, H, W) in physical units.
    """
    mismatches = []
    trained_CHW = assets.static_from_data_CHW
    for channel, trained_HW, data_HW in zip(assets.channels.static_stored, trained_CHW, static_CHW, strict=True):
        valid_HW = np.isfinite(trained_HW) & np.isfinite(data_HW)
        trained_values = trained_HW[valid_HW]
        data_values = data_HW[valid_HW]
        if not len(trained_values):
            continue
        # The data may be stored with a different precision, so differences below a thousandth are ignored.
        tolerance = 1e-3 * np.std(trained_values)
        if not np.allclose(data_values, trained_values, rtol=1e-3, atol=tolerance):
            largest_difference = np.abs(data_values - trained_values).max()
            mismatches.append(f"{channel.name} (by up to {largest_difference:.3g})")
    if not mismatches:
        return ""
    return (
        f"{', '.join(mismatches)}: the static fields of the data differ from the static fields in training; the "
        "forecast uses the static fields of the checkpoint. Check that the analyses were made with the same orography "
        "and land-sea mask"
    )
