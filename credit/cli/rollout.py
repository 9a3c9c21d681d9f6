"""``credit_rollout``: forecasts from a list of initial times."""

from __future__ import annotations

import argparse
import itertools
import logging
import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from credit.cli.common import add_config_arguments

if TYPE_CHECKING:
    from credit.config import Config
    from credit.config.schema_forecast import InferenceConfig
    from credit.data.reader import FieldReader
    from credit.forecast.io.diagnostics import OutputDiagnostics
    from credit.forecast.io.forecast_writer import ForecastWriter
    from credit.forecast.rollout import ForecastStart
    from credit.parallel.mesh import DeviceGrid
    from credit.parallel.process_info import ProcessInfo
    from credit.train.build import Forecaster

logger = logging.getLogger(__name__)

HELP = """Forecast from the initial times of inference.initial_times with the checkpoint inference.checkpoint.

Writes save_loc/forecasts (inference.folder): one CF netCDF file an initial time, or one zarr store (inference.format).
Started on several ranks, each takes its share of the initial times; inference.parallelism spreads one forecast over
ranks.

Data to start from need the prognostic variables and the dynamic forcing alone, unless inference.initial_times is a
range without an end. data.store is read where it was made of data.sources; other sources, such as those of a new
analysis, are read themselves.

Forecasts that are already complete are not made again. Files of other weights, another analysis, other levels, lead
times or settings are replaced. A zarr store of those is refused, with what differs: choose another inference.folder;
later initial times are appended to it."""

__all__ = ["HELP", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, overrides and the part."""
    add_config_arguments(parser)
    parser.add_argument(
        "--latest", action="store_true", help="from the last time of the data: inference.initial_times=latest"
    )
    parser.add_argument("--part", metavar="I/N", help="only the I-th of N parts of the initial times, for job arrays")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from credit.calendar import parse_duration
    from credit.config import load_config
    from credit.parallel.process_info import process_group, read_process_info
    from credit.train.build_model import build_forecast_mesh, choose_device

    if arguments.latest:
        _require_no_times(arguments.overrides)
    latest = ["inference.initial_times=latest"] if arguments.latest else []
    config = load_config(arguments.config, [*arguments.overrides, *latest])
    launch, conf = read_process_info(), config.inference.parallelism
    device = choose_device(config.trainer.device, launch.local_rank)
    with ExitStack() as held:
        if conf.is_spread:
            timeout = parse_duration(config.trainer.parallelism.timeout)
            held.enter_context(process_group(launch, device, timeout))
        _forecast(config, arguments.part, launch, build_forecast_mesh(conf, launch, device.type))
    return 0


def _require_no_times(overrides: Sequence[str]) -> None:
    """Refuse initial times beside ``--latest``, which would take their place."""
    from credit.errors import ConfigError

    for text in overrides:
        if re.match(r"inference\.initial_times[.=]", text):
            raise ConfigError(
                f"--latest: {text} is given beside it, and --latest takes the last time of the data alone; leave one "
                "of them out"
            )


def _forecast(config: Config, part: str | None, launch: ProcessInfo, mesh: DeviceGrid) -> None:
    """Make the forecasts that fall to this rank."""
    from credit.data.store.store_reader import StoreReader
    from credit.forecast.ensemble.feature_noise import build_noise
    from credit.forecast.ensemble.perturbations import build_perturbation
    from credit.forecast.ensemble.sppt import build_stochastic
    from credit.forecast.initial_times import choose_initial_times, choose_leads, group
    from credit.forecast.io.async_writer import BackgroundWriter
    from credit.forecast.rollout import forecast, inference_mode
    from credit.train.build import assemble_forecaster, build_products
    from credit.train.open_data import open_for_forecasts
    from credit.utils.progress import ProgressBar

    reader, splits = open_for_forecasts(config)
    if launch.is_main and config.inference.initial_times == "latest" and isinstance(reader, StoreReader):
        logger.warning(
            "inference.initial_times: latest is the last time of data.store %s, which ends with data.splits; name "
            "newer analyses by data.sources",
            config.data.store,
        )
    made = assemble_forecaster(config, reader, config.inference.checkpoint, launch, mesh)
    conf, step, history = config.inference, config.data.step_minutes, config.data.history_len
    initial = choose_initial_times(conf, config.data, reader.times, reader.clock, splits["test"])
    leads = choose_leads(conf, step)
    products = build_products(made, leads[-1])
    writer = _open_writer(config, made, reader, products, initial, leads)
    members = 1 if conf.ensemble is None else conf.ensemble.members
    groups = _share(group(initial, members, conf.batch_size), part, launch, mesh)
    mine = [minutes for own in groups for minutes in own]
    todo = _agree([minutes for minutes in mine if not writer.is_complete(minutes)], launch, mesh)
    if launch.is_main and todo:
        _warn_of_unlike(config, made, reader, todo[0])
    batches = _batches(groups, conf)
    batches = [batch for batch in batches if any(start.initial in todo for start in batch)]
    idle = _company(initial[0], conf, _most(len(batches), mesh) - len(batches))
    numbers = {lead: number for number, lead in enumerate(leads)}
    with BackgroundWriter(writer, numbers, step, str(made.path), todo, products) as background:
        perturb, reading, grid = None, background.reading, made.assets.grid
        if conf.ensemble is not None:
            perturb = build_perturbation(conf.ensemble, made.stepper, made.frames, grid, step, history, reading)
        drawn = build_stochastic(conf.ensemble, grid, step), build_noise(conf.ensemble, made.stepper.model)
        with ProgressBar(
            total=sum(map(len, batches)), desc="forecasting", unit="start", disable=True if launch.rank else None
        ) as bar:
            for number, batch in enumerate([*batches, *idle]):
                steps = (leads[-1] + max(start.initial - start.analysis for start in batch)) // step
                outputs = forecast(made.stepper, made.frames, batch, steps, step, history, perturb, reading, *drawn)
                for taken, output in enumerate(inference_mode(outputs), start=1):
                    # tensor-parallel peers compute the same
                    if number < len(batches) and mesh.tensor_rank == 0:
                        background.put(batch, taken, output)
                bar.update(len(batch) if number < len(batches) else 0)
    if mesh.tensor_rank == 0:
        who = f"rank {launch.rank}: " if launch.world > 1 else ""
        print(f"{who}{len(todo)} forecasts written, {len(mine) - len(todo)} were there: {_folder(config)}")


def _warn_of_unlike(config: Config, made: Forecaster, reader: FieldReader, minutes: int) -> None:
    """Warn where the first fields of a forecast are of other units than those of training, or over another ground."""
    from credit.data.analyses import read_static_of
    from credit.errors import DataError
    from credit.train.initial_condition_checks import describe_distribution_shift, describe_static_mismatch

    assets, when = made.assets, reader.clock.format(minutes)
    warnings = []
    with suppress(DataError):  # of what the forecast needs it says so itself
        warnings.append(
            describe_distribution_shift(assets, made.stepper.normalizer, made.frames.prognostic(minutes), when)
        )
    static = assets.channels.static_stored
    has_static = reader.channels.static_stored == static
    warnings.append(
        describe_static_mismatch(
            assets, reader.static() if has_static else read_static_of(config.data, static, reader.grid)
        )
    )
    for warning in filter(None, warnings):
        logger.warning("%s", warning)


def _folder(config: Config) -> Path:
    return Path(config.save_loc) / config.inference.folder


def _open_writer(
    config: Config,
    made: Forecaster,
    reader: FieldReader,
    products: OutputDiagnostics,
    initial: list[int],
    leads: list[int],
) -> ForecastWriter:
    from credit.forecast.initial_times import lag_offsets
    from credit.forecast.io.forecast_writer import ForecastWriter
    from credit.forecast.rollout import checksums
    from credit.train.build import describe_run

    conf, step, history = config.inference, config.data.step_minutes, config.data.history_len
    lags = lag_offsets(conf.ensemble)
    return ForecastWriter(
        _folder(config),
        products.channels,
        made.assets.grid,
        reader.clock,
        products.attributes,
        step,
        lead_minutes=leads,
        initial_minutes=initial,
        level_units=products.level_units,
        format=conf.format,
        layout=conf.layout,
        variables=conf.variables,
        levels=conf.levels,
        members=None if conf.ensemble is None else conf.ensemble.members,
        split=conf.split,
        keep_bits=conf.keep_bits,
        compression=conf.compression,
        masks=products.masks,
        global_attributes=describe_run(made) | products.described,
        windows=products.windows,
        started_from=checksums(made.frames, lags, step, history),
    )


def _share(groups: list[list[int]], part: str | None, launch: ProcessInfo, mesh: DeviceGrid) -> list[list[int]]:
    """Return this rank's groups of initial times: of an array job's part, dealt to ranks or to their groups."""
    from credit.forecast.initial_times import deal, select_part

    mine = select_part(groups, part) if part else groups
    rank, ranks = (launch.rank, launch.world) if mesh.device_mesh is None else (mesh.data_rank, mesh.data_ranks)
    if launch.is_main and len(mine) < ranks:
        logger.warning(
            "%d of %d ranks have nothing to do: inference.batch_size makes %d batches of initial times; lower it",
            ranks - len(mine), ranks, len(mine),
        )  # fmt: skip
    return deal(mine, rank, ranks)


def _batches(groups: list[list[int]], conf: InferenceConfig) -> list[list[ForecastStart]]:
    """Return the starts of each batch, group by group."""
    from credit.forecast.ensemble.perturbations import lag_minutes
    from credit.forecast.rollout import batch_starts

    members, lag = 1 if conf.ensemble is None else conf.ensemble.members, lag_minutes(conf.ensemble)
    return [batch for own in groups for batch in batch_starts(own, conf.batch_size, members, lag)]


def _company(initial: int, conf: InferenceConfig, number: int) -> list[list[ForecastStart]]:
    """Return batches that are forecast for nobody: sharded weights are gathered by all ranks, so one that has no more
    to do takes part in the others' forecasts. They have as many steps as those, which lags make longer."""
    return list(itertools.islice(itertools.cycle(_batches([[initial]], conf)), number))


def _agree(todo: list[int], launch: ProcessInfo, mesh: DeviceGrid) -> list[int]:
    """Return what the first of the tensor-parallel peers wants to do: they saw the files at different moments."""
    if mesh.device_mesh is None:
        return todo
    from credit.parallel.object_collectives import together

    return together(lambda: todo)[launch.rank - mesh.tensor_rank]


def _most(batches: int, mesh: DeviceGrid) -> int:
    """Return the largest number of batches of any rank that weights are shared with."""
    if mesh.device_mesh is None:
        return batches
    from credit.parallel.object_collectives import together

    return max(together(lambda: batches))
