"""Sources of the ``data`` section, and the grid that they are brought to."""

from __future__ import annotations

import inspect
import math
from typing import Any, Literal

from pydantic import Field, model_validator

from credit.config.schema_base import PathText, Section
from credit.errors import did_you_mean

_TYPES: dict[str, type] = {}


def register_source_type(name: str, cls: type) -> None:
    """Let ``data.sources.N.type`` be `name`; `credit.data.formats.plugin_source.register_source` calls it.

    Args:
        name: of the type.
        cls: what takes ``data.sources.N.options``.
    """
    _TYPES[name] = cls


class VerticalConfig(Section):
    """What belongs to the levels of a source: it lies on hybrid levels, or is to be brought to hybrid ones."""

    surface_pressure: str = Field(description="Variable with surface pressure or, as in ERA5, its logarithm (lnsp).")
    surface_geopotential: str | None = Field(
        None, description="Variable with geopotential or height of the ground, for what lies below it and `derive`."
    )
    coefficients: PathText | None = Field(
        None,
        description="A file with the levels' coefficients where the source has none: netCDF, or CSV with columns a "
        "(Pa) and b of the half levels.",
    )


class SourceConfig(Section):
    """One set of files, or one source that a plugin registers, with some or all of the variables."""

    path: PathText | list[PathText] | None = Field(
        None,
        description="A file, a zarr store (on a disk, or s3://, gs://, https://), a glob, a strftime pattern "
        "(era5_%Y%m.nc), or a list of these. "
        "`sample:NAME` finds data that ships with the package. `~` and `$VAR` are expanded.",
    )
    type: str | None = Field(None, description="Instead of `path`: a source that a plugin registers, by its name.")
    options: dict[str, Any] = Field({}, description="What the class of `type` is called with.")
    format: Literal["auto", "netcdf", "zarr", "grib"] = Field(
        "auto", description="By default from the name's ending and the first bytes."
    )
    variables: list[str] | None = Field(None, description="Read only these from here; default: all that it has.")
    rename: dict[str, str | list[str]] = Field(
        {},
        description="Our name -> name in the files, or a list of names (`t: [t, T, var130]`) where files differ: of "
        "each file the first that it has is read.",
    )
    period: tuple[str, str] | None = Field(
        None,
        description="Use its times from the first to the last of these two dates only (UTC; a date without a time as "
        "the last one means the whole day), so that one source can follow another.",
    )
    select: dict[str, int | float | str] = Field(
        {},
        description="Coordinate -> its value: one position along a further dimension (`{number: 0}`). In GRIB files "
        "typeOfLevel, stepType, number, grid, step (hours), expver, dataType, stream, or a type of level.",
    )
    times: Literal["exact", "persist", "cyclic"] = Field(
        "exact",
        description="When its values count: at their own times; each until the next (`persist`, for forcings that are "
        "rarer than the rest); or in every year (`cyclic`, a representative year).",
    )
    vertical: VerticalConfig | None = Field(
        None,
        description="Its variables on levels are interpolated to `data.levels`, from hybrid levels or to them; none: "
        "its levels are matched exactly.",
    )
    storage_options: dict[str, bool | int | float | str] = Field(
        {}, description="How to reach a remote zarr store, for example `{anon: true}`; keys belong in the environment."
    )

    def names_of(self, variable: str) -> list[str]:
        """Return the names under which the files may hold a variable of the run, in the order of preference."""
        names = self.rename.get(variable, variable)
        return [names] if isinstance(names, str) else names

    @model_validator(mode="after")
    def _named(self) -> SourceConfig:
        for variable, names in self.rename.items():
            if not names:
                raise ValueError(f"rename.{variable}: names no variable of the files; write at least one name")
        return self

    @model_validator(mode="after")
    def _files_or_a_type(self) -> SourceConfig:
        if (self.path is None) == (self.type is None):
            raise ValueError("name files (path), or a source that a plugin registers (type), one of the two")
        if self.type is None:
            if self.options:
                raise ValueError(f"options: {self.options} are for a source with a type; for files there is format")
            return self
        if self.type not in _TYPES:
            hint = did_you_mean(self.type, _TYPES) or "; no plugin has registered one: name its module in plugins"
            raise ValueError(f'type: "{self.type}" is no source{hint}')
        for key in ("format", "select", "storage_options"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is for files; a source with a type has options")
        self._check_options(inspect.signature(_TYPES[self.type]))
        return self

    def _check_options(self, signature: inspect.Signature) -> None:
        odd = [name for name, value in self.options.items() if not _is_plain(value)]
        if odd:
            raise ValueError(
                f"options: {odd[0]} is {self.options[odd[0]]!r}; the config that is kept with the run holds "
                "text, finite numbers, true, false, null, and lists and mappings (with names of text) of these"
            )
        known = signature.parameters.values()
        if not any(one.kind is one.VAR_KEYWORD for one in known):
            for name in [own for own in self.options if own not in signature.parameters]:
                hint = did_you_mean(name, signature.parameters) or "; it takes none"
                raise ValueError(f'options: "{name}" is none of {self.type}{hint}')
        try:
            signature.bind(**self.options)
        except TypeError as error:
            raise ValueError(f"options: {error}; {self.type} takes {signature}") from error


def _is_plain(value: object) -> bool:
    """Return whether a value of the config is read again as it is when it has been written."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(one) for name, one in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


class GridConfig(Section):
    """The run's grid, where sources are on others: `rows`, `columns` and `poles`, or `like`."""

    rows: int | None = Field(None, ge=2, description="Rows of a global grid with equal spacing.")
    columns: int | None = Field(None, ge=2, description="Its columns; the first is at longitude 0.")
    poles: bool | None = Field(
        None, description="Whether the outermost rows lie on the poles (181 x 360) or half a cell off (180 x 360)."
    )
    like: PathText | None = Field(
        None, description="A file with the grid, or several with the same, written as in `data.sources.N.path`."
    )

    @model_validator(mode="after")
    def _one_way(self) -> GridConfig:
        numbers = (self.rows, self.columns, self.poles)
        if numbers.count(None) != (0 if self.like is None else 3):
            raise ValueError("name rows, columns and poles, or like alone")
        return self
