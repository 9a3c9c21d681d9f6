"""Encoding of GRIB2 messages with ecCodes.

The keys of messages have their ecCodes names. Sections and code tables refer to WMO, Manual on Codes (WMO-No. 306),
volume I.2, GRIB edition 2.

Shape suffixes: H latitude rows, W longitude columns.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from credit.data.formats.grib.messages import import_eccodes
from credit.errors import ConfigError
from credit.forecast.io.grib.fields import FieldPlan, FixedSurface, build_half_level_coefficients, plan_fields
from credit.forecast.io.grib.grid import build_grid_keys
from credit.forecast.io.grib.options import GribOptions
from credit.forecast.io.schema import SINCE_START, ForecastSchema

# Version of the code tables (code table 1.0). It is fixed, so that files do not depend on the version of ecCodes.
_TABLES_VERSION = 32
# Production status of the data (code table 1.3).
_STATUS = {"operational": 0, "test": 1, "research": 2}
# Types of processed data (code table 1.4).
_FORECAST, _CONTROL_FORECAST, _PERTURBED_FORECAST = (1, 3, 4)
# Types of generating process (code table 4.3).
_FROM_FORECAST, _FROM_ENSEMBLE_FORECAST = (2, 4)
# Types of ensemble forecast (code table 4.6). NCEP also writes 3 for all perturbed members.
_UNPERTURBED, _PERTURBED = (1, 3)
# (is ensemble, has statistical process over time) -> product definition template (code table 4.0).
_TEMPLATES = {(False, False): 0, (True, False): 1, (False, True): 8, (True, True): 11}
# Units of time (code table 4.4).
_MINUTES, _HOURS = (0, 1)
# Successive times have the same initial time and increasing lead times (code table 4.11).
_SAME_START = 2
_MISSING_UNIT = 255
# Data representation templates, as ecCodes names them.
_PACKING_TYPES = {"ccsds": "grid_ccsds", "simple": "grid_simple"}
# float32 fields have no more than 24 significant bits.
_MAX_BITS = 24
# Placeholder for missing values while a message is encoded; no field has this value.
_MISSING_VALUE = -1e100


class MessageEncoder:
    """Encoder of the fields of a run as GRIB2 messages.

    Args:
        schema: content of each forecast.
        options: settings of GRIB2 files.

    Attributes:
        schema: content of each forecast.
        plans: description of the messages of each variable, in the order of the file.

    Raises:
        ConfigError: if GRIB2 cannot represent a variable, the grid or the calendar, or if a setting is wrong.
        DataError: if ecCodes is not installed.
    """

    def __init__(self, schema: ForecastSchema, options: GribOptions) -> None:
        self._eccodes: Any = import_eccodes()
        self.schema = schema
        self.plans = plan_fields(schema, options)
        self._options = options
        self._half_levels = build_half_level_coefficients(options)
        # All times of a run are stored in the same unit: hours if possible, otherwise minutes.
        durations = [*schema.lead_minutes.tolist(), *(variable.window or 0 for variable in schema.variables)]
        self._minutes_per_unit = 60 if all(minutes % 60 == 0 for minutes in durations) else 1
        self._base = self._eccodes.codes_grib_new_from_samples("GRIB2")
        self._set_common_keys()

    def _set_common_keys(self) -> None:
        """Set the keys that all messages of a run have in common."""
        conf = self._options.conf
        self._set_key("tablesVersion", _TABLES_VERSION)
        try:
            self._set_key("centre", conf.centre)
        except self._eccodes.CodesInternalError as error:
            raise ConfigError(
                f'inference.grib.centre: "{conf.centre}" is not a centre of the tables of ecCodes ({error}); give the '
                "short name of the centre, such as edzw, or its number in WMO common code table C-11"
            ) from error
        self._set_key("subCentre", conf.sub_centre)
        self._set_key("significanceOfReferenceTime", 1)  # start of the forecast (code table 1.2)
        self._set_key("productionStatusOfProcessedData", _STATUS[conf.status])
        for key, value in build_grid_keys(self.schema.grid).items():
            self._set_key(key, value)
        try:
            self._set_key("packingType", _PACKING_TYPES[conf.packing])
            # Encode an arbitrary field with different values, to test whether the packing works.
            self._encode_values(self._base, np.arange(math.prod(self.schema.grid.shape)), None)
        except self._eccodes.CodesInternalError as error:
            raise ConfigError(
                f"inference.grib.packing: {conf.packing}: this build of ecCodes cannot write it ({error}); set simple"
            ) from error

    def _set_key(self, key: str, value: float | str | None, handle: int | None = None) -> None:
        """Set a key of a message.

        Args:
            key: name of the key in ecCodes.
            value: value of the key; None to mark it as missing.
            handle: message; None for the message from which all messages are copied.
        """
        if handle is None:
            handle = self._base
        if value is None:
            self._eccodes.codes_set_missing(handle, key)
        else:
            self._eccodes.codes_set(handle, key, value)

    def encode(
        self, plan: FieldPlan, level_index: int, initial_minutes: int, lead: int, member: int, values_HW: np.ndarray
    ) -> bytes | None:
        """Return one field encoded as a GRIB2 message.

        Args:
            plan: description of the variable's messages.
            level_index: index of the level among the levels of the variable.
            initial_minutes: initial time in minutes.
            lead: lead time in minutes.
            member: number of the member; 0 for a single forecast.
            values_HW: field in the units of the variable, NaN where missing.

        Returns:
            The message; None for a mean or sum whose window begins before the initial time. Its values are missing, and
            GRIB2 cannot describe this window as part of a forecast.
        """
        window_start = 0
        if plan.process is not None and plan.variable.window != SINCE_START:
            assert plan.variable.window is not None
            window_start = lead - plan.variable.window
        if window_start < 0:
            return None
        handle = self._eccodes.codes_clone(self._base)
        try:
            self._set_product(handle, plan, member)
            self._set_times(handle, plan, initial_minutes, window_start, lead)
            self._set_surface(handle, plan.surfaces[level_index])
            self._encode_values(handle, plan.conversion.scale * values_HW + plan.conversion.offset, plan.precision)
            return self._eccodes.codes_get_message(handle)
        finally:
            self._eccodes.codes_release(handle)

    def _set_product(self, handle: int, plan: FieldPlan, member: int) -> None:
        """Set the parameter, the generating process and the member of a message."""
        members = self.schema.members
        is_ensemble = members is not None
        is_control = self._options.has_control and member == 0
        discipline, category, number = plan.parameter.numbers
        self._set_key("discipline", discipline, handle)
        processed_data = _FORECAST
        if is_ensemble:
            processed_data = _CONTROL_FORECAST if is_control else _PERTURBED_FORECAST
        self._set_key("typeOfProcessedData", processed_data, handle)
        self._set_key("productDefinitionTemplateNumber", _TEMPLATES[is_ensemble, plan.process is not None], handle)
        self._set_key("parameterCategory", category, handle)
        self._set_key("parameterNumber", number, handle)
        self._set_key("typeOfGeneratingProcess", _FROM_ENSEMBLE_FORECAST if is_ensemble else _FROM_FORECAST, handle)
        self._set_key("generatingProcessIdentifier", self._options.conf.generating_process, handle)
        if is_ensemble:
            self._set_key("typeOfEnsembleForecast", _UNPERTURBED if is_control else _PERTURBED, handle)
            self._set_key("perturbationNumber", member, handle)
            self._set_key("numberOfForecastsInEnsemble", members, handle)

    def _set_times(self, handle: int, plan: FieldPlan, initial_minutes: int, window_start: int, lead: int) -> None:
        """Set the initial time and either the lead time or, for a mean or sum, the window.

        Args:
            handle: message.
            plan: description of the variable's messages.
            initial_minutes: initial time in minutes.
            window_start: start of the window in minutes after the initial time.
            lead: lead time in minutes, the end of the window.
        """
        unit = _HOURS if self._minutes_per_unit == 60 else _MINUTES
        self._set_date(handle, initial_minutes, "")
        self._set_key("indicatorOfUnitOfTimeRange", unit, handle)
        if plan.process is None:
            self._set_key("forecastTime", lead // self._minutes_per_unit, handle)
            return
        self._set_key("forecastTime", window_start // self._minutes_per_unit, handle)
        self._set_date(handle, initial_minutes + lead, "OfEndOfOverallTimeInterval")
        self._set_key("numberOfTimeRange", 1, handle)
        self._set_key("typeOfStatisticalProcessing", plan.process, handle)
        self._set_key("typeOfTimeIncrement", _SAME_START, handle)
        self._set_key("indicatorOfUnitForTimeRange", unit, handle)
        self._set_key("lengthOfTimeRange", (lead - window_start) // self._minutes_per_unit, handle)
        self._set_key("indicatorOfUnitForTimeIncrement", _MISSING_UNIT, handle)
        self._set_key("timeIncrement", 0, handle)

    def _set_date(self, handle: int, minutes: int, suffix: str) -> None:
        """Set the keys of a date (in minutes of the run's calendar); the names of the keys end with `suffix`."""
        date = self.schema.calendar.datetime(minutes)
        for name in ("year", "month", "day", "hour", "minute", "second"):
            self._set_key(f"{name}{suffix}", getattr(date, name), handle)

    def _set_surface(self, handle: int, surface: FixedSurface) -> None:
        """Set the keys of the level of a message."""
        self._set_key("typeOfFirstFixedSurface", surface.first_type, handle)
        self._set_key("scaleFactorOfFirstFixedSurface", surface.scale, handle)
        self._set_key("scaledValueOfFirstFixedSurface", surface.scaled_value, handle)
        self._set_key("typeOfSecondFixedSurface", surface.second_type, handle)
        self._set_key("scaleFactorOfSecondFixedSurface", None, handle)
        self._set_key("scaledValueOfSecondFixedSurface", None, handle)
        is_model_level = self.schema.level_units == "model_level" and surface.first_type == 105
        if is_model_level and self._half_levels is not None:
            self._set_key("PVPresent", 1, handle)
            self._eccodes.codes_set_array(handle, "pv", self._half_levels)

    def _encode_values(self, handle: int, values_HW: np.ndarray, precision: float | None) -> None:
        """Pack the values of a field into a message.

        Args:
            handle: message.
            values_HW: field in the units of the parameter, NaN where missing.
            precision: largest error of the packed values; None to use the configured number of bits.
        """
        values = np.asarray(values_HW, dtype=np.float64).ravel()
        is_missing = np.isnan(values)
        valid = values[~is_missing]
        value_range = float(np.ptp(valid)) if len(valid) else 0.0
        self._set_key("bitsPerValue", choose_bits(value_range, precision, self._options.conf.bits), handle)
        if is_missing.any():
            self._set_key("bitmapPresent", 1, handle)
            self._set_key("missingValue", _MISSING_VALUE, handle)
            values = np.where(is_missing, _MISSING_VALUE, values)
        self._eccodes.codes_set_values(handle, values)


def choose_bits(value_range: float, precision: float | None, default_bits: int) -> int:
    """Return the number of bits per value for packing a field.

    A packed value is the smallest value of the field plus an integer times a step. The step is a power of 2, and the
    largest error is half a step.

    Args:
        value_range: difference between the largest and the smallest value.
        precision: largest allowed error of a packed value; None to use `default_bits`.
        default_bits: number of bits if there is no precision.
    """
    if precision is None:
        return default_bits
    step = 2.0 ** math.floor(math.log2(2.0 * precision))
    bits = math.ceil(math.log2(value_range / step + 1.0))
    return min(max(bits, 1), _MAX_BITS)
