"""Score forecasts and write the scores, the figures and the report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from credit.config import Config
from credit.errors import CreditError
from credit.forecast.forecast_source import ForecastSource
from credit.verify.partial_scores import WorkShare
from credit.verify.replace_files import replace_files
from credit.verify.report.metadata import TrainingLog, read_training_log
from credit.verify.scorer import Verification, score_forecasts
from credit.verify.significance.bootstrap import MIN_BLOCKS_FOR_INTERVALS
from credit.verify.table.table import ScoreTable

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

# All figures that a verification may draw. Those of an earlier one are removed, as they would be taken for this one's;
# other figures, as of training, stay.
_FIGURE_PATTERNS = (
    "figures/skill.png", "figures/spread.png", "figures/ranks.png", "figures/reliability.png",
    "figures/scorecard*.png", "figures/spectra.png", "figures/loss.png", "figures/maps_*.png",
    "figures/hovmoeller_*.png", "figures/animation_*.gif",
)  # fmt: skip


def verify_forecasts(
    config: Config,
    reader: FieldReader,
    archive: ForecastSource,
    folder: str | os.PathLike,
    share: WorkShare | None = None,
    against: str | None = None,
    notice: str | None = None,
    is_trained_here: bool = True,
) -> ScoreTable | None:
    """Collective: score forecasts; write ``scores.nc``, ``scores.csv``, ``figures/`` and ``report.html`` into `folder`.

    Args:
        config: config of the run.
        reader: reader of the truth, and of the training data of climatology and damping.
        archive: forecasts of the model.
        folder: folder for the results, usually that of the run; it is created if necessary.
        share: share of the cases of this process, if there are several; the first process writes.
        against: name of the other forecast with which the model is compared.
        notice: a remark for the readers of the report.
        is_trained_here: True if the training log in `folder` is that of the forecasts' weights.

    Returns:
        The scores on the first rank, None on the others.

    Raises:
        DataError: if forecasts and truth do not match.
        ConfigError: if the climatology cannot be computed.
        CreditError: if a file cannot be written; the files of an earlier verification then stay.
    """
    folder = Path(folder)
    # A folder that cannot be written is reported now rather than after hours of scoring.
    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CreditError(
            f"{folder}: cannot be written ({error.strerror}); check its permissions or choose another save_loc"
        ) from error
    verification = score_forecasts(config, reader, archive, share)
    if verification is None:
        return None
    table = verification.table
    if against is not None:
        table.dataset.attrs["compared_with"] = against
    # Importing jinja2 and matplotlib takes long, so it waits until the config is known to be scorable.
    from credit.verify.report.report import write_report

    log = None
    if is_trained_here:
        log = read_training_log(folder / "metrics.jsonl")
    # All files are written into a temporary folder first, so that an error leaves those of an earlier verification.
    with replace_files(folder, remove=_FIGURE_PATTERNS) as temporary_folder:
        table.write(temporary_folder)
        (temporary_folder / "figures").mkdir()
        figures = _draw_figures(verification, reader, log, temporary_folder / "figures")
        write_report(config, verification, archive, log, figures, temporary_folder, notice)
    return table


def _draw_figures(
    verification: Verification, reader: FieldReader, log: TrainingLog | None, folder: Path
) -> list[tuple[str, Path]]:  # fmt: skip
    """Draw every figure into `folder` and return (caption, path) in the order of the report."""
    from credit.verify.plots import ensemble, events, scores, spectra, style
    from credit.verify.plots.example import draw_example

    table = verification.table
    channels = verification.figure_channels
    lead_hours = [lead / 60 for lead in verification.figure_leads]

    # Scores by lead time.
    caption = (
        "Root-mean-square error and anomaly correlation by lead time. Shaded: 95 % intervals, by resampling of blocks "
        f"of days; a lead time with fewer than {MIN_BLOCKS_FOR_INTERVALS} blocks has none."
    )
    figures = [(caption, style.save_figure(folder / "skill.png", scores.plot_skill, table, channels))]
    if "crps" in table.dataset:
        caption = (
            "Continuous ranked probability score by lead time, of single forecasts the mean absolute error; and spread "
            "over the error of the mean, corrected for the number of members: below 1 the ensemble is overconfident."
        )
        figures.append(
            (caption, style.save_figure(folder / "spread.png", ensemble.plot_spread_and_skill, table, channels))
        )
    # Rank histograms and reliability diagrams are drawn of the model alone, and only if it is an ensemble.
    if "ranks" in table.dataset and np.isfinite(table.dataset["ranks"].sel(forecast="model")).any():
        caption = "Rank of the truth among the members. A U shape: too little spread; a slope: a bias."
        path = style.save_figure(folder / "ranks.png", ensemble.plot_rank_histograms, table, channels, lead_hours)
        figures.append((caption, path))
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

    # Comparison with other forecasts, the example, spectra and training.
    figures += scores.draw_scorecards(table, folder)
    figures += draw_example(verification, reader, folder)
    if verification.spectra:
        caption = (
            f"Power by total wavenumber, up to {int(table.dataset['wavenumber'][-1])}, the largest that the grids of "
            "the scores, the truth and all forecasts resolve, and over the truth's; of an ensemble its first member. A "
            "ratio below 1: the forecast is too smooth."
        )
        figures.append((caption, style.save_figure(folder / "spectra.png", spectra.plot_spectra, table, channels)))
    if log is not None:
        path = style.save_figure(folder / "loss.png", style.plot_loss, log.train, log.valid)
        figures.append(("Training and validation loss.", path))
    return figures
