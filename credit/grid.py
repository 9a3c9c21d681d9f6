"""Global latitude-longitude grids: coordinates, cell areas, and the order of rows and columns.

Every grid in this package runs from north to south and eastward from the smallest longitude in [0, 360). Files come in
any order: `LatLonGrid.from_coords` also returns the indices that bring a file's fields into that order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from credit.errors import DataError

# Coordinates that differ by less are the same: float32 degrees are exact to about 3e-5.
_TOLERANCE_DEGREES = 1e-3


@dataclass(frozen=True)
class AxisOrder:
    """Indices that bring fields from the order of a file to that of the grid: ``field[..., rows, :][..., columns]``.

    Attributes:
        rows: (H,) indices of the file's H rows, from north to south.
        columns: (W,) indices of the file's W columns, eastward from the smallest longitude.
    """

    rows: np.ndarray
    columns: np.ndarray

    def apply(self, field: np.ndarray) -> np.ndarray:
        """Return a field (..., H, W) in the grid's order, contiguous; `field` itself if it is so already."""
        # Slices are copied several times faster than indices, and mostly suffice.
        rows = _build_slice(self.rows)
        columns = _build_slice(self.columns)
        return np.ascontiguousarray(field[..., rows, :][..., columns])


@dataclass(frozen=True, eq=False)
class LatLonGrid:
    """A global latitude-longitude grid with H rows and W columns.

    Attributes:
        lat: (H,) latitude of the rows, degrees north, descending, float64.
        lon: (W,) longitude of the columns, degrees east in [0, 360), ascending and equally spaced, float64.
        lat_bounds: (H + 1,) latitude of the edges of the rows, degrees north, descending from 90 to -90, float64.
    """

    lat: np.ndarray
    lon: np.ndarray
    lat_bounds: np.ndarray

    @classmethod
    def from_coords(
        cls, lat: np.ndarray, lon: np.ndarray, lat_bounds: np.ndarray | None = None, origin: str = "grid"
    ) -> tuple[LatLonGrid, AxisOrder]:
        """Build the grid from the coordinates of a file.

        Args:
            lat: (H,) degrees north, ascending or descending.
            lon: (W,) degrees east, in -180..180 or 0..360, ascending from any start.
            lat_bounds: (H, 2) edges of each row in degrees north; None puts the edges half way between the rows.
            origin: name of the grid in messages, for example that of the file.

        Returns:
            The grid, and the indices that bring the file's fields to its order.

        Raises:
            DataError: if coordinates are not finite, repeat or do not cover the globe, longitudes are not equally
                spaced, or `lat_bounds` do not fit the rows.
        """
        lat = _validate_coordinate(lat, "latitude", origin)
        lon = _validate_coordinate(lon, "longitude", origin)
        # Rows from north to south.
        if np.abs(lat).max() > 90 + _TOLERANCE_DEGREES:
            raise DataError(f"{origin}: latitude {lat[np.abs(lat).argmax()]:g} is outside -90..90 degrees")
        rows = np.argsort(-lat, kind="stable")
        southward = np.clip(lat[rows], -90.0, 90.0)
        # The rows descend now, so a step that is not negative means that two rows have the same latitude.
        if np.diff(southward).max() > -1e-6:
            raise DataError(f"{origin}: latitudes repeat; every row must have its own")
        # Columns eastward from 0. A float32 longitude of 0 that was shifted by 360 may lie just below 360.
        is_zero = np.mod(lon, 360.0) > 360.0 - _TOLERANCE_DEGREES
        wrapped = np.mod(np.where(is_zero, 0.0, lon), 360.0)
        columns = np.argsort(wrapped, kind="stable")
        eastward = wrapped[columns]
        _refuse_repeated_columns(eastward, columns, lon, origin)
        _require_global_longitudes(eastward, origin)
        if lat_bounds is None:
            bounds = _bounds_from_centres(southward, origin)
        else:
            bounds = _bounds_from_file(np.asarray(lat_bounds, dtype=np.float64), rows, southward, origin)
        return cls(southward, eastward, bounds), AxisOrder(rows, columns)

    @classmethod
    def equiangular(cls, rows: int, columns: int, poles: bool) -> LatLonGrid:
        """Return the global grid with equally spaced rows and columns; the first column is at longitude 0.

        Args:
            rows: number of rows.
            columns: number of columns.
            poles: True if the outermost rows lie on the poles, False if they lie half a cell away from them.
        """
        northernmost = 90.0 if poles else 90.0 - 90.0 / rows
        lat = np.linspace(northernmost, -northernmost, rows)
        lon = np.arange(columns) * 360.0 / columns
        return cls.from_coords(lat, lon)[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and of columns, (H, W)."""
        return len(self.lat), len(self.lon)

    @property
    def has_pole_points(self) -> bool:
        """True if the first and the last row are the poles themselves."""
        has_north_pole = abs(self.lat[0] - 90) < _TOLERANCE_DEGREES
        has_south_pole = abs(self.lat[-1] + 90) < _TOLERANCE_DEGREES
        return bool(has_north_pole and has_south_pole)

    def area_weights(self) -> np.ndarray:
        """Return (H, W) cell areas as fractions of the sphere, float64, summing to 1.

        The area of a cell is proportional to the difference of the sines of its edges. A row on a pole is half a cell.
        """
        # The sines run from 1 at the north pole to -1 at the south pole, so half of a difference is a fraction.
        sine_of_edges = np.sin(np.deg2rad(self.lat_bounds))
        band_H = -np.diff(sine_of_edges) / 2.0
        return np.repeat(band_H[:, None] / len(self.lon), len(self.lon), axis=1)

    def masked_area_weights(self, valid_CHW: np.ndarray) -> np.ndarray:
        """Return (C, H, W) cell areas as fractions of the valid area of each channel, float64; each channel sums to 1.

        Args:
            valid_CHW: (C, H, W) bool, False in cells that do not count. The weight of these cells is 0. Each channel
                must have a valid cell.
        """
        area_CHW = valid_CHW * self.area_weights()
        return area_CHW / area_CHW.sum(axis=(1, 2), keepdims=True)

    def select(self, rows: slice, columns: slice) -> LatLonGrid:
        """Return some rows and columns of the grid, which do not cover the globe.

        Use the areas of the whole grid: `area_weights` of the result are those of complete circles of latitude.

        Args:
            rows: consecutive rows, with a start and a stop.
            columns: consecutive columns.
        """
        # Row i lies between the bounds i and i + 1.
        return LatLonGrid(self.lat[rows], self.lon[columns], self.lat_bounds[rows.start : rows.stop + 1])

    def describe_mismatch(self, other: LatLonGrid) -> str | None:
        """Return a description of how `other` differs from this grid.

        None means that all latitudes and longitudes agree within 0.001 degrees. `lat_bounds` are not compared.
        """
        if self.shape != other.shape:
            return f"{self.shape[0]} x {self.shape[1]} cells against {other.shape[0]} x {other.shape[1]}"
        axes = (("latitude", self.lat, other.lat), ("longitude", self.lon, other.lon))
        for name, values, other_values in axes:
            distance = np.abs(values - other_values)
            if distance.max() > _TOLERANCE_DEGREES:
                worst = int(distance.argmax())
                return f"{name} {worst} is {values[worst]:g} against {other_values[worst]:g}"
        return None

    def to_dict(self) -> dict[str, list[float]]:
        """Return ``lat``, ``lon`` and ``lat_bounds`` in degrees as plain lists, for checkpoints and stores."""
        return {"lat": self.lat.tolist(), "lon": self.lon.tolist(), "lat_bounds": self.lat_bounds.tolist()}

    @classmethod
    def from_dict(cls, data: dict[str, list[float]]) -> LatLonGrid:
        """Build a grid from what `to_dict` returned; the coordinates are not checked again."""
        return cls(
            lat=np.asarray(data["lat"], dtype=np.float64),
            lon=np.asarray(data["lon"], dtype=np.float64),
            lat_bounds=np.asarray(data["lat_bounds"], dtype=np.float64),
        )


def _build_slice(indices: np.ndarray) -> slice | np.ndarray:
    """Return the slice that selects what indices of a whole axis select, or the indices if there is none."""
    in_order = np.arange(len(indices))
    if np.array_equal(indices, in_order):
        return slice(None)
    if np.array_equal(indices, in_order[::-1]):
        return slice(None, None, -1)
    return indices


def _validate_coordinate(values: np.ndarray, name: str, origin: str) -> np.ndarray:
    """Return a coordinate as a float64 vector.

    Args:
        values: the coordinate, in degrees.
        name: latitude or longitude, for the message.
        origin: name of the grid in messages.

    Raises:
        DataError: if it is not 1-D, has fewer than two values, or a value is not finite.
    """
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or len(vector) < 2 or not np.isfinite(vector).all():
        raise DataError(f"{origin}: {name} must be a 1-D coordinate with at least two finite values")
    return vector


def _refuse_repeated_columns(eastward: np.ndarray, columns: np.ndarray, lon: np.ndarray, origin: str) -> None:
    """Raise DataError if two columns are at one longitude, such as 0 and 360 after adding a cyclic point for a plot.

    Args:
        eastward: (W,) longitudes in [0, 360), ascending.
        columns: (W,) indices of these longitudes in the file.
        lon: (W,) longitudes in the order of the file.
        origin: name of the grid in messages.
    """
    repeated = np.flatnonzero(np.diff(eastward) < _TOLERANCE_DEGREES)
    if len(repeated):
        # A short step lies between two columns; their indices in the file are named.
        first, second = sorted(columns[repeated[0] : repeated[0] + 2])
        raise DataError(
            f"{origin}: columns {first} and {second}, counted from 0, are at the same longitude ({lon[first]:g} and "
            f"{lon[second]:g} degrees); every column must have its own: remove one of the two from the file"
        )


def _require_global_longitudes(eastward: np.ndarray, origin: str) -> None:
    """Raise DataError unless longitudes are equally spaced round the globe, to 1 % of the spacing.

    Args:
        eastward: (W,) longitudes in degrees, ascending.
        origin: name of the grid in messages.
    """
    # The last spacing is that from the last column to the first one.
    spacing = np.diff(np.append(eastward, eastward[0] + 360.0))
    equal_spacing = 360.0 / len(eastward)
    if np.abs(spacing - equal_spacing).max() > max(_TOLERANCE_DEGREES, 0.01 * equal_spacing):
        widest = int(spacing.argmax())
        raise DataError(
            f"{origin}: longitudes {eastward[0]:g}..{eastward[-1]:g} ({len(eastward)} columns) do not go evenly round "
            f"the globe: {spacing[widest]:g} degrees without a column behind {eastward[widest]:g}; only global grids "
            "with equal spacing can be used: take a file of the whole globe"
        )


def _bounds_from_centres(lat: np.ndarray, origin: str) -> np.ndarray:
    """Return (H + 1,) edges half way between the rows, the outermost at the poles (the rule of WeatherBench 2).

    Args:
        lat: (H,) latitudes of the rows in degrees, from north to south.
        origin: name of the grid in messages.

    Raises:
        DataError: if an outermost row is further from its pole than from the next row.
    """
    inner_edges = 0.5 * (lat[:-1] + lat[1:])
    # The outermost row may lie up to one spacing from the pole; if it is further away, the grid is regional.
    is_north_missing = 90.0 - lat[0] > lat[0] - lat[1]
    is_south_missing = lat[-1] + 90.0 > lat[-2] - lat[-1]
    if is_north_missing or is_south_missing:
        raise DataError(
            f"{origin}: latitudes {lat[-1]:g}..{lat[0]:g} do not reach the poles; only global grids can be used: "
            "take a file of the whole globe"
        )
    return np.concatenate([[90.0], inner_edges, [-90.0]])


def _bounds_from_file(bounds: np.ndarray, rows: np.ndarray, lat: np.ndarray, origin: str) -> np.ndarray:
    """Return (H + 1,) edges of the rows, from north to south, from the latitude bounds of a file.

    Args:
        bounds: (H, 2) edges of the file's rows in degrees, either edge first.
        rows: (H,) indices that sort the file's rows from north to south.
        lat: (H,) latitudes of the rows in degrees, from north to south.
        origin: name of the grid in messages.

    Raises:
        DataError: if the bounds have another shape, leave gaps, do not enclose their rows, or do not reach the poles.
    """
    if bounds.shape != (len(lat), 2):
        raise DataError(f"{origin}: latitude bounds have shape {bounds.shape}, expected ({len(lat)}, 2)")
    # Gaps between rows, and rows outside their own bounds, are errors of the file.
    bounds = bounds[rows]
    upper = bounds.max(axis=1)
    lower = bounds.min(axis=1)
    has_gaps = np.abs(upper[1:] - lower[:-1]).max() > _TOLERANCE_DEGREES
    if has_gaps or (upper < lat).any() or (lower > lat).any():
        raise DataError(f"{origin}: latitude bounds leave gaps or do not enclose their rows")
    if abs(upper[0] - 90) > _TOLERANCE_DEGREES or abs(lower[-1] + 90) > _TOLERANCE_DEGREES:
        raise DataError(f"{origin}: latitude bounds {lower[-1]:g}..{upper[0]:g} do not reach the poles")
    # The outermost edges in the file may be rounded, so the poles themselves are used.
    return np.concatenate([[90.0], lower[:-1], [-90.0]])


class GridKey:
    """Key for caches of what depends on the cell centres of a grid: equal for grids with equal coordinates.

    Args:
        grid: the grid.
    """

    def __init__(self, grid: LatLonGrid) -> None:
        self.grid = grid
        self._coordinates = (grid.lat.tobytes(), grid.lon.tobytes())

    def __eq__(self, other: object) -> bool:
        """Return True if both grids have the same latitudes and longitudes."""
        return isinstance(other, GridKey) and self._coordinates == other._coordinates

    def __hash__(self) -> int:
        """Return a hash of the coordinates."""
        return hash(self._coordinates)
