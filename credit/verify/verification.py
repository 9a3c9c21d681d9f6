"""Score forecasts and write the scores, the figures and the report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from credit.config import Config
from credit.errors import CreditError
from credit.forecast.forecast_source import ForecastSource
from credit.verify.partial_scores import WorkShare
from credit.verify.replace_files import replace_files
from credit.verify.report.metadata import TrainingLog, read_training_log
from credit.verify.scorer import Verification, score_forecasts
from credit.verify.table.table import ScoreTable

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

# All figures and tables of pairs that a verification may write. Those of an earlier verification are removed, because
# readers would take them for results of this one. Other figures, such as those of training, stay.
_RESULT_PATTERNS = (
    "figures/skill.png", "figures/spread.png", "figures/ranks.png", "figures/reliability.png",
    "figures/scorecard*.png", "figures/spectra.png", "figures/loss.png", "figures/maps_*.png",
    "figures/hovmoeller_*.png", "figures/animation_*.gif", "pairs/*/scores.nc", "pairs/*/scores.csv",
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

    With ``verification.all_pairs``, the tables of each other forecast are written into ``pairs/NAME``.

    Args:
        config: config of the run.
        reader: reader of the truth, and of the training data to which climatology and damping are fitted.
        archive: forecasts of the model.
        folder: folder for the results, usually that of the run; it is created if necessary.
        share: share of the cases that this process scores; None if this process scores all cases. Only rank 0 writes.
        against: name of the other forecast with which the report compares the model first; None for the best baseline.
        notice: a remark for the readers of the report; None for no remark.
        is_trained_here: True if the training log in `folder` belongs to the weights that made the forecasts; the report
            then shows it.

    Returns:
        The scores on rank 0, None on the other ranks.

    Raises:
        DataError: if forecasts and truth cannot be compared.
        ConfigError: if the climatology cannot be computed.
        CreditError: if a file cannot be written.
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
    # Importing jinja2 takes long, so it waits until the config is known to be scorable.
    from credit.verify.report.report import write_report

    log = None
    if is_trained_here:
        log = read_training_log(folder / "metrics.jsonl")
    # All files are written into a temporary folder first, so that an error leaves those of an earlier verification.
    with replace_files(folder, remove=_RESULT_PATTERNS) as temporary_folder:
        _write_tables(verification, temporary_folder)
        (temporary_folder / "figures").mkdir()
        figures = _draw_figures(config, verification, reader, log, temporary_folder / "figures")
        write_report(config, verification, archive, log, figures, temporary_folder, notice)
    return table


def _write_tables(verification: Verification, folder: Path) -> None:
    """Write the scores into a folder, and those of pairs of other forecasts into ``pairs/NAME`` in it."""
    verification.table.write(folder)
    for name, table in verification.other_tables.items():
        pair_folder = folder / "pairs" / name
        pair_folder.mkdir(parents=True)
        table.write(pair_folder)


def _draw_figures(
    config: Config, verification: Verification, reader: FieldReader, log: TrainingLog | None, folder: Path
) -> list[tuple[str, Path]]:
    """Draw all figures unless the config leaves them out; see `credit.verify.plots.all_figures.draw_all_figures`."""
    if not config.verification.draw_figures:
        return []
    # Importing matplotlib takes long, so it waits until there is something to draw.
    from credit.verify.plots.all_figures import draw_all_figures

    return draw_all_figures(verification, reader, log, folder)
