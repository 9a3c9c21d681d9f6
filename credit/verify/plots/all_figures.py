"""Draw all figures of a verification, with their captions, in the order of the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from credit.drawing import style
from credit.verify.plots import ensemble, events, scores, spectra
from credit.verify.plots.example import draw_example
from credit.verify.report.metadata import TrainingLog
from credit.verify.scorer import Verification
from credit.verify.significance.bootstrap import MIN_BLOCKS_FOR_INTERVALS
from credit.verify.table.table import ScoreTable

if TYPE_CHECKING:
    from credit.data.reader import FieldReader


def draw_all_figures(
    verification: Verification, reader: FieldReader, log: TrainingLog | None, folder: Path
) -> list[tuple[str, Path]]:  # fmt: skip
    """Draw every figure of a verification.

    Args:
        verification: the scores and the example forecast.
        reader: reader of the truth.
        log: training log of the run; None to omit the figure of the loss.
        folder: folder for the figures; it must exist.

    Returns:
        (caption, path) of each figure, in the order of the report.

    Raises:
        CreditError: if a figure cannot be written.
    """
    table = verification.table
    channels = verification.figure_channels
    lead_hours = [lead / 60 for lead in verification.figure_leads]

    caption = (
        "Root-mean-square error and anomaly correlation by lead time. Shaded: 95 % intervals, by resampling of blocks "
        f"of days; a lead time with fewer than {MIN_BLOCKS_FOR_INTERVALS} blocks has no interval."
    )
    path = style.save_figure(folder / "skill.png", scores.plot_skill, table, channels)
    figures = [(caption, path)]
    if "crps" in table.dataset:
        caption = (
            "Top: continuous ranked probability score by lead time; for single forecasts, the mean absolute error. "
            "Bottom: spread divided by the error of the ensemble mean, corrected for the number of members; below 1, "
            "the ensemble is overconfident."
        )
        path = style.save_figure(folder / "spread.png", ensemble.plot_crps_and_spread_ratio, table, channels)
        figures.append((caption, path))
    # If the model is a single forecast, the table may contain ranks of other forecasts, but not of the model.
    if "ranks" in table.dataset and np.isfinite(table.dataset["ranks"].sel(forecast="model")).any():
        figures += _draw_calibration(table, channels, lead_hours, folder)

    figures += scores.draw_scorecards(table, folder)
    figures += draw_example(verification, reader, folder)
    if verification.spectra:
        caption = (
            "Top: power by total wavenumber. Below: this power divided by the power of the truth; a ratio below 1 "
            f"means that the forecast is too smooth. Wavenumber {int(table.dataset['wavenumber'][-1])} is the largest "
            "that the grids of the scores, of the truth and of all forecasts resolve. For an ensemble, the first "
            "member is shown."
        )
        path = style.save_figure(folder / "spectra.png", spectra.plot_spectra, table, channels)
        figures.append((caption, path))
    if log is not None:
        path = style.save_figure(folder / "loss.png", style.plot_loss, log.train, log.valid)
        figures.append(("Training and validation loss.", path))
    return figures


def _draw_calibration(
    table: ScoreTable, channels: list[str], lead_hours: list[float], folder: Path
) -> list[tuple[str, Path]]:  # fmt: skip
    """Draw rank histograms and, if there are events, reliability diagrams of the model, which must be an ensemble.

    Args:
        table: the scores.
        channels: names of the channels of the rank histograms.
        lead_hours: lead times in hours; each lead time is one line.
        folder: folder for the figures; it must exist.

    Returns:
        (caption, path) of each figure.
    """
    caption = "Rank of the truth among the members. A U shape means too little spread; a slope means a bias."
    path = style.save_figure(folder / "ranks.png", ensemble.plot_rank_histograms, table, channels, lead_hours)
    figures = [(caption, path)]
    if table.events:
        caption = (
            "Top: observed frequency of an event by forecast probability. Bottom: frequency with which each "
            "probability was forecast. Probabilities on the diagonal are reliable; a flatter curve means "
            "overconfidence. The curve of a consistent ensemble with few members is slightly flatter than the "
            "diagonal. Bars: 95 % intervals of the observed frequency, by resampling of blocks of days. A lead time "
            f"with fewer than {MIN_BLOCKS_FOR_INTERVALS} blocks has no interval, and a probability that was forecast "
            "on few days has no interval."
        )
        path = style.save_figure(folder / "reliability.png", events.plot_reliability_diagrams, table, lead_hours)
        figures.append((caption, path))
    return figures
