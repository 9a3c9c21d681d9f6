"""Maps of fields at each lead time, and of the tracks of tropical cyclones.

Shape suffixes: N members or quantiles, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from credit.calendar import format_duration, parse_duration
from credit.drawing.maps import MapBackground, compute_robust_range, create_map_axes, draw_map
from credit.drawing.style import add_title, create_figure, find_display_units, save_figure
from credit.errors import ConfigError, did_you_mean
from credit.forecast.io.schema import MEMBER
from credit.products.base import Product, ProductCase, ProductContext, ProductOutput, register_product
from credit.products.cyclones.product import CycloneTracks
from credit.products.cyclones.track_map import TrackMap
from credit.products.description import FieldInfo
from credit.products.section import MapSection


@register_product("map", MapSection)
class Map(Product):
    """Map of a field at each lead time, or of the tracks of tropical cyclones."""

    def __init__(self, section: MapSection, context: ProductContext) -> None:
        super().__init__(section, context)
        self.inputs = (section.of,)
        self.background = MapBackground(context.forecasts.grid, context.land_HW)
        self.tracks: CycloneTracks | None = None
        product = context.products.get(section.of)
        if isinstance(product, CycloneTracks):
            self.tracks = product
            for key in ("lead_times", "member", "range"):
                if getattr(section, key) is not None:
                    raise ConfigError(f"{context.key}.{key}: has no effect on a map of tracks; remove it")
            return
        self.info = context.find_field(section.of)
        if section.colormap not in colormaps:
            raise ConfigError(
                f'{context.key}.colormap: "{section.colormap}" is not a colour map of matplotlib'
                f"{did_you_mean(section.colormap, colormaps)}"
            )
        if section.member is not None and (self.info.dim != MEMBER or section.member >= len(self.info.coordinate)):
            count = len(self.info.coordinate) if self.info.dim == MEMBER else 0
            raise ConfigError(
                f"{context.key}.member: {section.member} is not a member of {self.info.name}, which has {count} "
                "members; they are numbered from 0"
            )
        self.lead_indices = _find_leads(section, context)

    def open(self, case: ProductCase) -> ProductOutput:
        """Return a writer of the maps of one forecast."""
        if self.tracks is not None:
            return TrackMap(self.name, self.tracks, case, self.background)
        return _FieldMaps(self, case)


def _find_leads(section: MapSection, context: ProductContext) -> set[int]:
    """Return the indices of the lead times for which maps are plotted.

    Raises:
        ConfigError: if the forecasts do not contain a lead time of the section.
    """
    leads = context.forecasts.lead_minutes.tolist()
    if section.lead_times is None:
        return set(range(len(leads)))
    indices = set()
    for text in section.lead_times:
        minutes = parse_duration(text)
        if minutes not in leads:
            choices = ", ".join(format_duration(lead) for lead in leads)
            raise ConfigError(f"{context.key}.lead_times: the forecasts have no lead time {text}; they have {choices}")
        indices.add(leads.index(minutes))
    return indices


class _FieldMaps(ProductOutput):
    """Writer of the maps of a field, one PNG file per lead time."""

    def __init__(self, product: Map, case: ProductCase) -> None:
        self._product = product
        self._case = case
        self._paths: list[Path] = []

    def add(self, lead_index: int) -> None:
        """Plot the map of a lead time, if maps are plotted for this lead time."""
        if lead_index not in self._product.lead_indices:
            return
        lead = int(self._case.forecasts.lead_minutes[lead_index])
        hours, minutes = divmod(lead, 60)
        suffix = f"{hours:03d}h" + (f"{minutes:02d}" if minutes else "")
        path = self._case.folder / f"{self._product.name}_{suffix}.png"
        fields, names = select_panels(
            self._case.fields.read(self._product.info.name, lead_index),
            self._product.info,
            self._product.section.member,
        )
        text = self._case.valid_text(lead).replace("T", " ")
        title = f"valid {text} UTC ({lead / 60:g} h from {self._case.initial_text.replace('T', ' ')} UTC)"
        save_figure(path, plot_panels, fields, names, title, self._product)
        self._paths.append(path)

    def finish(self) -> list[Path]:
        """Return the paths of the PNG files."""
        return self._paths


def select_panels(fields_NHW: np.ndarray, info: FieldInfo, member: int | None) -> tuple[list[np.ndarray], list[str]]:
    """Return the fields (H, W) that a figure shows, and the title of each field.

    Args:
        fields_NHW: field at a lead time, with N members or quantiles.
        info: description of the field.
        member: number of the member to show; None for the mean of all members.
    """
    if info.dim == MEMBER:
        if member is not None:
            return [fields_NHW[member]], [f"{info.title}, member {member}"]
        mean_HW = fields_NHW.mean(axis=0, dtype=np.float64)
        return [mean_HW], [f"mean of the members of {info.title}"]
    if info.dim is None:
        return [fields_NHW[0]], [info.title]
    return list(fields_NHW), [f"{info.name}, {info.dim} {value:g}" for value in info.coordinate]


def plot_panels(fields: Sequence[np.ndarray], names: Sequence[str], title: str, product: Map) -> Figure:
    """Return a figure with one map per field, one below the other, all with the same colour scale.

    Args:
        fields: fields (H, W).
        names: title of each map.
        title: title of the figure, with the valid time.
        product: the map product, which defines the colour scale and the background.
    """
    info = product.info
    section = product.section
    factor, units = find_display_units(info.units)
    if info.is_probability:
        low, high = section.range or (0.0, 1.0)
        label = "probability"
    else:
        low, high = section.range or _find_color_range(fields)
        low, high = factor * low, factor * high
        label = "" if units == "1" else units
    figure = create_figure(7.4, 3.5 * len(fields) + 0.45)
    axes = create_map_axes(figure, len(fields), 1)[:, 0]
    for axis, field_HW, name in zip(axes, fields, names, strict=True):
        mesh = draw_map(axis, factor * field_HW, product.background, section.colormap, low, high)
        axis.set_title(name)
    extend = "neither" if info.is_probability and section.range is None else "both"
    figure.colorbar(mesh, ax=list(axes), shrink=0.85, pad=0.02, label=label, extend=extend)
    add_title(figure, title)
    return figure


def _find_color_range(fields: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the lower and upper end of the common colour scale of several fields.

    The ends are computed by `credit.drawing.maps.compute_robust_range`. They are 0 and 1 if all values are missing, for
    example in a sum over hours at the first lead times.
    """
    if not any(np.isfinite(field).any() for field in fields):
        return 0.0, 1.0
    return compute_robust_range(fields)
