"""Course of a sweep: choose the trials, train those that are not done, and collect the results."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from credit.compare.execution import Executor, Part, divide_host, exit_on_sigterm
from credit.compare.sweep.results import TrialResult, read_results, write_csv
from credit.compare.sweep.trials import Trial, TrialRecord
from credit.errors import CreditError
from credit.train.monitor.run_files import read_status
from credit.utils.file_lock import file_lock

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepRequest:
    """Arguments of ``credit sweep``.

    Attributes:
        config: path of the config file.
        overrides: ``section.key=value``, applied to all trials.
        folder: folder of the sweep.
        trials: overrides of each trial.
    """

    config: str
    overrides: Sequence[str]
    folder: Path
    trials: Sequence[tuple[str, ...]]


class Sweep:
    """A sweep in its folder; the process holds the lock of the folder.

    Args:
        request: arguments of the command.

    Raises:
        ConfigError: if the config of a trial is not valid, or the folder holds another sweep.
    """

    def __init__(self, request: SweepRequest) -> None:
        # Processes and jobs get absolute paths.
        self.folder = request.folder.resolve()
        self._record = TrialRecord(self.folder, request.config, request.overrides)
        self._trials = self._record.add(request.trials)
        self.base = self._record.base

    def pending(self) -> list[Trial]:
        """Return the trials of this call that are not done."""
        return [trial for trial in self._trials if not self._is_done(trial)]

    def _is_done(self, trial: Trial) -> bool:
        """Return True if the training of a trial is done."""
        return read_status(self.folder / trial.name).get("status") == "done"

    def write_configs(self) -> dict[Trial, Path]:
        """Write the record of the sweep and the configs of the trials that are not done, and return their paths."""
        self._record.save()
        return {trial: self._record.write_config(trial) for trial in self.pending()}

    def train(self, jobs: int, ranks: int) -> list[str]:
        """Train the trials that are not done in processes of this host, and return a sentence for each that failed.

        An interrupted training resumes from its last checkpoint. A failure does not stop the other trials.

        Args:
            jobs: number of trainings at the same time, which share processor cores and GPUs evenly.
            ranks: number of processes of each training.

        Raises:
            ConfigError: if the host has GPUs, but fewer than all processes need.
        """
        executor = Executor(self.folder, divide_host(jobs, ranks))
        parts = {}
        for trial, config_path in self.write_configs().items():
            logger.info("%s: %s", trial.name, " ".join(trial.overrides))
            run_folder = self.folder / trial.name
            parts[trial] = Part(
                f"train {trial.name}", "train", config_path, (), run_folder / "summary.json", trial.overrides, ranks
            )
        for trial, has_ended_well in zip(parts, executor.run_all(list(parts.values())), strict=True):
            if has_ended_well and not self._is_done(trial):
                # On several ranks, a stop in time has the exit code 0.
                status = read_status(self.folder / trial.name).get("status")
                executor.mark_failed(parts[trial], f"STATUS is {status}; the same command continues the training")
        return executor.list_failures()

    def collect(self) -> list[TrialResult]:
        """Return the results of all trials in the folder, the best first."""
        return read_results(self.folder, self._record.trials)

    def write_csv(self) -> Path:
        """Write the results of all trials to ``sweep.csv``, and return its path."""
        path = self.folder / "sweep.csv"
        write_csv(path, self.collect(), self.base.trainer.monitor)
        return path


@contextmanager
def open_sweep(request: SweepRequest) -> Iterator[Sweep]:
    """Context that holds the lock of a sweep's folder; SIGTERM ends the block as Ctrl-C does.

    Raises:
        ConfigError: if the config of a trial is not valid, or the folder holds another sweep.
        CreditError: if another process works in the folder, or a file cannot be written.
    """
    request.folder.mkdir(parents=True, exist_ok=True)
    with exit_on_sigterm(), file_lock(request.folder / ".lock", wait=False) as is_locked:
        if not is_locked:
            raise CreditError(
                f"{request.folder}: another credit sweep works in this folder; wait until it has ended, or choose "
                "another folder with -o"
            )
        yield Sweep(request)
