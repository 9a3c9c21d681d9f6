"""Collect the example forecast and its truth at all lead times, for Hovmoeller diagrams and animations.

The example is one case, chosen by `credit.verify.scorer`. Its fields at all lead times would take gigabytes, so the
collector keeps only meridional means over a latitude band, zonal means and, of the animated channels, at most
`_MAX_FRAMES` fields on a grid of one degree or coarser.

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

# An animation of more frames would take too long to watch and too much space on the disk.
_MAX_FRAMES = 60
# The pixels of an animation cannot show more columns.
_MAX_COLUMNS = 360


@dataclass(frozen=True)
class ExampleEvolution:
    """Truth and forecast of the example at all lead times; the forecast of an ensemble is the ensemble mean.

    Values are in the units of the data, NaN where all cells are masked.

    Attributes:
        band_means: (figure channel, lead time in minutes) -> (truth, forecast), each (W,): means of each column over
            the latitude band.
        band: (southern, northern) edge of the latitude band in degrees north.
        zonal_means: (figure channel, lead time in minutes) -> (truth, forecast), each (H,): means of each row.
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
    """Collector that reduces the fields of the example to means and frames while they are scored.

    Args:
        config: verification section, with the animated channels and the latitude band of the Hovmoeller diagrams.
        grid: grid of the fields.
        channels: the C channels of the fields.
        masks: variable -> (H, W) bool, True where the variable is always missing.
        leads: (L,) lead times in minutes, increasing.
        figure_channels: names of the channels whose means are kept.
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
        # Frames are evenly spread over the lead times, with the first and the last among them.
        num_frames = min(len(leads), _MAX_FRAMES)
        frame_index = np.linspace(0, len(leads) - 1, num_frames).round().astype(int)
        self._frame_leads = {int(leads[index]) for index in frame_index}
        # Fields of a fine grid are averaged to one degree, those of a coarse grid stay as they are.
        self._frame_grid = grid
        self._frame_regridder = None
        if len(grid.lon) > _MAX_COLUMNS:
            self._frame_grid = LatLonGrid.equiangular(180, 360, poles=False)
            self._frame_regridder = Regridder(grid, self._frame_grid, "conservative")

    def add(self, scores: PartialScores, lead: int, truth_CHW: np.ndarray, members_MCHW: np.ndarray) -> None:
        """Store the means and the animation frames of the example at one lead time.

        Args:
            scores: partial scores that store them.
            lead: lead time in minutes.
            truth_CHW: truth at the valid time.
            members_MCHW: members of the forecast, with the same channels.
        """
        collected_channels = self._figure_channels | self._animated_channels
        for index, channel in enumerate(self._channels):
            if channel.name not in collected_channels:
                continue
            key = channel.name, lead
            # NaN in masked cells, which the means leave out and figures show in grey.
            mask = self._masks.get(channel.variable, False)
            truth = np.where(mask, np.nan, truth_CHW[index])
            forecast = np.where(mask, np.nan, members_MCHW[:, index].mean(axis=0))
            if channel.name in self._figure_channels:
                scores.band_means[key] = self._compute_band_mean(truth), self._compute_band_mean(forecast)
                scores.zonal_means[key] = zonal_mean(truth), zonal_mean(forecast)
            if channel.name in self._animated_channels and lead in self._frame_leads:
                scores.animation_frames[key] = self._to_frame(truth), self._to_frame(forecast)

    def build_evolution(self, scores: PartialScores, num_members: int) -> ExampleEvolution:
        """Return the evolution of the example.

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

    def _to_frame(self, field_HW: np.ndarray) -> np.ndarray:
        """Return a field on the grid of the animation frames, (H', W') float32."""
        field_HW = field_HW.astype(np.float32)
        if self._frame_regridder is None:
            return field_HW
        return self._frame_regridder.apply(field_HW)

    def _compute_band_mean(self, field_HW: np.ndarray) -> np.ndarray:
        """Return the area-weighted mean of each column over the latitude band, (W,); NaN for a column without data."""
        # Both products add up the rows: one the weighted values, the other the weights of cells with data.
        is_valid = np.isfinite(field_HW)
        total = self._row_weights @ np.where(is_valid, field_HW, 0.0)
        return _divide(total, self._row_weights @ is_valid)


def zonal_mean(field_HW: np.ndarray) -> np.ndarray:
    """Return the mean over the finite cells of each row, (H,) float64; NaN for a row without any."""
    is_valid = np.isfinite(field_HW)
    total = np.where(is_valid, field_HW, 0.0).sum(axis=1, dtype=np.float64)
    return _divide(total, is_valid.sum(axis=1))


def _divide(total: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return total / weight, NaN where the weight is 0."""
    return np.divide(total, weight, out=np.full(len(weight), np.nan), where=weight > 0)


def band_weights(grid: LatLonGrid, band: tuple[float, float]) -> np.ndarray:
    """Return, for each row, the area of the part of one cell that lies inside a latitude band.

    Args:
        grid: grid with H rows.
        band: (southern, northern) edge of the band in degrees north.

    Returns:
        (H,) float64 fractions of the sphere's area; 0 for rows outside the band.
    """
    # The area between two latitudes is half the difference of their sines, as a fraction of the sphere. Rows run
    # southward, which gives the minus sign. Edges outside the band are moved to its edge, so rows outside have area 0.
    sines = np.sin(np.deg2rad(np.clip(grid.lat_bounds, *band)))
    return -np.diff(sines) / 2.0 / len(grid.lon)
