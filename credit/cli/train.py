"""``credit train``: start or resume a training run."""

from __future__ import annotations

import argparse
import functools
import logging
import signal
import sys
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit.cli.common import add_config_arguments
from credit.cli.console.interrupt import INTERRUPTED
from credit.cli.console.terminal import add_quiet_argument
from credit.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from credit.config import Config
    from credit.parallel.process_info import ProcessInfo
    from credit.train.monitor.run_lock import RunLock
    from credit.train.profile.request import ProfileRequest
    from credit.train.trainer import Trainer

HELP = """Train the model of CONFIG. If the run has a checkpoint, continue from the checkpoint (trainer.resume: auto).

The command writes config.yml, metrics.jsonl, checkpoints/, STATUS and, at the end, summary.json into the run folder
(save_loc).

To stop early, press Ctrl-C, send a signal (TERM, INT, USR1 or USR2), create a file named STOP in the run folder, or
set trainer.walltime. The run then saves a checkpoint and ends; the same command resumes it. A second signal ends
the run immediately, without saving.

--profile measures how the time of a step is spent. It writes a table and a timeline to profile/ in the run folder and
prints the table; then the run continues. It measures 20 steps after 5 warm-up steps. To change this, give the number of
steps, or the first and the last step.

examples:
  credit train config.yml trainer.max_steps=1000
  credit train config.yml --profile
  credit train config.yml --profile 100:149
  torchrun --standalone --nproc-per-node=4 -m credit.cli.main train config.yml

exit code: 0 done, 1 any other failure, 2 wrong config or data, 85 stopped (can be resumed), 130 stopped by Ctrl-C
(can be resumed). On several ranks, the last two cases have the exit code 0; STATUS shows the difference."""

__all__ = ["HELP", "add_arguments", "run_command"]

# Exit status of a run on one process that was stopped and can be resumed.
STOPPED_IN_TIME = 85


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `credit train`: CONFIG, overrides, ``--profile``, ``--profile-rank`` and ``--quiet``."""
    # This import is local, so that listing the commands does not need it.
    from credit.train.profile.request import ProfileRequest, parse_rank, parse_steps

    add_config_arguments(parser)
    parser.add_argument(
        "--profile",
        nargs="?",
        metavar="STEPS",
        type=parse_steps,
        const=ProfileRequest(),
        help="measure how the time of a step is spent: number of steps (20), or first and last step such as 100:119",
    )
    parser.add_argument(
        "--profile-rank", metavar="RANK", type=parse_rank, help="rank whose timeline --profile writes (0)"
    )
    add_quiet_argument(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Collective: train the model of the config and return the exit status that the help text lists.

    Raises:
        CreditError: if the config, the data, the run folder or the checkpoint has an error, or the run does not contain
            the steps to be profiled.
    """
    from credit.config import load_config
    from credit.parallel.elastic.spare_ranks import release_spare_ranks
    from credit.parallel.process_info import read_process_info
    from credit.train.loggers.base import require_loggers

    config = load_config(arguments.config, arguments.overrides)
    require_loggers(config.trainer.loggers)
    process_info = read_process_info()
    if not process_info.is_main:
        # The main rank prints messages about all ranks. The other ranks print only errors, and have separate log files.
        for handler in logging.getLogger().handlers:
            handler.setLevel(logging.ERROR)
    num_ranks = _choose_num_ranks(config, process_info)
    if process_info.rank >= num_ranks:
        return _wait_as_spare_rank(process_info)
    with release_spare_ranks(process_info, num_ranks):
        outcome, is_interrupt = _train(config, replace(process_info, world=num_ranks), _read_profile_request(arguments))
    if process_info.is_main:
        print(f"{outcome}: {config.save_loc}")
    if outcome == "failed":
        return 1
    # torchrun treats any status except 0 as a failure and restarts the ranks. Job scripts read STATUS instead.
    if outcome == "done" or process_info.world > 1 or process_info.can_restart:
        return 0
    if is_interrupt:
        return INTERRUPTED
    return STOPPED_IN_TIME


def _choose_num_ranks(config: Config, process_info: ProcessInfo) -> int:
    """Return the number of ranks that train; the other ranks are spare ranks and wait.

    Normally all ranks train, and an unsuitable number of ranks is an error. If torchrun may have restarted the run on
    the remaining nodes, no user can choose the number, so the largest suitable number of ranks trains.

    Raises:
        ConfigError: if the smallest mesh needs more ranks than remain.
    """
    from credit.parallel.elastic.spare_ranks import choose_num_ranks

    trainer = config.trainer
    if not process_info.can_restart or trainer.global_batch_size is None:
        return process_info.world
    return choose_num_ranks(trainer.parallelism, trainer.global_batch_size, process_info.world)


def _wait_as_spare_rank(process_info: ProcessInfo) -> int:
    """Wait until the other ranks have finished the run, and return the exit status of this spare rank."""
    from credit.parallel.elastic.spare_ranks import wait_for_run_end

    # The job script makes the launcher and its children ignore TERM, but torchrun sends TERM to end the ranks before a
    # restart, so a spare rank needs a handler. A scheduler also sends TERM, and the other ranks then save. torchrun
    # would end them immediately if this rank failed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    return 0 if wait_for_run_end(process_info) else 1


def _read_profile_request(arguments: argparse.Namespace) -> ProfileRequest | None:
    """Return the request for a profile; None without ``--profile``.

    Raises:
        ConfigError: if ``--profile-rank`` is given without ``--profile``.
    """
    # Benchmarks and tests call this function without these arguments.
    request = getattr(arguments, "profile", None)
    rank = getattr(arguments, "profile_rank", None)
    if rank is None:
        return request
    if request is None:
        raise ConfigError(f"--profile-rank {rank}: this option needs --profile")
    return replace(request, trace_rank=rank)


def _train(config: Config, process_info: ProcessInfo, profile: ProfileRequest | None = None) -> tuple[str, bool]:
    """Collective: set up signal handlers, process group, log file and lock of the run, and train.

    Args:
        config: the config of the run.
        process_info: rank and number of ranks of this process.
        profile: steps to be profiled; None for no profile.

    Returns:
        The state of the run, and True if Ctrl-C stopped it. The state is ``done``, ``requeue`` if the next job must
        continue the run, or ``failed`` if torchrun has restarted the ranks after an error that every restart would
        repeat.

    Raises:
        CreditError: if the config, the data, the run folder or the checkpoint has an error.
    """
    from credit.calendar import parse_duration
    from credit.parallel.object_collectives import run_on_all_ranks, run_on_rank0
    from credit.parallel.process_info import process_group
    from credit.parallel.watchdog import Watchdog
    from credit.train.build.model import choose_device
    from credit.train.build.training import assemble_training
    from credit.train.checkpoint.resume import create_run_folder
    from credit.train.monitor.metrics_log import rank_log
    from credit.train.monitor.run_lock import RunLock
    from credit.train.monitor.stop_signal import StopSignal

    start_time = time.perf_counter()
    trainer_config = config.trainer
    device = choose_device(trainer_config.device, process_info.local_rank)
    walltime = trainer_config.walltime
    walltime_seconds = None if walltime is None else parse_duration(walltime) * 60.0
    timeout_minutes = parse_duration(trainer_config.parallelism.timeout)
    folder = Path(config.save_loc)
    # Only the main rank locks the folder and looks for the file STOP in it.
    run_lock = RunLock(folder, process_info.job_id, process_info.launch_id) if process_info.is_main else None
    stop_folder = folder if process_info.is_main else None
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignal(stop_folder, walltime_seconds))
        store = stack.enter_context(process_group(process_info, device, timeout_minutes))
        # One rank of each host tests writing to the folder. An error of one rank is raised on all ranks.
        run_on_all_ranks(lambda: create_run_folder(folder) if process_info.local_rank == 0 else None)
        stack.enter_context(rank_log(folder, process_info.rank))
        if run_on_rank0(functools.partial(_repeats_failure, folder, process_info)):
            return "failed", False
        run_on_all_ranks(functools.partial(_enter_lock, stack, run_lock))
        # The watchdog reports a hanging rank long before the collectives of the other ranks time out.
        patience_seconds = timeout_minutes * 60.0 / 4
        watchdog = stack.enter_context(
            Watchdog(store, process_info.rank, process_info.world, patience=patience_seconds)
        )
        peak_rates = _find_peak_rates(device)
        try:
            trainer = assemble_training(config, process_info, device, watchdog, _draw_preview, start_time, peak_rates)
        except Exception as error:
            _record_failed_start(folder, process_info, error)
            raise
        _log_continuation(folder, trainer)
        stack.enter_context(_build_profile_context(profile, trainer))
        return trainer.run(stop, run_lock), stop.is_interrupt


def _log_continuation(folder: Path, trainer: Trainer) -> None:
    """Log on the main rank from which step the run in `folder` continues; a new run is not mentioned."""
    step, total_steps = trainer.state.step, trainer.parts.total_steps
    if not trainer.parts.process_info.is_main:
        return
    logger = logging.getLogger(__name__)
    if step >= total_steps:
        logger.info(
            "%s has already taken %d steps, and the config asks for %d; no step is left", folder, step, total_steps
        )
    elif step > 0:
        logger.info("%s continues after step %d of %d", folder, step, total_steps)


def _record_failed_start(folder: Path, process_info: ProcessInfo, error: Exception) -> None:
    """Write an error that occurred before the first step into STATUS, on the main rank.

    The STATUS "done" of a finished run is kept, because only the new command was wrong. For a new run, STATUS is
    written only if torchrun restarts the ranks. The restarted ranks then read from STATUS that every restart would
    fail.
    """
    from credit.train.monitor.metrics_log import write_failure
    from credit.train.monitor.run_files import read_status

    if not process_info.is_main:
        return
    status = read_status(folder)
    is_new_run = not status and process_info.can_restart
    if is_new_run or status.get("status") in ("requeue", "running"):
        write_failure(folder, status, error, status.get("step", 0), process_info.job_id, every_rank=False)


def _repeats_failure(folder: Path, process_info: ProcessInfo) -> bool:
    """Return True if torchrun has restarted the ranks after an error that every restart would repeat; log this error.

    An error of this kind, such as a non-finite loss after a rollback, sets STATUS to ``failed``. The loss of a node
    sets STATUS to ``requeue``.

    Args:
        folder: run folder.
        process_info: rank, job and number of restarts of this process.
    """
    from credit.train.monitor.run_files import read_status

    status = read_status(folder)
    is_permanent = status.get("status") == "failed" and status.get("job_id") == process_info.job_id
    if process_info.attempt == 0 or not is_permanent:
        return False
    logging.getLogger(__name__).error(
        "the restart number %d does not train, because the run has failed with an error that every start would repeat: "
        "%s",
        *(process_info.attempt, status.get("reason", "")),
    )
    return True


def _find_peak_rates(device: torch.device) -> dict[str, float]:
    """Return the peak FLOP rates in the GPU's data sheet, for the utilisation in metrics.jsonl; empty for a CPU."""
    import torch

    from credit.hpc.planner.gpus import find_peak_rates

    if device.type != "cuda":
        return {}
    return find_peak_rates(torch.cuda.get_device_name(device))


def _build_profile_context(profile: ProfileRequest | None, trainer: Trainer) -> AbstractContextManager[None]:
    """Collective: return a context manager that profiles the run; without a request it does nothing.

    Raises:
        ConfigError: if the run does not contain the steps to be profiled.
    """
    if profile is None:
        return nullcontext()
    # This import is local, because most runs are not profiled.
    from credit.train.profile.profiler import profile_steps

    return profile_steps(profile, trainer.parts, trainer.state.step)


def _draw_preview(*arguments: Any) -> list[Path]:
    """Plot a preview and return the paths of its figures.

    This function imports matplotlib, because the import is slow and most runs have no previews.

    Args:
        *arguments: arguments of `credit.verify.plots.preview.draw_preview`.
    """
    from credit.verify.plots.preview import draw_preview

    return draw_preview(*arguments)


def _enter_lock(stack: ExitStack, run_lock: RunLock | None) -> None:
    """Acquire the lock of the run folder until the stack closes.

    Args:
        stack: releases the lock when it closes.
        run_lock: lock of the run folder on the main rank; None on other ranks, which do nothing.

    Raises:
        CreditError: if another run holds the lock.
    """
    if run_lock is not None:
        stack.enter_context(run_lock)
