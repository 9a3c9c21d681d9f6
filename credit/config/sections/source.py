"""The entries of ``data.sources``, and the grid to which sources are interpolated."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from credit.config.sections.base import Duration, PathText, StrictModel
from credit.errors import did_you_mean

# Registered name of a source type -> section of its options; None if the source has no section.
_OPTION_SECTIONS: dict[str, type[StrictModel] | None] = {}


def register_source_type(name: str, options: type[StrictModel] | None = None) -> None:
    """Register a value of ``data.sources.N.type``.

    `credit.data.formats.plugin.source.register_source`, with which a plugin registers a source, calls this function.

    Args:
        name: name of the type.
        options: section with the keys of ``data.sources.N.options``; None if the options are not validated.
    """
    _OPTION_SECTIONS[name] = options


class VerticalConfig(StrictModel):
    """Vertical interpolation of a source, from hybrid levels or to hybrid levels."""

    surface_pressure: str = Field(
        description="Name of the variable with surface pressure or its logarithm (lnsp in ERA5)."
    )
    surface_geopotential: str | None = Field(
        None,
        description="Name of the variable with the geopotential or height of the surface. Needed for temperature "
        "below the ground and for `derive`.",
    )
    coefficients: PathText | None = Field(
        None,
        description="File with the coefficients of the source's levels, if the source does not contain them: netCDF, "
        "GRIB, or "
        "CSV with the columns a (in Pa) and b of the half levels.",
    )


class SourceConfig(StrictModel):
    """A set of files, or a source that a plugin registers. It contains some or all variables."""

    path: PathText | list[PathText] | None = Field(
        None,
        description="A file, a zarr store (on a disk, or s3://, gs://, https://), a glob, a strftime pattern "
        "(era5_%Y%m.nc), or a list of these. `sample:NAME` is a data set that the package contains. `~` "
        "and `$VAR` are expanded.",
    )
    type: str | None = Field(None, description="Instead of `path`: the name of a source that a plugin registers.")
    options: dict[str, Any] = Field({}, description="Keyword arguments of the class that `type` names.")
    format: Literal["auto", "netcdf", "zarr", "grib"] = Field(
        "auto", description="Format of the files. `auto` recognises it by the file name or the first bytes."
    )
    variables: list[str] | None = Field(
        None, description="Read only these variables from this source. Default: all variables that it contains."
    )
    rename: dict[str, str | list[str]] = Field(
        {},
        description="Variable of the run -> its name in the files. If the names differ between files, give a list "
        "(`t: [t, T, var130]`): the first name that a file contains is used.",
    )
    period: tuple[str, str] | None = Field(
        None,
        description="Read only the times between these two dates (UTC, including both dates). If the last date has no "
        "clock "
        "time, the whole day is included. Use this key if one source continues a different source.",
    )
    every: Duration | None = Field(
        None,
        description="Read only the times that are a multiple of this interval after 00 UTC, for example `6h` of hourly "
        "data. Variables that are means or sums need a source without `every`.",
    )
    select: dict[str, int | float | str] = Field(
        {},
        description="Coordinate -> value: selects one position of an additional dimension (`{number: 0}`). In GRIB "
        "files: typeOfLevel, stepType, number, grid, step (hours), expver, dataType, stream, or a type of "
        "level.",
    )
    times: Literal["exact", "persist", "cyclic"] = Field(
        "exact",
        description="Times at which a value is used. `exact`: only the time of the value. `persist`: until the next "
        "value, for "
        "forcing with fewer times than the other data. `cyclic`: in every year, for a representative "
        "year.",
    )
    vertical: VerticalConfig | None = Field(
        None,
        description="Interpolate the variables on levels to `data.levels`, from hybrid levels or to hybrid levels. "
        "Default: no interpolation; the source must contain these levels.",
    )
    storage_options: dict[str, bool | int | float | str] = Field(
        {},
        description="Options of fsspec for a remote zarr store, for example `{anon: true}`. Set access keys in the "
        "environment.",
    )

    def names_in_files(self, variable: str) -> list[str]:
        """Return the possible names of a variable of the run in the files, in order of preference."""
        names = self.rename.get(variable, variable)
        if isinstance(names, str):
            return [names]
        return names

    @model_validator(mode="after")
    def _require_filled_rename_lists(self) -> SourceConfig:
        """Raise ValueError if the list of names for a variable is empty."""
        for variable, names in self.rename.items():
            if not names:
                raise ValueError(f"rename.{variable}: the list is empty; write at least one name")
        return self

    @model_validator(mode="after")
    def _require_files_or_type(self) -> SourceConfig:
        """Raise ValueError unless exactly one of ``path`` and ``type`` is set, or if a key does not apply to the
        source.
        """
        # The comparison is True if both keys are missing or both keys are set.
        if (self.path is None) == (self.type is None):
            state = "neither is" if self.path is None else "both are"
            raise ValueError(
                f"give exactly one of path (files) and type (a source that a plugin registers); {state} given"
            )
        # The source consists of files.
        if self.type is None:
            if self.options:
                raise ValueError(f"options: {self.options} are for a source with a type; files have no options")
            return self
        # The source is registered by a plugin.
        if self.type not in _OPTION_SECTIONS:
            hint = did_you_mean(self.type, _OPTION_SECTIONS)
            if not hint:
                hint = "; no plugin has registered a source: list the module of your source in plugins"
            raise ValueError(f'type: "{self.type}" is not a registered source{hint}')
        for key in ("format", "select", "storage_options"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is only for files; a source with a type has options instead")
        self._require_valid_options(_OPTION_SECTIONS[self.type])
        return self

    def _require_valid_options(self, section: type[StrictModel] | None) -> None:
        """Raise an error if options cannot be saved with the config or are invalid for the source type.

        Args:
            section: section of the options of this type; None if the options are not validated.
        """
        # The config of a run is saved as YAML and JSON, so both formats must preserve every value.
        for name, value in self.options.items():
            if not _is_plain_value(value):
                raise ValueError(
                    f"options: {name} is {value!r}; the config is saved with the run and may hold text, finite "
                    "numbers, true, false, null, and lists and mappings (with text as keys) of these"
                )
        if section is None:
            return
        # Pydantic would report an unknown option without the nearest name.
        for name in self.options:
            if name not in section.model_fields:
                hint = did_you_mean(name, section.model_fields) or "; it has no options"
                raise ValueError(f'options: "{name}" is not an option of {self.type}{hint}')
        try:
            section.model_validate(self.options)
        except ValidationError as error:
            detail = error.errors()[0]
            option = ".".join(str(item) for item in detail["loc"])
            rule = "this option is missing" if detail["type"] == "missing" else detail["msg"]
            raise ValueError(f"options: {option}: {rule}; it is an option of {self.type}") from error


def _is_plain_value(value: object) -> bool:
    """Return True if a value does not change when it is written as YAML and read again."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain_value(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_plain_value(item) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)


class GridConfig(StrictModel):
    """A global latitude-longitude grid. Set either `rows`, `columns` and `poles`, or `like`."""

    rows: int | None = Field(None, ge=2, description="Number of rows, equally spaced in latitude.")
    columns: int | None = Field(None, ge=2, description="Number of columns; the first one is at longitude 0.")
    poles: bool | None = Field(
        None,
        description="true: the first and last row are at the poles (181 x 360). false: they are half a cell away from "
        "the poles (180 x 360).",
    )
    like: PathText | None = Field(
        None, description="A file with the grid; it may be a pattern as in `data.sources.N.path`."
    )

    @model_validator(mode="after")
    def _require_one_description(self) -> GridConfig:
        """Raise ValueError unless either ``rows``, ``columns`` and ``poles``, or only ``like`` are set."""
        num_missing = (self.rows, self.columns, self.poles).count(None)
        # Without `like`, all three keys are required; with `like`, none of them is allowed.
        num_required = 0 if self.like is None else 3
        if num_missing != num_required:
            raise ValueError("set rows, columns and poles, or only like")
        return self
