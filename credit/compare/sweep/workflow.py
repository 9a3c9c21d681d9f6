"""Workflow of a sweep: record the trials, train the trials that are not done, and collect the results."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from credit.compare.execution import ComparisonPart, Executor, divide_host_into_slots, exit_on_sigterm
from credit.compare.sweep.results import TrialResult, list_changed_keys, read_results, write_csv
from credit.compare.sweep.seeds import average_over_seeds, remove_seed, write_seeds_csv
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
    """Sweep in a folder. The process that creates the object must hold the lock of the folder.

    Args:
        request: arguments of the command.

    Raises:
        ConfigError: if the config of a trial is not valid, or the folder contains a sweep of a different config.
    """

    def __init__(self, request: SweepRequest) -> None:
        # The path is absolute, because processes and jobs may have a different working directory.
        self.folder = request.folder.resolve()
        self._record = TrialRecord(self.folder, request.config, request.overrides)
        self._trials = self._record.add_trials(request.trials)
        self.base = self._record.base

    def list_pending(self) -> list[Trial]:
        """Return the trials of this call that are not done."""
        return [trial for trial in self._trials if not self._is_done(trial)]

    def _is_done(self, trial: Trial) -> bool:
        """Return True if the training run of a trial is done."""
        return read_status(self.folder / trial.name).get("status") == "done"

    def write_configs(self) -> dict[Trial, Path]:
        """Write the record of the sweep and the configs of the pending trials.

        Returns:
            Trial -> path of its config file.
        """
        self._record.save()
        return {trial: self._record.write_config(trial) for trial in self.list_pending()}

    def train(self, jobs: int, ranks: int) -> list[str]:
        """Train the pending trials on this host, and return a sentence for each trial that failed.

        An interrupted training run resumes from its last checkpoint. If a trial fails, the other trials continue.

        Args:
            jobs: number of training runs at the same time, which share processor cores and GPUs equally.
            ranks: number of processes of each training run.

        Raises:
            ConfigError: if the host has GPUs, but fewer than all processes need.
        """
        executor = Executor(self.folder, divide_host_into_slots(jobs, ranks))
        parts = {}
        for trial, config_path in self.write_configs().items():
            logger.info("%s: %s", trial.name, " ".join(trial.overrides))
            run_folder = self.folder / trial.name
            parts[trial] = ComparisonPart(
                f"train {trial.name}", "train", config_path, (), run_folder / "summary.json", trial.overrides, ranks
            )
        for trial, has_ended_well in zip(parts, executor.run_all(list(parts.values())), strict=True):
            if has_ended_well and not self._is_done(trial):
                # On several ranks, a training run that stops at its time limit has the exit code 0.
                status = read_status(self.folder / trial.name).get("status")
                executor.mark_failed(parts[trial], f"STATUS is {status}; the same command continues the training run")
        return executor.list_failures()

    def read_results(self) -> list[TrialResult]:
        """Return the results of all trials in the folder, the best trial first."""
        return read_results(self.folder, self._record.trials)

    def write_tables(self) -> list[Path]:
        """Write the results of all trials to ``sweep.csv``, and return the paths of the written tables.

        If trials differ only in their seed, the averages over the seeds are written to ``seeds.csv``.
        """
        paths = [self.folder / "sweep.csv"]
        results = self.read_results()
        monitor = self.base.trainer.monitor
        write_csv(paths[0], results, monitor)
        averages = average_over_seeds(results)
        seeds_path = self.folder / "seeds.csv"
        if averages:
            write_seeds_csv(seeds_path, averages, remove_seed(list_changed_keys(results)), monitor)
            paths.append(seeds_path)
        else:
            # An earlier sweep in this folder may have left the file.
            seeds_path.unlink(missing_ok=True)
        return paths


@contextmanager
def open_sweep(request: SweepRequest) -> Iterator[Sweep]:
    """Context manager that locks the folder of a sweep and yields the `Sweep`; SIGTERM ends the block like Ctrl-C.

    Raises:
        ConfigError: if the config of a trial is not valid, or the folder contains a sweep of a different config.
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
