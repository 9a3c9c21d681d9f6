"""scores.nc: the table of scores with the attributes of the CF conventions."""

from __future__ import annotations

from pathlib import Path

import xarray as xr

from credit.verify.meanings import MEANINGS

_ENDS = {"_low": "lower end", "_high": "upper end"}
_LONG_NAMES = {
    "level": "level of the channel",
    "wind_level": "level of the wind",
    "event_level": "level of the event's channel",
    "n_cases": "number of initial times",
    "n_blocks": "number of blocks of days",
    "n_eff": "number of independent cases whose mean would be as uncertain",
    "rmse_difference": "RMSE of the model over that of the reference, less 1",
    "p_value": "p-value of the paired difference of squared errors",
    "p_adjusted": "p-value adjusted for the false discovery rate of the scorecard",
    "significant": "whether the difference is significant",
    "ranks": "relative frequency of the truth's rank among the members",
}


def write_scores(dataset: xr.Dataset, path: Path) -> None:
    """Write a table's dataset as netCDF, with a long name for whatever has none."""
    described = dataset.copy().assign_attrs(Conventions="CF-1.8")
    for name, variable in described.variables.items():
        variable.attrs.setdefault("long_name", long_name(str(name)))
    # CF 1.8 has no integers of 64 bits, and no missing values of coordinates
    encoding = {name: {"dtype": "int32"} for name, own in described.data_vars.items() if own.dtype == "int64"}
    described.to_netcdf(path, engine="netcdf4", encoding=encoding | {"lead": {"_FillValue": None}})


def long_name(name: str) -> str:
    """Return what a variable of the scores is, in words."""
    for end, words in _ENDS.items():
        if name.endswith(end):
            return f"{words} of the 95 % interval: {long_name(name.removesuffix(end))}"
    of_wind = name.removeprefix("wind_vector_")
    if name in MEANINGS:
        return MEANINGS[name].label
    if of_wind in MEANINGS:
        return MEANINGS[of_wind].wind_label or f"{MEANINGS[of_wind].label} of the wind vector"
    if name.removeprefix("wind_") in _LONG_NAMES and name not in _LONG_NAMES:
        return f"{_LONG_NAMES[name.removeprefix('wind_')]}, wind vectors"
    return _LONG_NAMES.get(name, name.replace("_", " "))
