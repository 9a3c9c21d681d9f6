"""Figures of fields, scores and training runs. Each function returns a matplotlib figure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.figure import Figure

from credit.channels import Channel, select_figure_channels
from credit.drawing.maps import FIELD_COLORMAP, MapBackground, compute_robust_range, draw_map
from credit.drawing.style import create_figure, find_display_units, plot_loss
from credit.errors import DataError
from credit.grid import LatLonGrid
from credit.verify.plots.scores import plot_skill
from credit.verify.table.table import ScoreTable

_LAT_NAMES = ("latitude", "lat")
_LON_NAMES = ("longitude", "lon")


def plot_map(field: xr.DataArray, *, land: xr.DataArray | None = None, title: str | None = None) -> Figure:
    """Return a map of a global field in the Equal Earth projection.

    Args:
        field: field with the dimensions latitude and longitude, in degrees, such as ``forecast.t2m.isel(time=-1)``.
        land: land fraction (0 to 1) on the same grid, from which the coastline is drawn; None for no coastline.
        title: title of the figure; by default the name, level and time of the field.

    Raises:
        DataError: if the field has dimensions other than latitude and longitude, or its grid is not global.
    """
    background, values = _build_background_and_values(field)
    if land is not None:
        land_background, land_values = _build_background_and_values(land)
        mismatch = land_background.grid.describe_mismatch(background.grid)
        if mismatch:
            raise DataError(f"land: {mismatch}; it must be on the grid of the field")
        background = MapBackground(background.grid, land_values)
    factor, units = find_display_units(str(field.attrs.get("units", "")))
    values = factor * values
    figure = create_figure(7.0, 3.6)
    axis = figure.subplots()
    mesh = draw_map(axis, values, background, FIELD_COLORMAP, *compute_robust_range([values]))
    figure.colorbar(mesh, ax=axis, shrink=0.85, pad=0.02, label=units)
    axis.set_title(title if title is not None else _describe_field(field))
    return figure


def plot_scores(scores: xr.Dataset, channels: Sequence[str] | None = None) -> Figure:
    """Plot the RMSE, and the anomaly correlation if the scores contain it, as curves over lead time.

    Args:
        scores: dataset that `credit.score` returns, or the dataset of a file ``scores.nc``.
        channels: names of the channels, such as ``["z500", "t2m"]``; by default up to four well-known channels.

    Raises:
        ConfigError: if a channel has no scores.
    """
    table = ScoreTable(scores)
    # The choice depends only on the names of the channels.
    scored = [Channel(name, name, None, "prognostic") for name in table.channels]
    return plot_skill(table, select_figure_channels(channels, scored, "channels"))


def plot_metrics(metrics: pd.DataFrame) -> Figure:
    """Plot the training loss and the validation loss as curves over optimizer steps.

    Args:
        metrics: table that `credit.read_metrics` returns.

    Raises:
        DataError: if the table contains no loss.
    """
    curves = []
    for column in ("loss", "valid/loss"):
        values = metrics[column].dropna() if column in metrics else pd.Series(dtype=float)
        curves.append(list(zip(values.index.tolist(), values.tolist(), strict=True)))
    if not curves[0]:
        raise DataError("metrics: no step has a loss yet; read the metrics again when the run has logged a step")
    return plot_loss(*curves)


def _build_background_and_values(field: xr.DataArray) -> tuple[MapBackground, np.ndarray]:
    """Return a map background with the grid of a field, and the values (H, W) from north to south and eastward.

    Raises:
        DataError: if the field has dimensions other than latitude and longitude.
    """
    lat = next((name for name in _LAT_NAMES if name in field.dims), None)
    lon = next((name for name in _LON_NAMES if name in field.dims), None)
    if set(field.dims) != {lat, lon}:
        raise DataError(
            f"field: has the dimensions {', '.join(map(str, field.dims))}; select one time, level and member, so that "
            "only latitude and longitude remain"
        )
    field = field.transpose(lat, lon)
    grid, order = LatLonGrid.from_coords(field[lat].values, field[lon].values, origin="field")
    return MapBackground(grid, None), order.apply(field.values)


def _describe_field(field: xr.DataArray) -> str:
    """Return the title of a field: its name, level and time, if they exist."""
    parts = [str(field.attrs.get("long_name") or field.name or "")]
    if "level" in field.coords:
        parts.append(f"level {field['level'].item():g}")
    if "time" in field.coords and field["time"].ndim == 0:
        parts.append(f"{field['time'].dt.strftime('%Y-%m-%d %H:%M').item()} UTC")
    return ", ".join(part for part in parts if part)
