"""``credit_verify``: scores forecasts and writes the scores, the figures and the report."""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from credit.cli.common import path_argument

if TYPE_CHECKING:
    from credit.config import Config
    from credit.data.reader import FieldReader
    from credit.forecast.forecast_source import ForecastSource
    from credit.parallel.mesh import DeviceGrid
    from credit.parallel.process_info import ProcessInfo
    from credit.verify.statistics.partial_scores import WorkShare

HELP = """Score the forecasts in save_loc/forecasts (inference.folder) against the data of the test period.

The model, persistence, damped persistence, climatology and verification.other_forecasts are scored on the same initial
times. Writes scores.csv, scores.nc, figures/ and report.html into save_loc and prints a table.

With a second run, OTHER, its forecasts are scored beside the first's, which are tested against them; the results go
into save_loc/against_NAME. With --online the forecasts are made while they are scored and leave no file; with --model,
too, by the run of that config, with its pressure levels and derived variables, against the data of CONFIG. Started on
several ranks, each scores its share of the initial times."""

__all__ = ["HELP", "add_arguments", "run"]

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, a second run, overrides and where forecasts come from."""
    parser.add_argument("config", metavar="CONFIG", type=path_argument, help="the run's YAML file")
    parser.add_argument(
        "rest", nargs="*", type=path_argument, metavar="OTHER, section.key=value",
        help="the YAML file or the folder of a run to compare with; and replaced keys of the first, e.g. "
        "verification.regions=[global,europe]",
    )  # fmt: skip
    parser.add_argument(
        "--online", action="store_true", help="forecast from inference.initial_times while scoring, without files"
    )
    parser.add_argument(
        "--model", metavar="RUN", type=path_argument,
        help="the YAML file or the folder of the run that forecasts with --online, where the data to score against are "
        "others than its own; its inference counts, also of replaced keys",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from contextlib import ExitStack

    from credit.calendar import parse_duration
    from credit.parallel.process_info import process_group, read_process_info
    from credit.train.build_model import choose_device
    from credit.verify.verification import verify

    others = [text for text in arguments.rest if "=" not in text or os.path.exists(text)]
    overrides = [text for text in arguments.rest if text not in others]
    config, model = load_configs(arguments, overrides)
    config, other = _compared(config, others)
    folder = Path(config.save_loc) / (f"against_{other}" if other else "")
    launch, maker = read_process_info(), model or config
    device = choose_device(maker.trainer.device if arguments.online else "cpu", launch.local_rank)
    with ExitStack() as held:
        timeout = parse_duration(maker.trainer.parallelism.timeout)
        held.enter_context(process_group(launch, device, timeout))
        reader, forecasts, share = _open(config, model, arguments.online, launch, device.type)
        notice, is_own = _find_doubt(maker, forecasts.attributes) if launch.is_main else (None, True)
        is_own = is_own and Path(maker.save_loc).resolve() == Path(config.save_loc).resolve()
        if notice is not None:
            logger.warning("%s", notice)
        table = verify(config, reader, forecasts, folder, share, other, notice, is_own)
    if table is not None:
        print(table.format(other))
        print(f"\nscores   {folder / 'scores.csv'}, {folder / 'scores.nc'}")
        print(f"figures  {folder / 'figures'}")
        print(f"report   {folder / 'report.html'}")
    return 0


def load_configs(arguments: argparse.Namespace, overrides: list[str]) -> tuple[Config, Config | None]:
    """Return the config, with the inference of the run of ``--model`` where there is one, and that run's."""
    from credit.config import load_config
    from credit.errors import ConfigError

    if arguments.model is None:
        return load_config(arguments.config, overrides), None
    if not arguments.online:
        raise ConfigError("--model: it goes with --online; files are found by save_loc and inference.folder of CONFIG")
    of_run = [text for text in overrides if re.match(r"inference[.=]", text)]
    model = load_run_config(arguments.model, of_run)
    config = load_config(arguments.config, [text for text in overrides if text not in of_run])
    return config.model_copy(update={"inference": model.inference}), model


def resolve_config_path(run: str) -> Path:
    """Return the config file of a run that is named by it or by its folder."""
    return Path(run) / "config.yml" if Path(run).is_dir() else Path(run)


def load_run_config(run: str, overrides: list[str]) -> Config:
    """Return the config of a run; of a folder, which may have been moved, the folder is its save_loc."""
    from credit.config import load_config

    config = load_config(resolve_config_path(run), overrides)
    return config.model_copy(update={"save_loc": run}) if Path(run).is_dir() else config


def _compared(config: Config, others: list[str]) -> tuple[Config, str | None]:
    """Return the config with the second run's forecasts among those to score, and its name.

    Raises:
        ConfigError: if there are several, if it is no run, or if its name is taken.
    """
    from credit.config.schema_verification import OtherForecastsConfig, is_reserved_name
    from credit.errors import ConfigError

    if not others:
        return config, None
    if len(others) > 1:
        raise ConfigError(
            f"{', '.join(others)}: one run is compared with one other; name more in verification.other_forecasts"
        )
    path = Path(others[0])
    if path.is_dir() and not (path / "config.yml").exists():
        raise ConfigError(
            f"{path}: has no config.yml, so it is no run's folder (save_loc); forecasts alone are compared by "
            f"verification.other_forecasts={{NAME: {path}}}"
        )
    second = load_run_config(others[0], [])
    folder = Path(second.save_loc)
    called = second.experiment if second.experiment != config.experiment else folder.resolve().name
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in called)
    if is_reserved_name(name) or name in config.verification.other_forecasts:
        raise ConfigError(f"{others[0]}: {name} is the name of another forecast here; give the run another experiment")
    known = config.verification.other_forecasts | {
        name: OtherForecastsConfig(path=str(folder / second.inference.folder))
    }
    verification = config.verification.model_copy(update={"other_forecasts": known})
    return config.model_copy(update={"verification": verification}), name


def _find_doubt(config: Config, attributes: Mapping[str, object]) -> tuple[str | None, bool]:
    """Return what is to be said of forecasts that are of other weights than the config names, and whether these are
    the run's own.
    """
    from credit.train.checkpoint import checkpoint

    weights, which = attributes.get("weights"), config.inference.checkpoint
    folder = Path(config.save_loc) / "checkpoints"
    known = {checkpoint.fingerprint(path, "forecast"): path.name for path in checkpoint.list_checkpoints(folder)}
    if weights is None or not known:
        return None, True
    made = f"The forecasts were made with the weights {weights}, step {attributes.get('checkpoint_step')} of "
    made += f"{attributes.get('experiment')}"
    asked = folder / which if which in ("best", "latest") else Path(which)
    if asked.is_dir() and checkpoint.fingerprint(asked, "forecast") == weights:
        return None, weights in known
    if weights in known:
        now = f"is {asked.resolve().name}" if asked.is_dir() else "is not there"
        return f"{made}; inference.checkpoint, {which}, {now} now. credit rollout forecasts with that.", True
    return f"{made}: of none of the checkpoints in {folder}. They are another run's, or of one that is gone.", False


def _open(
    config: Config, model: Config | None, online: bool, launch: ProcessInfo, device_type: str
) -> tuple[FieldReader, ForecastSource, WorkShare]:
    """Return the truth, the forecasts and which of the cases fall to this process."""
    from credit.forecast.io.forecast_reader import open_forecasts
    from credit.train.build_model import build_forecast_mesh
    from credit.train.open_data import open_reader_once
    from credit.verify.statistics.partial_scores import WorkShare

    if not online:
        archive = open_forecasts(Path(config.save_loc) / config.inference.folder)
        return open_reader_once(config.data), archive, WorkShare(launch.rank, launch.world)
    mesh = build_forecast_mesh(config.inference.parallelism, launch, device_type)
    reader, forecasts = _open_online(model or config, launch, mesh, products=model is not None)
    reader = reader if model is None else open_reader_once(config.data)
    if mesh.device_mesh is None:
        return reader, forecasts, WorkShare(launch.rank, launch.world)
    return reader, forecasts, WorkShare(mesh.data_rank, mesh.data_ranks, counts=mesh.tensor_rank == 0, is_spread=True)


def _open_online(
    config: Config, launch: ProcessInfo, mesh: DeviceGrid, products: bool
) -> tuple[FieldReader, ForecastSource]:
    """Return the data and the forecasts that the checkpoint makes of them, on request with what is derived of them."""
    from functools import partial

    from credit.forecast.ensemble.feature_noise import build_noise
    from credit.forecast.ensemble.perturbations import build_perturbation, lag_minutes
    from credit.forecast.ensemble.sppt import build_stochastic
    from credit.forecast.initial_times import choose_initial_times, choose_leads
    from credit.forecast.online import OnlineForecasts
    from credit.forecast.rollout import forecast
    from credit.train.build_forecaster import assemble_forecaster, build_products, describe_run
    from credit.train.open_data import open_fields, open_for_forecasts

    # with --model the truth is read elsewhere
    reader, splits = open_for_forecasts(config) if products else open_fields(config)
    made = assemble_forecaster(config, reader, config.inference.checkpoint, launch, mesh)
    conf, step, history = config.inference, config.data.step_minutes, config.data.history_len
    leads, assets, perturb = choose_leads(conf, step), made.assets, None
    channels, attributes, described, derived = assets.channels, assets.attributes, describe_run(made), None
    masks = assets.masks
    if products:
        derived = build_products(made, leads[-1])
        channels, attributes, masks = derived.channels, derived.attributes, derived.masks
        described |= derived.described
    if conf.ensemble is not None:
        perturb = build_perturbation(conf.ensemble, made.stepper, made.frames, made.assets.grid, step, history)
    forecasts = OnlineForecasts(
        partial(
            forecast,
            made.stepper,
            made.frames,
            step_minutes=step,
            history_len=history,
            perturb=perturb,
            stochastic=build_stochastic(conf.ensemble, made.assets.grid, step),
            noise=build_noise(conf.ensemble, made.stepper.model),
        ),
        choose_initial_times(conf, config.data, reader.times, reader.calendar, splits["test"]),
        leads,
        step,
        conf.batch_size,
        None if conf.ensemble is None else conf.ensemble.members,
        lag_minutes(conf.ensemble),
        origin=made.path,
        channels=channels,
        grid=assets.grid,
        calendar=reader.calendar,
        attributes=attributes,
        described=described,
        products=derived,
        masks=masks,
    )
    return reader, forecasts
