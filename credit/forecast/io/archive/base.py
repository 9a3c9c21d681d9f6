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

from credit.calendar import Calendar
from credit.errors import DataError
from credit.forecast.forecast_source import ForecastSource
from credit.forecast.io.archive.metadata import ForecastMetadata


class ForecastArchive(ForecastSource):
    """Reader of the complete forecasts in a folder or store.

    Args:
        origin: folder, store or URL.
        initial_minutes: initial times of the complete forecasts, in minutes. Incomplete forecasts are left out.
        lead_minutes: lead times in minutes, increasing.
        metadata: fields, levels, members and grid of the files or store.
        calendar: calendar of the times.
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
        self.flat_names = metadata.flat_names
        self.units = metadata.units
        self.attributes = metadata.attributes
        self.grid = metadata.grid
        self._orientation = metadata.orientation
        self._variables = metadata.variables
        self._dim_order = metadata.dim_order

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
            # A single field is not averaged, so that its values stay the same bit for bit.
            if len(fields_MCHW) == 1:
                fields.append(fields_MCHW[0])
            else:
                fields.append(fields_MCHW.mean(axis=0, dtype=np.float32))
        return np.stack(fields)

    def read_members(self, initial_minutes: int, lead_index: int) -> np.ndarray:
        """Return all members at one lead time, (M, C, H, W) float32; see the base class."""
        num_members = self.members or 1
        # Each variable with members and levels as its first two dimensions.
        variables = []
        for array in self._read_variables(int(initial_minutes), lead_index):
            variables.append(array.reshape(num_members, -1, *array.shape[-2:]))
        fields_MCHW = self._orientation.apply(np.concatenate(variables, axis=1))
        return fields_MCHW.astype(np.float32, copy=False)

    @abstractmethod
    def _read_variables(self, initial_minutes: int, lead_index: int) -> list[np.ndarray]:
        """Return each variable at one lead time, ([M,] [L,] H, W), with rows and columns in the stored order.

        Args:
            initial_minutes: initial time in minutes.
            lead_index: index of the lead time in `lead_minutes`.

        Raises:
            DataError: if the forecast cannot be read.
        """

    def _select(
        self, source: Mapping | netCDF4.Dataset, position: Mapping[str, int], origin: Path | str
    ) -> list[np.ndarray]:
        """Read each variable at one index of its time dimensions, ([M,] [L,] H, W).

        Args:
            source: variables by name.
            position: name of a dimension -> index along it. Dimensions that are not named are read completely.
            origin: file or store, for messages.

        Raises:
            DataError: if a variable cannot be read.
        """
        fields = []
        for name, dims in self._variables.items():
            selection = tuple(position.get(dim, slice(None)) for dim in dims)
            try:
                values = np.ma.filled(source[name][selection], np.nan)
            except Exception as error:
                # The library of each file system has its own errors.
                raise DataError(f"{origin}: {name} cannot be read ({error}); copy or forecast it again") from error
            # Files of other programs may have their dimensions in another order.
            remaining_dims = [dim for dim in dims if dim not in position]
            axes = [remaining_dims.index(dim) for dim in self._dim_order if dim in remaining_dims]
            fields.append(values.transpose(axes))
        return fields
