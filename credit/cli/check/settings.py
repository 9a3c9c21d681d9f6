"""Checks that build, from the config alone, the objects that training, forecasts and scores build later."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from torch import nn

from credit.calendar import format_duration
from credit.channels import select_figure_channels
from credit.cli.check.data import DataSummary
from credit.cli.check.other_forecasts import PlannedForecasts, check_other_forecasts
from credit.cli.check.report import CheckReport
from credit.config import Config
from credit.config.schema_inference import InitialTimesConfig
from credit.data.climatology.file import load_climatology
from credit.data.climatology.fit import plan_fit
from credit.data.formats.run_grid import load_grid
from credit.errors import ConfigError
from credit.forecast.ensemble.feature_noise import find_blocks
from credit.forecast.ensemble.perturbations import enable_dropout
from credit.forecast.initial_times import choose_leads, find_initial_times, interval_minutes
from credit.forecast.io.diagnostics import OutputDiagnostics
from credit.forecast.io.forecast_writer import require_same_format
from credit.forecast.io.schema import OutputFields, OutputOptions, build_layout
from credit.losses.build import build_loss, channel_weights
from credit.train.assets import LEAST_CLIMATOLOGY_MINUTES
from credit.train.build import require_monitor
from credit.train.checkpoint.checkpoint import no_such_checkpoint
from credit.train.monitor.preview import plan_preview
from credit.train.optim import build_optimizer
from credit.utils.installation import install_command
from credit.verify.cases import cases_with_truth
from credit.verify.scores.thresholds import find_events, find_precipitation
from credit.verify.statistics.regions import region_weights, scored_regions


def check_training(config: Config, data: DataSummary, report: CheckReport) -> None:
    """Build the loss, the optimizer and what else training takes from the config alone."""
    conf = config.trainer
    with report.collect():
        require_monitor(config, data.channels)
    with report.collect():
        scale = np.ones(len(data.channels.group("prognostic")))
        with np.errstate(invalid="ignore"):
            build_loss(config.loss, data.channels, data.grid, scale, data.masks)
            weight_C = channel_weights(config.loss, data.channels)
        if not weight_C.min() >= 0:
            raise ConfigError(
                f"loss.weights: {config.loss.weights}: no weight may be below 0, and one at least must be above"
            )
    with report.collect():
        try:
            build_optimizer(nn.Linear(1, 1), conf)
        except ValueError as error:
            raise ConfigError(f"trainer.betas: {list(conf.betas)}: {error}; both must lie from 0 to below 1") from error
    if conf.tensorboard and importlib.util.find_spec("tensorboard") is None:
        report.add(f"trainer.tensorboard: true needs TensorBoard; install it with: {install_command('tensorboard')}")
    if conf.preview is not None and "valid" in data.splits and len(data.times):
        with report.collect():
            plan = plan_preview(config, data.channels, data.times, data.calendar, data.splits["valid"])
            report.say(f"trainer.preview: {plan.describe(data.calendar)}")
    train = data.splits.get("train")
    for channel in data.channels.group("dynamic_forcing"):
        wants = channel.source == "data" and config.data.field(channel.variable).in_forecast == "climatology"
        if wants and train is not None and train.last - train.first < LEAST_CLIMATOLOGY_MINUTES:
            report.add(
                f"data.variable_options.{channel.variable}.in_forecast: climatology cannot be fitted to "
                "data.splits.train, which "
                f"has {(train.last - train.first) / 1440:.0f} days and needs {LEAST_CLIMATOLOGY_MINUTES // 1440}; use "
                "persist"
            )


def check_forecasts(config: Config, data: DataSummary, report: CheckReport) -> int:
    """Choose the initial times, lay out the files and look at what scoring needs.

    Returns:
        Bytes that the forecasts take at most.
    """
    conf, step, initial = config.inference, config.data.step_minutes, []
    leads = np.array(choose_leads(conf, step))
    report.say(
        f"lead times: {len(leads)}, {format_duration(int(leads[0]))} to {format_duration(int(leads[-1]))} "
        f"(inference.lead_time {conf.lead_time}, data.timestep {config.data.timestep}); figures of "
        f"{', '.join(config.verification.figure_leads)}"
    )
    _check_checkpoint(config, report)
    # a test period without a sample has been named
    chosen_by_split = isinstance(conf.initial_times, InitialTimesConfig)
    if len(data.times) and "test" in (data.samples if chosen_by_split else data.splits):
        with report.collect():
            chosen = find_initial_times(conf, config.data, data.times, data.calendar, data.splits["test"])
            initial = chosen.minutes
            first, last = data.calendar.format(initial[0]), data.calendar.format(initial[-1])
            whole = len(cases_with_truth({*initial}, data, leads, data.splits["test"]))
            report.say(f"inference.initial_times: {len(initial)}, {first} to {last}; {whole} of them can be scored")
            if chosen.left_out:
                report.say(chosen.left_out)
    elif chosen_by_split:
        with report.collect():
            interval_minutes(conf.initial_times, step)
    with report.collect():
        require_same_format(Path(config.save_loc) / conf.folder, conf.format, conf.split)
    written: list[str] = []
    with report.collect():
        written = _find_written(config, data, int(leads[-1]))
    with report.collect():
        select_figure_channels(
            config.verification.figure_channels, data.channels.output, "verification.figure_channels"
        )
    with report.collect():
        onto = config.verification.grid
        grid = data.grid if onto is None else load_grid(onto, "verification.grid")
        region_weights(grid, scored_regions(config.verification))
    with report.collect():
        find_events(config.verification.events, data.channels.output, data.attributes)
    with report.collect():
        find_precipitation(config.verification.seeps, data.channels.output, data.attributes)
    with report.collect():
        select_figure_channels(config.verification.animate, data.channels.output, "verification.animate")
    if "train" in data.samples:
        with report.collect():
            _try_climatology(config, data)
    # the latest time is appended to others, which are scored with it
    scored = np.array([] if conf.initial_times == "latest" else initial, dtype=np.int64)
    planned = PlannedForecasts("this run", scored, leads, written, data.calendar)
    check_other_forecasts(config, data, planned, report)
    return 4 * len(written) * data.grid.area_weights().size * len(leads) * len(initial)


def check_ensemble(config: Config, model: nn.Module, report: CheckReport) -> None:
    """See whether the network has the blocks that get noise, and dropout where that is to stay on."""
    conf = config.inference.ensemble
    # another run's network is not this one
    if conf is None or config.inference.checkpoint not in ("best", "latest"):
        return
    if conf.dropout:
        with report.collect():
            enable_dropout(model)
    if conf.noise is not None:
        with report.collect():
            names = find_blocks(model, conf.noise.where)
            report.say(f"inference.ensemble.noise: after {', '.join(names)}")


def _check_checkpoint(config: Config, report: CheckReport) -> None:
    """A checkpoint of another run must be there; those of this run may be to come."""
    which = config.inference.checkpoint
    run_checkpoints = (Path(config.save_loc) / "checkpoints").resolve()
    if (
        which not in ("best", "latest")
        and run_checkpoints not in Path(which).resolve().parents
        and not Path(which).is_dir()
    ):
        report.add(str(no_such_checkpoint("inference.checkpoint", which)))


def _find_written(config: Config, data: DataSummary, longest: int) -> list[str]:
    """Return the channels of the forecasts' files; what is made of outputs is known where the data can be read."""
    conf, step = config.inference, config.data.step_minutes
    if data.reader is not None:
        products = OutputDiagnostics(conf, config.data, data.channels, data.attributes, data.reader.static(), longest)
        fields = products.output_fields(data.grid, data.calendar)
    elif conf.pressure_levels is not None or conf.derive:
        return [channel.name for channel in data.channels.output]
    else:
        level_units = config.data.level_units
        fields = OutputFields(data.channels, data.grid, data.calendar, data.attributes, step, level_units)
    layout = build_layout(fields, [step], OutputOptions(variables=conf.variables, levels=conf.levels))
    output = fields.channels.output
    return [output[index].name for variable in layout.variables for index in variable.index]


def _try_climatology(config: Config, data: DataSummary) -> None:
    """See whether the climatology of the scores can be fitted to the training period's times, or read its file."""
    conf = config.verification.climatology
    train = data.splits["train"]
    if conf.method == "file":
        grid = data.grid if config.verification.grid is None else None
        channels = data.channels.output
        normal, _ = load_climatology(conf, config.data, channels, data.calendar, data.attributes, grid)
        normal.at(train.first)
    else:
        plan_fit(data.times, data.calendar, train.first, train.last, conf)
