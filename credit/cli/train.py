"""``credit train``: train a model, or continue a run."""

from __future__ import annotations

import argparse
import functools
import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit.cli.common import add_config_arguments
from credit.cli.console.interrupt import INTERRUPTED
from credit.cli.console.terminal import add_quiet_argument

if TYPE_CHECKING:
    from credit.config import Config
    from credit.parallel.process_info import ProcessInfo
    from credit.train.monitor.run_lock import RunLock

HELP = """Train the model of CONFIG. A run with a checkpoint continues from it (trainer.resume: auto).

The run folder (save_loc) receives config.yml, metrics.jsonl, checkpoints/, STATUS and, at the end, summary.json.

To stop early, press Ctrl-C, send a signal (TERM, INT, USR1 or USR2), create a file named STOP in the run folder, or
set trainer.walltime. The run then saves a checkpoint and ends; the same command continues it. A second signal ends
the run at once, without saving.

example:
  credit train config.yml trainer.max_steps=1000
  torchrun --standalone --nproc-per-node=4 -m credit.cli.main train config.yml

exit code: 0 done, 1 any other failure, 2 wrong config or data, 85 stopped (can be continued), 130 stopped by Ctrl-C
(can be continued). On several ranks, the last two cases have the exit code 0; STATUS shows the difference."""

__all__ = ["HELP", "add_arguments", "run_command"]

# Exit status of a single process that was stopped in time and can be continued; see the help text.
STOPPED_IN_TIME = 85


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, overrides and ``--quiet``."""
    add_config_arguments(parser)
    add_quiet_argument(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Collective: train the model of the config and return the exit status, which the help text lists.

    Raises:
        CreditError: if the config, the data, the run's folder or its checkpoint do not allow the run.
    """
    from credit.config import load_config
    from credit.parallel.process_info import read_process_info

    config = load_config(arguments.config, arguments.overrides)
    process_info = read_process_info()
    if not process_info.is_main:
        # The main rank prints what concerns all ranks; the others print errors only, and have log files of their own.
        for handler in logging.getLogger().handlers:
            handler.setLevel(logging.ERROR)
    outcome, is_interrupt = _train(config, process_info)
    if process_info.is_main:
        print(f"{outcome}: {config.save_loc}")
    # torchrun would take another status for a failure and start the ranks again; job scripts read STATUS.
    if outcome == "done" or process_info.world > 1:
        return 0
    if is_interrupt:
        return INTERRUPTED
    return STOPPED_IN_TIME


def _train(config: Config, process_info: ProcessInfo) -> tuple[str, bool]:
    """Collective: train while holding the signal handlers, the process group, the log file and the lock of the run.

    Returns:
        The state of the run: ``done``, or ``requeue`` if another job is to continue it; and True if Ctrl-C stopped it.

    Raises:
        CreditError: if the config, the data, the run's folder or its checkpoint do not allow the run.
    """
    import torch

    from credit.calendar import parse_duration
    from credit.hpc.planner.gpus import find_peak_rates
    from credit.parallel.object_collectives import run_on_all_ranks
    from credit.parallel.process_info import process_group
    from credit.parallel.watchdog import Watchdog
    from credit.train.build.model import choose_device
    from credit.train.build.training import assemble_training
    from credit.train.checkpoint.resume import prepare_folder
    from credit.train.monitor.metrics_log import rank_log, write_failure
    from credit.train.monitor.run_files import read_status
    from credit.train.monitor.run_lock import RunLock
    from credit.train.monitor.stop_signal import StopSignal

    start_time = time.perf_counter()
    trainer_config = config.trainer
    device = choose_device(trainer_config.device, process_info.local_rank)
    walltime_seconds = None
    if trainer_config.walltime is not None:
        walltime_seconds = parse_duration(trainer_config.walltime) * 60.0
    timeout_minutes = parse_duration(trainer_config.parallelism.timeout)
    folder = Path(config.save_loc)
    # The main rank alone locks the folder and looks for the file STOP in it.
    run_lock = RunLock(folder, process_info.job_id) if process_info.is_main else None
    stop_folder = folder if process_info.is_main else None
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignal(stop_folder, walltime_seconds))
        store = stack.enter_context(process_group(process_info, device, timeout_minutes))
        # `run_on_all_ranks` raises the error of one rank on all ranks, so that none waits for a rank that has ended.
        run_on_all_ranks(lambda: prepare_folder(folder))
        stack.enter_context(rank_log(folder, process_info.rank))
        run_on_all_ranks(functools.partial(_enter_lock, stack, run_lock))
        # The watchdog reports a rank that hangs long before the collectives of the other ranks time out.
        patience_seconds = timeout_minutes * 60.0 / 4
        watchdog = stack.enter_context(
            Watchdog(store, process_info.rank, process_info.world, patience=patience_seconds)
        )
        # Peak FLOP rates of this GPU's data sheet, for the utilisation in metrics.jsonl; none for a CPU.
        peak_rates = {}
        if device.type == "cuda":
            peak_rates = find_peak_rates(torch.cuda.get_device_name(device))
        try:
            trainer = assemble_training(config, process_info, device, watchdog, _draw_preview, start_time, peak_rates)
        except Exception as error:
            # STATUS of a run that is done stays "done": only the new request was wrong.
            status = read_status(folder) if process_info.is_main else {}
            if status.get("status") in ("requeue", "running"):
                write_failure(folder, status, error, status.get("step", 0), process_info.job_id, every_rank=False)
            raise
        return trainer.run(stop, run_lock), stop.is_interrupt


def _draw_preview(*arguments: Any) -> list[Path]:
    """Draw a preview and return the paths of its figures.

    matplotlib is imported here and not at the top of the file, because the import is slow.

    Args:
        *arguments: those of `credit.verify.plots.preview.draw_preview`.
    """
    from credit.verify.plots.preview import draw_preview

    return draw_preview(*arguments)


def _enter_lock(stack: ExitStack, run_lock: RunLock | None) -> None:
    """Take the lock of the run's folder until the stack closes.

    Args:
        stack: releases the lock when it closes.
        run_lock: lock of the main rank; None on other ranks, which then do nothing.

    Raises:
        CreditError: if another run holds the lock.
    """
    if run_lock is not None:
        stack.enter_context(run_lock)
