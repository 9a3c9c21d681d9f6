"""Base class of readers of forecasts in files and stores.

Shape suffixes: N lead times, M members, C channels, L levels, H latitude rows, W longitude columns. Dimensions in
brackets exist only for ensembles ([M,]) or variables on levels ([L,]).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path

import netCDF4
import numpy as np
import xarray as xr

from credit.calendar import Calendar
from credit.errors import DataError
from credit.forecast.forecast_source import ForecastSource
from credit.forecast.io.archive.metadata import ForecastMetadata


class ForecastArchive(ForecastSource):
    """Base class of readers of the complete forecasts in a folder or store.

    Args:
        origin: folder, store or URL.
        initial_minutes: initial times of the complete forecasts, in minutes.
        lead_minutes: lead times in minutes, ascending.
        metadata: fields, levels, members and grid of the files or store.
        calendar: calendar of the times.

    Attributes:
        cell_methods: name of a variable -> CF cell methods, for example ``time: sum``; instants have no entry.
        descriptions: name of a variable -> attributes ``standard_name`` and ``long_name``.
        windows: for the name of each sum or mean, a mapping from lead time to the length of the window that ends at
            this lead time, both in minutes. The inner mapping is empty if the windows are unknown.
        level_units: units of the levels; empty without levels.
        channel_levels: name of a channel -> name of its variable, and its level; None for a variable without levels.
    """

    def __init__(
        self,
        origin: Path | str,
        initial_minutes: np.ndarray,
        lead_minutes: np.ndarray,
        metadata: ForecastMetadata,
        calendar: Calendar,
    ) -> None:
        self.origin = origin
        self.calendar = calendar
        self.initial_minutes = np.asarray(initial_minutes, dtype=np.int64)
        self.lead_minutes = lead_minutes
        self.members = metadata.members
        self.channel_names = metadata.channel_names
        self.channel_levels = metadata.channel_levels
        self.cell_methods = metadata.cell_methods
        self.descriptions = metadata.descriptions
        self.windows = metadata.windows
        self.level_units = metadata.level_units
        self.names_without_levels = metadata.names_without_levels
        self.units = metadata.units
        self.attributes = metadata.attributes
        self.grid = metadata.grid
        self._orientation = metadata.orientation
        self._variables = metadata.variables
        self._dim_order = metadata.dim_order
        self._channel_positions = metadata.channel_positions

    def read(self, initial_minutes: int) -> np.ndarray:
        """Return one forecast at all lead times; for an ensemble, the mean of its members.

        Args:
            initial_minutes: initial time in minutes.

        Returns:
            (N, C, H, W) float32, NaN where missing.

        Raises:
            DataError: if the forecast cannot be read.
        """
        fields = []
        for lead_index in range(len(self.lead_minutes)):
            fields_MCHW = self.read_members(initial_minutes, lead_index)
            # A single forecast is not averaged, so that its values stay bitwise identical.
            if len(fields_MCHW) == 1:
                fields.append(fields_MCHW[0])
            else:
                fields.append(fields_MCHW.mean(axis=0, dtype=np.float32))
        return np.stack(fields)

    def read_members(self, initial_minutes: int, lead_index: int) -> np.ndarray:
        """Return all members at one lead time, (M, C, H, W) float32; see `ForecastSource.read_members`."""
        num_members = self.members or 1
        # Each variable with members and levels as its first two dimensions.
        variables = []
        for array in self._read_variables(int(initial_minutes), lead_index):
            variables.append(array.reshape(num_members, -1, *array.shape[-2:]))
        fields_MCHW = self._orientation.apply(np.concatenate(variables, axis=1))
        return fields_MCHW.astype(np.float32, copy=False)

    def read_channel(self, initial_minutes: int, lead_index: int, channel: str) -> np.ndarray:
        """Return one channel of all members at one lead time, (M, H, W) float32, without reading other channels.

        Args:
            initial_minutes: initial time in minutes.
            lead_index: index of the lead time in `lead_minutes`.
            channel: name of the channel.

        Raises:
            DataError: if the forecast cannot be read.
        """
        (array,) = self._read_variables(int(initial_minutes), lead_index, channel)
        fields_MHW = self._orientation.apply(array.reshape(-1, *array.shape[-2:]))
        return fields_MHW.astype(np.float32, copy=False)

    @abstractmethod
    def describe_version(self, initial_minutes: int) -> str:
        """Return a string that changes when the stored forecast from an initial time (in minutes) is replaced."""

    @abstractmethod
    def _read_variables(self, initial_minutes: int, lead_index: int, channel: str | None = None) -> list[np.ndarray]:
        """Return the array of each variable at one lead time, ([M,] [L,] H, W), with rows and columns in stored order.

        Args:
            initial_minutes: initial time in minutes.
            lead_index: index of the lead time in `lead_minutes`.
            channel: name of the only channel to read, ([M,] H, W); None to read all variables.

        Raises:
            DataError: if the forecast cannot be read.
        """

    def _read_arrays_at(
        self,
        source: Mapping[str, netCDF4.Variable] | Mapping[str, xr.Variable],
        position: Mapping[str, int],
        origin: Path | str,
        channel: str | None = None,
    ) -> list[np.ndarray]:
        """Return the array of each variable, ([M,] [L,] H, W), at one index along each time dimension.

        Args:
            source: variables by name.
            position: name of a dimension -> index along this dimension. All other dimensions are read completely.
            origin: file or store, for messages.
            channel: name of the only channel to read; None to read all variables.

        Raises:
            DataError: if a variable cannot be read.
        """
        variables = self._variables
        if channel is not None:
            channel_variable, level_position = self._channel_positions[channel]
            variables = {channel_variable: variables[channel_variable]}
            position = {**position, **level_position}
        fields = []
        for name, dims in variables.items():
            selection = tuple(position.get(dim, slice(None)) for dim in dims)
            try:
                values = np.ma.filled(source[name][selection], np.nan)
            except Exception as error:
                # Each file-system library has different exception classes.
                raise DataError(f"{origin}: {name} cannot be read ({error}); copy or forecast it again") from error
            # Files of other programs may have a different order of dimensions.
            remaining_dims = [dim for dim in dims if dim not in position]
            axes = [remaining_dims.index(dim) for dim in self._dim_order if dim in remaining_dims]
            fields.append(values.transpose(axes))
        return fields
