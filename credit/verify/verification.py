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

# All figures and tables of pairs that a verification may write. Old files with these names are removed, because readers
# would mistake them for results of the new verification. Other figures, such as figures of the training run, remain.
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

    With ``verification.all_pairs``, the scores of each other forecast NAME are also written into ``pairs/NAME``.

    Args:
        config: config of the run.
        reader: reader of the truth, and of the training data to which climatology and damping are fitted.
        archive: forecasts of the model.
        folder: folder for the results, usually the run folder; it is created if necessary.
        share: share of the cases that this process scores; None if this process scores all cases. Only rank 0 writes.
        against: name of the forecast with which the report compares the model by default; None for the best baseline.
        notice: remark for the readers of the report; None for no remark.
        is_trained_here: True if the training log in `folder` belongs to the weights that made the forecasts. The report
            then shows the training curves.

    Returns:
        The scores on rank 0, None on the other ranks.

    Raises:
        DataError: if forecasts and truth cannot be compared.
        ConfigError: if the climatology cannot be computed.
        CreditError: if a file cannot be written.
    """
    folder = Path(folder)
    # The folder is created first, so that missing permissions are reported before hours of scoring.
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
    # Importing jinja2 takes long, so it is imported only after the forecasts have been scored.
    from credit.verify.report.report import write_report

    log = None
    if is_trained_here:
        log = read_training_log(folder / "metrics.jsonl")
    # All files are first written into a temporary folder, so that an error does not change files of an earlier call.
    with replace_files(folder, old_patterns=_RESULT_PATTERNS) as temporary_folder:
        _write_tables(verification, temporary_folder)
        (temporary_folder / "figures").mkdir()
        figures = _draw_figures(config, verification, reader, log, temporary_folder / "figures")
        write_report(config, verification, archive, log, figures, temporary_folder, notice)
    return table


def _write_tables(verification: Verification, folder: Path) -> None:
    """Write the score table into a folder, and the table of each other forecast into the subfolder ``pairs/NAME``."""
    verification.table.write(folder)
    for name, table in verification.other_tables.items():
        pair_folder = folder / "pairs" / name
        pair_folder.mkdir(parents=True)
        table.write(pair_folder)


def _draw_figures(
    config: Config, verification: Verification, reader: FieldReader, log: TrainingLog | None, folder: Path
) -> list[tuple[str, Path]]:
    """Draw all figures unless ``verification.draw_figures`` is False, and return (caption, path) of each figure."""
    if not config.verification.draw_figures:
        return []
    # Importing matplotlib takes long, so it is imported only if figures are drawn.
    from credit.verify.plots.all_figures import draw_all_figures

    return draw_all_figures(verification, reader, log, folder)
