"""Sources of the ``data`` section, and the grid that they are brought to."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from credit.config.base import Section


class VerticalConfig(Section):
    """What belongs to the levels of a source: it lies on hybrid levels, or is to be brought to hybrid ones."""

    surface_pressure: str = Field(description="Variable with surface pressure or, as in ERA5, its logarithm (lnsp).")
    surface_geopotential: str | None = Field(
        None, description="Variable with geopotential or height of the ground, for what lies below it and `derive`."
    )
    coefficients: str | None = Field(
        None,
        description="A file with the levels' coefficients where the source has none: netCDF, or CSV with columns a "
        "(Pa) and b of the half levels.",
    )


class SourceConfig(Section):
    """One set of files that hold some or all of the variables."""

    path: str | list[str] = Field(
        description="A file, a zarr store (on a disk, or s3://, gs://, https://), a glob, a strftime pattern "
        "(era5_%Y%m.nc), or a list of these. "
        "`sample:NAME` finds data that ships with the package. `$VAR` is expanded."
    )
    format: Literal["auto", "netcdf", "zarr", "grib"] = Field(
        "auto", description="By default from the name's ending and the first bytes."
    )
    variables: list[str] | None = Field(None, description="Read only these from here; default: all that it has.")
    rename: dict[str, str] = Field({}, description="Our name -> name in the files.")
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


class GridConfig(Section):
    """The run's grid, where sources are on others: `rows`, `columns` and `poles`, or `like`."""

    rows: int | None = Field(None, ge=2, description="Rows of a global grid with equal spacing.")
    columns: int | None = Field(None, ge=2, description="Its columns; the first is at longitude 0.")
    poles: bool | None = Field(
        None, description="Whether the outermost rows lie on the poles (181 x 360) or half a cell off (180 x 360)."
    )
    like: str | None = Field(
        None, description="A file with the grid, or several with the same, written as in `data.sources.N.path`."
    )

    @model_validator(mode="after")
    def _one_way(self) -> GridConfig:
        numbers = (self.rows, self.columns, self.poles)
        if numbers.count(None) != (0 if self.like is None else 3):
            raise ValueError("name rows, columns and poles, or like alone")
        return self
