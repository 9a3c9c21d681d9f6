"""Power spectra in the table of scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from credit.verify.statistics.partial_scores import Pairs
from credit.verify.statistics.regions import GLOBE
from credit.verify.statistics.seasons import ALL
from credit.verify.table.table import SHORT_WAVES, ScoreTable


def add_spectra(table: ScoreTable, spectra: Pairs, forecasts: Sequence[str]) -> None:
    """Add power spectra to a table; where there are none it stays as it is.

    ``power`` and ``power_ratio`` (over the truth's) are over (forecast, spectrum_channel, spectrum_lead, wavenumber),
    ``power_truth`` lacks forecast; powers are in ``spectrum_units``. `SHORT_WAVES`, the power of the shortest third of
    the wavenumbers over the truth's, is over the dimensions of other scores, NaN where there is no spectrum; its
    attribute ``wavenumbers`` says which they are.

    Args:
        table: the scores.
        spectra: (channel, lead in minutes) -> powers by total wavenumber, (K,) each, of the truth and then of each of
            `forecasts`, means over all cases; NaN of a forecast without the channel.
        forecasts: those of the table that have spectra.
    """
    if not spectra:
        return
    data = table.dataset
    channels = [name for name in table.channels if any(name == channel for channel, _ in spectra)]
    leads = sorted({lead for _, lead in spectra})
    power = np.array([[spectra[name, lead] for lead in leads] for name in channels])  # (X, L, 1 + F, K)
    truth, number = power[:, :, 0], np.arange(power.shape[-1], dtype=np.int32)
    own = np.full((len(table.forecasts), *truth.shape), np.nan)
    own[[table.forecasts.index(name) for name in forecasts]] = np.moveaxis(power[:, :, 1:], 2, 0)
    short = shortest_third(number)
    waves = {"wavenumbers": f"total wavenumbers {number[short][0]} to {number[-1]}"} if short.any() else {}
    scores = np.full([data.sizes[dim] for dim in ("forecast", "season", "channel", "lead", "region")], np.nan)
    rows = np.array([table.channels.index(name) for name in channels])[:, None]
    columns = [table.lead_hours.index(lead / 60) for lead in leads]
    place = table.seasons.index(ALL), rows, columns, table.regions.index(next(iter(GLOBE)))
    dims = ("spectrum_channel", "spectrum_lead", "wavenumber")
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio, blur = own / truth, own[..., short].sum(axis=-1) / truth[..., short].sum(axis=-1)
    scores[:, *place] = np.where(np.isfinite(blur), blur, np.nan)
    table.dataset = data.assign(
        {
            "power": (("forecast", *dims), own),
            "power_truth": (dims, truth),
            "power_ratio": (("forecast", *dims), np.where(np.isfinite(ratio), ratio, np.nan)),
            SHORT_WAVES: (("forecast", "season", "channel", "lead", "region"), scores, waves),
        }
    ).assign_coords(
        spectrum_channel=channels,
        spectrum_units=("spectrum_channel", [f"({table.units(name)})2" for name in channels]),
        spectrum_lead=("spectrum_lead", np.array(leads) / 60.0, {"units": "hour"}),
        wavenumber=number,
    )


def shortest_third(number: np.ndarray) -> np.ndarray:
    """Return which of the total wavenumbers 0, 1, 2, ... are the shortest third of the waves: 15 to 21 of 21."""
    waves = len(number) - 1
    return number > waves - waves // 3
