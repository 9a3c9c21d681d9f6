"""ScoreTable: scores by forecast, season, channel, lead time and region, on disk and on the terminal."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import numpy as np
import xarray as xr

from credit.config.schema_verification import BASELINES, BEST_BASELINE
from credit.utils.atomic import atomic_write
from credit.verify.report.metadata import is_prescribed
from credit.verify.significance.bootstrap import ENDS, WITH_INTERVAL
from credit.verify.significance.comparison import ENOUGH_BLOCKS
from credit.verify.statistics.seasons import ALL
from credit.verify.table.netcdf import write_scores

# global attributes that tell unlike numbers apart; in every row of scores.csv, too
FACTS = ("grid", "truth", "first_case", "last_case", "initial_hours", "climatology", "version")
SEEN_HERE = "seen_periods_scored"  # which forecasts have seen a part of the test period, in words
LACKING = "lead_times_without_scores"  # the lead times that were asked for and are not in the forecasts, in words
OWN_FACTS = ("members", "prescribed_forcing")  # of each forecast
COLUMNS = (
    "forecast", "variable", "level", "level_units", "region", "season", "lead_hours", "metric", "value", "units",
    "n_cases", "low", "high", "n_blocks", "event", *OWN_FACTS, *FACTS,
)  # fmt: skip
CORRELATIONS = ("acc", "acc_wb2", "acc_low", "acc_high")
METRICS = ("rmse", "bias", "mae", "acc", "acc_wb2", "activity", "activity_truth", "activity_ratio")
ENSEMBLE_METRICS = ("crps", "crps_fair", "spread", "spread_skill", "rmse_member")  # where a forecast has members
RANK_METRICS = ("rank_deviation", "rank_outliers")  # of channels only
SHORT_WAVES = "short_wave_power"  # of the channels and lead times that have spectra
SEEPS = "seeps"  # of channels that are precipitation
EVENT_METRICS = (
    "brier", "brier_fair", "brier_skill", "brier_skill_fair", "reliability", "resolution", "uncertainty",
)  # fmt: skip
WIND = "wind_vector_rmse"
# of a wind vector the bias is that of its length, and the CRPS is the energy score
_OF_WINDS = {"bias": "wind_speed_bias", "crps": "wind_energy_score", "crps_fair": "wind_energy_score_fair"}
WIND_METRICS = {name: _OF_WINDS.get(name, f"wind_vector_{name}") for name in METRICS + ENSEMBLE_METRICS}
WIND_NAMES = WIND_METRICS | {
    f"{name}{end}": f"{wind}{end}" for name, wind in WIND_METRICS.items() if name in WITH_INTERVAL for end in ENDS
}
_PURE_NUMBERS = ("acc", "acc_wb2", "activity_ratio", "spread_skill", *RANK_METRICS, SHORT_WAVES, SEEPS, *EVENT_METRICS)
_SHOWN_LEADS = (6, 12, 24, 48, 72, 120, 168, 240)


class ScoreTable:
    """Scores of a verification.

    Attributes:
        dataset: `METRICS` and, where a forecast is an ensemble, `ENSEMBLE_METRICS` over (forecast, season, channel,
            lead, region), and those of wind vectors over wind instead of channel; physical units; NaN where there is no
            score. ``rmse_low`` and ``rmse_high`` are the ends of the 95 % interval. What
            `credit.verify.significance.comparison.compare` finds has reference instead of forecast: of RMSE
            ``rmse_difference``, ``p_value``, ..., of events ``brier_difference``, ``brier_p_value``, ..., and so of
            CRPS and SEEPS. Of ensembles ``ranks``, the rank histogram, is over (forecast, channel, lead, region, rank),
            and `RANK_METRICS` without rank. `SEEPS` is of the channels that are precipitation; `EVENT_METRICS` have
            event instead of channel, and the reliability diagram, ``forecast_frequency`` and ``observed_frequency``, is
            over (forecast, event, lead, region, members_beyond). What
            `credit.verify.report.metadata.describe_forecasts` tells is over forecast.
        forecasts: names of the forecasts.
        channels: names of the channels.
        lead_hours: lead times.
        regions: names of the regions.
        seasons: all, and the seasons that have cases.
        events: names of the events.
    """

    def __init__(self, dataset: xr.Dataset) -> None:
        self.dataset = dataset
        self.forecasts: list[str] = dataset["forecast"].values.tolist()
        self.channels: list[str] = dataset["channel"].values.tolist()
        self.lead_hours: list[float] = dataset["lead"].values.tolist()
        self.regions: list[str] = dataset["region"].values.tolist()
        self.seasons: list[str] = dataset["season"].values.tolist()
        self.events: list[str] = dataset["event"].values.tolist() if "event" in dataset else []

    @property
    def n_cases(self) -> int:
        """Number of initial times, the same for every score that is not of one season."""
        return int(self.dataset["n_cases"][0])

    @property
    def n_blocks(self) -> list[int]:
        """Number of blocks by lead time, of all seasons."""
        return self.dataset["n_blocks"].values[0].tolist()

    @property
    def contenders(self) -> list[str]:
        """Names of the forecasts that are no baselines."""
        return [name for name in self.forecasts if name not in BASELINES]

    def told(self, what: str, forecast: str) -> str:
        """Return what `credit.verify.report.metadata.describe_forecasts` tells of a forecast."""
        return str(self.dataset[what].values[self.forecasts.index(forecast)])

    def caveats(self) -> list[str]:
        """Return in words what the scores lack, and what makes those of the forecasts unlike one another."""
        found = [f"{text}." for key in (SEEN_HERE, LACKING) if (text := self.dataset.attrs.get(key))]
        for name in self.contenders:
            forcing = self.told("prescribed_forcing", name)
            if is_prescribed(forcing):
                found.append(
                    f"Prescribed forcing of {_who(name)}: {forcing} was read from the analysed future, which a real "
                    "forecast does not have."
                )
        members = {_who(name): self.told("members", name) for name in self.contenders}
        if len(set(members.values())) > 1:
            found.append(
                f"Unequal numbers of members: {', '.join(f'{name} {number}' for name, number in members.items())}. "
                "The mean of more members has a smaller RMSE for that alone; of ensembles crps_fair and brier_fair "
                "allow for it."
            )
        return found

    def units(self, channel: str) -> str:
        """Return the units of a channel."""
        return str(self.dataset["units"].sel(channel=channel).item())

    def value(
        self, forecast: str, channel: str, lead_hours: float, metric: str = "rmse", region: str = "global",
        season: str = ALL,
    ) -> float:  # fmt: skip
        """Return one score."""
        return float(self.curve(forecast, channel, metric, region, season)[self.lead_hours.index(lead_hours)])

    def curve(
        self, forecast: str, channel: str, metric: str = "rmse", region: str = "global", season: str = ALL
    ) -> np.ndarray:
        """Return a score at every lead time, (L,); of an event `metric` is as in scores.csv, ``brier:NAME``."""
        metric, _, event = metric.partition(":")
        row = self.events.index(event) if event else self.channels.index(channel)
        place = self.forecasts.index(forecast), self.seasons.index(season), row
        return self.dataset[metric].values[(*place, slice(None), self.regions.index(region))]

    def compared(self, what: str, channel: str, reference: str = BEST_BASELINE, region: str = "global") -> np.ndarray:
        """Return ``rmse_difference``, ``p_value``, ``n_eff`` or ``significant`` at every lead time, (L,).

        Those of CRPS, SEEPS and Brier scores are called ``crps_p_value``, ``seeps_p_value`` and, with the event,
        ``brier_p_value:NAME``.
        """
        what, _, event = what.partition(":")
        number = self.dataset["reference"].values.tolist().index(reference)
        row = self.events.index(event) if event else self.channels.index(channel)
        place = number, self.seasons.index(ALL), row
        return self.dataset[what].values[(*place, slice(None), self.regions.index(region))]

    def skill(self, channel: str, lead_hours: float, region: str = "global", season: str = ALL) -> float:
        """Return the model's RMSE over that of the best baseline; below 1 is better than all of them."""
        best = min(self.value(name, channel, lead_hours, "rmse", region, season) for name in BASELINES)
        model = self.value("model", channel, lead_hours, "rmse", region, season)
        return model / best if best > 0 else float("nan")

    def rows(self) -> Iterator[tuple]:
        """Yield the rows of scores.csv, as `COLUMNS`; scores that do not exist have none."""
        for metric in (*METRICS, *ENSEMBLE_METRICS, *RANK_METRICS, SHORT_WAVES, SEEPS):
            yield from self._rows_of(metric, metric, "")
        for metric in EVENT_METRICS:
            yield from self._rows_of(metric, metric, "event_")
        for metric, name in WIND_METRICS.items():
            yield from self._rows_of(metric, name, "wind_")

    def _rows_of(self, metric: str, name: str, prefix: str) -> Iterator[tuple]:
        data = self.dataset
        if name not in data:
            return
        labels, columns = [], (data[prefix + label].values.tolist() for label in ("variable", "level", "units"))
        for variable, level, units in zip(*columns, strict=True):
            where = ("", "") if np.isnan(level) else (f"{level:g}", data.attrs["level_units"])
            labels.append(((variable, *where), "1" if metric in _PURE_NUMBERS else units))
        hours = [f"{lead:g}" for lead in self.lead_hours]
        cases, blocks = data["n_cases"].values.tolist(), data["n_blocks"].values.tolist()
        own_facts = list(zip(*(data[key].values.tolist() for key in OWN_FACTS), strict=True))
        facts = tuple(data.attrs[key] for key in FACTS)
        names, definitions = [name] * len(labels), [data[name].attrs.get("wavenumbers", "")] * len(labels)
        if prefix == "event_":
            names = [f"{name}:{event}" for event in self.events]
            definitions = data["event_definition"].values.tolist()
        values = data[name].values
        known = ~np.isnan(values)
        ends = [data[name + end].values[known].tolist() if metric in WITH_INTERVAL else repeat(np.nan) for end in ENDS]
        places = zip(*(index.tolist() for index in np.nonzero(known)), strict=True)
        for (f, s, c, lead, r), value, low, high in zip(places, values[known].tolist(), *ends, strict=False):
            label, units = labels[c]
            yield (
                self.forecasts[f], *label, self.regions[r], self.seasons[s], hours[lead], names[c], _number(value),
                units, cases[s], _number(low), _number(high), blocks[s][lead], definitions[c], *own_facts[f], *facts,
            )  # fmt: skip

    def write(self, folder: Path) -> None:
        """Write ``scores.nc`` and ``scores.csv``, each replaced whole.

        Raises:
            CreditError: if they cannot be written.
        """
        atomic_write(folder / "scores.nc", lambda path: write_scores(self.dataset, path))
        atomic_write(folder / "scores.csv", self._write_rows)

    def _write_rows(self, path: Path) -> None:
        with open(path, "w", newline="", encoding="utf-8") as handle:
            writer = csv.writer(handle)
            writer.writerow(COLUMNS)
            writer.writerows(self.rows())

    def shown_leads(self) -> list[float]:
        """Return the lead times of summaries: 6, 12, 24, 48, ... hours where they exist, else all."""
        return [hours for hours in self.lead_hours if hours in _SHOWN_LEADS] or self.lead_hours

    def format(self, reference: str | None = None) -> str:
        """Return the RMSE of the model and the baselines, or of the model and `reference`, for a terminal."""
        against = reference or BEST_BASELINE
        shown = ("model", *BASELINES) if reference is None else ("model", reference)
        what = "the best of the three baselines" if reference is None else reference
        short = {"damped_persistence": "damped"}
        heads = {name: f"{short.get(name, name):>11.20s}" for name in shown}
        lines = [
            f"RMSE, global, {self.n_cases} initial times. Ratio: model over {what}.",
            f"{'':12s} {'':10s} {'lead':>6s} {' '.join(heads.values())} {'ratio':>7s} {'n_eff':>6s}",
        ]
        for channel in self.channels:
            differences, stars, n_eff = (
                self.compared(what, channel, against) for what in ("rmse_difference", "significant", "n_eff")
            )
            for number, hours in enumerate(self.shown_leads()):
                head = f"{channel:12s} {self.units(channel):10s}" if number == 0 else " " * 23
                scores = {name: self.value(name, channel, hours) for name in shown}
                numbers = " ".join(_padded(score, ".4g", len(heads[name])) for name, score in scores.items())
                place = self.lead_hours.index(hours)
                star = "*" if stars[place] else " "
                ratio = f"{_padded(1 + differences[place], '.2f', 6)}{star} {_padded(n_eff[place], '.0f', 6)}"
                lines.append(f"{head} {f'{hours:g} h':>6s} {numbers} {ratio}")
        return "\n".join([*lines, self.explain_significance(against), *self.caveats()])

    def explain_significance(self, reference: str = BEST_BASELINE) -> str:
        """Return how many blocks there are, what stars mean or why there are none, and how many independent cases."""
        fewest, most = min(self.n_blocks), max(self.n_blocks)
        blocks = f"{most} {'block' if most == 1 else 'blocks'}"
        if fewest < most:
            blocks += f" at the first lead time and {fewest} at the last"
        text = f"The initial times make {blocks}, each at least 5 days long and 2 days longer than the lead time. "
        if most < ENOUGH_BLOCKS:
            text += f"A difference is called significant only where there are {ENOUGH_BLOCKS} blocks, so none is."
        else:
            few = f"; lead times with fewer than {ENOUGH_BLOCKS} blocks have none" if fewest < ENOUGH_BLOCKS else ""
            text += f"A star or hatching: significant, with a false discovery rate of 5 % over the scorecard{few}."
        n_eff = self.dataset["n_eff"].sel(reference=reference, season=ALL, region="global").values
        if np.isfinite(n_eff).any():
            low, high = f"{np.nanmin(n_eff):.0f}", f"{np.nanmax(n_eff):.0f}"
            worth = low if low == high else f"{low} to {high}"
            text += f" The global differences are as uncertain as those of {worth} independent cases (n_eff)."
        return text


def _who(name: str) -> str:
    return "the model" if name == "model" else name


def _padded(value: float, form: str, width: int) -> str:
    """Return a number for the terminal, a hyphen where there is none."""
    return f"{'-' if value != value else format(value, form):>{width}s}"


def _number(value: float) -> str:
    return "" if value != value else f"{value:.8g}"
