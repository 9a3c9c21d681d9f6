"""Collect forecast and truth of the example case at all lead times, for Hovmoeller diagrams and animations.

The example is the case that figures show; `credit.verify.scorer` chooses it. The fields of the example at all lead
times would take up gigabytes. The collector therefore stores only meridional means over a latitude band, zonal means,
and at most `_MAX_FRAMES` fields of each animated channel, on a grid of one degree or coarser.

Shapes: C channels, M members, H x W cells of the grid of the scores, H' x W' cells of the grid of the frames, L lead
times. Lead times are in minutes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from credit.channels import Channel
from credit.config.sections.verification import VerificationConfig
from credit.data.formats.regrid import Regridder
from credit.grid import LatLonGrid
from credit.verify.partial_scores import FieldsByChannelAndLead, PartialScores

# Largest number of frames of an animation. A longer animation would take too long to watch and be too large a file.
_MAX_FRAMES = 60
# Largest number of grid columns in an animation, which has too few pixels for more columns.
_MAX_COLUMNS = 360


@dataclass(frozen=True)
class ExampleEvolution:
    """Truth and forecast of the example case at all lead times; for an ensemble, the forecast is the ensemble mean.

    Values are in the units of the data. A mean is NaN where all cells are masked.

    Attributes:
        band_means: (figure channel, lead time in minutes) -> (truth, forecast), each (W,): mean of each grid column
            over the latitude band.
        band: (southern, northern) edge of the latitude band in degrees north.
        zonal_means: (figure channel, lead time in minutes) -> (truth, forecast), each (H,): mean of each grid row.
        animation_frames: (animated channel, lead time in minutes) -> (truth, forecast), each (H', W') on `frame_grid`.
        frame_grid: grid of the animation frames, of one degree or coarser.
        is_ensemble: True if the forecast is the mean of an ensemble.
    """

    band_means: FieldsByChannelAndLead
    band: tuple[float, float]
    zonal_means: FieldsByChannelAndLead
    animation_frames: FieldsByChannelAndLead
    frame_grid: LatLonGrid
    is_ensemble: bool


class ExampleCollector:
    """Collector that reduces the fields of the example case to means and animation frames during the scoring.

    Args:
        config: config section `verification`; it names the animated channels and the band of the Hovmoeller diagrams.
        grid: grid of the fields.
        channels: the C channels of the fields.
        masks: variable -> (H, W) bool, True where the variable is always missing.
        leads: (L,) lead times in minutes, increasing.
        figure_channels: names of the channels whose means are stored.
    """

    def __init__(
        self, config: VerificationConfig, grid: LatLonGrid, channels: Sequence[Channel],
        masks: Mapping[str, np.ndarray], leads: Sequence[int], figure_channels: Sequence[str],
    ) -> None:  # fmt: skip
        self._channels = channels
        self._masks = masks
        self._figure_channels = set(figure_channels)
        self._animated_channels = set(config.animate)
        self._band = config.hovmoeller_band
        self._row_weights = band_weights(grid, self._band)
        # Frames are at equal intervals of the lead times, including the first and the last lead time.
        num_frames = min(len(leads), _MAX_FRAMES)
        frame_index = np.linspace(0, len(leads) - 1, num_frames).round().astype(int)
        self._frame_leads = {int(leads[index]) for index in frame_index}
        # Fields on a fine grid are averaged to a grid of one degree; fields on a coarse grid are not changed.
        self._frame_grid = grid
        self._frame_regridder = None
        if len(grid.lon) > _MAX_COLUMNS:
            self._frame_grid = LatLonGrid.equiangular(180, 360, poles=False)
            self._frame_regridder = Regridder(grid, self._frame_grid, "conservative")

    def add(self, scores: PartialScores, lead: int, truth_CHW: np.ndarray, members_MCHW: np.ndarray) -> None:
        """Store the means and the animation frames of the example at one lead time.

        Args:
            scores: partial scores to which the means and frames are added.
            lead: lead time in minutes.
            truth_CHW: truth at the valid time.
            members_MCHW: members of the forecast, with the same channels as the truth.
        """
        collected_channels = self._figure_channels | self._animated_channels
        for index, channel in enumerate(self._channels):
            if channel.name not in collected_channels:
                continue
            key = channel.name, lead
            # Masked cells are set to NaN, so that the means leave them out and figures show them in grey.
            mask = self._masks.get(channel.variable, False)
            truth = np.where(mask, np.nan, truth_CHW[index])
            forecast = np.where(mask, np.nan, members_MCHW[:, index].mean(axis=0))
            if channel.name in self._figure_channels:
                scores.band_means[key] = self._compute_band_mean(truth), self._compute_band_mean(forecast)
                scores.zonal_means[key] = zonal_mean(truth), zonal_mean(forecast)
            if channel.name in self._animated_channels and lead in self._frame_leads:
                scores.animation_frames[key] = self._regrid_to_frame(truth), self._regrid_to_frame(forecast)

    def build_evolution(self, scores: PartialScores, num_members: int) -> ExampleEvolution:
        """Return truth and forecast of the example case at all lead times, for the figures.

        Args:
            scores: joined scores of all cases, which contain the means and frames that `add` stored.
            num_members: number of members of the forecast, 1 for a single forecast.
        """
        return ExampleEvolution(
            scores.band_means,
            self._band,
            scores.zonal_means,
            scores.animation_frames,
            self._frame_grid,
            is_ensemble=num_members > 1,
        )

    def _regrid_to_frame(self, field_HW: np.ndarray) -> np.ndarray:
        """Return a field on the grid of the animation frames, (H', W') float32."""
        field_HW = field_HW.astype(np.float32)
        if self._frame_regridder is None:
            return field_HW
        return self._frame_regridder.apply(field_HW)

    def _compute_band_mean(self, field_HW: np.ndarray) -> np.ndarray:
        """Return the area-weighted mean of each column over the latitude band, (W,); NaN for a column without data."""
        # The first product is the sum of the weighted values, the second the sum of the weights of cells with data.
        is_valid = np.isfinite(field_HW)
        total = self._row_weights @ np.where(is_valid, field_HW, 0.0)
        return _divide(total, self._row_weights @ is_valid)


def zonal_mean(field_HW: np.ndarray) -> np.ndarray:
    """Return the mean over the finite cells of each row, (H,) float64; NaN for a row without finite cells."""
    is_valid = np.isfinite(field_HW)
    total = np.where(is_valid, field_HW, 0.0).sum(axis=1, dtype=np.float64)
    return _divide(total, is_valid.sum(axis=1))


def _divide(total: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return total / weight, NaN where the weight is 0."""
    return np.divide(total, weight, out=np.full(len(weight), np.nan), where=weight > 0)


def band_weights(grid: LatLonGrid, band: tuple[float, float]) -> np.ndarray:
    """Return, for each grid row, the area of the part of one cell that is inside a latitude band.

    Args:
        grid: grid with H rows.
        band: (southern, northern) edge of the band in degrees north.

    Returns:
        (H,) float64 fractions of the area of the sphere; 0 for rows outside the band.
    """
    # The area between two latitudes, as a fraction of the sphere, is half the difference of their sines. The minus sign
    # is needed because rows are ordered from north to south. Cell edges outside the band are clipped to the band.
    sines = np.sin(np.deg2rad(np.clip(grid.lat_bounds, *band)))
    return -np.diff(sines) / 2.0 / len(grid.lon)
