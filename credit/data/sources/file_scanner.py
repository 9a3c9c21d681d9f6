"""Inspection of one source file: the layout, grid, levels and times of its variables."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr

from credit.config.sections.data import DataConfig, VariableOptions
from credit.data.formats.cf import Coordinates, is_vector_component, match_levels, read_level_values
from credit.data.formats.grib.dataset import ABSENT
from credit.data.formats.unit_checks import (
    ValueRules,
    build_value_rules,
    convert_range_to_file_units,
    read_file_range,
    require_plausible_units,
)
from credit.data.formats.units import Conversion, ExpConversion, find_conversion
from credit.data.formats.variable_layout import VariableLayout
from credit.data.sources.derived_variables import (
    build_derived_attributes,
    find_extrapolated_quantity,
    find_si_conversion,
)
from credit.data.sources.levels.level_mapping import LevelResolver
from credit.data.sources.reading.used_times import find_used_times, require_instantaneous
from credit.data.sources.required_variables import FIELD, VariableRequest, find_unusable_variables
from credit.data.sources.shared_coordinates import SharedCoordinates
from credit.errors import DataError
from credit.physics.vertical import LevelMapping

logger = logging.getLogger(__name__)

# Attributes of a variable in a file that are copied to its layout.
_LAYOUT_ATTRIBUTES = ("units", "standard_name", "long_name", "cell_methods")


@dataclass(frozen=True)
class FileVariable:
    """One variable in one file.

    Attributes:
        path: path of the file, or URL.
        source_number: index of the source of the file in ``data.sources``.
        layout: layout of the variable in the file.
        positions: (M,) int64 indices in the file of the used times; None if the file has no time. A time is used if
            `find_used_times` selects it and all levels are present.
    """

    path: Path | str
    source_number: int
    layout: VariableLayout
    positions: np.ndarray | None

    @property
    def times(self) -> np.ndarray | None:
        """(M,) int64 used times in minutes since 1900; None if the file has no time."""
        if self.positions is None:
            return None
        return self.layout.times[self.positions]


class FileScanner:
    """Scanner of one file, which determines how each variable must be read; it reads no fields.

    Args:
        path: path of the file, or URL.
        dataset: the open file.
        source_number: index of the source of the file in ``data.sources``.
        conf: the ``data`` section of the config.
        shared: grid and calendar that all files share; the first file that is scanned determines them.
        level_resolver: finder of the mapping from the levels of files to the levels of the run.

    Attributes:
        names: names in the file of all variables with at least two dimensions.
        unusable_variables: variables of the file that cannot be read, as a mapping from name to reason.
    """

    def __init__(
        self,
        path: Path | str,
        dataset: xr.Dataset,
        source_number: int,
        conf: DataConfig,
        shared: SharedCoordinates,
        level_resolver: LevelResolver,
    ) -> None:
        self.names = {str(name) for name, variable in dataset.variables.items() if variable.ndim >= 2}
        self.unusable_variables = find_unusable_variables(dataset, source_number)
        self._path = path
        self._origin = str(path)
        self._dataset = dataset
        self._source_number = source_number
        self._conf = conf
        self._shared = shared
        self._level_resolver = level_resolver
        self._coordinates = Coordinates(dataset)
        # Mapping from the name of a time coordinate to its times and their bounds, in minutes.
        self._decoded_times: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}

    def build_file_variable(self, request: VariableRequest, name_in_file: str) -> FileVariable:
        """Return the description of a variable of the file: its layout, and the times that are used.

        Args:
            request: the variable that the run needs.
            name_in_file: name of this variable in the file.

        Raises:
            DataError: see `build_layout`.
            ConfigError: see `find_used_times`, `require_instantaneous` and `build_layout`.
        """
        layout = self.build_layout(request, name_in_file)
        if layout.times is None:
            return FileVariable(self._path, self._source_number, layout, None)
        key = f"data.sources.{self._source_number}"
        source = self._conf.sources[self._source_number]
        require_instantaneous(source.every, request.name, self._options_of(request).temporal, key)
        is_used = find_used_times(layout.times, source, key, self._dataset.attrs, self._shared.calendar, self._origin)
        # GRIB files can lack single levels at some times.
        absent = self._dataset.variables[name_in_file].encoding.get(ABSENT)
        if absent is not None and layout.level_indices is not None:
            # Only missing levels that the run reads are considered.
            is_incomplete = is_used & absent[:, list(layout.level_indices)].any(axis=1)
            is_used &= ~is_incomplete
            if is_incomplete.any():
                first_time = self._shared.calendar.format(layout.times[is_incomplete][0])
                logger.warning(
                    "%s: %s lacks levels at %d of %d times, the first is %s; these times are left out",
                    self._origin,
                    request.name,
                    is_incomplete.sum(),
                    len(is_incomplete),
                    first_time,
                )
        return FileVariable(self._path, self._source_number, layout, np.flatnonzero(is_used))

    def build_layout(self, request: VariableRequest, name_in_file: str) -> VariableLayout:
        """Return the layout of a variable in the file.

        Args:
            request: the variable that the run needs.
            name_in_file: name of this variable in the file.

        Raises:
            DataError: if values are not numbers, dimensions are unknown, levels or coefficients are missing, or the
                grid, calendar or units do not match the run.
            ConfigError: if ``units`` in the config are not known, or cf-units is needed and not installed.
        """
        variable = self._dataset.variables[name_in_file]
        self._require_numbers(request, name_in_file)
        # Dimensions and levels.
        level_units = self._conf.level_units if request.levels else None
        dims = self._coordinates.find_dims(name_in_file, self._origin, level_units)
        options = self._options_of(request)
        level_indices, level_mapping = self._find_level_indices(request, dims)
        # Attributes and units. A derived variable does not have the attributes of its inputs, and it is not packed.
        file_attributes = {key: str(variable.attrs[key]) for key in _LAYOUT_ATTRIBUTES if key in variable.attrs}
        si_conversion = self._find_si_conversion(request, name_in_file, file_attributes, level_mapping)
        attributes = file_attributes.copy()
        packing_step = _read_packing_step(variable)
        if options.derive is not None:
            attributes = build_derived_attributes(options.derive)
            packing_step = 0.0
        # Grid and times.
        vector = is_vector_component(options.vector, attributes.get("standard_name", ""))
        method = options.regrid or self._conf.regrid
        grid, axis_order, regridder = self._shared.find_regridder(self._coordinates, dims, method, vector, self._origin)
        times, window_bounds = self._read_times(dims)
        conversion = None
        if options.units is not None:
            source_units = attributes.get("units", "")
            conversion = find_conversion(source_units, options.units, request.target_variable, self._origin)
            attributes["units"] = options.units
        if conversion is not None:
            packing_step *= abs(conversion.scale)
        return VariableLayout(
            name=name_in_file,
            dims=dims,
            level_indices=level_indices,
            level_mapping=level_mapping,
            grid=grid,
            axis_order=axis_order,
            regridder=regridder,
            conversion=conversion,
            si_conversion=si_conversion,
            times=times,
            window_bounds=window_bounds,
            attributes=attributes,
            packing_step=packing_step,
            times_per_chunk=variable.encoding.get("preferred_chunks", {}).get(dims.get("time"), 1),
            rules=self._build_rules(request, variable, file_attributes, level_mapping, conversion),
            origin=f"{self._origin}: {request.name}",
            calendar=self._shared.calendar,
        )

    def _require_numbers(self, request: VariableRequest, name_in_file: str) -> None:
        """Raise DataError if the values of a variable are not numbers."""
        # numpy's kinds of numbers: bool, signed and unsigned integers, floating-point numbers.
        dtype = self._dataset.variables[name_in_file].dtype
        if dtype.kind not in "biuf":
            raise DataError(
                f"{self._origin}: {name_in_file} has values of type {dtype}, not numbers; write numbers, or name a "
                f"different variable (data.sources.N.rename: {{{request.name}: NAME}})"
            )

    def _options_of(self, request: VariableRequest) -> VariableOptions:
        """Return the options in the config for a requested variable.

        For the main input of a formula, the options of the target variable are returned; for any other input, the
        default options.
        """
        if request.role == FIELD:
            return self._conf.options_of(request.target_variable)
        return VariableOptions()

    def _find_si_conversion(
        self,
        request: VariableRequest,
        name_in_file: str,
        attributes: dict[str, str],
        level_mapping: LevelMapping | None,
    ) -> Conversion | ExpConversion | None:
        """Return the conversion of a variable to the SI units of formulas.

        The result is None if the variable is in SI units, or if no formula uses the variable.

        Raises:
            DataError: if a formula needs the variable and its units are missing or not known.
        """
        is_main_input = request.role == FIELD
        role: str | None = request.role
        if is_main_input:
            # The first input of a derived variable is its main input.
            role = next(iter(self._options_of(request).derived_from), None)
        if role is None and level_mapping is not None:
            role = find_extrapolated_quantity(request.target_variable, attributes.get("standard_name", ""))
        is_derived = self._conf.options_of(request.target_variable).derive is not None
        # Temperature is the only quantity that must be in SI units to be interpolated.
        if is_derived or not is_main_input or role == "temperature":
            return find_si_conversion(role, name_in_file, attributes, self._origin)
        return None

    def _build_rules(
        self,
        request: VariableRequest,
        variable: xr.Variable,
        attributes: dict[str, str],
        level_mapping: LevelMapping | None,
        conversion: Conversion | None,
    ) -> ValueRules:
        """Build the rules that check the values of a variable, in the units of the file.

        Raises:
            DataError: if the variable has the units of a different quantity.
        """
        options = self._options_of(request)
        # A range that the config declares applies to a variable that is not derived, and not to inputs of formulas.
        is_read = request.role == FIELD and options.derive is None
        valid_range = None
        if is_read:
            valid_range = options.valid_range
        # If a range is declared, the units are accepted without a check.
        if is_read and valid_range is None:
            require_plausible_units(request.target_variable, attributes, self._origin)
        packing = None
        packing_step = _read_packing_step(variable)
        if packing_step:
            packing = (packing_step, float(variable.encoding.get("add_offset", 0.0)))
        # xarray moves attributes that it has decoded to the encoding.
        declared = variable.encoding | variable.attrs
        has_fill_value = not declared.keys().isdisjoint(("_FillValue", "missing_value"))
        file_range = read_file_range(declared, packing)
        # Packed numbers are searched for undeclared fill values only if the file declares none.
        if has_fill_value:
            packing = None
        # The limits are defined for the levels of the run, so they do not apply to levels that are interpolated.
        levels: tuple[float | None, ...] = (None,)
        if request.levels is not None and level_mapping is None:
            levels = request.levels
        return build_value_rules(
            request.name,
            attributes,
            levels=levels,
            level_units=self._conf.level_units,
            packing=packing,
            file_range=file_range,
            valid_range=convert_range_to_file_units(valid_range, conversion),
            has_options=is_read,
        )

    def _find_level_indices(
        self, request: VariableRequest, dims: dict[str, str]
    ) -> tuple[tuple[int, ...] | None, LevelMapping | None]:
        """Return the indices of the levels to read from the file, and their mapping to the levels of the run.

        Returns:
            The indices of the levels in the file, None for a variable without levels; and the mapping from the levels
            of the file to the levels of the run, None if they are the same and no formula needs their pressure.

        Raises:
            DataError: if levels are missing, a 2-D variable has several levels, or a 3-D variable has none.
        """
        kind = self._conf.options_of(request.target_variable).derive
        # Mean sea level pressure has no levels, but its input is on levels.
        if request.levels is None and kind != "mean_sea_level_pressure":
            return self._find_single_level_index(request.name, dims, request.role == FIELD), None
        coordinates = self._coordinates
        if "level" in dims:
            _, name = coordinates.role_and_name_by_dim[dims["level"]]
        else:
            name = coordinates.scalar_by_role.get("level")
        if name is None:
            advice = "" if kind else "; list it in vars_2D"
            raise DataError(f"{self._origin}: {request.name} is in vars_3D but has no levels in the file{advice}")
        level_indices, level_mapping = self._level_resolver.find_level_mapping(
            self._dataset, name, request, self._source_number, self._origin
        )
        if level_indices is None:
            level_units = self._conf.level_units
            file_levels = read_level_values(self._dataset.variables[name], name, level_units, self._origin)
            level_indices = match_levels(file_levels, request.levels, request.name, level_units, self._origin)
        return level_indices, level_mapping

    def _find_single_level_index(self, name: str, dims: dict[str, str], is_field: bool) -> tuple[int, ...] | None:
        """Return the index of the only level of a 2-D variable, (0,); None if the variable has no level dimension.

        Args:
            name: name of the variable.
            dims: mapping from a role to the name of the dimension.
            is_field: True if the variable is listed in the config, False for an additional input of a formula; the
                advice in the error message depends on it.

        Raises:
            DataError: if the variable has several levels.
        """
        if "level" not in dims:
            return None
        num_levels = self._dataset.sizes[dims["level"]]
        if num_levels > 1 and is_field:
            raise DataError(
                f"{self._origin}: {name} is in vars_2D but is on {num_levels} levels in the file; list it in vars_3D"
            )
        if num_levels > 1:
            raise DataError(f"{self._origin}: {name} is on {num_levels} levels in the file, but must have no levels")
        return (0,) if num_levels else None

    def _read_times(self, dims: dict[str, str]) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the times (N,) and the time bounds (N, 2), in int64 minutes since 1900.

        If the file has no times or no time bounds, None is returned instead. A scalar time coordinate is one time.

        Raises:
            DataError: if the times cannot be decoded, or the calendar differs from the calendar of the other files.
        """
        coordinates = self._coordinates
        if "time" in dims:
            _, name = coordinates.role_and_name_by_dim[dims["time"]]
        else:
            name = coordinates.scalar_by_role.get("time")
        if name is None:
            return None, None
        # All variables of a file usually share one time coordinate, which is decoded once.
        if name not in self._decoded_times:
            coordinate = self._dataset.variables[name]
            times = self._shared.decode_times(coordinate, np.atleast_1d(coordinate.values), self._origin)
            bounds = coordinates.find_bounds(name)
            if bounds is not None:
                bounds = self._shared.decode_times(coordinate, bounds, self._origin).reshape(-1, 2)
            self._decoded_times[name] = times, bounds
        return self._decoded_times[name]


def _read_packing_step(variable: xr.Variable) -> float:
    """Return the difference of adjacent packed values in the units of the file, 0 if the variable is not packed."""
    is_packed = np.dtype(variable.encoding.get("dtype", float)).kind in "iu"
    if not is_packed:
        return 0.0
    return abs(float(variable.encoding.get("scale_factor", 0.0)))
