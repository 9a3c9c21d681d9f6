"""The part of ``credit_check`` that builds from the config what training, forecasts and scores build later."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from torch import nn

from credit.calendar import format_duration
from credit.channels import figure_channels
from credit.cli.check.data import DataSummary
from credit.cli.check.other_forecasts import Planned, check_other_forecasts
from credit.cli.check.report import CheckReport
from credit.config import Config
from credit.config.schema_forecast import InitialTimesConfig
from credit.data.climatology.file import load_climatology
from credit.data.climatology.fit import plan_fit
from credit.data.formats.run_grid import load_grid
from credit.errors import ConfigError
from credit.forecast.ensemble.feature_noise import find_blocks
from credit.forecast.ensemble.perturbations import enable_dropout
from credit.forecast.initial_times import choose_leads, every_minutes, find_initial_times
from credit.forecast.io.diagnostics import OutputDiagnostics
from credit.forecast.io.forecast_writer import require_same_format
from credit.forecast.io.schema import build_layout
from credit.losses import build_loss
from credit.train.assets import LEAST_CLIMATOLOGY_MINUTES
from credit.train.build import require_monitor
from credit.train.checkpoint.checkpoint import no_such_checkpoint
from credit.train.monitor.preview import plan_early_view
from credit.train.optim import build_optimizer
from credit.utils.installation import install_command
from credit.verify.cases import cases_with_truth
from credit.verify.scores.thresholds import find_events, find_precipitation
from credit.verify.statistics.regions import region_weights, scored_regions


def check_training(config: Config, found: DataSummary, findings: CheckReport) -> None:
    """Build the loss, the optimizer and what else training takes from the config alone."""
    conf = config.trainer
    with findings.collect():
        require_monitor(config, found.channels)
    with findings.collect():
        scale = np.ones(len(found.channels.group("prognostic")))
        with np.errstate(invalid="ignore"):
            loss = build_loss(config.loss, found.channels, found.grid.area_weights(), scale, found.masks)
        if not loss.share_C.min() >= 0:
            raise ConfigError(
                f"loss.weights: {config.loss.weights}: no weight may be below 0, and one at least must be above"
            )
    with findings.collect():
        try:
            build_optimizer(nn.Linear(1, 1), conf)
        except ValueError as error:
            raise ConfigError(f"trainer.betas: {list(conf.betas)}: {error}; both must lie from 0 to below 1") from error
    if conf.tensorboard and importlib.util.find_spec("tensorboard") is None:
        findings.add(f"trainer.tensorboard: true needs TensorBoard; install it with: {install_command('tensorboard')}")
    if conf.early_view is not None and "valid" in found.splits and len(found.times):
        with findings.collect():
            plan = plan_early_view(config, found.channels, found.times, found.clock, found.splits["valid"])
            findings.say(f"trainer.early_view: {plan.describe(found.clock)}")
    train = found.splits.get("train")
    for channel in found.channels.group("dynamic_forcing"):
        wants = channel.source == "data" and config.data.field(channel.variable).in_forecast == "climatology"
        if wants and train is not None and train.last - train.first < LEAST_CLIMATOLOGY_MINUTES:
            findings.add(
                f"data.fields.{channel.variable}.in_forecast: climatology cannot be fitted to data.splits.train, which "
                f"has {(train.last - train.first) / 1440:.0f} days and needs {LEAST_CLIMATOLOGY_MINUTES // 1440}; use "
                "persist"
            )


def check_forecasts(config: Config, found: DataSummary, findings: CheckReport) -> int:
    """Choose the initial times, lay out the files and look at what scoring needs.

    Returns:
        Bytes that the forecasts take at most.
    """
    conf, step, initial = config.inference, config.data.step_minutes, []
    leads = np.array(choose_leads(conf, step))
    findings.say(
        f"lead times: {len(leads)}, {format_duration(int(leads[0]))} to {format_duration(int(leads[-1]))} "
        f"(inference.lead_time {conf.lead_time}, data.timestep {config.data.timestep}); figures of "
        f"{', '.join(config.verification.figure_leads)}"
    )
    _check_checkpoint(config, findings)
    # a test period without a sample has been named
    chosen_by_split = isinstance(conf.initial_times, InitialTimesConfig)
    if len(found.times) and "test" in (found.samples if chosen_by_split else found.splits):
        with findings.collect():
            chosen = find_initial_times(conf, config.data, found.times, found.clock, found.splits["test"])
            initial = chosen.minutes
            first, last = found.clock.format(initial[0]), found.clock.format(initial[-1])
            whole = len(cases_with_truth({*initial}, found, leads, found.splits["test"]))
            findings.say(f"inference.initial_times: {len(initial)}, {first} to {last}; {whole} of them can be scored")
            if chosen.left_out:
                findings.say(chosen.left_out)
    elif chosen_by_split:
        with findings.collect():
            every_minutes(conf.initial_times, step)
    with findings.collect():
        require_same_format(Path(config.save_loc) / conf.folder, conf.format, conf.split)
    written: list[str] = []
    with findings.collect():
        written = _find_written(config, found, int(leads[-1]))
    with findings.collect():
        wanted = config.verification.figure_channels
        figure_channels(wanted, found.channels.output, "verification.figure_channels")
    with findings.collect():
        onto = config.verification.grid
        grid = found.grid if onto is None else load_grid(onto, "verification.grid")
        region_weights(grid, scored_regions(config.verification))
    with findings.collect():
        find_events(config.verification.events, found.channels.output, found.attributes)
    with findings.collect():
        find_precipitation(config.verification.seeps, found.channels.output, found.attributes)
    with findings.collect():
        figure_channels(config.verification.animate, found.channels.output, "verification.animate")
    if "train" in found.samples:
        with findings.collect():
            _try_climatology(config, found)
    # the latest time is appended to others, which are scored with it
    scored = np.array([] if conf.initial_times == "latest" else initial, dtype=np.int64)
    planned = Planned("this run", scored, leads, written, found.clock)
    check_other_forecasts(config, found, planned, findings)
    return 4 * len(written) * found.grid.area_weights().size * len(leads) * len(initial)


def check_ensemble(config: Config, model: nn.Module, findings: CheckReport) -> None:
    """See whether the network has the blocks that get noise, and dropout where that is to stay on."""
    conf = config.inference.ensemble
    # another run's network is not this one
    if conf is None or config.inference.checkpoint not in ("best", "latest"):
        return
    if conf.dropout:
        with findings.collect():
            enable_dropout(model)
    if conf.noise is not None:
        with findings.collect():
            names = find_blocks(model, conf.noise.where)
            findings.say(f"inference.ensemble.noise: after {', '.join(names)}")


def _check_checkpoint(config: Config, findings: CheckReport) -> None:
    """A checkpoint of another run must be there; those of this run may be to come."""
    which = config.inference.checkpoint
    own = (Path(config.save_loc) / "checkpoints").resolve()
    if which not in ("best", "latest") and own not in Path(which).resolve().parents and not Path(which).is_dir():
        findings.add(str(no_such_checkpoint("inference.checkpoint", which)))


def _find_written(config: Config, found: DataSummary, longest: int) -> list[str]:
    """Return the channels of the forecasts' files; what is made of outputs is known where the data can be read."""
    conf, step = config.inference, config.data.step_minutes
    channels, attributes, units = found.channels, found.attributes, config.data.level_units
    if found.reader is not None:
        products = OutputDiagnostics(conf, config.data, channels, attributes, found.reader.static(), longest)
        channels, attributes, units = products.channels, products.attributes, products.level_units
    elif conf.pressure_levels is not None or conf.derive:
        return [channel.name for channel in channels.output]
    layout = build_layout(
        channels, found.grid, found.clock, attributes, step, [step], units, conf.variables, conf.levels
    )  # fmt: skip
    return [channels.output[place].name for variable in layout.variables for place in variable.index]


def _try_climatology(config: Config, found: DataSummary) -> None:
    """See whether the climatology of the scores can be fitted to the training period's times, or read its file."""
    conf = config.verification.climatology
    train = found.splits["train"]
    if conf.method == "file":
        grid = found.grid if config.verification.grid is None else None
        channels = found.channels.output
        normal, _ = load_climatology(conf, config.data, channels, found.clock, found.attributes, grid)
        normal.at(train.first)
    else:
        plan_fit(found.times, found.clock, train.first, train.last, conf)
