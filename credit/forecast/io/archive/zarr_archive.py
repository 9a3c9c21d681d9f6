"""Reader of forecasts in a zarr store (zarr format 2 or 3), on disk or at a URL."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xarray as xr

from credit.calendar import Calendar
from credit.data.formats.zarr.remote import is_remote, open_remote_store
from credit.errors import DataError
from credit.forecast.io.archive.base import ForecastArchive
from credit.forecast.io.archive.metadata import ForecastMetadata
from credit.forecast.io.archive.stored_variables import StoredVariables
from credit.forecast.io.schema import INITIAL_FIELDS, select_run_attributes
from credit.forecast.io.zarr_arrays import WRITTEN


class ZarrArchive(ForecastArchive):
    """Reader of the forecasts in a zarr store of this package or of WeatherBench 2.

    Args:
        path: path or URL of the store.
        rename: name of a variable in this package -> its name in the store.
        level_units: units to which the levels are converted; None to keep the units of the store.
        options: options of the remote file system, such as credentials; unused for a path.

    Raises:
        DataError: if the store cannot be read, or has no initial and lead times.
    """

    def __init__(
        self, path: Path | str, rename: Mapping[str, str], level_units: str | None, options: Mapping[str, object]
    ) -> None:
        if is_remote(path):
            variables, attributes = _open_remote_zarr(path, options)
        else:
            variables, attributes = _open_zarr(path)
        # A directory lists variables in arbitrary order, so they are sorted: all processes need the same channel order.
        source = StoredVariables(path, dict(sorted(variables.items())), attributes)
        # The time dimensions have the names of `inference.layout: cf` or `weatherbench2`.
        if "init_time" in source.names:
            init, lead = ("init_time", "lead_time")
        else:
            init, lead = ("time", "prediction_timedelta")
        if init not in source.names:
            raise DataError(f"{path}: has neither init_time and lead_time nor time and prediction_timedelta")
        metadata = ForecastMetadata(source, (init, lead), lead, rename, level_units)
        init_attributes = source.variable_attributes(init)
        if "units" not in init_attributes:
            raise DataError(f'{path}: {init} has no units; set them, for example "hours since 1900-01-01"')
        calendar = Calendar(str(init_attributes.get("calendar", "standard")))
        initial_minutes = calendar.minutes_from_cf(source.values(init), str(init_attributes["units"]))
        self._source = variables
        self._leading_dims = (init, lead)
        self._init_index = {int(minutes): index for index, minutes in enumerate(initial_minutes)}
        is_complete = np.ones(len(initial_minutes), dtype=bool)
        if WRITTEN in source.names:
            # When a store is extended, its initial times are written last, so there may be more marks than times.
            is_complete = source.values(WRITTEN).astype(bool)[: len(initial_minutes)]
        super().__init__(path, np.sort(initial_minutes[is_complete]), metadata.lead_minutes, metadata, calendar)

    def describe_version(self, initial_minutes: int) -> str:
        """Return a string with the attributes of the store and the checksum of the forecast's initial fields, if any.

        All forecasts of a store have the same settings, so a forecast is replaced only if its analysis has changed.
        """
        checksum = ""
        if INITIAL_FIELDS in self._source:
            checksum = str(int(self._source[INITIAL_FIELDS][self._init_index[int(initial_minutes)]].values))
        return f"{json.dumps(select_run_attributes(self.attributes), sort_keys=True, default=str)} {checksum}".strip()

    def _read_variables(self, initial_minutes: int, lead_index: int, channel: str | None = None) -> list[np.ndarray]:
        """Return the array of each variable at one lead time, ([M,] [L,] H, W); see `ForecastArchive`."""
        init, lead = self._leading_dims
        position = {init: self._init_index[initial_minutes], lead: lead_index}
        return self._read_arrays_at(self._source, position, self.origin, channel)


def _open_zarr(path: Path) -> tuple[Mapping[str, xr.Variable], Mapping[str, object]]:
    """Return the variables, by name, and the global attributes of a zarr store on disk.

    Raises:
        DataError: if the store cannot be read.
    """
    try:
        # The store is not opened as a dataset, because a dataset needs arrays of equal length. The lengths differ for a
        # moment while a store is extended.
        variables, attributes = xr.backends.ZarrStore.open_group(path, consolidated=False).load()
        decoded_variables, decoded_attributes, _ = xr.conventions.decode_cf_variables(
            variables, attributes, decode_times=False, decode_timedelta=False
        )
        return decoded_variables, decoded_attributes
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: cannot be read as zarr ({error})") from error


def _open_remote_zarr(
    url: str, options: Mapping[str, object]
) -> tuple[Mapping[str, xr.Variable], Mapping[str, object]]:
    """Return the variables, by name, and the global attributes of a zarr store at a URL.

    Args:
        url: URL of the store.
        options: options of the remote file system, such as credentials.
    """
    dataset = open_remote_store(url, options, decode_times=False, decode_timedelta=False, chunks=None, cache=False)
    return dataset.variables, dataset.attrs
