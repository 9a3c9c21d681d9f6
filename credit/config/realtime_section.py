"""The ``realtime`` section: forecasts from the newest operational analysis."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from credit.calendar import parse_duration
from credit.config.sections.base import Duration, Hour, StrictModel

# Placeholders that an address must contain, and placeholders that it may contain.
_REQUIRED_PLACEHOLDERS = ("date", "cycle")
_OPTIONAL_PLACEHOLDERS = ("stream",)
_PLACEHOLDER = re.compile(r"\{(\w*)\}")


class RecordConfig(StrictModel):
    """Record of the analysis from which a variable is read."""

    param: str = Field(
        description="Name of the parameter in the index, such as `TMP` (`gfs_idx`) or `2t` (`ecmwf_index`)."
    )
    level: str | None = Field(
        None,
        description="For a variable in `vars_2D`: its level in the index. `gfs_idx`: `surface`, `mean sea level`, "
        "`N m above ground`, `N mb` or `entire atmosphere ...`. `ecmwf_index`: `sfc` (default) or `N hPa`. Variables "
        "in `vars_3D` have pressure levels.",
    )
    short_name: str | None = Field(
        None,
        description="Expected `shortName` of the record in ecCodes. Default: the built-in name of `param`.",
    )


class RealtimeConfig(StrictModel):
    """Forecasts of `credit realtime` from the newest operational analysis, which is fetched by HTTP."""

    format: Literal["gfs_idx", "ecmwf_index"] = Field(
        description="Format of the index next to a GRIB 2 file. `gfs_idx`: lines such as "
        "`1:0:d=2026112700:PRMSL:mean sea level:anl:`. `ecmwf_index`: JSON lines with `_offset` and `_length`."
    )
    url: str = Field(
        description="Address of the GRIB 2 file of one analysis, http:// or https://, with the placeholders `{date}` "
        "(YYYYMMDD) and `{cycle}` (HH). `{stream}` becomes `oper` at 00 and 12 UTC and `scda` at other hours, as in "
        "ECMWF's open data."
    )
    index_url: str | None = Field(
        None,
        description="Address of the index. Default: `url` with `.idx` appended (`gfs_idx`), or with `.index` instead "
        "of its extension (`ecmwf_index`).",
    )
    cycles: list[Hour] = Field([0, 6, 12, 18], min_length=1, description="Hours (UTC) of the analyses.")
    available_after: Duration = Field(
        "4h",
        description="Time from the hour of an analysis until it is usually complete on the server. The newest cycle "
        "that is expected by now, or by the deadline of `--until`, is used.",
    )
    max_age: Duration = Field(
        "24h", description="Largest age of a usable cycle: the time from the hour of the cycle to the call."
    )
    on_incomplete: Literal["fail", "previous_cycle"] = Field(
        "fail",
        description="Action if a record of the expected cycle is missing or damaged, or the cycle is late. `fail`: "
        "exit code 3 and no forecast. `previous_cycle`: use the newest earlier cycle that is complete; exit code 4.",
    )
    on_shift: Literal["fail", "warn"] = Field(
        "fail",
        description="Action if the mean or the standard deviation of a field differs strongly from the training "
        "period. `fail`: the cycle is "
        "not used. `warn`: log a warning.",
    )
    fields: dict[str, RecordConfig] = Field(
        {},
        description="Variable of the model -> its record, for variables without a built-in record or with a different "
        "record in these analyses.",
    )
    regrid: Literal["bilinear", "conservative"] = Field(
        "conservative",
        description="Interpolation to the grid of the model. `conservative` is for an analysis on a finer grid.",
    )
    retries: int = Field(5, ge=0, description="Number of repetitions of a failed request or of a damaged record.")
    timeout: int = Field(60, ge=1, description="Longest time in seconds to wait for an answer of the server.")
    poll_every: Duration = Field("5min", description="With `--until`: interval between checks for a late cycle.")
    keep_analyses: Duration = Field(
        "3d", description="Age at which analyses in the folder of the run are deleted. Forecasts and scores are kept."
    )

    @field_validator("url", "index_url")
    @classmethod
    def _require_valid_address(cls, url: str | None) -> str | None:
        """Raise ValueError if an address has an unsupported protocol, or an unknown or a missing placeholder."""
        if url is None:
            return url
        if not url.startswith(("http://", "https://")):
            raise ValueError(f'"{url}" must begin with http:// or https://')
        names = _PLACEHOLDER.findall(url)
        for name in names:
            if name not in _REQUIRED_PLACEHOLDERS + _OPTIONAL_PLACEHOLDERS:
                raise ValueError(
                    f'"{{{name}}}" is not a placeholder; use {{date}} (YYYYMMDD), {{cycle}} (HH) and {{stream}}'
                )
        rest = _PLACEHOLDER.sub("", url)
        if "{" in rest or "}" in rest:
            raise ValueError(f'"{url}" has a brace that is not part of a placeholder')
        for name in _REQUIRED_PLACEHOLDERS:
            if name not in names:
                raise ValueError(f'"{url}" must contain {{{name}}}, or all analyses would have the same address')
        return url

    @model_validator(mode="after")
    def _require_consistent(self) -> RealtimeConfig:
        """Raise ValueError if the durations allow no cycle, or if an hour is repeated."""
        if len(set(self.cycles)) < len(self.cycles):
            raise ValueError(f"cycles: {self.cycles} contains an hour twice")
        if parse_duration(self.max_age) < parse_duration(self.available_after):
            raise ValueError(
                f"max_age: {self.max_age} must be at least available_after {self.available_after}, otherwise no cycle "
                f"is usable"
            )
        return self
