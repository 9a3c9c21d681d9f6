"""Score table: scores by forecast, season, channel, lead time (L lead times) and region, and the files of scores."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xarray as xr

from credit.config.sections.verification import BASELINES, BEST_BASELINE, REGIONS
from credit.utils.atomic import atomic_write
from credit.verify.report.metadata import has_prescribed_forcing
from credit.verify.significance.bootstrap import INTERVAL_SUFFIXES, METRICS_WITH_INTERVAL
from credit.verify.significance.comparison import MIN_BLOCKS_FOR_SIGNIFICANCE
from credit.verify.statistics.seasons import ALL_SEASONS
from credit.verify.table.netcdf import write_scores

# Global attributes of scores.nc that affect the scores; they are also columns of scores.csv.
COMMON_ATTRIBUTES = ("grid", "truth", "first_case", "last_case", "initial_hours", "climatology", "version")
# Attributes of forecasts that are also columns of scores.csv.
FORECAST_ATTRIBUTES = ("members", "prescribed_forcing")
# Global attributes that contain a message: about forecasts whose weights were trained on a part of the test period, and
# about requested lead times that are missing in the forecasts.
SEEN_PERIODS = "seen_periods_scored"
MISSING_LEADS = "lead_times_without_scores"
CSV_COLUMNS = (
    "forecast", "variable", "level", "level_units", "region", "season", "lead_hours", "metric", "value", "units",
    "n_cases", "low", "high", "n_blocks", "event", *FORECAST_ATTRIBUTES, *COMMON_ATTRIBUTES,
)  # fmt: skip

# Metrics that are not defined for the climatology, because its anomaly is zero in all cells.
CORRELATIONS = ("acc", "acc_wb2", "acc_low", "acc_high")
# Metrics of every channel and wind.
METRICS = ("rmse", "bias", "mae", "acc", "acc_wb2", "activity", "activity_truth", "activity_ratio")
# Further metrics of tables with an ensemble.
ENSEMBLE_METRICS = ("crps", "crps_fair", "spread", "spread_skill", "rmse_member")
# Metrics of ensembles that channels have, but not winds.
RANK_METRICS = ("rank_deviation", "rank_outliers")
# Metric of channels and lead times with spectra.
SHORT_WAVES = "short_wave_power"
# Metric of channels with precipitation.
SEEPS = "seeps"
EVENT_METRICS = (
    "brier", "brier_fair", "brier_skill", "brier_skill_fair", "reliability", "resolution", "uncertainty",
)  # fmt: skip
# For a wind vector, the bias is the bias of the wind speed, and the CRPS is the energy score.
_SPECIAL_WIND_METRICS = {"bias": "wind_speed_bias", "crps": "wind_energy_score", "crps_fair": "wind_energy_score_fair"}
WIND_METRICS = {name: _SPECIAL_WIND_METRICS.get(name, f"wind_vector_{name}") for name in METRICS + ENSEMBLE_METRICS}
# Metric of channels -> variable of scores.nc for winds, including the ends of intervals.
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

    Most variables of the dataset have the dimensions (forecast, season, channel, lead, region). Scores of wind vectors
    have the dimension wind instead of channel, and scores of events have the dimension event. These variables are:

    - `METRICS` and, if a forecast is an ensemble, `ENSEMBLE_METRICS`, with the ends of their 95 % intervals, such as
      ``rmse_low`` and ``rmse_high``.
    - `SEEPS` for precipitation, `RANK_METRICS` for ensembles, and `EVENT_METRICS` for events.
    - The results of the comparison with the references, with the dimension reference instead of forecast, such as
      ``rmse_difference`` or ``brier_p_value``. See `credit.verify.significance.comparison.comparison_name`.

    The rank histograms are ``ranks`` with the dimensions (forecast, channel, lead, region, rank). The reliability
    diagrams are ``forecast_frequency`` and ``observed_frequency`` with the dimensions (forecast, event, lead, region,
    members_beyond). Attributes of forecasts (`credit.verify.report.metadata.describe_forecasts`) have the dimension
    forecast.

    Attributes:
        dataset: xarray dataset of the scores, in physical units; NaN where there is no score.
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
        """Number of cases (initial times) in all seasons together."""
        # The first entry is for all seasons together.
        return int(self.dataset["n_cases"][0])

    @property
    def n_blocks(self) -> list[int]:
        """Number of blocks of contiguous cases at each lead time, which intervals and tests use, for all seasons."""
        return self.dataset["n_blocks"].values[0].tolist()

    @property
    def candidates(self) -> list[str]:
        """Names of the forecasts that are not baselines."""
        return [name for name in self.forecasts if name not in BASELINES]

    def forecast_attribute(self, attribute: str, forecast: str) -> str:
        """Return an attribute of a forecast, such as ``members``, as a string.

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

        The display name of ``model``, the forecasts of the run, is the experiment. The display name of a baseline or
        region is its name in words, such as "Damped persistence". Other forecasts keep the name that the user chose.
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
        # The user chooses the names of other forecasts, so one of them may be equal to the experiment.
        if experiment in self.forecasts:
            return f"{experiment} (this run)"
        return experiment

    def warnings(self) -> list[str]:
        """Return warnings about missing scores and about differences that make comparisons of the forecasts unfair."""
        warnings = []
        for key in (SEEN_PERIODS, MISSING_LEADS):
            text = self.dataset.attrs.get(key)
            if text:
                warnings.append(f"{text}.")
        for name in self.candidates:
            forcing = self.forecast_attribute("prescribed_forcing", name)
            if has_prescribed_forcing(forcing):
                warnings.append(
                    f"Prescribed forcing of {self.display_name(name)}: {forcing} was read from the analysis after the "
                    "initial time, which a real forecast does not have."
                )
        # The numbers of members of the ensembles may differ.
        num_members = {}
        for name in self.candidates:
            num_members[self.display_name(name)] = self.forecast_attribute("members", name)
        if len(set(num_members.values())) > 1:
            numbers = ", ".join(f"{name} {number}" for name, number in num_members.items())
            warnings.append(
                f"Unequal numbers of members: {numbers}. The mean of a larger ensemble has a smaller RMSE even if its "
                "members are not better. To compare ensembles of different size, use crps_fair and brier_fair."
            )
        return warnings

    def units(self, channel: str) -> str:
        """Return the units of a channel."""
        return str(self.dataset["units"].sel(channel=channel).item())

    def score(
        self, forecast: str, channel: str, lead_hours: float, metric: str = "rmse", region: str = "global",
        season: str = ALL_SEASONS,
    ) -> float:  # fmt: skip
        """Return a score at one lead time in hours, NaN if it is missing; `scores_by_lead` describes the arguments."""
        scores_L = self.scores_by_lead(forecast, channel, metric, region, season)
        return float(scores_L[self.lead_hours.index(lead_hours)])

    def scores_by_lead(
        self, forecast: str, channel: str, metric: str = "rmse", region: str = "global", season: str = ALL_SEASONS
    ) -> np.ndarray:
        """Return a score at every lead time, (L,), in the units of the metric; NaN where there is no score.

        Args:
            forecast: name of the forecast.
            channel: name of the channel; ignored for the metric of an event.
            metric: name of the metric. For a metric of an event, the name of the event follows, as in ``brier:EVENT``.
            region: name of the region.
            season: name of the season.

        Raises:
            KeyError: if the table has no such metric.
            ValueError: if the table has no such forecast, channel, event, region or season.
        """
        metric, _, event = metric.partition(":")
        row = self._find_row_index(channel, event)
        index = self.forecasts.index(forecast), self.seasons.index(season), row
        return self.dataset[metric].values[(*index, slice(None), self.regions.index(region))]

    def comparison(
        self, result: str, channel: str, reference: str = BEST_BASELINE, region: str = "global"
    ) -> np.ndarray:
        """Return a result of the comparison of the model with a reference at every lead time, (L,).

        The comparison is over all seasons together. Values are NaN where no comparison was made.

        Args:
            result: name of the result. For RMSE, it is ``rmse_difference``, ``p_value``, ``n_eff`` or ``significant``.
                For other scores, it begins with the score, as in ``crps_p_value`` and ``brier_p_value:EVENT``.
            channel: name of the channel; ignored for the result of an event.
            reference: name of the forecast with which the model is compared.
            region: name of the region.
        """
        result, _, event = result.partition(":")
        reference_index = self.dataset["reference"].values.tolist().index(reference)
        row = self._find_row_index(channel, event)
        index = reference_index, self.seasons.index(ALL_SEASONS), row
        return self.dataset[result].values[(*index, slice(None), self.regions.index(region))]

    def _find_row_index(self, channel: str, event: str) -> int:
        """Return the index of an event in `events` or, if `event` is "", the index of a channel in `channels`."""
        if event:
            return self.events.index(event)
        return self.channels.index(channel)

    def summary_leads(self) -> list[float]:
        """Return the lead times of summaries in hours: those of 6, 12, 24, 48, ... that are scored; all if none is."""
        summary_leads = [hours for hours in self.lead_hours if hours in _SUMMARY_LEADS]
        return summary_leads or self.lead_hours

    def describe_significance(self, reference: str = BEST_BASELINE) -> str:
        """Return sentences that explain the significance of the comparison with a reference to readers of the report.

        The sentences state the number of blocks, the meaning of stars and hatching (or the reason why no difference is
        marked), and the effective number of cases (n_eff).
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
                f"A difference can only be marked as significant with at least {MIN_BLOCKS_FOR_SIGNIFICANCE} blocks, "
                "so no difference is marked."
            )
        else:
            text += "A star or hatching marks a significant difference (false discovery rate of 5 % over the scorecard)"
            if fewest < MIN_BLOCKS_FOR_SIGNIFICANCE:
                text += f"; lead times with fewer than {MIN_BLOCKS_FOR_SIGNIFICANCE} blocks have no marks"
            text += "."
        # If neighbouring cases are similar, the effective number of cases is much smaller than the number of cases.
        n_eff = self.dataset["n_eff"].sel(reference=reference, season=ALL_SEASONS, region="global").values
        if np.isfinite(n_eff).any():
            smallest = f"{np.nanmin(n_eff):.0f}"
            largest = f"{np.nanmax(n_eff):.0f}"
            n_eff_range = smallest if smallest == largest else f"{smallest} to {largest}"
            text += f" The global differences are as uncertain as a mean over {n_eff_range} independent cases (n_eff)."
        return text

    def write(self, folder: Path) -> None:
        """Write ``scores.nc`` and ``scores.csv`` into a folder, each atomically.

        Raises:
            CreditError: if a file cannot be written.
        """
        atomic_write(folder / "scores.nc", lambda path: write_scores(self.dataset, path))
        atomic_write(folder / "scores.csv", self._write_rows)

    def _write_rows(self, path: Path) -> None:
        """Write the rows of scores.csv to a file."""
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
            variable: name of the metric in the dataset; for wind vectors, it differs from `metric`.
            prefix: prefix of the names of the coordinates that label the rows: "" for channels, ``event_`` or
                ``wind_``.
        """
        data = self.dataset
        if variable not in data:
            return
        # These columns are equal for all rows of a channel, wind or event.
        labels = self._build_row_labels(metric, prefix)
        metric_names = [variable] * len(labels)
        definitions = [data[variable].attrs.get("wavenumbers", "")] * len(labels)
        if prefix == "event_":
            metric_names = [f"{variable}:{event}" for event in self.events]
            definitions = data["event_definition"].values.tolist()
        # These columns depend on the other dimensions.
        hours = [f"{lead:g}" for lead in self.lead_hours]
        n_cases = data["n_cases"].values.tolist()
        n_blocks = data["n_blocks"].values.tolist()
        attribute_columns = [data[name].values.tolist() for name in FORECAST_ATTRIBUTES]
        attributes_by_forecast = list(zip(*attribute_columns, strict=True))
        common_attributes = tuple(data.attrs[name] for name in COMMON_ATTRIBUTES)
        # Arrays are converted to lists, because a loop over a list is faster.
        values = data[variable].values
        is_scored = ~np.isnan(values)
        # For metrics without an interval, the columns of the interval are empty.
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
        """Return ((variable, level, level units), units of the metric) as strings for each channel, event or wind.

        Args:
            metric: name of the metric; some metrics are dimensionless, others have the units of the channel.
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
    """Return a number as a string with eight significant digits, "" for NaN."""
    if np.isnan(value):
        return ""
    return f"{value:.8g}"
