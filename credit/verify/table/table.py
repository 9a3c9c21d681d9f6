"""Score table: scores by forecast, season, channel, lead time (L of them) and region, and the files that hold them."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xarray as xr

from credit.config.sections.verification import BASELINES, BEST_BASELINE, REGIONS
from credit.utils.atomic import atomic_write
from credit.verify.report.metadata import is_prescribed
from credit.verify.significance.bootstrap import INTERVAL_SUFFIXES, METRICS_WITH_INTERVAL
from credit.verify.significance.comparison import MIN_BLOCKS_FOR_SIGNIFICANCE
from credit.verify.statistics.seasons import ALL_SEASONS
from credit.verify.table.netcdf import write_scores

# Global attributes of scores.nc on which numbers depend; every row of scores.csv has them, too.
COMMON_ATTRIBUTES = ("grid", "truth", "first_case", "last_case", "initial_hours", "climatology", "version")
# Variables of scores.nc over forecast that every row of scores.csv has.
FORECAST_ATTRIBUTES = ("members", "prescribed_forcing")
# Global attributes with sentences: forecasts whose weights have seen a part of the test period, and requested lead
# times that the forecasts lack.
SEEN_PERIODS = "seen_periods_scored"
MISSING_LEADS = "lead_times_without_scores"
CSV_COLUMNS = (
    "forecast", "variable", "level", "level_units", "region", "season", "lead_hours", "metric", "value", "units",
    "n_cases", "low", "high", "n_blocks", "event", *FORECAST_ATTRIBUTES, *COMMON_ATTRIBUTES,
)  # fmt: skip

# Metrics that the climatology does not have, because its anomaly is zero everywhere.
CORRELATIONS = ("acc", "acc_wb2", "acc_low", "acc_high")
# Metrics of every channel and wind.
METRICS = ("rmse", "bias", "mae", "acc", "acc_wb2", "activity", "activity_truth", "activity_ratio")
# Further metrics of tables with an ensemble.
ENSEMBLE_METRICS = ("crps", "crps_fair", "spread", "spread_skill", "rmse_member")
# Metrics of ensembles that channels have, but not winds.
RANK_METRICS = ("rank_deviation", "rank_outliers")
# Metric of the channels and lead times that have spectra.
SHORT_WAVES = "short_wave_power"
# Metric of precipitation.
SEEPS = "seeps"
EVENT_METRICS = (
    "brier", "brier_fair", "brier_skill", "brier_skill_fair", "reliability", "resolution", "uncertainty",
)  # fmt: skip
# For a wind vector, the bias is that of its length (wind speed), and the CRPS is the energy score.
_SPECIAL_WIND_METRICS = {"bias": "wind_speed_bias", "crps": "wind_energy_score", "crps_fair": "wind_energy_score_fair"}
WIND_METRICS = {name: _SPECIAL_WIND_METRICS.get(name, f"wind_vector_{name}") for name in METRICS + ENSEMBLE_METRICS}
# Names of the wind variables of scores.nc, those of intervals included.
WIND_NAMES = dict(WIND_METRICS)
for _metric, _wind_metric in WIND_METRICS.items():
    if _metric in METRICS_WITH_INTERVAL:
        for _suffix in INTERVAL_SUFFIXES:
            WIND_NAMES[f"{_metric}{_suffix}"] = f"{_wind_metric}{_suffix}"
_DIMENSIONLESS = ("acc", "acc_wb2", "activity_ratio", "spread_skill", *RANK_METRICS, SHORT_WAVES, SEEPS, *EVENT_METRICS)
# Lead times of summaries in hours.
_SUMMARY_LEADS = (6, 12, 24, 48, 72, 120, 168, 240)
_REGION_NAMES = {
    "ausnz": "Australia and New Zealand",
    "east_asia": "East Asia",
    "north_america": "North America",
    "north_atlantic": "North Atlantic",
    "north_pacific": "North Pacific",
}


class ScoreTable:
    """Scores of a verification.

    Most variables of the dataset have the dimensions (forecast, season, channel, lead, region). For scores of wind
    vectors the dimension wind replaces channel, and for scores of events event replaces channel. These variables are:

    - `METRICS` and, if a forecast is an ensemble, `ENSEMBLE_METRICS`, with the ends of their 95 % intervals, such as
      ``rmse_low`` and ``rmse_high``.
    - `SEEPS` for precipitation, `RANK_METRICS` for ensembles, and `EVENT_METRICS` for events.
    - The results of the comparison with the references, with the dimension reference instead of forecast, such as
      ``rmse_difference`` or ``brier_p_value``. See `credit.verify.significance.comparison.comparison_name`.

    Further variables are ``ranks``, the rank histogram, with dimensions (forecast, channel, lead, region, rank);
    ``forecast_frequency`` and ``observed_frequency``, the reliability diagram, with dimensions (forecast, event, lead,
    region, members_beyond); and the attributes of the forecasts (`credit.verify.report.metadata.describe_forecasts`),
    with the dimension forecast.

    Attributes:
        dataset: the scores, in physical units, NaN where there is no score.
        forecasts: names of the forecasts and baselines.
        channels: names of the channels.
        lead_hours: lead times in hours, increasing.
        regions: names of the regions.
        seasons: ``all``, then the names of the seasons that have cases.
        events: names of the events; empty if no event is scored.
    """

    def __init__(self, dataset: xr.Dataset) -> None:
        self.dataset = dataset
        self.forecasts: list[str] = dataset["forecast"].values.tolist()
        self.channels: list[str] = dataset["channel"].values.tolist()
        self.lead_hours: list[float] = dataset["lead"].values.tolist()
        self.regions: list[str] = dataset["region"].values.tolist()
        self.seasons: list[str] = dataset["season"].values.tolist()
        self.events: list[str] = []
        if "event" in dataset:
            self.events = dataset["event"].values.tolist()

    @property
    def n_cases(self) -> int:
        """Number of initial times (cases) of the scores that cover all seasons."""
        # All seasons come first.
        return int(self.dataset["n_cases"][0])

    @property
    def n_blocks(self) -> list[int]:
        """Number of blocks of days at each lead time, for the scores that cover all seasons."""
        return self.dataset["n_blocks"].values[0].tolist()

    @property
    def candidates(self) -> list[str]:
        """Names of the forecasts that are not baselines."""
        return [name for name in self.forecasts if name not in BASELINES]

    def forecast_attribute(self, attribute: str, forecast: str) -> str:
        """Return an attribute of a forecast as text, such as its ``members``.

        Args:
            attribute: name of the attribute, one of `credit.verify.report.metadata.describe_forecasts`.
            forecast: name of the forecast.

        Raises:
            KeyError: if the table has no such attribute.
            ValueError: if the table has no such forecast.
        """
        return str(self.dataset[attribute].values[self.forecasts.index(forecast)])

    def display_name(self, name: str) -> str:
        """Return the name that figures and reports show for a forecast, a reference or a region.

        For ``model``, the forecasts of the run, it is the name of the experiment. For other forecasts it is the name
        that the user gave them. For baselines and regions it is their name in words, such as "Damped persistence".
        """
        if name == "model":
            return self._find_model_name()
        if name in _REGION_NAMES:
            return _REGION_NAMES[name]
        if name in BASELINES or name == BEST_BASELINE or name in REGIONS:
            return name.replace("_", " ").capitalize()
        return name

    def _find_model_name(self) -> str:
        """Return the name that figures and reports show for the forecasts of the run."""
        experiment = ""
        if "experiment" in self.dataset:
            experiment = self.forecast_attribute("experiment", "model")
        experiment = experiment or str(self.dataset.attrs.get("experiment", ""))
        if not experiment:
            return "Model"
        # The names of other forecasts are free, so one may be that of the experiment.
        if experiment in self.forecasts:
            return f"{experiment} (this run)"
        return experiment

    def warnings(self) -> list[str]:
        """Return sentences on missing scores, and on differences between the forecasts that make comparisons unfair."""
        warnings = []
        # Requested lead times without scores, and test periods that weights were trained on.
        for key in (SEEN_PERIODS, MISSING_LEADS):
            text = self.dataset.attrs.get(key)
            if text:
                warnings.append(f"{text}.")
        # Forcing that was read from the future.
        for name in self.candidates:
            forcing = self.forecast_attribute("prescribed_forcing", name)
            if is_prescribed(forcing):
                warnings.append(
                    f"Prescribed forcing of {self.display_name(name)}: {forcing} was read from the analysed future, "
                    "which a real forecast does not have."
                )
        # Ensembles of different size.
        num_members = {}
        for name in self.candidates:
            num_members[self.display_name(name)] = self.forecast_attribute("members", name)
        if len(set(num_members.values())) > 1:
            numbers = ", ".join(f"{name} {number}" for name, number in num_members.items())
            warnings.append(
                f"Unequal numbers of members: {numbers}. The mean of more members has a smaller RMSE for that reason "
                "alone; of ensembles crps_fair and brier_fair correct for it."
            )
        return warnings

    def units(self, channel: str) -> str:
        """Return the units of a channel."""
        return str(self.dataset["units"].sel(channel=channel).item())

    def score(
        self, forecast: str, channel: str, lead_hours: float, metric: str = "rmse", region: str = "global",
        season: str = ALL_SEASONS,
    ) -> float:  # fmt: skip
        """Return a score at one lead time in hours, NaN if there is none; `scores_by_lead` describes the arguments."""
        scores_L = self.scores_by_lead(forecast, channel, metric, region, season)
        return float(scores_L[self.lead_hours.index(lead_hours)])

    def scores_by_lead(
        self, forecast: str, channel: str, metric: str = "rmse", region: str = "global", season: str = ALL_SEASONS
    ) -> np.ndarray:
        """Return a score at every lead time, (L,), in the units of the metric; NaN where there is no score.

        Args:
            forecast: name of the forecast.
            channel: name of the channel; ignored for the metric of an event.
            metric: name of the metric. A metric of events is followed by the name of the event: ``brier:EVENT``.
            region: name of the region.
            season: name of the season.

        Raises:
            KeyError: if the table has no such metric.
            ValueError: if the table has no such forecast, channel, event, region or season.
        """
        metric, _, event = metric.partition(":")
        row = self._find_row(channel, event)
        index = self.forecasts.index(forecast), self.seasons.index(season), row
        return self.dataset[metric].values[(*index, slice(None), self.regions.index(region))]

    def comparison(
        self, result: str, channel: str, reference: str = BEST_BASELINE, region: str = "global"
    ) -> np.ndarray:
        """Return a result of the comparison of the model with a reference at every lead time, (L,).

        The comparison covers all seasons. Values are NaN where nothing was compared.

        Args:
            result: name of the result: for RMSE ``rmse_difference``, ``p_value``, ``n_eff`` or ``significant``; for
                other scores their name followed by that of the result, such as ``crps_p_value`` and
                ``brier_p_value:EVENT``.
            channel: name of the channel; ignored for the result of an event.
            reference: name of the forecast with which the model is compared.
            region: name of the region.
        """
        result, _, event = result.partition(":")
        reference_index = self.dataset["reference"].values.tolist().index(reference)
        row = self._find_row(channel, event)
        index = reference_index, self.seasons.index(ALL_SEASONS), row
        return self.dataset[result].values[(*index, slice(None), self.regions.index(region))]

    def _find_row(self, channel: str, event: str) -> int:
        """Return the index of the event in `events` or, if `event` is "", the index of the channel in `channels`."""
        if event:
            return self.events.index(event)
        return self.channels.index(channel)

    def summary_leads(self) -> list[float]:
        """Return the lead times of summaries: those of 6, 12, 24, 48, ... hours that are scored; if none is, all."""
        summary_leads = [hours for hours in self.lead_hours if hours in _SUMMARY_LEADS]
        return summary_leads or self.lead_hours

    def describe_significance(self, reference: str = BEST_BASELINE) -> str:
        """Return sentences that explain the significance of the comparison with a reference to readers of the report.

        They state the number of blocks, what stars and hatching mean or why there are none, and the effective number of
        cases (n_eff).
        """
        # Blocks are longer at longer lead times, so there are fewer of them.
        fewest = min(self.n_blocks)
        most = max(self.n_blocks)
        blocks = "1 block" if most == 1 else f"{most} blocks"
        if fewest < most:
            blocks += f" at the first lead time and {fewest} at the last"
        text = f"The initial times make {blocks}, each at least 5 days long and 2 days longer than the lead time. "
        if most < MIN_BLOCKS_FOR_SIGNIFICANCE:
            text += (
                f"A difference is called significant only where there are {MIN_BLOCKS_FOR_SIGNIFICANCE} blocks, so "
                "none is."
            )
        else:
            text += "A star or hatching: significant, with a false discovery rate of 5 % over the scorecard"
            if fewest < MIN_BLOCKS_FOR_SIGNIFICANCE:
                text += f"; lead times with fewer than {MIN_BLOCKS_FOR_SIGNIFICANCE} blocks have none"
            text += "."
        # The effective number of cases; it is far below their number if neighbouring cases are similar.
        n_eff = self.dataset["n_eff"].sel(reference=reference, season=ALL_SEASONS, region="global").values
        if np.isfinite(n_eff).any():
            smallest = f"{np.nanmin(n_eff):.0f}"
            largest = f"{np.nanmax(n_eff):.0f}"
            n_eff_range = smallest if smallest == largest else f"{smallest} to {largest}"
            text += f" The global differences are as uncertain as those of {n_eff_range} independent cases (n_eff)."
        return text

    def write(self, folder: Path) -> None:
        """Write ``scores.nc`` and ``scores.csv`` into a folder, each atomically.

        Raises:
            CreditError: if a file cannot be written.
        """
        atomic_write(folder / "scores.nc", lambda path: write_scores(self.dataset, path))
        atomic_write(folder / "scores.csv", self._write_rows)

    def _write_rows(self, path: Path) -> None:
        """Write scores.csv to a path."""
        with open(path, "w", newline="", encoding="utf-8") as handle:
            writer = csv.writer(handle)
            writer.writerow(CSV_COLUMNS)
            writer.writerows(self.csv_rows())

    def csv_rows(self) -> Iterator[tuple]:
        """Yield the rows of scores.csv with the columns `CSV_COLUMNS`; a score that is NaN has no row."""
        for metric in (*METRICS, *ENSEMBLE_METRICS, *RANK_METRICS, SHORT_WAVES, SEEPS):
            yield from self._metric_rows(metric, metric, "")
        for metric in EVENT_METRICS:
            yield from self._metric_rows(metric, metric, "event_")
        for metric, variable in WIND_METRICS.items():
            yield from self._metric_rows(metric, variable, "wind_")

    def _metric_rows(self, metric: str, variable: str, prefix: str) -> Iterator[tuple]:
        """Yield the rows of scores.csv for one metric.

        Args:
            metric: name of the metric for channels.
            variable: name of the metric in the dataset, which differs for wind vectors.
            prefix: prefix of the names of the coordinates that label the rows: "" for channels, ``event_`` or
                ``wind_``.
        """
        data = self.dataset
        if variable not in data:
            return
        # Columns that are the same for every row of a channel, wind or event.
        labels = self._build_row_labels(metric, prefix)
        metric_names = [variable] * len(labels)
        definitions = [data[variable].attrs.get("wavenumbers", "")] * len(labels)
        if prefix == "event_":
            metric_names = [f"{variable}:{event}" for event in self.events]
            definitions = data["event_definition"].values.tolist()
        # Columns that depend on the other dimensions.
        hours = [f"{lead:g}" for lead in self.lead_hours]
        n_cases = data["n_cases"].values.tolist()
        n_blocks = data["n_blocks"].values.tolist()
        attribute_columns = [data[name].values.tolist() for name in FORECAST_ATTRIBUTES]
        attributes_by_forecast = list(zip(*attribute_columns, strict=True))
        common_attributes = tuple(data.attrs[name] for name in COMMON_ATTRIBUTES)
        # Lists of Python numbers are faster to go through one by one than arrays.
        values = data[variable].values
        is_scored = ~np.isnan(values)
        # Metrics without an interval have empty columns.
        low = np.full(values.shape, np.nan)
        high = low
        if metric in METRICS_WITH_INTERVAL:
            low, high = (data[f"{variable}{suffix}"].values for suffix in INTERVAL_SUFFIXES)
        numbers = zip(values[is_scored].tolist(), low[is_scored].tolist(), high[is_scored].tolist(), strict=True)
        for (f, s, row, lead, region), (value, low_end, high_end) in zip(
            np.argwhere(is_scored).tolist(), numbers, strict=True
        ):
            label, units = labels[row]
            yield (
                self.forecasts[f], *label, self.regions[region], self.seasons[s], hours[lead], metric_names[row],
                _format_number(value), units, n_cases[s], _format_number(low_end), _format_number(high_end),
                n_blocks[s][lead], definitions[row], *attributes_by_forecast[f], *common_attributes,
            )  # fmt: skip

    def _build_row_labels(self, metric: str, prefix: str) -> list[tuple[tuple[str, str, str], str]]:
        """Return ((variable, level, level units), units of the metric) as text for each channel, event or wind.

        Args:
            metric: name of the metric, which determines whether it has the units of the channel or is dimensionless.
            prefix: prefix of the names of the coordinates, see `_metric_rows`.
        """
        data = self.dataset
        variables = data[f"{prefix}variable"].values.tolist()
        levels = data[f"{prefix}level"].values.tolist()
        units = data[f"{prefix}units"].values.tolist()
        labels = []
        for variable, level, row_units in zip(variables, levels, units, strict=True):
            level_label = ("", "")
            if not np.isnan(level):
                level_label = (f"{level:g}", data.attrs["level_units"])
            score_units = "1" if metric in _DIMENSIONLESS else row_units
            labels.append(((variable, *level_label), score_units))
        return labels


def _format_number(value: float) -> str:
    """Return a number as text with eight significant digits, "" for NaN."""
    if np.isnan(value):
        return ""
    return f"{value:.8g}"
