"""Reader of forecasts that are stored in xarray datasets, for scores and products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import xarray as xr

from credit.calendar import Calendar
from credit.data.formats.plugin.fields import encode_times
from credit.errors import DataError
from credit.forecast.io.archive.base import ForecastArchive
from credit.forecast.io.archive.metadata import ForecastMetadata
from credit.forecast.io.archive.stored_variables import StoredVariables
from credit.forecast.io.schema import INITIAL_FIELDS

# Names of the dimensions of initial time and lead time in a dataset of several forecasts: in zarr stores of this
# package, and of WeatherBench 2.
_TIME_DIMS = (("init_time", "lead_time"), ("time", "prediction_timedelta"))
# Names of the coordinates of initial time and lead time in the dataset of a single forecast.
_INITIAL_TIME = "forecast_reference_time"
_LEAD_TIME = "forecast_period"


class DatasetArchive(ForecastArchive):
    """Reader of forecasts in datasets.

    Args:
        datasets: datasets with one forecast each, as `credit.api.model.Model.forecast` returns them, or one dataset
            with dimensions of initial time and lead time.
        origin: name of the datasets, for messages.
        level_units: units to which the levels are converted; None to keep the units of the datasets.

    Raises:
        DataError: if the datasets have no initial times or no lead times, or are forecasts of different runs.
    """

    def __init__(self, datasets: Sequence[xr.Dataset], origin: str, level_units: str | None = None) -> None:
        if not datasets:
            raise DataError(f"{origin}: there are no forecasts; give at least one dataset")
        self._leading_dims = _find_time_dims(datasets[0], origin)
        # Initial time in minutes -> the variables of its dataset, and its index along the dimension of initial times.
        self._forecasts: dict[int, tuple[Mapping[str, xr.Variable], int | None]] = {}
        metadata = None
        calendar = Calendar("standard")
        for dataset in datasets:
            variables = _convert_durations_to_hours(dataset)
            lead_name = self._leading_dims[-1] if len(self._leading_dims) == 2 else _LEAD_TIME
            # The attribute that identifies the initial state differs between the forecasts of a run.
            attributes = {name: value for name, value in dataset.attrs.items() if name != INITIAL_FIELDS}
            source = StoredVariables(origin, variables, attributes)
            dataset_metadata = ForecastMetadata(source, self._leading_dims, lead_name, {}, level_units)
            if metadata is None:
                metadata = dataset_metadata
            problem = metadata.describe_mismatch(dataset_metadata)
            if problem is None and not np.array_equal(metadata.lead_minutes, dataset_metadata.lead_minutes):
                problem = "has different lead times"
            if problem is not None:
                raise DataError(f"{origin}: one of the datasets {problem}; score forecasts of one model together")
            initial_name = self._leading_dims[0] if len(self._leading_dims) == 2 else _INITIAL_TIME
            initial_minutes, calendar_name = encode_times(np.atleast_1d(dataset[initial_name].values))
            calendar = Calendar(calendar_name)
            for index, minutes in enumerate(initial_minutes.astype(np.int64).tolist()):
                if minutes in self._forecasts:
                    raise DataError(
                        f"{origin}: two forecasts begin at {calendar.format(minutes)}; score one of them, or give the "
                        "members of an ensemble the dimension member"
                    )
                self._forecasts[minutes] = (variables, index if len(self._leading_dims) == 2 else None)
        initial_times = np.array(sorted(self._forecasts), dtype=np.int64)
        super().__init__(origin, initial_times, metadata.lead_minutes, metadata, calendar)

    def describe_version(self, initial_minutes: int) -> str:
        """Return an empty string, because a change of a dataset in memory cannot be detected."""
        return ""

    def _read_variables(self, initial_minutes: int, lead_index: int, channel: str | None = None) -> list[np.ndarray]:
        """Return the arrays of the variables at one lead time, each ([M,] [L,] H, W), as `ForecastArchive` requires."""
        variables, initial_index = self._forecasts[initial_minutes]
        position = {self._leading_dims[-1]: lead_index}
        if initial_index is not None:
            position[self._leading_dims[0]] = initial_index
        return self._read_arrays_at(variables, position, self.origin, channel)


def _find_time_dims(dataset: xr.Dataset, origin: str) -> tuple[str, ...]:
    """Return the names of the time dimensions: of initial time and lead time, or only of the valid time.

    Raises:
        DataError: if the dataset has no such dimensions.
    """
    for dims in _TIME_DIMS:
        if set(dims) <= set(dataset.dims):
            return dims
    if {_INITIAL_TIME, _LEAD_TIME} <= set(dataset.coords) and "time" in dataset.dims:
        return ("time",)
    pairs = " nor ".join(" and ".join(dims) for dims in _TIME_DIMS)
    raise DataError(
        f"{origin}: a forecast has neither the dimensions {pairs}, nor the dimension time with the coordinates "
        f"{_INITIAL_TIME} and {_LEAD_TIME}; its dimensions are {', '.join(map(str, dataset.dims))}"
    )


def _convert_durations_to_hours(dataset: xr.Dataset) -> dict[str, xr.Variable]:
    """Return the variables of a dataset by name, with durations converted to hours."""
    variables = {}
    for name, variable in dataset.variables.items():
        if variable.dtype.kind == "m":
            hours = variable.values / np.timedelta64(1, "h")
            variable = xr.Variable(variable.dims, hours, {**variable.attrs, "units": "hour"})
        variables[str(name)] = variable
    return variables
