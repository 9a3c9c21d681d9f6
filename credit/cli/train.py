"""``credit_train``: train, or continue a run."""

from __future__ import annotations

import argparse
import logging

from credit.cli.arguments import add_config_arguments as add_arguments

HELP = """Train the model of CONFIG, or continue where its last checkpoint stands (trainer.resume: auto).

The run's folder (save_loc) receives config.yml, metrics.jsonl, checkpoints/ and STATUS. A signal (TERM, INT, USR1,
USR2), a file STOP in the folder or the end of trainer.walltime saves a checkpoint and ends the run with exit code 85;
the same command goes on from there. Exit codes: 0 done, 2 bad config or data, 85 stopped to be continued, 1 else."""

__all__ = ["HELP", "add_arguments", "run"]

STOPPED_IN_TIME = 85


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from credit.config import load_config
    from credit.parallel.launch import process_group, read_launch
    from credit.times import parse_duration
    from credit.train.assemble import assemble_training
    from credit.train.network import choose_device

    config = load_config(arguments.config, arguments.overrides)
    launch = read_launch()
    if not launch.is_main:
        logging.getLogger().setLevel(logging.ERROR)
    device = choose_device(config.trainer.device, launch.local_rank)
    with process_group(launch, device, parse_duration(config.trainer.parallelism.timeout)):
        outcome = assemble_training(config, launch, device).run()
    if launch.is_main:
        print(f"{outcome}: {config.save_loc}")
    # torchrun would take another code for a failure and start the ranks again; job scripts read STATUS
    return 0 if outcome == "done" or launch.world > 1 else STOPPED_IN_TIME
