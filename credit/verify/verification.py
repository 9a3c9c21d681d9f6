"""verify: score forecasts and write the scores, the figures and the report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from credit.config import Config
from credit.errors import CreditError
from credit.forecast.forecast_source import ForecastSource
from credit.verify.replace_files import replace_files_atomically
from credit.verify.report.metadata import TrainingLog, read_training_log
from credit.verify.scorer import Verification, score_forecasts
from credit.verify.significance.bootstrap import LEAST_BLOCKS
from credit.verify.statistics.partial_scores import WorkShare
from credit.verify.table.table import ScoreTable

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

# all that a verification may draw: what is left of the last one would be taken for this one's; others' figures stay
_FIGURES = tuple(
    f"figures/{name}"
    for name in (
        "skill.png", "spread.png", "ranks.png", "reliability.png", "scorecard*.png", "spectra.png", "loss.png",
        "maps_*.png", "hovmoeller_*.png", "animation_*.gif",
    )
)  # fmt: skip


def verify(
    config: Config,
    reader: FieldReader,
    archive: ForecastSource,
    folder: str | os.PathLike,
    share: WorkShare | None = None,
    against: str | None = None,
    notice: str | None = None,
    is_trained_here: bool = True,
) -> ScoreTable | None:
    """Score `archive`; write ``scores.nc``, ``scores.csv``, ``figures/`` and ``report.html`` into `folder`, or none.

    Args:
        config: the run's config.
        reader: truth, and the training data of climatology and damping.
        archive: the model's forecasts.
        folder: the run's, or another.
        share: which cases are this process's, where there are several; the first writes.
        against: the other forecast that this is about.
        notice: what a reader of the report is to know beside the scores.
        is_trained_here: whether the training that `folder` has a log of is that of the forecasts' weights.

    Returns:
        The scores, on the first rank, None on the others.

    Raises:
        DataError: if forecasts and truth do not belong together.
        ConfigError: if the climatology cannot be made.
        CreditError: if a file cannot be written; those of an earlier verification then stay.
    """
    folder = Path(folder)
    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CreditError(f"{folder}: cannot be written ({error.strerror}); choose another save_loc") from error
    found = score_forecasts(config, reader, archive, share)
    if found is None:
        return None
    if against is not None:
        found.table.dataset.attrs["compared_with"] = against
    # jinja2 and matplotlib are slow to import; a config that cannot be scored never gets here
    from credit.verify.report.report import write_report

    log = read_training_log(folder / "metrics.jsonl") if is_trained_here else None
    with replace_files_atomically(folder, _FIGURES) as beside:
        found.table.write(beside)
        (beside / "figures").mkdir()
        figures = _draw(found, reader, log, beside / "figures")
        write_report(config, found, archive, log, figures, beside, notice)
    return found.table


def _draw(found: Verification, reader: FieldReader, log: TrainingLog | None, figures: Path) -> list[tuple[str, Path]]:
    """Draw every figure into the folder `figures`; return (caption, path) in the order of the report."""
    from credit.verify.plots import ensemble, events, scores, spectra, style
    from credit.verify.plots.example import draw_example

    table = found.table
    drawn = [
        (
            "Root-mean-square error and anomaly correlation by lead time. Shaded: 95 % intervals, by resampling of "
            f"blocks of days; a lead time with fewer than {LEAST_BLOCKS} blocks has none.",
            style.draw(figures / "skill.png", scores.skill_curves, table, found.figure_channels),
        )
    ]
    if "crps" in table.dataset:
        path = style.draw(figures / "spread.png", ensemble.spread_and_skill, table, found.figure_channels)
        caption = (
            "Continuous ranked probability score by lead time, of single forecasts the mean absolute error; and spread "
            "over the error of the mean, corrected for the number of members: below 1 the ensemble is too sure of "
            "itself."
        )
        drawn.append((caption, path))
    if "ranks" in table.dataset and np.isfinite(table.dataset["ranks"].sel(forecast="model")).any():
        hours = [lead / 60 for lead in found.figure_leads]
        path = style.draw(figures / "ranks.png", ensemble.rank_histograms, table, found.figure_channels, hours)
        drawn.append(("Where the truth lies among the members. A U: too little spread; a slope: a bias.", path))
        if table.events:
            path = style.draw(figures / "reliability.png", events.reliability_diagrams, table, hours)
            caption = (
                "How often an event happened by the probability it was forecast with, and how often that was forecast. "
                "On the diagonal probabilities can be taken at their word; flatter: too sure. A consistent ensemble of "
                "few members is a little flatter. Bars: 95 % intervals of how often it happened, by resampling of "
                f"blocks of days; a lead time with fewer than {LEAST_BLOCKS} blocks has none, nor has a probability "
                "that was forecast on few days."
            )
            drawn.append((caption, path))
    drawn += scores.draw_scorecards(table, figures)
    drawn += draw_example(found, reader, figures)
    if found.spectra:
        path = style.draw(figures / "spectra.png", spectra.spectra, table, found.figure_channels)
        caption = (
            f"Power by total wavenumber, up to {int(table.dataset['wavenumber'][-1])}, the largest that the grids of "
            "the scores, the truth and all forecasts resolve, and over the truth's; of an ensemble its first member. A "
            "ratio below 1: the forecast is too smooth."
        )
        drawn.append((caption, path))
    if log is not None:
        path = style.draw(figures / "loss.png", style.loss_curve, log.train, log.valid)
        drawn.append(("Training and validation loss.", path))
    return drawn
