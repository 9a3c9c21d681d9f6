"""Write the score table to a netCDF file with attributes of the CF conventions, version 1.8."""

from __future__ import annotations

from pathlib import Path

import xarray as xr

from credit import __version__
from credit.verify.report.score_descriptions import EVENT_DESCRIPTIONS, SCORE_DESCRIPTIONS, SEEPS_DESCRIPTION

# Suffix of a variable -> words that precede the name of the score; any score may have these suffixes.
_SUFFIXES = {
    "_low": "lower end of the 95 % interval of the",
    "_high": "upper end of the 95 % interval of the",
    "_fair": "fair",
}
# Suffix of a result of `credit.verify.significance.comparison` -> words, for scores other than RMSE.
_COMPARISON_SUFFIXES = {
    "_difference": "of the model divided by the score of the reference, minus 1",
    "_p_value": "p-value of the paired difference of the",
    "_n_eff": "number of independent cases with an equally uncertain mean difference of the",
    "_p_adjusted": "p-value, adjusted for the false discovery rate of the scorecard, of the difference of the",
    "_significant": "1 if the difference is significant, else 0, for the",
}
_DESCRIPTIONS = {**SCORE_DESCRIPTIONS, **EVENT_DESCRIPTIONS, "seeps": SEEPS_DESCRIPTION}
_LONG_NAMES = {
    "lead": "lead time",
    "acc_wb2": "mean over cases of the anomaly correlation of each case",
    "activity": "standard deviation in space of the anomaly",
    "activity_truth": "standard deviation in space of the truth's anomaly",
    "rmse_member": "root-mean-square error of a member",
    "rank_deviation": "sum over ranks of the distance between their frequency and the frequency in a flat histogram",
    "rank_outliers": "frequency of a truth outside the ensemble, divided by this frequency in a flat histogram",
    "level": "level of the channel",
    "wind_level": "level of the wind",
    "event_level": "level of the event's channel",
    "n_cases": "number of initial times",
    "n_blocks": "number of blocks of days",
    "n_eff": "number of independent cases with an equally uncertain mean difference",
    "rmse_difference": "RMSE of the model divided by the RMSE of the reference, minus 1",
    "p_value": "p-value of the paired difference of squared errors",
    "p_adjusted": "p-value adjusted for the false discovery rate of the scorecard",
    "significant": "1 if the difference is significant, else 0",
    "members": "number of members, 1 for a single forecast",
    "forcing": "source of the forcing in the forecast",
    "prescribed_forcing": "forcing variables whose values during the forecast were read from the analysis",
    "ensemble": "method that makes the members differ",
    "experiment": "name of the run",
    "checkpoint_step": "optimizer step of the weights",
    "weights": "fingerprint of the network's weights",
    "seen_periods": "periods on which the weights were trained or selected",
    "power": "power by total wavenumber, mean over the cases; for an ensemble, power of the first member",
    "power_truth": "power of the truth by total wavenumber, mean over the cases",
    "power_ratio": "power divided by the power of the truth, by total wavenumber",
    "short_wave_power": "power of the shortest third of the waves, divided by their power in the truth",
    "spectrum_lead": "lead time of the spectra",
    "spectrum_channel": "channel of the spectra",
    "spectrum_units": "units of the power",
    "wavenumber": "total wavenumber",
    "ranks": "relative frequency of the truth's rank among the members",
}


def write_scores(dataset: xr.Dataset, path: Path) -> None:
    """Write the dataset of a score table to a netCDF file; add a long name to every variable without one.

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
    # CF 1.8 does not support 64-bit integers and missing values in coordinates.
    encoding = {}
    for name, variable in described.data_vars.items():
        if variable.dtype == "int64":
            encoding[name] = {"dtype": "int32"}
    for name in ("lead", "spectrum_lead"):
        if name in described.coords:
            encoding[name] = {"_FillValue": None}
    described.to_netcdf(path, engine="netcdf4", encoding=encoding)


def long_name(name: str) -> str:
    """Return the long name of a variable of scores.nc.

    The long name combines the label of the score with the meaning of its suffixes or prefix. For ``bias_high``, it is
    "upper end of the 95 % interval of the bias".

    Args:
        name: name of the variable.
    """
    # A score may have several of these suffixes, such as crps_fair_low.
    for suffix, words in _SUFFIXES.items():
        if name.endswith(suffix):
            return f"{words} {_lower_first(long_name(name.removesuffix(suffix)))}"
    if name in _DESCRIPTIONS:
        return _DESCRIPTIONS[name].label
    if name in _LONG_NAMES:
        return _LONG_NAMES[name]
    # The name of a wind score is the name of the channel score with a prefix.
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
    """Return words with a lower-case first letter, for use in a phrase; abbreviations and names are not changed."""
    if words[1:2].isupper() or words.startswith("Brier"):
        return words
    return words[:1].lower() + words[1:]
