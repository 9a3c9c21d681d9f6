"""Global latitude-longitude grids: coordinates, cell areas, and the order of rows and columns.

The rows of every grid in this package run from north to south, and the columns run eastward from the smallest longitude
in [0, 360). The rows and columns of files may have any order. `LatLonGrid.from_coords` also returns the indices that
sort the fields of a file into the order of the grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from credit.errors import DataError

# Coordinates with a smaller difference are treated as equal. The rounding error of float32 degrees is about 3e-5.
_TOLERANCE_DEGREES = 1e-3


@dataclass(frozen=True)
class AxisOrder:
    """Indices that sort fields from the order of a file into the order of the grid: ``field[..., rows, :][...,
    columns]``.

    Attributes:
        rows: (H,) indices of the file's H rows, from north to south.
        columns: (W,) indices of the file's W columns, eastward from the smallest longitude.
    """

    rows: np.ndarray
    columns: np.ndarray

    def apply(self, field: np.ndarray) -> np.ndarray:
        """Return a contiguous field (..., H, W) in the order of the grid; `field` itself if it has this order."""
        # Indexing with slices is several times faster than with index arrays, and is possible for most files.
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
        """Build the grid and the axis order from the coordinates of a file.

        Args:
            lat: (H,) degrees north, ascending or descending.
            lon: (W,) degrees east, in -180..180 or 0..360, ascending from any start.
            lat_bounds: (H, 2) edges of each row in degrees north; None for edges half way between the rows.
            origin: name of the grid in messages, for example the name of the file.

        Returns:
            The grid, and the indices that sort the fields of the file into the order of the grid.

        Raises:
            DataError: if coordinates are not finite, are repeated or do not cover the globe, longitudes are not equally
                spaced, or `lat_bounds` do not match the rows.
        """
        lat = _validate_coordinate(lat, "latitude", origin)
        lon = _validate_coordinate(lon, "longitude", origin)
        # Sort the rows from north to south.
        if np.abs(lat).max() > 90 + _TOLERANCE_DEGREES:
            raise DataError(f"{origin}: latitude {lat[np.abs(lat).argmax()]:g} is outside -90..90 degrees")
        rows = np.argsort(-lat, kind="stable")
        southward = np.clip(lat[rows], -90.0, 90.0)
        # Latitudes are now in descending order, so a step that is not negative means that two rows have the same
        # latitude.
        if np.diff(southward).max() > -1e-6:
            raise DataError(f"{origin}: latitudes repeat; every row must have a different latitude")
        # Sort the columns eastward from 0. A float32 longitude of 0 that was shifted by 360 may be slightly below 360.
        is_zero = np.mod(lon, 360.0) > 360.0 - _TOLERANCE_DEGREES
        wrapped = np.mod(np.where(is_zero, 0.0, lon), 360.0)
        columns = np.argsort(wrapped, kind="stable")
        eastward = wrapped[columns]
        _require_different_longitudes(eastward, columns, lon, origin)
        _require_global_longitudes(eastward, origin)
        if lat_bounds is None:
            bounds = _compute_bounds_from_centres(southward, origin)
        else:
            bounds = _read_bounds_from_file(np.asarray(lat_bounds, dtype=np.float64), rows, southward, origin)
        return cls(southward, eastward, bounds), AxisOrder(rows, columns)

    @classmethod
    def equiangular(cls, rows: int, columns: int, poles: bool) -> LatLonGrid:
        """Return the global grid with equally spaced rows and columns; the first column is at longitude 0.

        Args:
            rows: number of rows.
            columns: number of columns.
            poles: True if the outermost rows are at the poles, False if they are half a cell away from the poles.
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
        """True if the first and the last row are at the poles."""
        has_north_pole = abs(self.lat[0] - 90) < _TOLERANCE_DEGREES
        has_south_pole = abs(self.lat[-1] + 90) < _TOLERANCE_DEGREES
        return bool(has_north_pole and has_south_pole)

    def area_weights(self) -> np.ndarray:
        """Return the (H, W) cell areas as fractions of the sphere, float64; their sum is 1.

        The area of a cell is proportional to the difference between the sines of its edge latitudes. Rows at a pole
        have half cells.
        """
        # The sines range from 1 at the north pole to -1 at the south pole, so half of a difference is a fraction of the
        # sphere.
        sine_of_edges = np.sin(np.deg2rad(self.lat_bounds))
        band_H = -np.diff(sine_of_edges) / 2.0
        return np.repeat(band_H[:, None] / len(self.lon), len(self.lon), axis=1)

    def masked_area_weights(self, valid_CHW: np.ndarray) -> np.ndarray:
        """Return the (C, H, W) cell areas as fractions of the valid area of each channel, float64; each channel sums to
        1.

        Args:
            valid_CHW: (C, H, W) bool, False in cells that are ignored, which get the weight 0. Each channel must have
                at least one valid cell.
        """
        area_CHW = valid_CHW * self.area_weights()
        return area_CHW / area_CHW.sum(axis=(1, 2), keepdims=True)

    def select(self, rows: slice, columns: slice) -> LatLonGrid:
        """Return a part of the grid, which does not cover the globe.

        Do not use `area_weights` of the result, because they assume complete circles of latitude. Select from the areas
        of the whole grid instead.

        Args:
            rows: consecutive rows, with a start and a stop.
            columns: consecutive columns.
        """
        # Row i is between the bounds i and i + 1.
        return LatLonGrid(self.lat[rows], self.lon[columns], self.lat_bounds[rows.start : rows.stop + 1])

    def describe_mismatch(self, other: LatLonGrid) -> str | None:
        """Describe how `other` differs from this grid; None if both grids are equal.

        Grids are equal if all latitudes and longitudes agree within 0.001 degrees. `lat_bounds` are not compared.
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
        """Build a grid from a dict that `to_dict` returned; the coordinates are not checked again."""
        return cls(
            lat=np.asarray(data["lat"], dtype=np.float64),
            lon=np.asarray(data["lon"], dtype=np.float64),
            lat_bounds=np.asarray(data["lat_bounds"], dtype=np.float64),
        )


def _build_slice(indices: np.ndarray) -> slice | np.ndarray:
    """Return the slice that is equivalent to indices of a whole axis; return the indices if there is no such slice."""
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
        DataError: if the coordinate is not 1-D, has fewer than two values, or a value is not finite.
    """
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or len(vector) < 2 or not np.isfinite(vector).all():
        raise DataError(f"{origin}: {name} must be a 1-D coordinate with at least two finite values")
    return vector


def _require_different_longitudes(eastward: np.ndarray, columns: np.ndarray, lon: np.ndarray, origin: str) -> None:
    """Raise DataError if two columns are at the same longitude, such as 0 and 360 degrees.

    Args:
        eastward: (W,) longitudes in [0, 360), ascending.
        columns: (W,) indices of these longitudes in the file.
        lon: (W,) longitudes in the order of the file.
        origin: name of the grid in messages.
    """
    repeated = np.flatnonzero(np.diff(eastward) < _TOLERANCE_DEGREES)
    if len(repeated):
        # A step that is too short is between two equal columns. The message states their indices in the file.
        first, second = sorted(columns[repeated[0] : repeated[0] + 2])
        raise DataError(
            f"{origin}: columns {first} and {second}, counted from 0, are at the same longitude ({lon[first]:g} and "
            f"{lon[second]:g} degrees); every column must have a different longitude: "
            "remove one of these columns from the file"
        )


def _require_global_longitudes(eastward: np.ndarray, origin: str) -> None:
    """Raise DataError unless longitudes are equally spaced around the globe, within 1 % of the spacing.

    Args:
        eastward: (W,) longitudes in degrees, ascending.
        origin: name of the grid in messages.
    """
    # The last spacing is the spacing from the last column to the first column.
    spacing = np.diff(np.append(eastward, eastward[0] + 360.0))
    equal_spacing = 360.0 / len(eastward)
    if np.abs(spacing - equal_spacing).max() > max(_TOLERANCE_DEGREES, 0.01 * equal_spacing):
        widest = int(spacing.argmax())
        raise DataError(
            f"{origin}: longitudes {eastward[0]:g}..{eastward[-1]:g} ({len(eastward)} columns) are not equally spaced "
            f"around the globe: {spacing[widest]:g} degrees without a column after {eastward[widest]:g}; only global "
            f"grids "
            "with equal spacing can be used: take a file of the whole globe"
        )


def _compute_bounds_from_centres(lat: np.ndarray, origin: str) -> np.ndarray:
    """Return (H + 1,) edges half way between the rows; the outermost edges are at the poles, as in WeatherBench 2.

    Args:
        lat: (H,) latitudes of the rows in degrees, from north to south.
        origin: name of the grid in messages.

    Raises:
        DataError: if an outermost row is further from its pole than from the next row.
    """
    inner_edges = 0.5 * (lat[:-1] + lat[1:])
    # The outermost row may be up to one spacing away from the pole. If it is further away, the grid is regional.
    is_north_missing = 90.0 - lat[0] > lat[0] - lat[1]
    is_south_missing = lat[-1] + 90.0 > lat[-2] - lat[-1]
    if is_north_missing or is_south_missing:
        raise DataError(
            f"{origin}: latitudes {lat[-1]:g}..{lat[0]:g} do not reach the poles; only global grids can be used: "
            "take a file of the whole globe"
        )
    return np.concatenate([[90.0], inner_edges, [-90.0]])


def _read_bounds_from_file(bounds: np.ndarray, rows: np.ndarray, lat: np.ndarray, origin: str) -> np.ndarray:
    """Return (H + 1,) edges of the rows, from north to south, from the latitude bounds of a file.

    Args:
        bounds: (H, 2) edges of the file's rows in degrees, either edge first.
        rows: (H,) indices that sort the file's rows from north to south.
        lat: (H,) latitudes of the rows in degrees, from north to south.
        origin: name of the grid in messages.

    Raises:
        DataError: if the bounds have a different shape, leave gaps, do not enclose their rows, or do not reach the
            poles.
    """
    if bounds.shape != (len(lat), 2):
        raise DataError(f"{origin}: latitude bounds have shape {bounds.shape}, expected ({len(lat)}, 2)")
    # Gaps between rows, and rows outside their bounds, are errors in the file.
    bounds = bounds[rows]
    upper = bounds.max(axis=1)
    lower = bounds.min(axis=1)
    has_gaps = np.abs(upper[1:] - lower[:-1]).max() > _TOLERANCE_DEGREES
    if has_gaps or (upper < lat).any() or (lower > lat).any():
        raise DataError(f"{origin}: latitude bounds leave gaps or do not enclose their rows")
    if abs(upper[0] - 90) > _TOLERANCE_DEGREES or abs(lower[-1] + 90) > _TOLERANCE_DEGREES:
        raise DataError(f"{origin}: latitude bounds {lower[-1]:g}..{upper[0]:g} do not reach the poles")
    # The outermost edges in the file may be rounded, so they are set to the poles.
    return np.concatenate([[90.0], lower[:-1], [-90.0]])


class GridKey:
    """Cache key for values that depend only on the cell centres of a grid; keys of grids with equal coordinates are
    equal.

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
