"""``credit check``: find everything that would go wrong before a job is queued, in one pass."""

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
  - the config keys, and with `realtime` that an operational analysis has every variable
  - files, variables, levels, units, times, and the samples of each split
  - the training store, its chunks and statistics
  - the run folder (save_loc), the free disk space, and the checkpoint from which a run would continue
  - the ranks and the time limit
  - a training step on tensors without memory

It prints what it checked, then errors and warnings with their remedies. Equal messages about several files are
combined. The last line counts errors and warnings.

--json prints one document: {"errors": [...], "warnings": [...], "notes": [...], "num_errors": N, "num_warnings": N}.
Each error or warning is {"message": TEXT, "count": N, "files": [...]}; files is empty for a single message.

example:
  credit check config.yml --world-size 16

exit code: 0 no errors, 2 errors, 130 interrupted."""

__all__ = ["HELP", "add_arguments", "check_config", "run_command"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, overrides, the number of ranks and the form of the output."""
    add_config_arguments(parser)
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="number of ranks of the run; default: that of the launcher, otherwise that of pbs or slurm, otherwise the "
        "smallest number that trainer.parallelism allows",
    )
    parser.add_argument(
        "--deep",
        action="store_true",
        help="also read every field of data.store and compare checksums; takes as long as reading the store",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    add_quiet_argument(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Check the config and print the report; return the exit status, which the help text lists."""
    from contextlib import suppress

    from credit.cli.check.report import CheckReport
    from credit.config.load import build_config, read_config
    from credit.errors import ConfigError
    from credit.parallel.process_info import read_process_info
    from credit.utils.installation import find_conflicts

    if arguments.world_size is not None and arguments.world_size < 1:
        raise ConfigError(f"--world-size: {arguments.world_size} must be at least 1")
    # Under a launcher one rank checks. A wrong environment of the launcher is reported with the ranks.
    with suppress(ConfigError):
        if not read_process_info().is_main:
            return 0
    show_notes = not (arguments.json or arguments.quiet)
    report = CheckReport(_print_note) if show_notes else CheckReport()
    document: dict[str, Any] = {}
    # Another package with the same import name, such as miles-credit, may hide this one in the jobs of the run.
    for conflict in find_conflicts():
        report.add_warning(conflict)
    with report.collect_log():
        try:
            document = read_config(arguments.config, arguments.overrides)
            config = build_config(document, origin=arguments.config)
        except ConfigError as error:
            report.add(str(error))
            _check_data_alone(document, report)
        else:
            check_config(config, report, arguments.world_size, arguments.deep)
    if arguments.json:
        print_json(report.to_json_dict())
    elif show_notes or report.messages or report.warnings:
        print(report.format())
    return report.exit_status


def _print_note(note: str) -> None:
    """Print a note on standard output at once, because the whole check may take minutes."""
    print(wrap_text(note, indent="  "))


def check_config(config: Config, report: CheckReport, world_size: int | None = None, deep: bool = False) -> None:
    """Check a config, its data and its folder.

    Args:
        config: a valid config.
        report: receives errors, warnings and notes.
        world_size: number of ranks of the run. None for the number of ranks of the launcher, else of the job of the
            config, else for the smallest number that the config allows.
        deep: True to read every field of the store and compare checksums.
    """
    from credit.cli.check.data import inspect_data
    from credit.cli.check.disk import check_disk_space, check_folder
    from credit.cli.check.job import check_run_length, check_walltime, plan_ranks, render_job
    from credit.cli.check.other_forecasts import open_other_archives
    from credit.cli.check.resume import check_resume
    from credit.cli.check.settings import check_ensemble, check_forecasts, check_realtime, check_training

    # Each check reports its errors and returns what later checks need, None or 0 where it could not be determined.
    # First the checks without the data.
    check_folder(config, report)
    check_realtime(config, report)
    job = render_job(config, report)
    degrees = plan_ranks(config, world_size, job, report)
    data = inspect_data(config.data, report, deep)
    dry_run = None
    forecast_bytes = 0
    if data is None:
        # Without the grid of the data nothing can be built. Whether other forecasts can be opened is still checked.
        open_other_archives(config, report)
    else:
        check_training(config, data, report)
        forecast_bytes = check_forecasts(config, data, report)
        dry_run = _try_network(config, data, degrees, report)
    if dry_run is not None:
        check_ensemble(config, dry_run.model, report)
    resumed_config, first_step = check_resume(config, data, dry_run, degrees, report)
    if data is None:
        return

    # Last the length of the run and the size of its files, which depend on all of the above.
    num_steps = 0
    if "train" in data.samples:
        num_steps, samples_per_step = check_run_length(resumed_config, data, degrees, report)
        if num_steps:
            check_walltime(config, job, num_steps - first_step, samples_per_step, report)
    check_disk_space(config, data, dry_run, forecast_bytes, num_steps, report)


def _check_data_alone(document: Mapping[str, Any], report: CheckReport) -> None:
    """Check the data section of a config that has errors in other sections, which the report contains already.

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
        # The error of the whole config names these keys as well.
        return
    inspect_data(data_config, report)


def _try_network(config: Config, data: DataSummary, degrees: ParallelDims, report: CheckReport) -> DryRunResult | None:
    """Try a training step on tensors without memory, then try to split the model over the ranks of the run.

    The division of the fields of forecasts (``inference.parallelism.domain``) is tried as well.

    Args:
        config: config of the run.
        data: summary of the data.
        degrees: degrees of parallelism of the run's mesh.
        report: receives errors and notes.

    Returns:
        The result of the dry run, with the model and its sizes; None if the model cannot be built or the step fails.
    """
    from credit.train.build.dry_run import dummy_assets, try_bfloat16, try_divided_forecasts, try_mesh, try_step

    # Take the step in float32 on one process, which reveals most errors of a model.
    dry_run = None
    with report.collect():
        assets = dummy_assets(config, data.grid, data.attributes, data.masks)
        dry_run = try_step(config, assets)
        report.add_note(
            f"model: {config.model.type}, {dry_run.parameters:,} parameters, {dry_run.trained_parameters:,} of them "
            f"trained, {len(data.channels.input)} input channels, {len(data.channels.output)} output channels"
        )
        if dry_run.skip_reason:
            report.add_note(f"model: a step could not be tried without values ({dry_run.skip_reason})")
    if dry_run is None:
        return None
    # Try the dtypes and the mesh of the run; each may fail although the plain step works.
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
