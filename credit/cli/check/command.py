"""``credit check``: find all errors in a config and its data before a job is submitted."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from credit.cli.common import add_config_arguments
from credit.cli.console.terminal import add_quiet_argument, print_json, wrap_text

if TYPE_CHECKING:
    from credit.cli.check.data import DataSummary
    from credit.cli.check.report import CheckReport
    from credit.config import Config
    from credit.parallel.mesh import ParallelDims
    from credit.train.build.dry_run import DryRunResult

HELP = """Check CONFIG and its data before you submit a job. The command writes nothing.

It checks:
  - other installed packages with the same import name, such as miles-credit
  - the config keys and, if the config has `realtime`, that operational analyses contain every variable
  - files, variables, levels, units, times, and the samples of each split
  - the training store, its chunks and statistics
  - the run folder (save_loc), the free disk space, and the checkpoint from which a run would continue
  - the ranks and the time limit
  - one training step on tensors without memory (meta device)

The command prints what it checked, then errors and warnings with their remedies. Equal messages about several files
are combined. The last line states the number of errors and warnings.

--json prints one document: {"errors": [...], "warnings": [...], "notes": [...], "num_errors": N, "num_warnings": N}.
Each error or warning is {"message": TEXT, "count": N, "files": [...]}; files is empty for a single message.

example:
  credit check config.yml --world-size 16

exit code: 0 no errors, 2 errors, 130 interrupted."""

__all__ = ["HELP", "add_arguments", "check_config", "run_command"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `credit check`: CONFIG, overrides, number of ranks and output format."""
    add_config_arguments(parser)
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="number of ranks of the run; default: the number of the launcher, otherwise of pbs or slurm, otherwise "
        "the smallest number that trainer.parallelism allows",
    )
    parser.add_argument(
        "--deep",
        action="store_true",
        help="also read every field of data.store and compare checksums; takes as long as reading the store",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    add_quiet_argument(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Check the config, print the report, and return the exit status that the help text lists."""
    from contextlib import suppress

    from credit.cli.check.report import CheckReport
    from credit.config.load import build_config, read_config
    from credit.errors import ConfigError
    from credit.parallel.process_info import read_process_info
    from credit.utils.installation import describe_conflicts

    if arguments.world_size is not None and arguments.world_size < 1:
        raise ConfigError(f"--world-size: {arguments.world_size} must be at least 1")
    # Under a launcher, only rank 0 checks. Errors in the launcher's environment variables are reported later, by
    # plan_ranks.
    with suppress(ConfigError):
        if not read_process_info().is_main:
            return 0
    show_notes = not (arguments.json or arguments.quiet)
    report = CheckReport(_print_note) if show_notes else CheckReport()
    document: dict[str, Any] = {}
    # Jobs may import a different package with the same import name, such as miles-credit, in place of this package.
    for conflict in describe_conflicts():
        report.add_warning(conflict)
    with report.collect_logged_warnings():
        try:
            document = read_config(arguments.config, arguments.overrides)
            config = build_config(document, origin=arguments.config)
        except ConfigError as error:
            report.add(str(error))
            _check_data_section_only(document, report)
        else:
            check_config(config, report, arguments.world_size, arguments.deep)
    if arguments.json:
        print_json(report.to_json_dict())
    elif show_notes or report.messages or report.warnings:
        print(report.format())
    return report.exit_status


def _print_note(note: str) -> None:
    """Print a note on standard output immediately, because the whole check may take minutes."""
    print(wrap_text(note, indent="  "))


def check_config(config: Config, report: CheckReport, world_size: int | None = None, deep: bool = False) -> None:
    """Check a config, its data and its run folder.

    Args:
        config: a valid config.
        report: receives errors, warnings and notes.
        world_size: number of ranks of the run. If None, use the number of ranks of the launcher, otherwise of the
            config's job, otherwise the smallest number that the config allows.
        deep: True to read every field of the store and compare checksums.
    """
    from credit.cli.check.data import inspect_data
    from credit.cli.check.disk import check_disk_space, check_folder
    from credit.cli.check.job import check_run_length, check_walltime, plan_ranks, render_job
    from credit.cli.check.other_forecasts import open_other_archives
    from credit.cli.check.resume import check_resume
    from credit.cli.check.settings import check_ensemble, check_forecasts, check_realtime, check_training

    # Each check reports its errors and returns the values that later checks need (None or 0 if it cannot determine
    # them). The first checks do not need the data.
    check_folder(config, report)
    check_realtime(config, report)
    job = render_job(config, report)
    degrees = plan_ranks(config, world_size, job, report)
    data = inspect_data(config.data, report, deep)
    dry_run = None
    forecast_bytes = 0
    if data is None:
        # Without the grid of the data, no network can be built. The other forecasts can still be opened and checked.
        open_other_archives(config, report)
    else:
        check_training(config, data, report)
        forecast_bytes = check_forecasts(config, data, report)
        dry_run = _try_training_step(config, data, degrees, report)
    if dry_run is not None:
        check_ensemble(config, dry_run.model, report)
    resumed_config, first_step = check_resume(config, data, dry_run, degrees, report)
    if data is None:
        return

    # The length of the run and the size of its files depend on all results above, so they are checked last.
    num_steps = 0
    if "train" in data.samples:
        num_steps, samples_per_step = check_run_length(resumed_config, data, degrees, report)
        if num_steps:
            check_walltime(config, job, num_steps - first_step, samples_per_step, report)
    check_disk_space(config, data, dry_run, forecast_bytes, num_steps, report)


def _check_data_section_only(document: Mapping[str, Any], report: CheckReport) -> None:
    """Check only the data section, for a config that cannot be built. The report already contains the config's errors.

    Args:
        document: contents of the config file, not validated.
        report: receives errors and notes on the data.
    """
    from credit.cli.check.data import inspect_data
    from credit.config.load import build_data_config
    from credit.errors import ConfigError

    try:
        data_config = build_data_config(document, origin="data")
    except ConfigError:
        # The errors in the data section are already in the report, as part of the errors of the whole config.
        return
    inspect_data(data_config, report)


def _try_training_step(
    config: Config, data: DataSummary, degrees: ParallelDims, report: CheckReport
) -> DryRunResult | None:
    """Try a training step on tensors without memory, then try to split the model over the ranks of the run.

    If ``inference.parallelism.domain`` divides the fields of forecasts, also try this division.

    Args:
        config: config of the run.
        data: summary of the data.
        degrees: size of each axis of the run's mesh.
        report: receives errors and notes.

    Returns:
        The result of the dry run, with the model and its sizes; None if the model cannot be built or the step fails.
    """
    from credit.train.build.dry_run import (
        build_placeholder_assets,
        try_bfloat16,
        try_divided_forecasts,
        try_mesh,
        try_step,
    )

    # A step in float32 on one process finds most errors of a model.
    dry_run = None
    with report.collect():
        assets = build_placeholder_assets(config, data.grid, data.attributes, data.masks)
        dry_run = try_step(config, assets)
        report.add_note(
            f"model: {config.model.type}, {dry_run.num_parameters:,} parameters, {dry_run.num_trained_parameters:,} "
            f"of them trained, {len(data.channels.input)} input channels, {len(data.channels.output)} output channels"
        )
        if dry_run.skip_reason:
            report.add_note(f"model: a step could not be tried without values ({dry_run.skip_reason})")
    if dry_run is None:
        return None
    # The dtypes and the mesh of the run may cause errors although the step in float32 on one process works.
    if config.trainer.amp or config.inference.amp:
        with report.collect():
            try_bfloat16(config, assets)
    if degrees.world > 1:
        with report.collect():
            try_mesh(config, assets, degrees)
    if config.inference.parallelism.num_domain_ranks > 1:
        with report.collect():
            grid = try_divided_forecasts(config, assets).grid
            report.add_note(
                f"inference.parallelism.domain: {len(grid.rows.owned)} parts of the rows x {len(grid.columns.owned)} "
                "parts of the columns"
            )
    return dry_run
