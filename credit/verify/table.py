"""ScoreTable: scores by forecast, channel, lead time and region, on disk and on the terminal."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import xarray as xr

from credit.channels import Channel
from credit.errors import CreditError
from credit.verify.baselines import BASELINES
from credit.verify.sums import REGIONS, ScoreSums

COLUMNS = (
    "forecast", "variable", "level", "level_units", "region", "season", "lead_hours", "metric", "value", "units",
    "n_cases",
)  # fmt: skip
CORRELATIONS = ("acc", "acc_wb2")
METRICS = ("rmse", "bias", "mae", *CORRELATIONS)
WIND = "wind_vector_rmse"
_SHOWN_LEADS = (6, 12, 24, 48, 72, 120, 168, 240)


class ScoreTable:
    """Scores of a verification.

    Attributes:
        dataset: ``rmse``, ``bias``, ``mae``, ``acc``, ``acc_wb2`` over (forecast, channel, lead, region) and
            ``wind_vector_rmse`` over (forecast, wind, lead, region); physical units; NaN where there is no score.
        forecasts: names of the forecasts.
        channels: names of the channels.
        lead_hours: lead times.
    """

    def __init__(self, dataset: xr.Dataset) -> None:
        self.dataset = dataset
        self.forecasts: list[str] = dataset["forecast"].values.tolist()
        self.channels: list[str] = dataset["channel"].values.tolist()
        self.lead_hours: list[float] = dataset["lead"].values.tolist()

    @property
    def n_cases(self) -> int:
        """Number of initial times, the same for every score."""
        return int(self.dataset.attrs["n_cases"])

    def units(self, channel: str) -> str:
        """Return the units of a channel."""
        return str(self.dataset["units"].sel(channel=channel).item())

    def value(
        self, forecast: str, channel: str, lead_hours: float, metric: str = "rmse", region: str = "global"
    ) -> float:
        """Return one score."""
        return float(self.curve(forecast, channel, metric, region)[self.lead_hours.index(lead_hours)])

    def curve(self, forecast: str, channel: str, metric: str = "rmse", region: str = "global") -> np.ndarray:
        """Return a score at every lead time, (L,)."""
        place = self.forecasts.index(forecast), self.channels.index(channel), slice(None), REGIONS.index(region)
        return self.dataset[metric].values[place]

    def skill(self, channel: str, lead_hours: float, region: str = "global") -> float:
        """Return the model's RMSE over that of the best baseline; below 1 is better than all of them."""
        best = min(self.value(name, channel, lead_hours, region=region) for name in BASELINES)
        model = self.value("model", channel, lead_hours, region=region)
        return model / best if best > 0 else float("nan")

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield the rows of scores.csv; scores that do not exist have none."""
        for metric in METRICS:
            yield from self._rows_of(metric, "")
        if WIND in self.dataset:
            yield from self._rows_of(WIND, "wind_")

    def _rows_of(self, metric: str, prefix: str) -> Iterator[dict[str, object]]:
        data = self.dataset
        columns = (data[prefix + name].values.tolist() for name in ("variable", "level", "units"))
        labels = list(zip(*columns, strict=True))
        values = data[metric].values
        for f, c, number, r in np.argwhere(~np.isnan(values)):
            variable, level, units = labels[c]
            yield {
                "forecast": self.forecasts[f],
                "variable": variable,
                "level": "" if np.isnan(level) else f"{level:g}",
                "level_units": "" if np.isnan(level) else data.attrs["level_units"],
                "region": REGIONS[r],
                "season": "all",
                "lead_hours": f"{self.lead_hours[number]:g}",
                "metric": metric,
                "value": f"{values[f, c, number, r]:.8g}",
                "units": "1" if metric in CORRELATIONS else units,
                "n_cases": self.n_cases,
            }

    def write(self, folder: Path) -> None:
        """Write ``scores.nc`` and ``scores.csv``, each replaced whole.

        Raises:
            CreditError: if they cannot be written.
        """
        try:
            beside = folder / ".scores.nc.part"
            self.dataset.to_netcdf(beside, engine="netcdf4")
            os.replace(beside, folder / "scores.nc")
            beside = folder / ".scores.csv.part"
            with open(beside, "w", newline="", encoding="utf-8") as handle:
                writer = csv.DictWriter(handle, COLUMNS)
                writer.writeheader()
                writer.writerows(self.rows())
            os.replace(beside, folder / "scores.csv")
        except (OSError, RuntimeError) as error:
            beside.unlink(missing_ok=True)
            raise CreditError(f"{folder}: the scores cannot be written ({error}); is the disk full?") from error

    def shown_leads(self) -> list[float]:
        """Return the lead times of summaries: 6, 12, 24, 48, ... hours where they exist, else all."""
        return [hours for hours in self.lead_hours if hours in _SHOWN_LEADS] or self.lead_hours

    def format(self) -> str:
        """Return the RMSE of the model and the baselines as a table for a terminal."""
        lines = [
            f"RMSE, global, {self.n_cases} initial times. Ratio: model over the best of the three baselines.",
            f"{'':12s} {'':10s} {'lead':>6s} {'model':>11s} {'persistence':>11s} {'damped':>11s} {'climatology':>11s}"
            f" {'ratio':>6s}",
        ]
        for channel in self.channels:
            for number, hours in enumerate(self.shown_leads()):
                head = f"{channel:12s} {self.units(channel):10s}" if number == 0 else " " * 23
                scores = [self.value(name, channel, hours) for name in ("model", *BASELINES)]
                numbers = " ".join(f"{score:11.4g}" for score in scores)
                lines.append(f"{head} {f'{hours:g} h':>6s} {numbers} {self.skill(channel, hours):6.2f}")
        return "\n".join(lines)


def build_table(
    sums: Mapping[str, tuple[ScoreSums, Sequence[int]]],
    channels: Sequence[Channel],
    lead_minutes: np.ndarray,
    attributes: Mapping[str, Mapping[str, str]],
    winds: Sequence[tuple[int, int, str]],
    facts: Mapping[str, str | int],
) -> ScoreTable:
    """Turn sums into scores.

    Args:
        sums: forecast -> its sums and the indices, among `channels`, of the channels that it has.
        channels: the C channels.
        lead_minutes: (L,) lead times.
        attributes: variable -> ``units``.
        winds: from `credit.verify.sums.wind_pairs`.
        facts: global attributes: ``n_cases``, ``level_units`` and what else describes the scores.
    """
    shape = (len(sums), len(channels), len(lead_minutes), len(REGIONS))
    values = {name: np.full(shape, np.nan) for name in METRICS}
    for number, (forecast, (own, index)) in enumerate(sums.items()):
        for name, score in own.metrics().items():
            if name not in CORRELATIONS or forecast != "climatology":
                values[name][number, list(index)] = np.moveaxis(score, 1, 0)
    units = [str(attributes.get(c.variable, {}).get("units", "")) for c in channels]
    dims = ("forecast", "channel", "lead", "region")
    data = {name: (dims, array) for name, array in values.items()}
    coords = {
        "forecast": list(sums),
        "channel": [c.name for c in channels],
        "lead": ("lead", lead_minutes / 60.0, {"units": "hour", "standard_name": "forecast_period"}),
        "region": list(REGIONS),
        **_labels("channel", "", [c.variable for c in channels], [c.level for c in channels], units),
    }
    if winds:
        rmse = values["rmse"]
        squares = np.stack([rmse[:, u] ** 2 + rmse[:, v] ** 2 for u, v, _ in winds], axis=1)
        data[WIND] = (("forecast", "wind", "lead", "region"), np.sqrt(squares))
        coords |= _labels(
            "wind", "wind_", [name for *_, name in winds], [channels[u].level for u, *_ in winds],
            [units[u] for u, *_ in winds],
        )  # fmt: skip
    return ScoreTable(xr.Dataset(data, coords, dict(facts)))


def _labels(
    dim: str, prefix: str, variables: list[str], levels: list[float | None], units: list[str]
) -> dict[str, tuple[str, list]]:
    numbers = [np.nan if level is None else level for level in levels]
    return {
        f"{prefix}variable": (dim, variables),
        f"{prefix}level": (dim, np.array(numbers, dtype=np.float64)),
        f"{prefix}units": (dim, units),
    }
