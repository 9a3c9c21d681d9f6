"""Write the score table as netCDF with the attributes of the CF conventions, version 1.8."""

from __future__ import annotations

from pathlib import Path

import xarray as xr

from credit import __version__
from credit.verify.report.score_descriptions import EVENT_DESCRIPTIONS, SCORE_DESCRIPTIONS, SEEPS_DESCRIPTION

# Suffixes of variables, which apply to any score.
_SUFFIXES = {
    "_low": "lower end of the 95 % interval of the",
    "_high": "upper end of the 95 % interval of the",
    "_fair": "fair",
}
# Results of `credit.verify.significance.comparison`, for other scores than RMSE.
_COMPARISON_SUFFIXES = {
    "_difference": "of the model over that of the reference, less 1",
    "_p_value": "p-value of the paired difference of the",
    "_n_eff": "number of independent cases whose mean would be as uncertain, by the",
    "_p_adjusted": "p-value adjusted for the false discovery rate of the scorecard, of the",
    "_significant": "whether the difference is significant, of the",
}
_DESCRIPTIONS = {**SCORE_DESCRIPTIONS, **EVENT_DESCRIPTIONS, "seeps": SEEPS_DESCRIPTION}
_LONG_NAMES = {
    "lead": "lead time",
    "acc_wb2": "anomaly correlation of each case, then the mean",
    "activity": "standard deviation in space of the anomaly",
    "activity_truth": "standard deviation in space of the truth's anomaly",
    "rmse_member": "root-mean-square error of a member",
    "rank_deviation": "sum over ranks of the distance of their frequency from a flat histogram's",
    "rank_outliers": "frequency of a truth outside the ensemble over that of a flat histogram",
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
    "members": "number of members, 1 of a single forecast",
    "forcing": "where forcing came from in the forecast",
    "prescribed_forcing": "forcing that was read from the analysed future",
    "ensemble": "how the members differ",
    "experiment": "name of the run",
    "checkpoint_step": "optimizer steps behind the weights",
    "weights": "fingerprint of the network's weights",
    "seen_periods": "periods that the weights were trained or selected on",
    "power": "power by total wavenumber, mean over the cases, of an ensemble that of its first member",
    "power_truth": "power of the truth by total wavenumber, mean over the cases",
    "power_ratio": "power over the truth's, by total wavenumber",
    "short_wave_power": "power of the shortest third of the wavenumbers over the truth's",
    "spectrum_lead": "lead time of the spectra",
    "spectrum_channel": "channel of the spectra",
    "spectrum_units": "units of the power",
    "wavenumber": "total wavenumber",
    "ranks": "relative frequency of the truth's rank among the members",
}


def write_scores(dataset: xr.Dataset, path: Path) -> None:
    """Write the dataset of a score table as netCDF, and add a long name to every variable that has none.

    Args:
        dataset: the scores, see `credit.verify.table.table.ScoreTable`.
        path: path of the file.

    Raises:
        OSError: if the file cannot be written.
    """
    history = f"credit {__version__}: credit verify"
    described = dataset.copy().assign_attrs(Conventions="CF-1.8", history=history)
    for name, variable in described.variables.items():
        variable.attrs.setdefault("long_name", long_name(str(name)))
    # CF 1.8 has no integers of 64 bits, and no missing values of coordinates.
    encoding = {}
    for name, variable in described.data_vars.items():
        if variable.dtype == "int64":
            encoding[name] = {"dtype": "int32"}
    for name in ("lead", "spectrum_lead"):
        if name in described.coords:
            encoding[name] = {"_FillValue": None}
    described.to_netcdf(path, engine="netcdf4", encoding=encoding)


def long_name(name: str) -> str:
    """Return the long name of a variable of scores.nc, given its name.

    It combines the label of the score with the meaning of a suffix or prefix: ``bias_high`` becomes "upper end of the
    95 % interval of the bias".
    """
    # These suffixes are removed first, and any score may have several: crps_fair_low is the lower end of the fair CRPS.
    for suffix, words in _SUFFIXES.items():
        if name.endswith(suffix):
            return f"{words} {_lower_first(long_name(name.removesuffix(suffix)))}"
    if name in _DESCRIPTIONS:
        return _DESCRIPTIONS[name].label
    if name in _LONG_NAMES:
        return _LONG_NAMES[name]
    # The names of scores of winds are those of the channels with a prefix.
    score = name.removeprefix("wind_vector_").removeprefix("wind_")
    if score != name:
        # The CRPS of a wind vector is the energy score.
        wind_score = score.replace("crps", "energy_score")
        return f"{long_name(wind_score)}, wind vectors"
    for suffix, words in _COMPARISON_SUFFIXES.items():
        if name.endswith(suffix):
            score_name = long_name(name.removesuffix(suffix))
            if suffix == "_difference":
                return f"{score_name} {words}"
            return f"{words} {_lower_first(score_name)}"
    return name.replace("_", " ")


def _lower_first(words: str) -> str:
    """Return text with a small first letter, for use inside a phrase; abbreviations and names stay unchanged."""
    if words[1:2].isupper() or words.startswith("Brier"):
        return words
    return words[:1].lower() + words[1:]
