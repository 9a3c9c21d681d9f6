"""``credit_train``: train, or continue a run."""

from __future__ import annotations

import argparse
import functools
import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit.cli.arguments import add_config_arguments as add_arguments

if TYPE_CHECKING:
    from credit.config import Config
    from credit.parallel.process_info import ProcessInfo
    from credit.train.monitor.run_lock import RunLock

HELP = """Train the model of CONFIG, or continue where its last checkpoint stands (trainer.resume: auto).

The run's folder (save_loc) receives config.yml, metrics.jsonl, checkpoints/, STATUS and, at the end, summary.json. A
signal (TERM, INT, USR1, USR2), a file STOP in the folder or the end of trainer.walltime saves a checkpoint and ends the
run with exit code 85; the same command goes on from there. Exit codes: 0 done, 2 bad config or data, 85 stopped to be
continued, 1 else."""

__all__ = ["HELP", "add_arguments", "run"]

STOPPED_IN_TIME = 85


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from credit.config import load_config
    from credit.parallel.process_info import read_process_info

    launch = read_process_info()
    if not launch.is_main:
        for handler in logging.getLogger().handlers:
            handler.setLevel(logging.ERROR)
    config = load_config(arguments.config, arguments.overrides)
    outcome = _train(config, launch)
    if launch.is_main:
        print(f"{outcome}: {config.save_loc}")
    # torchrun would take another code for a failure and start the ranks again; job scripts read STATUS
    return 0 if outcome == "done" or launch.world > 1 else STOPPED_IN_TIME


def _train(config: Config, launch: ProcessInfo) -> str:
    """Train, and hold meanwhile what has to be given back: signals, process group, log, folder."""
    import torch

    from credit.calendar import parse_duration
    from credit.hpc.planner.gpus import reported_peaks
    from credit.parallel.object_collectives import together
    from credit.parallel.process_info import process_group
    from credit.parallel.watchdog import Watchdog
    from credit.train.build import assemble_training
    from credit.train.build_model import choose_device
    from credit.train.checkpoint.resume import prepare_folder
    from credit.train.monitor.metrics_log import rank_log, write_failure
    from credit.train.monitor.run_files import read_status
    from credit.train.monitor.run_lock import RunLock
    from credit.train.monitor.stop_signal import StopSignal

    conf, began = config.trainer, time.perf_counter()
    device = choose_device(conf.device, launch.local_rank)
    walltime = None if conf.walltime is None else parse_duration(conf.walltime) * 60.0
    timeout = parse_duration(conf.parallelism.timeout)
    folder = Path(config.save_loc)
    presence = RunLock(folder, launch.job_id) if launch.is_main else None
    with ExitStack() as held:
        stop = held.enter_context(StopSignal(folder if launch.is_main else None, walltime))
        store = held.enter_context(process_group(launch, device, timeout))
        together(lambda: prepare_folder(folder))
        held.enter_context(rank_log(folder, launch.rank))
        together(functools.partial(_hold, held, presence))
        # long before the collectives give up
        watchdog = held.enter_context(Watchdog(store, launch.rank, launch.world, patience=timeout * 60.0 / 4))
        peaks = reported_peaks(torch.cuda.get_device_name(device)) if device.type == "cuda" else {}
        try:
            trainer = assemble_training(config, launch, device, watchdog, _draw_preview, began, peaks)
        except Exception as error:
            # a run that is done stays so: what was asked of it now is wrong
            before = read_status(folder) if launch.is_main else {}
            if before.get("status") in ("requeue", "running"):
                write_failure(folder, before, error, before.get("step", 0), launch.job_id, every_rank=False)
            raise
        return trainer.run(stop, presence)


def _draw_preview(*arguments: Any) -> list[Path]:
    """Draw; matplotlib is slow to import, and most runs draw nothing."""
    from credit.verify.plots.preview import draw_preview

    return draw_preview(*arguments)


def _hold(held: ExitStack, presence: RunLock | None) -> None:
    if presence is not None:
        held.enter_context(presence)
