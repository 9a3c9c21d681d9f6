"""Whether the fields that a forecast starts from are of the kind that the weights were trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from credit.data.normalize import Normalizer
from credit.data.reader import FieldReader
from credit.errors import DataError
from credit.train.assets import ModelAssets

# standard deviations over space and time; a mean over the globe of the same climate stays within one or two
_FAR = 5.0
_NAMED = 5


def find_masked_cells(assets: ModelAssets, reader: FieldReader, path: Path) -> dict[str, np.ndarray]:
    """Return what a forecast must not see: cells with values in the data that the checkpoint was trained without.

    A forecast reads prognostic variables and dynamic forcing; others are not looked at.

    Returns:
        variable -> (H, W) bool; such as land where an analysis has values and training had none.

    Raises:
        DataError: naming the first variable that the data lack where the checkpoint was trained on values.
    """
    none, hidden = np.zeros(assets.grid.shape, dtype=bool), {}
    read = [*assets.channels.group("prognostic"), *assets.channels.group("dynamic_forcing")]
    for name in dict.fromkeys(channel.variable for channel in read):
        ours, theirs = (masks.get(name, none) for masks in (assets.masks, reader.masks))
        lacking = int((theirs & ~ours).sum())
        if lacking:
            raise DataError(
                f"{name}: the data are missing in {lacking} cells where the checkpoint {path} was trained on values; "
                "fill them beforehand (cdo setmisstonn)"
            )
        if (ours & ~theirs).any():
            hidden[name] = ours
    return hidden


def describe_distribution_shift(assets: ModelAssets, normalizer: Normalizer, fields_CHW: np.ndarray, when: str) -> str:
    """Return what to warn of where means over the globe are far from those of the training period, else nothing.

    Args:
        assets: of the checkpoint.
        normalizer: of its statistics.
        fields_CHW: the prognostic channels of a time in physical units, NaN where missing.
        when: the time.
    """
    fields = torch.from_numpy(np.ascontiguousarray(fields_CHW)).to(normalizer.tendency_scale_C.device)
    encoded = normalizer.encode(fields[None], "prognostic")[0].cpu().numpy()
    weights = assets.grid.area_weights() * ~np.isnan(fields_CHW)
    means = (encoded * weights).sum(axis=(1, 2)) / weights.sum(axis=(1, 2)).clip(min=1e-12)
    channels = assets.channels.group("prognostic")
    far = [f"{c.name} {mean:+.3g}" for c, mean in zip(channels, means, strict=True) if abs(mean) > _FAR]
    if not far:
        return ""
    more = f" and {len(far) - _NAMED} others" if len(far) > _NAMED else ""
    return (
        f"the fields of {when} are unlike those of training: their means over the globe lie far from the training "
        f"period's, in standard deviations by {', '.join(far[:_NAMED])}{more}; see whether units and variables are the "
        "same (data.variable_options.NAME.units, data.sources.N.rename)"
    )


def describe_static_mismatch(assets: ModelAssets, static_CHW: np.ndarray) -> str:
    """Return what to warn of where the data's static fields are not the checkpoint's, else nothing.

    Cells that either lacks are not compared.

    Args:
        assets: of the checkpoint.
        static_CHW: the static channels that are read from the data, in physical units.
    """
    other = []
    for channel, ours, theirs in zip(assets.channels.static_stored, assets.static_stored_CHW, static_CHW, strict=True):
        both = np.isfinite(ours) & np.isfinite(theirs)
        ours, theirs = ours[both], theirs[both]
        if len(ours) and not np.allclose(theirs, ours, rtol=1e-3, atol=1e-3 * np.std(ours)):
            other.append(f"{channel.name} (by up to {np.abs(theirs - ours).max():.3g})")
    if not other:
        return ""
    return (
        f"{', '.join(other)}: the data's static fields are not those of training, which the checkpoint has and which "
        "the forecast takes; were the analyses made over another ground?"
    )
