"""Map of the tracks of tropical cyclones of all members."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from credit.drawing.maps import MapBackground, create_map_axes, draw_background
from credit.drawing.style import add_title, create_figure, save_figure
from credit.products.base import ProductCase, ProductOutput
from credit.products.cyclones.product import CycloneTracks


class TrackMap(ProductOutput):
    """Writer of the map of the tracks, which reads the tracks from their CSV file.

    The product of the tracks is listed before the map, so its CSV file is complete when the map is plotted.

    Args:
        name: name of the map.
        tracks: product that writes the tracks.
        case: the forecast.
        background: grid and coastline.
    """

    def __init__(self, name: str, tracks: CycloneTracks, case: ProductCase, background: MapBackground) -> None:
        self._path = case.folder / f"{name}.png"
        self._tracks_path = case.folder / f"{tracks.name}.csv"
        self._members = tracks.members
        # Without the warm core, the tracks may also be those of other lows.
        self._tracked = "Tropical cyclones" if tracks.warm_core else "Lows (no warm-core criterion)"
        self._case = case
        self._background = background

    def add(self, lead_index: int) -> None:
        """Do nothing, because `finish` reads the tracks of all lead times."""
        return

    def finish(self) -> list[Path]:
        """Read the tracks, plot the map, and return the path of the PNG file in a list."""
        tracks: dict[tuple[str, str], list[tuple[float, float]]] = {}
        with self._tracks_path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                points = tracks.setdefault((row["member"], row["track"]), [])
                points.append((float(row["longitude"]), float(row["latitude"])))
        title = f"{self._tracked}, forecast from {self._case.initial_text.replace('T', ' ')} UTC"
        if not tracks:
            title += ": none"
        return [save_figure(self._path, plot_tracks, tracks, self._members, title, self._background)]


def plot_tracks(
    tracks: dict[tuple[str, str], list[tuple[float, float]]],
    members: int | None,
    title: str,
    background: MapBackground,
) -> Figure:
    """Return a map of tracks, with one colour per member and a dot at the first point of each track.

    Args:
        tracks: (member, number of the track) -> (longitude, latitude) in degrees of each point.
        members: number of members; None for a forecast without members.
        title: title of the figure.
        background: grid and coastline.
    """
    figure = create_figure(7.4, 3.9)
    axis = create_map_axes(figure, 1, 1)[0, 0]
    draw_background(axis, background)
    colors = colormaps["viridis"](np.linspace(0.0, 0.9, members or 1))
    for (member, _), points in tracks.items():
        lon, lat = np.array(points).T
        west = background.edges[0]
        lon = west + np.mod(lon - west, 360.0)
        color = colors[int(member or 0)]
        # Split a line where it leaves the map at the west or east edge and continues at the opposite edge.
        crossings = np.flatnonzero(np.abs(np.diff(lon)) > 180.0) + 1
        for part_lon, part_lat in zip(np.split(lon, crossings), np.split(lat, crossings), strict=True):
            axis.plot(*background.project(part_lon, part_lat), color=color, linewidth=1.2)
        axis.plot(*background.project(lon[:1], lat[:1]), color=color, marker="o", markersize=3)
    add_title(figure, title)
    return figure
