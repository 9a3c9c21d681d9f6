"""Checks that a forecast starts from fields like those that the weights were trained on.

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

# Largest difference of a global mean that is not reported, in standard deviations over space and time. A global mean of
# the same climate stays within one or two of them.
_MAX_SHIFT = 5.0
# Number of channels that a warning names.
_MAX_LISTED_CHANNELS = 5


def find_masked_cells(assets: ModelAssets, reader: FieldReader, path: Path) -> dict[str, np.ndarray]:
    """Return the cells that have values in the data but were missing in training, which a forecast must not see.

    Only the variables that a forecast reads are compared: prognostic variables and dynamic forcing.

    Args:
        assets: the assets of the checkpoint.
        reader: the data that the forecast starts from.
        path: the checkpoint, for the message.

    Returns:
        variable -> (H, W) bool, True in cells that were missing in training; only variables for which the data have
        values in such cells. An example is land, where an analysis has values and the training data had none.

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


def describe_distribution_shift(assets: ModelAssets, normalizer: Normalizer, fields_CHW: np.ndarray, time: str) -> str:
    """Return a warning if global means of the initial fields are far from those of training, else an empty string.

    Args:
        assets: the assets of the checkpoint.
        normalizer: built from the statistics of the checkpoint.
        fields_CHW: the prognostic channels at one time, (C, H, W) in physical units, NaN where missing.
        time: the time as text, for the warning.
    """
    fields = torch.from_numpy(np.ascontiguousarray(fields_CHW)).to(normalizer.tendency_scale_C.device)
    # In normalised units, the mean over the training period is 0 and the standard deviation is 1.
    normalized_CHW = normalizer.encode(fields[None], "prognostic")[0].cpu().numpy()
    weight_CHW = assets.grid.area_weights() * ~np.isnan(fields_CHW)
    # A channel without a single valid cell has the weight 0; the floor keeps its mean at 0 instead of NaN.
    total_weight_C = weight_CHW.sum(axis=(1, 2)).clip(min=1e-12)
    mean_C = (normalized_CHW * weight_CHW).sum(axis=(1, 2)) / total_weight_C
    shifted_channels = []
    for channel, mean in zip(assets.channels.group("prognostic"), mean_C, strict=True):
        if abs(mean) > _MAX_SHIFT:
            shifted_channels.append(f"{channel.name} {mean:+.3g}")
    if not shifted_channels:
        return ""
    listed = ", ".join(shifted_channels[:_MAX_LISTED_CHANNELS])
    if len(shifted_channels) > _MAX_LISTED_CHANNELS:
        listed += f" and {len(shifted_channels) - _MAX_LISTED_CHANNELS} others"
    return (
        f"the fields of {time} are unlike those of training: their global means differ from those of the training "
        f"period, in standard deviations by {listed}; check that units and variables are the same "
        "(data.variable_options.NAME.units, data.sources.N.rename)"
    )


def describe_static_mismatch(assets: ModelAssets, static_CHW: np.ndarray) -> str:
    """Return a warning if the static fields of the data differ from the checkpoint's, else an empty string.

    Cells that are missing in either are not compared.

    Args:
        assets: the assets of the checkpoint.
        static_CHW: the static channels that are read from the data, (C_static_stored, H, W) in physical units.
    """
    mismatches = []
    trained_CHW = assets.static_stored_CHW
    for channel, trained_HW, data_HW in zip(assets.channels.static_stored, trained_CHW, static_CHW, strict=True):
        valid_HW = np.isfinite(trained_HW) & np.isfinite(data_HW)
        trained_values = trained_HW[valid_HW]
        data_values = data_HW[valid_HW]
        if not len(trained_values):
            continue
        # The data may be stored with another precision, so a thousandth is not a difference.
        tolerance = 1e-3 * np.std(trained_values)
        if not np.allclose(data_values, trained_values, rtol=1e-3, atol=tolerance):
            largest_difference = np.abs(data_values - trained_values).max()
            mismatches.append(f"{channel.name} (by up to {largest_difference:.3g})")
    if not mismatches:
        return ""
    return (
        f"{', '.join(mismatches)}: the data's static fields are not those of training; the forecast uses those of the "
        "checkpoint. Check that the analyses were made with the same orography and land-sea mask"
    )
