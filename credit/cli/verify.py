"""``credit verify``: score forecasts and write the scores, the figures and the report."""

from __future__ import annotations

import argparse
import logging
import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from credit.cli.common import parse_path
from credit.cli.console.terminal import add_quiet_argument, print_json
from credit.cli.weights_check import WeightsCheck, check_weights

if TYPE_CHECKING:
    from credit.calendar import Calendar
    from credit.config import Config
    from credit.config.sections.data import DataConfig
    from credit.data.reader import FieldReader
    from credit.forecast.forecast_source import ForecastSource
    from credit.forecast.io.schema import OutputFields
    from credit.parallel.mesh import DeviceGrid
    from credit.parallel.process_info import ProcessInfo
    from credit.train.build.assets import ModelAssets
    from credit.verify.partial_scores import WorkShare
    from credit.verify.table.table import ScoreTable

HELP = """Score the forecasts in save_loc/forecasts (inference.folder) against the data of the test period.

The command scores the model, persistence, damped persistence, climatology and verification.other_forecasts on the same
initial times. It writes scores.csv, scores.nc, figures/ and report.html into save_loc (verification.folder), and prints
a table of the headline channels: z500, t850, t2m, 10 m wind, mean sea level pressure, q700 and precipitation.

OTHER is a second run for comparison. The command also scores its forecasts and tests the differences for significance.
The results are written into the subfolder against_NAME of this folder.

With --online, the forecasts are made during scoring and are not written to files. With --online --model RUN, the run
RUN makes the forecasts, with its pressure levels and derived variables. Several ranks share the initial times.

example:
  credit verify config.yml
  credit verify run_a.yml run_b.yml verification.regions=[global,europe]

--json prints one object on standard output, with these keys:
  version      1; it changes if the meaning of a key changes
  metric, region, season   of all rows: rmse, global, all
  forecasts    name of a forecast -> its name in figures; model is the name of the run's forecasts
  reference    name of the forecast with which the run is compared, or best_baseline
  n_cases, first_case, last_case   number, first and last of the initial times
  rows         all channels and lead times, each with channel, units, lead_hours, rmse (forecast -> RMSE), ratio (RMSE
               of the model divided by the RMSE of the reference), significant, n_eff; null for a missing number
  warnings     sentences on missing scores and on differences between forecasts
  files        paths: scores_csv, scores_nc, figures, report"""

__all__ = ["HELP", "add_arguments", "run_command"]

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `credit verify`: CONFIG, second run, overrides, forecasts and output format."""
    parser.add_argument("config", metavar="CONFIG", type=parse_path, help="YAML file that describes the run")
    parser.add_argument(
        "rest", nargs="*", type=parse_path, metavar="OTHER, section.key=value",
        help="YAML file or folder of a run to compare with; replaced keys of CONFIG, for example "
        "verification.regions=[global,europe]",
    )  # fmt: skip
    parser.add_argument(
        "--online",
        action="store_true",
        help="make the forecasts of inference.initial_times during scoring, without files",
    )
    parser.add_argument(
        "--model", metavar="RUN", type=parse_path,
        help="with --online: YAML file or folder of the run that makes the forecasts, if it is not CONFIG; replaced "
        "keys of the section inference apply to RUN",
    )  # fmt: skip
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--all", action="store_true", help="print all channels, not only the headline channels")
    output.add_argument("--json", action="store_true", help="print the scores as JSON instead of a table")
    add_quiet_argument(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Collective: score the forecasts, write and print the scores; return the exit status 0.

    Raises:
        ConfigError: if the config or an option is wrong.
        DataError: if forecasts or data are missing, or do not match.
    """
    from credit.calendar import parse_duration
    from credit.parallel.process_info import process_group, read_process_info
    from credit.train.build.model import choose_device
    from credit.verify.verification import verify_forecasts

    # The path of a second run may contain an equals sign, so an existing path is never an override.
    other_runs = [text for text in arguments.rest if "=" not in text or os.path.exists(text)]
    overrides = [text for text in arguments.rest if text not in other_runs]
    config, model_config = load_configs(arguments, overrides)
    config, other_name = _add_other_run(config, other_runs)
    folder = Path(config.save_loc) / config.verification.folder
    if other_name is not None:
        folder = folder / f"against_{other_name}"
    # With --model, the other run makes the forecasts, so its weights and its parallelism are used.
    forecast_config = model_config or config
    process = read_process_info()
    # Scores of files are computed on the CPU.
    device_name = forecast_config.trainer.device if arguments.online else "cpu"
    device = choose_device(device_name, process.local_rank)
    with ExitStack() as stack:
        timeout = parse_duration(forecast_config.trainer.parallelism.timeout)
        stack.enter_context(process_group(process, device, timeout))
        reader, forecasts, share = _open_data_and_forecasts(
            config, model_config, arguments.online, process, device.type
        )
        weights = WeightsCheck()
        # Only the main rank prints notices.
        if process.is_main:
            weights = check_weights(forecast_config, forecasts.attributes)
        if weights.notice is not None:
            logger.warning("%s", weights.notice)
        # The report shows the training log of the folder only if these weights were trained there.
        is_same_run = Path(forecast_config.save_loc).resolve() == Path(config.save_loc).resolve()
        is_trained_here = weights.belong_to_run and is_same_run
        table = verify_forecasts(config, reader, forecasts, folder, share, other_name, weights.notice, is_trained_here)
    if table is None:
        # The main rank has collected the scores of all ranks.
        return 0
    _print_scores(table, folder, other_name, arguments)
    return 0


def _print_scores(table: ScoreTable, folder: Path, other_name: str | None, arguments: argparse.Namespace) -> None:
    """Print the scores and the paths of the written files, as text or as one JSON document.

    Args:
        table: the scores.
        folder: folder of the written files.
        other_name: name of the second run; None without a second run.
        arguments: options of the command, of which `json` and `all` are used.
    """
    files = {
        "scores_csv": str(folder / "scores.csv"),
        "scores_nc": str(folder / "scores.nc"),
        "figures": str(folder / "figures"),
        "report": str(folder / "report.html"),
    }
    if arguments.json:
        from credit.verify.table.summary import summary_document

        print_json(summary_document(table, other_name, files))
        return
    from credit.cli.console.score_summary import format_summary

    print(format_summary(table, other_name, arguments.all))
    print(f"\nscores   {files['scores_csv']}, {files['scores_nc']}")
    print(f"figures  {files['figures']}")
    print(f"report   {files['report']}")


def load_configs(arguments: argparse.Namespace, overrides: list[str]) -> tuple[Config, Config | None]:
    """Load the config of the run, and with ``--model`` the config of the run that makes the forecasts.

    Args:
        arguments: options of the command, of which `config`, `model` and `online` are used.
        overrides: overrides ``section.key=value``. With ``--model``, keys of the section ``inference`` apply to the
            second config, and all other keys to the first config.

    Returns:
        The config of the run, and the config of ``--model`` (None without this option). With ``--model``, the section
        ``inference`` of the first config is replaced with the section of the second config.

    Raises:
        ConfigError: if a config is not valid, or ``--model`` is given without ``--online``.
    """
    from credit.config import load_config
    from credit.errors import ConfigError

    if arguments.model is None:
        return load_config(arguments.config, overrides), None
    if not arguments.online:
        raise ConfigError(
            "--model requires --online; save_loc and inference.folder of CONFIG determine the folder of forecast files"
        )
    # An override sets a key of the section (inference.lead_time=24h) or the whole section (inference={...}).
    inference_overrides = [text for text in overrides if re.match(r"inference[.=]", text)]
    other_overrides = [text for text in overrides if text not in inference_overrides]
    model_config = load_run_config(arguments.model, inference_overrides)
    config = load_config(arguments.config, other_overrides)
    return config.model_copy(update={"inference": model_config.inference}), model_config


def resolve_config_path(run: str) -> Path:
    """Return the path of a run's config file, given the path of this file or of the run folder."""
    path = Path(run)
    if path.is_dir():
        return path / "config.yml"
    return path


def load_run_config(run: str, overrides: list[str]) -> Config:
    """Return the config of a run, given its config file or its run folder.

    If a run folder is given, its path replaces `save_loc` in the config, because the folder may have been moved.

    Args:
        run: path of a config file or of a run folder.
        overrides: overrides ``section.key=value``.

    Raises:
        ConfigError: if the file cannot be read or is not valid.
    """
    from credit.config import load_config

    config = load_config(resolve_config_path(run), overrides)
    if Path(run).is_dir():
        return config.model_copy(update={"save_loc": run})
    return config


def _add_other_run(config: Config, other_runs: list[str]) -> tuple[Config, str | None]:
    """Add the forecasts of a second run to ``verification.other_forecasts``.

    Args:
        config: config of the first run.
        other_runs: paths of config files or folders of runs; at most one path.

    Returns:
        A copy of the config that includes the second run, and the name of the second run. Without a second run, the
        unchanged config and None.

    Raises:
        ConfigError: if there are several paths, the path is not a run, or another forecast has the same name.
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
    # The name of the second run is its experiment, or its folder if both runs have the same experiment.
    experiment = other.experiment
    if experiment == config.experiment:
        experiment = other_folder.resolve().name
    name = re.sub(r"[^\w.-]", "_", experiment)
    if is_reserved_name(name) or name in config.verification.other_forecasts:
        raise ConfigError(
            f"{other_runs[0]}: {name} is the name of another forecast here; set a different experiment in its config"
        )
    other_forecasts = dict(config.verification.other_forecasts)
    other_forecasts[name] = OtherForecastsConfig(path=str(other_folder / other.inference.folder))
    verification = config.verification.model_copy(update={"other_forecasts": other_forecasts})
    return config.model_copy(update={"verification": verification}), name


def _open_data_and_forecasts(
    config: Config, model_config: Config | None, online: bool, process: ProcessInfo, device_type: str
) -> tuple[FieldReader, ForecastSource, WorkShare]:
    """Collective: return the reader of the truth, the forecasts, and the initial times that this rank scores.

    Args:
        config: config of the run whose data are the truth.
        model_config: config of the run that ``--model`` names; None without this option.
        online: True to make the forecasts while scoring, False to read them from files.
        process: rank and world size of this process.
        device_type: ``cpu`` or ``cuda``, the device of the forecasts.

    Raises:
        DataError: if the data or the forecasts cannot be opened.
    """
    from credit.forecast.io.forecast_reader import open_forecasts
    from credit.train.build.model import build_forecast_mesh
    from credit.train.build.open_data import open_reader_on_rank0
    from credit.verify.partial_scores import WorkShare

    if not online:
        archive = open_forecasts(Path(config.save_loc) / config.inference.folder)
        return open_reader_on_rank0(config.data), archive, WorkShare(process.rank, process.world)
    mesh = build_forecast_mesh(config.inference.parallelism, process, device_type)
    if model_config is None:
        truth_reader, forecasts = _open_online_forecasts(config, process, mesh, has_other_truth=False)
    else:
        _, forecasts = _open_online_forecasts(model_config, process, mesh, has_other_truth=True)
        truth_reader = open_reader_on_rank0(config.data)
    if mesh.degrees.world == 1:
        return truth_reader, forecasts, WorkShare(process.rank, process.world)
    # Ranks that share weights, fields or members forecast the same cases, and one of these ranks scores them. A rank
    # scores only if it has all members and the whole fields.
    has_whole_fields = mesh.degrees.domain == 1 or mesh.gets_forecasts
    share = WorkShare(
        mesh.sample_rank,
        mesh.num_sample_ranks,
        are_scores_used=mesh.gets_forecasts,
        is_sharded=True,
        has_whole_forecasts=mesh.ensemble_rank == 0 and has_whole_fields,
    )
    return truth_reader, forecasts, share


def _open_online_forecasts(
    config: Config, process: ProcessInfo, mesh: DeviceGrid, has_other_truth: bool
) -> tuple[FieldReader, ForecastSource]:
    """Collective: open the data of the run that makes the forecasts, and return the reader and the forecasts.

    The forecasts are not read from files. The model makes each forecast when the scoring code requests it.

    Args:
        config: config of the run that makes the forecasts.
        process: rank and world size of this process.
        mesh: mesh of the ranks that make forecasts.
        has_other_truth: True if the forecasts are scored against the data of a different run. Derived variables and
            pressure levels are then also computed, because the data of that run may contain them.
    """
    from contextlib import nullcontext

    from credit.cli.rollout import build_shared_forecast_function
    from credit.forecast.ensemble.perturbations import compute_member_lag
    from credit.forecast.initial_times import choose_initial_times, list_output_leads
    from credit.forecast.online import ForecastBatching, OnlineForecasts, build_step_filter
    from credit.train.build.forecaster import assemble_forecaster, build_output_diagnostics, build_run_attributes
    from credit.train.build.open_data import open_data_and_splits, open_forecast_fields

    # The data from which forecasts start need not contain variables that only the truth needs.
    if has_other_truth:
        reader, splits = open_forecast_fields(config)
    else:
        reader, splits = open_data_and_splits(config)
    inference = config.inference
    forecaster = assemble_forecaster(config, reader, inference.checkpoint, process, mesh)
    lead_minutes = list_output_leads(inference, config.data.step_minutes)

    # The scored fields are the output of the model, or fields derived from it.
    select_run_attributes = build_run_attributes(forecaster)
    diagnostics = None
    if has_other_truth:
        diagnostics = build_output_diagnostics(forecaster, lead_minutes[-1])
        fields = diagnostics.output_fields(forecaster.assets.grid, reader.calendar)
        select_run_attributes |= diagnostics.global_attributes
    else:
        fields = _describe_model_output(config.data, forecaster.assets, reader.calendar)
    # Only this thread reads files during scoring, so no lock is needed.
    is_step_used = build_step_filter(lead_minutes, config.data.step_minutes, diagnostics)
    forecast_batch = build_shared_forecast_function(config, forecaster, nullcontext(), mesh, is_step_used)
    ensemble = inference.ensemble
    members = None if ensemble is None else ensemble.members
    batching = ForecastBatching(
        inference.batch_size, members, compute_member_lag(ensemble), mesh.degrees.ensemble, mesh.degrees.domain == 1
    )
    forecasts = OnlineForecasts(
        forecast_batch,
        fields,
        choose_initial_times(inference, config.data, reader.times, reader.calendar, splits["test"]),
        lead_minutes,
        batching,
        origin=forecaster.path,
        attributes=select_run_attributes,
        diagnostics=diagnostics,
    )
    return reader, forecasts


def _describe_model_output(data: DataConfig, assets: ModelAssets, calendar: Calendar) -> OutputFields:
    """Return the description of a model's output fields, without derived variables.

    Args:
        data: the section data of the run.
        assets: channels, grid, attributes and masks of the model.
        calendar: calendar of the times.
    """
    from credit.forecast.io.schema import OutputFields

    return OutputFields(
        assets.channels,
        assets.grid,
        calendar,
        assets.attributes,
        data.step_minutes,
        data.level_units,
        assets.masks,
    )
