"""``credit_verify``: score forecasts and write the scores, the figures and the report."""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from credit.cli.common import path_argument
from credit.cli.console.terminal import add_quiet_argument, print_json

if TYPE_CHECKING:
    from credit.config import Config
    from credit.data.reader import FieldReader
    from credit.forecast.forecast_source import ForecastSource
    from credit.parallel.mesh import DeviceGrid
    from credit.parallel.process_info import ProcessInfo
    from credit.verify.partial_scores import WorkShare

HELP = """Score the forecasts in save_loc/forecasts (inference.folder) against the data of the test period.

The model, persistence, damped persistence, climatology and verification.other_forecasts are scored on the same initial
times. Writes scores.csv, scores.nc, figures/ and report.html into save_loc and prints a table of the headline channels:
z500, t850, t2m, 10 m wind, mean sea level pressure, q700 and precipitation.

With a second run, OTHER, its forecasts are scored as well and the first run is tested against them; the results go into
save_loc/against_NAME. With --online the forecasts are made during scoring and leave no file; with --model, too, by the
run of that config, with its pressure levels and derived variables, against the data of CONFIG. If several ranks are
started, each scores a share of the initial times.

--json prints one object and nothing else on standard output:
  version      1; it changes when a key changes its meaning
  metric, region, season   of the rows: rmse, global, all
  forecasts    name of a forecast -> its name in figures; the run's own is called model
  reference    name of the forecast compared with, or best_baseline
  n_cases, first_case, last_case   number, first and last of the initial times
  rows         all channels and lead times, each with channel, units, lead_hours, rmse (forecast -> RMSE), ratio (RMSE
               of the model over that of the reference), significant, n_eff; null where a number does not exist
  warnings     sentences on missing scores and unequal forecasts
  files        paths: scores_csv, scores_nc, figures, report"""

__all__ = ["HELP", "add_arguments", "run_command"]

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, a second run, overrides, the source of the forecasts and the form of the output."""
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
        help="the YAML file or the folder of the run that forecasts with --online, if it is not the one whose data are "
        "scored against; its inference section counts, also for replaced keys",
    )  # fmt: skip
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--all", action="store_true", help="print all channels, not only the headline channels")
    output.add_argument("--json", action="store_true", help="print the scores as JSON (see above) instead of a table")
    add_quiet_argument(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from credit.calendar import parse_duration
    from credit.parallel.process_info import process_group, read_process_info
    from credit.train.build.model import choose_device
    from credit.verify.verification import verify

    other_runs = [text for text in arguments.rest if "=" not in text or os.path.exists(text)]
    overrides = [text for text in arguments.rest if text not in other_runs]
    config, model_config = load_configs(arguments, overrides)
    config, other_name = _add_other_run(config, other_runs)
    folder = Path(config.save_loc)
    if other_name is not None:
        folder = folder / f"against_{other_name}"
    forecast_config = model_config or config
    process = read_process_info()
    device = choose_device(forecast_config.trainer.device if arguments.online else "cpu", process.local_rank)
    with ExitStack() as stack:
        timeout = parse_duration(forecast_config.trainer.parallelism.timeout)
        stack.enter_context(process_group(process, device, timeout))
        reader, forecasts, share = _open_data_and_forecasts(
            config, model_config, arguments.online, process, device.type
        )
        weights = WeightsCheck()
        if process.is_main:
            weights = check_weights(forecast_config, forecasts.attributes)
        if weights.notice is not None:
            logger.warning("%s", weights.notice)
        is_same_run = Path(forecast_config.save_loc).resolve() == Path(config.save_loc).resolve()
        is_trained_here = weights.are_of_run and is_same_run
        table = verify(config, reader, forecasts, folder, share, other_name, weights.notice, is_trained_here)
    if table is None:
        # Another rank has the scores.
        return 0
    files = {
        "scores_csv": str(folder / "scores.csv"),
        "scores_nc": str(folder / "scores.nc"),
        "figures": str(folder / "figures"),
        "report": str(folder / "report.html"),
    }
    if arguments.json:
        from credit.verify.table.summary import summary_document

        print_json(summary_document(table, other_name, files))
    else:
        from credit.cli.console.score_summary import format_summary

        print(format_summary(table, other_name, arguments.all))
        print(f"\nscores   {files['scores_csv']}, {files['scores_nc']}")
        print(f"figures  {files['figures']}")
        print(f"report   {files['report']}")
    return 0


def load_configs(arguments: argparse.Namespace, overrides: list[str]) -> tuple[Config, Config | None]:
    """Return the config of the run, and that of the run of ``--model``, None without it.

    With ``--model`` the inference section of the first is that of the second.
    """
    from credit.config import load_config
    from credit.errors import ConfigError

    if arguments.model is None:
        return load_config(arguments.config, overrides), None
    if not arguments.online:
        raise ConfigError(
            "--model requires --online; forecasts in files are found by save_loc and inference.folder of CONFIG"
        )
    inference_overrides = [text for text in overrides if re.match(r"inference[.=]", text)]
    model_config = load_run_config(arguments.model, inference_overrides)
    config = load_config(arguments.config, [text for text in overrides if text not in inference_overrides])
    return config.model_copy(update={"inference": model_config.inference}), model_config


def resolve_config_path(run: str) -> Path:
    """Return the config file of a run, given the file or the run's folder."""
    path = Path(run)
    return path / "config.yml" if path.is_dir() else path


def load_run_config(run: str, overrides: list[str]) -> Config:
    """Return the config of a run, given its file or its folder.

    A folder may have been moved since it was made, so it becomes the config's save_loc.
    """
    from credit.config import load_config

    config = load_config(resolve_config_path(run), overrides)
    if Path(run).is_dir():
        return config.model_copy(update={"save_loc": run})
    return config


def _add_other_run(config: Config, other_runs: list[str]) -> tuple[Config, str | None]:
    """Return the config with the second run's forecasts among those to score, and its name.

    Raises:
        ConfigError: if there are several runs, if the second is not a run, or if its name is taken.
    """
    from credit.config.sections.verification import OtherForecastsConfig, is_reserved_name
    from credit.errors import ConfigError

    if not other_runs:
        return config, None
    if len(other_runs) > 1:
        raise ConfigError(
            f"{', '.join(other_runs)}: one run is compared with one other; name more in verification.other_forecasts"
        )
    path = Path(other_runs[0])
    if path.is_dir() and not (path / "config.yml").exists():
        raise ConfigError(
            f"{path}: is not a run folder: config.yml is missing; to compare with forecasts alone set "
            f"verification.other_forecasts={{NAME: {path}}}"
        )
    other = load_run_config(other_runs[0], [])
    other_folder = Path(other.save_loc)
    experiment = other.experiment
    if experiment == config.experiment:
        experiment = other_folder.resolve().name
    name = re.sub(r"[^\w.-]", "_", experiment)
    if is_reserved_name(name) or name in config.verification.other_forecasts:
        raise ConfigError(
            f"{other_runs[0]}: {name} is the name of another forecast here; give the run another experiment"
        )
    other_forecasts = dict(config.verification.other_forecasts)
    other_forecasts[name] = OtherForecastsConfig(path=str(other_folder / other.inference.folder))
    verification = config.verification.model_copy(update={"other_forecasts": other_forecasts})
    return config.model_copy(update={"verification": verification}), name


@dataclass(frozen=True)
class WeightsCheck:
    """Result of comparing the forecasts' weights with the checkpoints of a run.

    Attributes:
        notice: a sentence if the forecasts were made with other weights than the config names.
        are_of_run: False if the weights are of none of the run's checkpoints.
    """

    notice: str | None = None
    are_of_run: bool = True


def check_weights(config: Config, attributes: Mapping[str, object]) -> WeightsCheck:
    """Compare the weights named in the forecasts' attributes with the run's checkpoints."""
    from credit.train.checkpoint import checkpoint

    weights = attributes.get("weights")
    folder = Path(config.save_loc) / "checkpoints"
    run_weights = {checkpoint.weights_fingerprint(path, "forecast") for path in checkpoint.list_checkpoints(folder)}
    if weights is None or not run_weights:
        return WeightsCheck()
    name = config.inference.checkpoint
    requested = folder / name if name in ("best", "latest") else Path(name)
    if requested.is_dir() and checkpoint.weights_fingerprint(requested, "forecast") == weights:
        return WeightsCheck(are_of_run=weights in run_weights)
    description = (
        f"The forecasts were made with the weights {weights}, step {attributes.get('checkpoint_step')} of "
        f"{attributes.get('experiment')}"
    )
    if weights in run_weights:
        state = f"is {requested.resolve().name}" if requested.is_dir() else "does not exist"
        return WeightsCheck(
            f"{description}; inference.checkpoint, {name}, {state} now. credit rollout forecasts with that."
        )
    return WeightsCheck(
        f"{description}: of none of the checkpoints in {folder}. They are of another run, or their checkpoint was "
        "deleted.",
        are_of_run=False,
    )


def _open_data_and_forecasts(
    config: Config, model_config: Config | None, online: bool, process: ProcessInfo, device_type: str
) -> tuple[FieldReader, ForecastSource, WorkShare]:
    """Return the truth, the forecasts and the share of the cases of this process."""
    from credit.forecast.io.forecast_reader import open_forecasts
    from credit.train.build.model import build_forecast_mesh
    from credit.train.build.open_data import open_reader_once
    from credit.verify.partial_scores import WorkShare

    if not online:
        archive = open_forecasts(Path(config.save_loc) / config.inference.folder)
        return open_reader_once(config.data), archive, WorkShare(process.rank, process.world)
    mesh = build_forecast_mesh(config.inference.parallelism, process, device_type)
    has_other_data = model_config is not None
    reader, forecasts = _open_online(model_config or config, process, mesh, products=has_other_data)
    if has_other_data:
        reader = open_reader_once(config.data)
    if mesh.device_mesh is None:
        return reader, forecasts, WorkShare(process.rank, process.world)
    share = WorkShare(mesh.data_rank, mesh.num_data_ranks, is_counted=mesh.tensor_rank == 0, is_sharded=True)
    return reader, forecasts, share


def _open_online(
    config: Config, process: ProcessInfo, mesh: DeviceGrid, products: bool
) -> tuple[FieldReader, ForecastSource]:
    """Return the data, and the forecasts that are made of them while they are scored.

    Args:
        config: config of the run that forecasts.
        process: this process.
        mesh: mesh of the forecasts.
        products: True if derived variables and pressure levels are computed, too.
    """
    from functools import partial

    from credit.forecast.ensemble.feature_noise import build_feature_noise
    from credit.forecast.ensemble.perturbations import build_perturbation, lag_minutes
    from credit.forecast.ensemble.sppt import build_tendency_perturbation
    from credit.forecast.initial_times import choose_initial_times, choose_leads
    from credit.forecast.io.schema import OutputFields
    from credit.forecast.online import ForecastBatching, OnlineForecasts
    from credit.forecast.rollout import ForecastInputs, forecast_batch
    from credit.train.build.forecaster import assemble_forecaster, build_output_diagnostics, describe_run
    from credit.train.build.open_data import open_fields, open_for_forecasts

    # Forecasts with products are scored against other data, so this reader need not have the truth.
    reader, splits = open_for_forecasts(config) if products else open_fields(config)
    forecaster = assemble_forecaster(config, reader, config.inference.checkpoint, process, mesh)
    inference = config.inference
    ensemble = inference.ensemble
    step = config.data.step_minutes
    history = config.data.history_len
    leads = choose_leads(inference, step)
    assets = forecaster.assets
    described = describe_run(forecaster)
    derived = None
    if products:
        derived = build_output_diagnostics(forecaster, leads[-1])
        fields = derived.output_fields(assets.grid, reader.calendar)
        described |= derived.description
    else:
        level_units = config.data.level_units
        fields = OutputFields(
            assets.channels, assets.grid, reader.calendar, assets.attributes, step, level_units, assets.masks
        )
    inputs = ForecastInputs(forecaster.frames, step, history)
    perturb = None
    if ensemble is not None:
        perturb = build_perturbation(ensemble, forecaster.stepper, inputs, assets.grid)
    make_forecast = partial(
        forecast_batch,
        forecaster.stepper,
        inputs,
        perturb_states=perturb,
        draw_factors=build_tendency_perturbation(ensemble, assets.grid, step),
        build_noise_context=build_feature_noise(ensemble, forecaster.stepper.model),
    )
    members = None if ensemble is None else ensemble.members
    forecasts = OnlineForecasts(
        make_forecast,
        fields,
        choose_initial_times(inference, config.data, reader.times, reader.calendar, splits["test"]),
        leads,
        ForecastBatching(inference.batch_size, members, lag_minutes(ensemble)),
        origin=forecaster.path,
        attributes=described,
        diagnostics=derived,
    )
    return reader, forecasts
