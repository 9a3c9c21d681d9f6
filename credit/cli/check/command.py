"""``credit_check``: everything that can be known to go wrong before a job is queued, all at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from credit.cli.common import add_config_arguments

if TYPE_CHECKING:
    from credit.cli.check.data import DataSummary
    from credit.cli.check.report import CheckReport
    from credit.config import Config
    from credit.parallel.mesh import ParallelDims
    from credit.train.dry_run import DryRunResult

HELP = """Check CONFIG and its data before anything is queued: keys, files, variables, levels, units, times and samples
of each split, the store, its chunks and statistics, save_loc and the room in it, the checkpoint that a run would go on
from, the ranks, the time, and a training step without memory (on the meta device). Nothing is written.

Prints what it looked at, then every problem with what to do about it. Exit codes: 0 no problem, 2 problems."""

__all__ = ["HELP", "add_arguments", "check", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, overrides and the number of ranks."""
    add_config_arguments(parser)
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="ranks of the run; default: the launcher's, those that pbs or slurm ask for, or the least that "
        "trainer.parallelism allows",
    )
    parser.add_argument(
        "--deep",
        action="store_true",
        help="also read every field of data.store and compare it with its checksums, which takes as long as reading it",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from contextlib import suppress

    from credit.config import load_config
    from credit.errors import ConfigError
    from credit.parallel.process_info import read_process_info

    if arguments.world_size is not None and arguments.world_size < 1:
        raise ConfigError(f"--world-size: {arguments.world_size} must be at least 1")
    with suppress(ConfigError):
        if not read_process_info().is_main:
            return 0
    try:
        config = load_config(arguments.config, arguments.overrides)
    except ConfigError as error:
        problems = [str(error), *_check_what_is_left(arguments.config, arguments.overrides)]
    else:
        problems = check(config, print, arguments.world_size, arguments.deep)
    for problem in problems:
        print(f"PROBLEM: {problem}")
    if not problems:
        print("no problem found")
    return 2 if problems else 0


def check(
    config: Config,
    say: Callable[[str], None] = lambda line: None,
    world_size: int | None = None,
    deep: bool = False,
) -> list[str]:
    """Return every problem of a config, its data and its folder, each with its fix.

    Args:
        config: a valid config.
        say: receives a line for each thing that was looked at.
        world_size: ranks that the run will have.
        deep: read every field of the store and compare checksums.
    """
    from credit.cli.check.data import inspect_data
    from credit.cli.check.job import (
        check_disk_space,
        check_folder,
        check_resume,
        check_run_length,
        check_walltime,
        plan_ranks,
        render_job,
    )
    from credit.cli.check.other_forecasts import open_others
    from credit.cli.check.report import CheckReport
    from credit.cli.check.settings import check_ensemble, check_forecasts, check_training

    findings = CheckReport(say)
    check_folder(config, findings)
    job = render_job(config, findings)
    degrees = plan_ranks(config, world_size, job, findings)
    found, tried, forecast_bytes, steps = inspect_data(config.data, findings, deep), None, 0, 0
    if found is None:
        open_others(config, findings)
    else:
        check_training(config, found, findings)
        forecast_bytes = check_forecasts(config, found, findings)
        tried = _try_network(config, found, degrees, findings)
    if tried is not None:
        check_ensemble(config, tried.model, findings)
    as_run, step = check_resume(config, found, tried, degrees, findings)
    if found is not None and "train" in found.samples:
        steps, samples = check_run_length(as_run, found, degrees, findings)
        if steps:
            check_walltime(config, job, steps - step, samples, findings)
    if found is not None:
        check_disk_space(config, found, tried, forecast_bytes, steps, findings)
    return findings.messages


def _check_what_is_left(path: str, overrides: Sequence[str]) -> list[str]:
    """Check the data of a config that has wrong keys elsewhere; those keys are known already."""
    from credit.cli.check.data import inspect_data
    from credit.cli.check.report import CheckReport
    from credit.config.load import apply_overrides, build_config, read_yaml
    from credit.errors import ConfigError

    try:
        raw = apply_overrides(read_yaml(path), overrides)
        rest = {"save_loc": ".", "model": {"type": "wxformer"}, "trainer": {"max_steps": 1}}
        config = build_config({"data": raw.get("data"), **rest})
    except ConfigError:
        return []
    findings = CheckReport(print)
    inspect_data(config.data, findings)
    return findings.messages


def _try_network(
    config: Config, found: DataSummary, degrees: ParallelDims, findings: CheckReport
) -> DryRunResult | None:
    """Build the model without memory for its weights and take a step, then split it as on the run's ranks."""
    from credit.train.dry_run import dummy_assets, try_bfloat16, try_mesh, try_step

    tried = None
    with findings.collect():
        assets = dummy_assets(config, found.grid, found.attributes, found.masks)
        tried = try_step(config, assets)
        findings.say(
            f"model: {config.model.type}, {tried.parameters:,} parameters, {tried.trained_parameters:,} of them train, "
            f"{len(found.channels.input)} channels in, {len(found.channels.output)} out"
        )
        if tried.untried:
            findings.say(f"model: a step could not be tried without values ({tried.untried})")
    if tried is not None and (config.trainer.amp or config.inference.amp):
        with findings.collect():
            try_bfloat16(config, assets)
    if tried is not None and degrees.world > 1:
        with findings.collect():
            try_mesh(config, assets, degrees)
    return tried
