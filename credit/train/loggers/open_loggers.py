"""Start of the loggers of a run, and the id by which they continue the same record of the run after a restart."""

from __future__ import annotations

import uuid
from pathlib import Path

from credit.config import Config
from credit.config.redact import redact_config
from credit.train.loggers.background import BackgroundLogger
from credit.train.loggers.base import LoggedRun, find_logger_class
from credit.utils.atomic import atomic_write_text

# File in the run folder that contains the id of the logger run.
_ID_FILE = "logger_id"


def open_loggers(config: Config, first_step: int) -> list[BackgroundLogger]:
    """Start and return the loggers of ``trainer.loggers``, without waiting for their servers.

    Only the main process calls this function.

    Args:
        config: the config of the run.
        first_step: number of optimizer steps that the run took before this start.

    Raises:
        ConfigError: if a logger is unknown.
        CreditError: if the id cannot be written into the run's folder.
    """
    names = config.trainer.loggers
    if not names:
        return []
    folder = Path(config.save_loc)
    run = LoggedRun(
        name=config.experiment,
        run_id=_obtain_run_id(folder),
        folder=folder,
        # The logger run may be public, and the storage options of data sources may contain keys.
        config=redact_config(config),
        first_step=first_step,
    )
    return [BackgroundLogger(name, find_logger_class(name)(), run) for name in names]


def _obtain_run_id(folder: Path) -> str:
    """Return the id by which loggers identify the run in a folder.

    At the first start of the run, the id is generated and written to a file in the folder.
    """
    path = folder / _ID_FILE
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    run_id = uuid.uuid4().hex[:16]
    atomic_write_text(path, run_id + "\n")
    return run_id
