"""Course: the example forecast and its truth over all lead times, as diagrams over time and animations show them.

Whole fields at all lead times would be gigabytes, so what is kept is means over a band of latitudes and over all
longitudes, and of channels that are animated at most `_MOST_FRAMES` fields on a grid of one degree or coarser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from credit.channels import Channel
from credit.data.formats.regrid import Regridder
from credit.grid import LatLonGrid
from credit.verify.statistics.partial_scores import Pairs, PartialScores

_MOST_FRAMES = 60
_MOST_COLUMNS = 360  # more than an animation's pixels can show


@dataclass(frozen=True)
class ExampleEvolution:
    """The example's truth and forecast, of an ensemble the mean, by channel and lead time in minutes.

    Attributes:
        strips: (figure channel, lead) -> (truth, forecast), each (W,): means over the band.
        band: south and north in degrees.
        zonal: (figure channel, lead) -> (truth, forecast), each (H,): means over the longitudes.
        frames: (animated channel, lead) -> (truth, forecast), each on `frame_grid`.
        frame_grid: the grid of the frames.
        is_ensemble: whether the forecast is the mean of an ensemble.
    """

    strips: Pairs
    band: tuple[float, float]
    zonal: Pairs
    frames: Pairs
    frame_grid: LatLonGrid
    is_ensemble: bool


class ExampleCollector:
    """Takes from the fields of the example what its course is made of."""

    def __init__(
        self, grid: LatLonGrid, channels: Sequence[Channel], masks: Mapping[str, np.ndarray], leads: Sequence[int],
        shown: Sequence[str], animate: Sequence[str], band: tuple[float, float],
    ) -> None:  # fmt: skip
        """Take what is kept.

        Args:
            grid: of the fields.
            channels: of the fields.
            masks: variable -> (H, W), True where it is missing.
            leads: (L,) lead times in minutes.
            shown: channels whose means are kept.
            animate: channels whose fields are kept.
            band: south and north in degrees.
        """
        self._channels, self._masks, self._band = channels, masks, band
        self._shown, self._animate = set(shown), set(animate)
        self._weights = band_weights(grid, band)
        some = np.linspace(0, len(leads) - 1, min(len(leads), _MOST_FRAMES)).round().astype(int)
        self._frame_leads = {int(leads[number]) for number in some}
        self._frame_grid = grid if len(grid.lon) <= _MOST_COLUMNS else LatLonGrid.equiangular(180, 360, poles=False)
        self._coarsen: Callable[[np.ndarray], np.ndarray] = lambda field: field
        if self._frame_grid is not grid:
            self._coarsen = Regridder(grid, self._frame_grid, "conservative").apply

    def keep(self, part: PartialScores, lead: int, truth: np.ndarray, members: np.ndarray) -> None:
        """Keep what is wanted of the truth (C, H, W) and the members (M, C, H, W) at one lead time."""
        for index, channel in enumerate(self._channels):
            name, key = channel.name, (channel.name, lead)
            if name not in self._shown | self._animate:
                continue
            hidden = self._masks.get(channel.variable, False)
            fields = [np.where(hidden, np.nan, own) for own in (truth[index], members[:, index].mean(axis=0))]
            if name in self._shown:
                part.strips[key] = tuple(self._band_mean(field) for field in fields)
                part.zonal[key] = tuple(zonal_mean(field) for field in fields)
            if name in self._animate and lead in self._frame_leads:
                part.frames[key] = tuple(self._coarsen(field.astype(np.float32)) for field in fields)

    def conclude(self, part: PartialScores, members: int) -> ExampleEvolution:
        """Return the course."""
        return ExampleEvolution(part.strips, self._band, part.zonal, part.frames, self._frame_grid, members > 1)

    def _band_mean(self, field: np.ndarray) -> np.ndarray:
        """Return the area mean over the band's cells that are there, (W,), NaN where there are none."""
        there = np.isfinite(field)
        return _over(self._weights @ np.where(there, field, 0.0), self._weights @ there)


def zonal_mean(field: np.ndarray) -> np.ndarray:
    """Return the mean over each row's cells that are there, (H,), NaN where there are none."""
    there = np.isfinite(field)
    return _over(np.where(there, field, 0.0).sum(axis=1, dtype=np.float64), there.sum(axis=1))


def _over(total: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.divide(total, weight, out=np.full(len(weight), np.nan), where=weight > 0)


def band_weights(grid: LatLonGrid, band: tuple[float, float]) -> np.ndarray:
    """Return (H,) the area of each row's cells that lies between two latitudes, as fractions of the sphere."""
    sines = np.sin(np.deg2rad(np.clip(grid.lat_bounds, *band)))
    return -np.diff(sines) / 2.0 / len(grid.lon)
