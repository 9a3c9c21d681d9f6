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
        log: training log of the run; None leaves out the figure of the loss.
        folder: folder for the figures; it must exist.

    Returns:
        (caption, path) of each figure, in the order of the report.

    Raises:
        CreditError: if a figure cannot be written.
    """
    table = verification.table
    channels = verification.figure_channels
    lead_hours = [lead / 60 for lead in verification.figure_leads]

    # Scores by lead time.
    caption = (
        "Root-mean-square error and anomaly correlation by lead time. Shaded: 95 % intervals, by resampling of blocks "
        f"of days; a lead time with fewer than {MIN_BLOCKS_FOR_INTERVALS} blocks has none."
    )
    path = style.save_figure(folder / "skill.png", scores.plot_skill, table, channels)
    figures = [(caption, path)]
    if "crps" in table.dataset:
        caption = (
            "Continuous ranked probability score by lead time, of single forecasts the mean absolute error; and spread "
            "over the error of the mean, corrected for the number of members: below 1 the ensemble is overconfident."
        )
        path = style.save_figure(folder / "spread.png", ensemble.plot_spread_and_skill, table, channels)
        figures.append((caption, path))
    # There may be ranks of another forecast only, if the model is a single forecast.
    if "ranks" in table.dataset and np.isfinite(table.dataset["ranks"].sel(forecast="model")).any():
        figures += _draw_calibration(table, channels, lead_hours, folder)

    # Comparison with other forecasts, the example, spectra and training.
    figures += scores.draw_scorecards(table, folder)
    figures += draw_example(verification, reader, folder)
    if verification.spectra:
        caption = (
            f"Power by total wavenumber, up to {int(table.dataset['wavenumber'][-1])}, the largest that the grids of "
            "the scores, the truth and all forecasts resolve, and over the truth's; of an ensemble its first member. A "
            "ratio below 1: the forecast is too smooth."
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
        lead_hours: lead times in hours, one line each.
        folder: folder for the figures; it must exist.

    Returns:
        (caption, path) of each figure.
    """
    caption = "Rank of the truth among the members. A U shape: too little spread; a slope: a bias."
    path = style.save_figure(folder / "ranks.png", ensemble.plot_rank_histograms, table, channels, lead_hours)
    figures = [(caption, path)]
    if table.events:
        caption = (
            "Observed frequency of an event by forecast probability, and how often each probability was forecast. "
            "On the diagonal the probabilities are reliable; a flatter curve is overconfident. A consistent "
            "ensemble of few members is a little flatter. Bars: 95 % intervals of the observed frequency, by "
            f"resampling of blocks of days; a lead time with fewer than {MIN_BLOCKS_FOR_INTERVALS} blocks has "
            "none, nor has a probability that was forecast on few days."
        )
        path = style.save_figure(folder / "reliability.png", events.plot_reliability_diagrams, table, lead_hours)
        figures.append((caption, path))
    return figures
