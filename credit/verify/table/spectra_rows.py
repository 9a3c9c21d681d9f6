"""Power spectra in the score table.

Shapes: F forecasts and baselines, C channels with spectra, L lead times with spectra, K total wavenumbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from credit.verify.partial_scores import FieldsByChannelAndLead
from credit.verify.statistics.regions import GLOBE
from credit.verify.statistics.seasons import ALL_SEASONS
from credit.verify.table.table import SHORT_WAVES, ScoreTable


def add_spectra(table: ScoreTable, spectra: FieldsByChannelAndLead, forecasts: Sequence[str]) -> None:
    """Add the power spectra to the dataset of a score table in place; if there are any, these variables are added:

    - ``power``: power in ``spectrum_units``, with dimensions (forecast, spectrum_channel, spectrum_lead, wavenumber).
    - ``power_truth``: power of the truth in the same units, with the same dimensions except forecast.
    - ``power_ratio``: ``power`` divided by ``power_truth``, with the dimensions of ``power``.
    - ``short_wave_power``: power of the shortest third of the waves divided by their power in the truth, with the
      dimensions of the other scores; NaN without a spectrum. Its attribute ``wavenumbers`` lists these waves.

    Args:
        table: the scores.
        spectra: (channel, lead time in minutes) -> power spectra, each (K,) and averaged over the cases: first of the
            truth, then of each of `forecasts`. The spectrum of a forecast without the channel is NaN.
        forecasts: names of the forecasts that are not baselines.
    """
    if not spectra:
        return
    data = table.dataset
    # The power is sorted by forecast, channel, lead time and wavenumber, in the order of the table.
    channels_with_spectra = {channel for channel, _ in spectra}
    channels = [name for name in table.channels if name in channels_with_spectra]
    leads = sorted({lead for _, lead in spectra})
    # The third dimension contains the truth, then the forecasts.
    spectra_CLFK = np.array([[spectra[name, lead] for lead in leads] for name in channels])
    truth_CLK = spectra_CLFK[:, :, 0]
    wavenumbers = np.arange(spectra_CLFK.shape[-1], dtype=np.int32)
    power_FCLK = np.full((len(table.forecasts), *truth_CLK.shape), np.nan)
    forecast_index = [table.forecasts.index(name) for name in forecasts]
    power_FCLK[forecast_index] = np.moveaxis(spectra_CLFK[:, :, 1:], 2, 0)
    # The power is divided by the power of the truth, for each wavenumber and for all short waves together.
    is_short = is_among_shortest_third(wavenumbers)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_FCLK = power_FCLK / truth_CLK
        short_ratio_FCL = power_FCLK[..., is_short].sum(axis=-1) / truth_CLK[..., is_short].sum(axis=-1)

    # The power of the short waves is stored like the other scores, for all seasons together and the globe.
    score_dims = ("forecast", "season", "channel", "lead", "region")
    short_waves = np.full([data.sizes[dim] for dim in score_dims], np.nan)
    rows = np.array([table.channels.index(name) for name in channels])[:, None]
    columns = [table.lead_hours.index(lead / 60) for lead in leads]
    globe = table.regions.index(next(iter(GLOBE)))
    index = table.seasons.index(ALL_SEASONS), rows, columns, globe
    short_waves[:, *index] = np.where(np.isfinite(short_ratio_FCL), short_ratio_FCL, np.nan)
    attributes = {}
    if is_short.any():
        attributes["wavenumbers"] = f"total wavenumbers {wavenumbers[is_short][0]} to {wavenumbers[-1]}"
    dims = ("spectrum_channel", "spectrum_lead", "wavenumber")
    variables = {
        "power": (("forecast", *dims), power_FCLK),
        "power_truth": (dims, truth_CLK),
        "power_ratio": (("forecast", *dims), np.where(np.isfinite(ratio_FCLK), ratio_FCLK, np.nan)),
        SHORT_WAVES: (score_dims, short_waves, attributes),
    }
    coordinates = {
        "spectrum_channel": channels,
        "spectrum_units": ("spectrum_channel", [f"({table.units(name)})2" for name in channels]),
        "spectrum_lead": ("spectrum_lead", np.array(leads) / 60.0, {"units": "hour"}),
        "wavenumber": wavenumbers,
    }
    table.dataset = data.assign(variables).assign_coords(coordinates)


def is_among_shortest_third(wavenumbers: np.ndarray) -> np.ndarray:
    """Return a mask (K,), True for the shortest third of the waves.

    For the total wavenumbers 0 to 21, for example, the shortest third are the wavenumbers 15 to 21.

    Args:
        wavenumbers: (K,) total wavenumbers 0, 1, ..., K - 1. Wavenumber 0 is the global mean and not a wave.
    """
    num_waves = len(wavenumbers) - 1
    return wavenumbers > num_waves - num_waves // 3
