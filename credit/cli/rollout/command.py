"""``credit rollout``: make forecasts from a list of initial times."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from credit.cli.common import add_config_arguments
from credit.cli.console.terminal import add_quiet_argument

if TYPE_CHECKING:
    from credit.cli.rollout.rank_work import RankWork
    from credit.config import Config
    from credit.data.reader import FieldReader
    from credit.forecast.io.diagnostics import OutputDiagnostics
    from credit.forecast.io.forecast_writer import ForecastWriter
    from credit.forecast.rollout import ForecastStart
    from credit.forecast.shared_forecasts import ForecastFunction, StepFilter
    from credit.parallel.domain.domain import Domain
    from credit.parallel.mesh import DeviceGrid
    from credit.parallel.process_info import ProcessInfo
    from credit.train.build.forecaster import Forecaster


logger = logging.getLogger(__name__)

HELP = """Make forecasts from the times in inference.initial_times with the weights of inference.checkpoint.

The forecasts are written to save_loc/forecasts (inference.folder): one CF netCDF or GRIB2 file for each initial time,
or one zarr store (inference.format). Several ranks share the initial times. With inference.parallelism, several ranks
share the fields or the members of one forecast.

The data must contain the prognostic variables and the dynamic forcing. They must also contain the truth if
inference.initial_times is a range without an end. If data.sources are the sources of the training store, the store is
read; otherwise the sources are read.

Complete forecasts are kept. Files with different weights, analyses, levels, lead times or settings are replaced. A zarr
store with different settings is an error; choose a different inference.folder. Later initial times are appended to a
store.

example:
  credit rollout config.yml inference.lead_time=240h
  credit rollout config.yml --latest data.sources.0.path=analysis.nc"""

__all__ = ["HELP", "add_arguments", "run_command"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `credit rollout`: CONFIG, overrides and the options that select the initial times."""
    add_config_arguments(parser)
    parser.add_argument(
        "--latest",
        action="store_true",
        help="start from the last time of the data; equivalent to inference.initial_times=latest",
    )
    parser.add_argument(
        "--part", metavar="I/N", help="for job arrays: use only part I of N parts of the initial times; I starts at 1"
    )
    add_quiet_argument(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Collective: make the forecasts of the config and return the exit status 0.

    Raises:
        ConfigError: if the config or an option is wrong.
        DataError: if the data do not contain an initial time or a variable.
        CheckpointError: if the checkpoint is missing or damaged.
    """
    from credit.calendar import parse_duration
    from credit.config import load_config
    from credit.parallel.process_info import process_group, read_process_info
    from credit.train.build.model import build_forecast_mesh, choose_device

    overrides = list(arguments.overrides)
    if arguments.latest:
        _require_no_initial_times(overrides)
        overrides.append("inference.initial_times=latest")
    config = load_config(arguments.config, overrides)
    process_info = read_process_info()
    parallelism = config.inference.parallelism
    device = choose_device(config.trainer.device, process_info.local_rank)
    with ExitStack() as stack:
        if parallelism.needs_process_group:
            timeout_minutes = parse_duration(config.trainer.parallelism.timeout)
            stack.enter_context(process_group(process_info, device, timeout_minutes))
        mesh = build_forecast_mesh(parallelism, process_info, device.type)
        make_forecasts(config, arguments.part, process_info, mesh)
    return 0


def _require_no_initial_times(overrides: Sequence[str]) -> None:
    """Raise a ConfigError if an override sets initial times, because this contradicts ``--latest``."""
    from credit.errors import ConfigError

    for text in overrides:
        if re.match(r"inference\.initial_times[.=]", text):
            raise ConfigError(f"--latest: cannot be combined with {text}; leave one of them out")


def make_forecasts(config: Config, part: str | None, process_info: ProcessInfo, mesh: DeviceGrid) -> None:
    """Collective: make the forecasts of this rank and write them.

    All ranks of a mesh make the same number of batches, because all of them must gather the sharded weights.

    Args:
        config: config of the run.
        part: value ``I/N`` of ``--part``; None for all initial times.
        process_info: rank and world size of this process.
        mesh: mesh of the ranks that make forecasts.
    """
    from credit.cli.rollout.forecast_rounds import make_forecast_rounds, writes_shared_store
    from credit.cli.rollout.rank_work import plan_rank_work, shard_initial_times
    from credit.forecast.initial_times import choose_initial_times, list_output_leads
    from credit.forecast.io.async_writer import BackgroundWriter
    from credit.train.build.forecaster import assemble_forecaster, build_output_diagnostics
    from credit.train.build.open_data import open_forecast_fields

    # Open the data, the model and the files.
    inference = config.inference
    step_minutes = config.data.step_minutes
    reader, splits = open_forecast_fields(config)
    if process_info.is_main:
        _warn_old_store(config, reader)
    forecaster = assemble_forecaster(config, reader, inference.checkpoint, process_info, mesh)
    initial_times = choose_initial_times(inference, config.data, reader.times, reader.calendar, splits["test"])
    lead_minutes = list_output_leads(inference, step_minutes)
    # Into a zarr store, each rank writes its part of divided fields. Into files, one rank writes whole fields.
    every_rank_writes = writes_shared_store(config, mesh)
    written_domain = forecaster.stepper.domain if every_rank_writes else None
    diagnostics = build_output_diagnostics(forecaster, lead_minutes[-1], written_domain)
    writer = _open_writer(config, forecaster, reader, diagnostics, initial_times, lead_minutes, written_domain)
    _check_products(config, writer)

    # Determine the forecasts that this rank makes.
    rank_groups = shard_initial_times(initial_times, inference, part, process_info, mesh)
    work = plan_rank_work(rank_groups, initial_times[0], inference, writer.is_complete, process_info, mesh)
    if process_info.is_main and work.incomplete_times:
        _warn_distribution_shift(config, forecaster, reader, work.incomplete_times[0])

    # Make the forecasts while a thread writes the outputs of earlier steps.
    lead_numbers = {lead: number for number, lead in enumerate(lead_minutes)}
    with BackgroundWriter(
        writer,
        lead_numbers,
        step_minutes,
        str(forecaster.path),
        work.incomplete_times,
        diagnostics,
        raises_in_put=not every_rank_writes,
    ) as background:
        make_forecast_rounds(config, forecaster, work, writer, background, lead_minutes[-1], process_info, mesh)
    if mesh.gets_forecasts:
        rank_name = f"rank {process_info.rank}: " if process_info.world > 1 else ""
        _report_and_make_products(config, forecaster, writer, work, rank_name)


def _check_products(config: Config, writer: ForecastWriter) -> None:
    """Check before the forecasts are made that the products can be made from them.

    Raises:
        ConfigError, DataError: if a product cannot be made; the message names its key.
    """
    if config.inference.products:
        # This import is local because maps need matplotlib, which is slow to import.
        from credit.cli.products.run_products import check_products

        check_products(config, writer.schema)


def _report_and_make_products(
    config: Config, forecaster: Forecaster, writer: ForecastWriter, work: RankWork, rank_name: str
) -> None:
    """Print the number of forecasts of this rank, and make the products of these forecasts.

    Args:
        config: config of the run.
        forecaster: model, with its static fields.
        writer: writer of the forecasts.
        work: forecasts of this rank, all of which are complete.
        rank_name: prefix of the printed lines.
    """
    num_written = len(work.incomplete_times)
    num_complete = len(work.initial_times) - num_written
    print(
        f"{rank_name}{num_written} forecasts written, {num_complete} were already complete: "
        f"{_get_forecast_folder(config)}"
    )
    if config.inference.products and work.initial_times:
        from credit.cli.products.run_products import make_run_products

        count = make_run_products(config, writer.schema, work.initial_times, forecaster.assets)
        print(f"{rank_name}{count.num_made} products written, {count.num_current} already existed")


def build_shared_forecast_function(
    config: Config,
    forecaster: Forecaster,
    file_lock: AbstractContextManager,
    mesh: DeviceGrid,
    is_step_used: StepFilter,
    sends_outputs: bool = True,
) -> ForecastFunction:
    """Build the function that makes the forecasts of a batch, with the perturbations of ``inference.ensemble``.

    Args:
        config: config of the run that makes the forecasts.
        forecaster: model, normalization and reader of the fields of this run.
        file_lock: context manager that is entered while fields are read, because netCDF does not support two threads.
        mesh: mesh of the ranks that make forecasts.
        is_step_used: function that returns True for steps that are written or scored; only these steps are sent.
        sends_outputs: True if the first of the ranks that make a forecast together receives all members and the whole
            fields; False if each rank writes its members and its part of the fields.

    Returns:
        Function of a list of B forecast starts and a number of steps, which yields the output (B, C, H, W) of each step
        in physical units, or None if this rank does not get the output.

    Raises:
        ConfigError: if ``inference.ensemble`` needs a component that the network does not have, such as dropout.
    """
    from credit.forecast.forecast_function import build_forecast_function
    from credit.forecast.rollout import ForecastInputs
    from credit.train.build.assets import build_model_spec

    assets = forecaster.assets
    inputs = ForecastInputs(forecaster.frames, config.data.step_minutes, config.data.history_len, file_lock)
    spec = build_model_spec(config.data, assets.channels, assets.grid, assets.attributes)
    make_forecasts = build_forecast_function(
        config.inference.ensemble, forecaster.stepper, inputs, spec, forecaster.config.model, forecaster.path
    )
    return _add_output_gathering(make_forecasts, forecaster, mesh, is_step_used, sends_outputs)


def _add_output_gathering(
    make_forecasts: ForecastFunction,
    forecaster: Forecaster,
    mesh: DeviceGrid,
    is_step_used: StepFilter,
    sends_outputs: bool,
) -> ForecastFunction:
    """Return a function that makes forecasts together with other ranks.

    First, the members are gathered among ranks with the same part of the fields. Then the parts are gathered.

    Args:
        make_forecasts: function that makes the forecasts of a batch on this rank, on its part of the grid.
        forecaster: model of this run.
        mesh: mesh of the ranks that make forecasts.
        is_step_used: function that returns True for steps that are written or scored.
        sends_outputs: True if the first of these ranks receives all members and the whole fields.
    """
    from credit.forecast.divided_forecasts import GatheringForecastFunction
    from credit.forecast.shared_forecasts import DistributedForecastFunction

    assets = forecaster.assets
    domain = forecaster.stepper.domain
    grid_shape = assets.grid.shape if domain is None else domain.part.shape
    if mesh.ensemble_group is not None:
        output_shape = (len(assets.channels.output), *grid_shape)
        device = forecaster.stepper.normalizer.tendency_scale_C.device
        is_step_sent = is_step_used if sends_outputs else None
        make_forecasts = DistributedForecastFunction(
            make_forecasts, mesh.ensemble_group, output_shape, device, is_step_sent
        )
    if domain is not None and sends_outputs:
        # Tensor-parallel peers have equal outputs, so only the outputs of the first peer are gathered.
        gathers = mesh.tensor_rank == 0
        make_forecasts = GatheringForecastFunction(
            make_forecasts, domain, is_step_used if gathers else _reject_every_step
        )
    return make_forecasts


def _reject_every_step(batch: Sequence[ForecastStart], step: int) -> bool:
    """Return False for every step; used by ranks whose outputs are neither written nor scored."""
    return False


def _warn_old_store(config: Config, reader: FieldReader) -> None:
    """Log a warning if ``inference.initial_times: latest`` refers to a training store.

    A store ends with the last split, so it does not contain the latest analyses.
    """
    from credit.data.store.store_reader import StoreReader

    if config.inference.initial_times == "latest" and isinstance(reader, StoreReader):
        logger.warning(
            "inference.initial_times: latest is the last time of data.store %s, which ends with data.splits; for newer "
            "analyses set data.sources",
            config.data.store,
        )


def _warn_distribution_shift(config: Config, forecaster: Forecaster, reader: FieldReader, initial_time: int) -> None:
    """Log a warning if the data from which forecasts start differ from the training data, for example in units.

    Compare the state at the first initial time with the statistics of the training data, and the static fields with the
    static fields of training.

    Args:
        config: config of the run.
        forecaster: model with the statistics and static fields of training.
        reader: reader of the data from which forecasts start.
        initial_time: first initial time of the forecasts in minutes.
    """
    from credit.data.analyses import read_static_fields
    from credit.errors import DataError
    from credit.train.build.initial_condition_checks import describe_distribution_shift, describe_static_mismatch

    assets = forecaster.assets
    warnings = []
    # If the fields cannot be read, the error is raised later, when the forecast is made.
    with suppress(DataError):
        state_CHW = forecaster.full_grid_frames.prognostic(initial_time)
        time_text = reader.calendar.format(initial_time)
        warnings.append(describe_distribution_shift(assets, forecaster.stepper.normalizer, state_CHW, time_text))
    # The reader of initial states may not have the static fields. They are then read from the sources that contain
    # them.
    static_channels = assets.channels.static_stored
    if reader.channels.static_stored == static_channels:
        static_CHW = reader.static()
    else:
        static_CHW = read_static_fields(config.data, static_channels, reader.grid)
    warnings.append(describe_static_mismatch(assets, static_CHW))
    for warning in warnings:
        if warning:
            logger.warning("%s", warning)


def _get_forecast_folder(config: Config) -> Path:
    """Return the folder into which the forecasts are written."""
    return Path(config.save_loc) / config.inference.folder


def _open_writer(
    config: Config,
    forecaster: Forecaster,
    reader: FieldReader,
    diagnostics: OutputDiagnostics,
    initial_times: list[int],
    lead_minutes: list[int],
    written_domain: Domain | None,
) -> ForecastWriter:
    """Open the writer of the forecasts. It skips forecasts that are complete on disk.

    A forecast on disk is treated as complete only if it has the same weights and the same initial states.

    Args:
        config: config of the run.
        forecaster: model, with its grid and the description of the weights for the files.
        reader: reader of the data; its calendar is used.
        diagnostics: function object that computes the written fields from the model's output.
        initial_times: all initial times of the run, in minutes.
        lead_minutes: lead times to write, in minutes.
        written_domain: ranks among which the fields are divided, if each rank writes its part; None for whole fields.
    """
    import torch.distributed as dist

    from credit.forecast.ensemble.perturbations import compute_analysis_offsets
    from credit.forecast.io.forecast_writer import ForecastWriter
    from credit.forecast.io.grib.options import build_grib_options
    from credit.forecast.io.schema import OutputOptions
    from credit.forecast.rollout import ForecastInputs, build_initial_state_checksum
    from credit.forecast.store_part import StorePart
    from credit.train.build.forecaster import build_run_attributes

    inference = config.inference
    part = None
    if written_domain is not None:
        part = StorePart(written_domain.grid, dist.get_rank(written_domain.group))
    # The checksum is computed from whole fields, so it does not depend on the division among ranks.
    inputs = ForecastInputs(forecaster.full_grid_frames, config.data.step_minutes, config.data.history_len)
    lags = compute_analysis_offsets(inference.ensemble)
    options = OutputOptions(
        format=inference.format,
        layout=inference.layout,
        split=inference.split,
        variables=inference.variables,
        levels=inference.levels,
        keep_bits=inference.keep_bits,
        compression=inference.compression,
        part=part,
        grib=build_grib_options(inference, config.data),
    )
    return ForecastWriter(
        _get_forecast_folder(config),
        diagnostics.output_fields(forecaster.assets.grid, reader.calendar),
        lead_minutes,
        initial_times,
        options,
        members=None if inference.ensemble is None else inference.ensemble.members,
        global_attributes=build_run_attributes(forecaster) | diagnostics.global_attributes,
        initial_state_checksum=build_initial_state_checksum(inputs, lags),
    )
