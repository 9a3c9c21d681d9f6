"""Checks of the config that build the same objects as training, forecasts and scores, to find errors."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import nn

from credit.calendar import format_duration
from credit.channels import select_figure_channels
from credit.cli.check.data import DataSummary
from credit.cli.check.other_forecasts import PlannedForecasts, check_other_forecasts
from credit.cli.check.report import CheckReport
from credit.config import Config
from credit.config.sections.inference import InitialTimesConfig
from credit.data.climatology.file import load_climatology
from credit.data.climatology.fit import plan_fit
from credit.data.formats.grib.messages import import_eccodes
from credit.data.formats.run_grid import load_grid
from credit.errors import ConfigError
from credit.forecast.ensemble.feature_noise import find_blocks
from credit.forecast.ensemble.perturbations import enable_dropout
from credit.forecast.initial_times import find_initial_times, list_output_leads, parse_interval_minutes
from credit.forecast.io.diagnostics import OutputDiagnostics
from credit.forecast.io.forecast_writer import build_file_format, require_same_format
from credit.forecast.io.grib.options import build_grib_options
from credit.forecast.io.schema import OutputFields, OutputOptions, build_schema
from credit.losses.build import build_loss, compute_channel_weights
from credit.parallel.blocks.cuda_graphs import describe_cuda_graphs
from credit.realtime.fetch.records import list_analysis_offsets, list_record_requests
from credit.train.build.assets import MIN_CLIMATOLOGY_MINUTES
from credit.train.build.validation import require_measured_monitor
from credit.train.checkpoint.checkpoint import build_missing_checkpoint_error
from credit.train.loggers.base import require_loggers
from credit.train.monitor.preview import plan_preview
from credit.train.optim import build_optimizer
from credit.verify.cases import cases_with_truth
from credit.verify.scores.thresholds import build_events, find_precipitation_channels
from credit.verify.statistics.regions import region_weights, scored_regions


def check_training(config: Config, data: DataSummary, report: CheckReport) -> None:
    """Check the sections that training uses, by building the loss, the optimizer and the preview plan.

    Args:
        config: config of the run.
        data: summary of the data.
        report: receives errors and notes.
    """
    trainer = config.trainer
    with report.collect():
        require_measured_monitor(config, data.channels)
    with report.collect():
        # The check does not need the true scales of the tendencies, which come from the statistics.
        scale_C = np.ones(len(data.channels.group("prognostic")))
        # Weights that are not finite are reported below, so numpy's warning is not needed.
        with np.errstate(invalid="ignore"):
            build_loss(config.loss, data.channels, data.grid, scale_C, data.masks)
            weight_C = compute_channel_weights(config.loss, data.channels)
        # The comparison is also False for NaN. Weights are NaN if their sum is 0.
        if not weight_C.min() >= 0:
            raise ConfigError(
                f"loss.weights: {config.loss.weights}: weights must be >= 0, and at least one must be > 0"
            )
    with report.collect():
        # The optimizer checks its settings when it is built, for which any small network is sufficient. Patterns of
        # weight names are checked with the network of the run.
        try:
            build_optimizer(nn.Linear(1, 1), trainer.model_copy(update={"learning_rate_factors": {}}))
        except ValueError as error:
            raise ConfigError(f"trainer.betas: {list(trainer.betas)}: {error}; both must be in [0, 1)") from error
    has_gpu = trainer.device == "cuda" or (trainer.device == "auto" and torch.cuda.is_available())
    for note in describe_cuda_graphs(trainer, config.data.forecast_len, has_gpu):
        report.add_note(note)
    with report.collect():
        require_loggers(trainer.loggers)
    if trainer.preview is not None and "valid" in data.splits and len(data.times):
        with report.collect():
            plan = plan_preview(config, data.channels, data.times, data.calendar, data.splits["valid"])
            report.add_note(f"trainer.preview: {plan.describe(data.calendar)}")
    _check_forcing_climatology(config, data, report)


def _check_forcing_climatology(config: Config, data: DataSummary, report: CheckReport) -> None:
    """Check that the training period is long enough to fit a climatology of the forcing for forecasts."""
    train = data.splits.get("train")
    for channel in data.channels.group("dynamic_forcing"):
        # Only `climatology` needs a long training period. Computed forcing needs no data, and `persist` keeps the
        # initial values.
        if channel.source != "data" or config.data.options_of(channel.variable).in_forecast != "climatology":
            continue
        if train is not None and train.last - train.first < MIN_CLIMATOLOGY_MINUTES:
            num_days = (train.last - train.first) / 1440
            report.add(
                f"data.variable_options.{channel.variable}.in_forecast: climatology cannot be fitted to "
                f"data.splits.train, which has {num_days:.0f} days but must have at least "
                f"{MIN_CLIMATOLOGY_MINUTES // 1440}; use persist"
            )


def check_forecasts(config: Config, data: DataSummary, report: CheckReport) -> int:
    """Check the sections that forecasts and scores use, by choosing the initial times and planning the forecast files.

    Args:
        config: config of the run.
        data: summary of the data.
        report: receives errors and notes.

    Returns:
        Upper bound of the size of the forecasts in bytes.
    """
    conf = config.inference
    step_minutes = config.data.step_minutes
    leads = np.array(list_output_leads(conf, step_minutes))
    initial_times = []
    report.add_note(
        f"lead times: {len(leads)}, {format_duration(int(leads[0]))} to {format_duration(int(leads[-1]))} "
        f"(inference.lead_time {conf.lead_time}, data.timestep {config.data.timestep}); figures of "
        f"{', '.join(config.verification.figure_leads)}"
    )
    _check_checkpoint(config, report)

    # Choose the initial times. A range needs samples in the test period (their absence has already been reported); a
    # list needs only the period.
    is_range = isinstance(conf.initial_times, InitialTimesConfig)
    usable_splits = data.samples if is_range else data.splits
    if len(data.times) and "test" in usable_splits:
        with report.collect():
            chosen = find_initial_times(conf, config.data, data.times, data.calendar, data.splits["test"])
            initial_times = chosen.minutes
            first_time = data.calendar.format(initial_times[0])
            last_time = data.calendar.format(initial_times[-1])
            cases = cases_with_truth(set(initial_times), data, leads, data.splits["test"])
            report.add_note(
                f"inference.initial_times: {len(initial_times)}, {first_time} to {last_time}; {len(cases)} of them can "
                "be scored"
            )
            if chosen.skip_message:
                report.add_note(chosen.skip_message)
    elif is_range:
        with report.collect():
            parse_interval_minutes(conf.initial_times, step_minutes)

    # Plan the contents of the files, and compare them with the channels and times that the scores need.
    with report.collect():
        require_same_format(Path(config.save_loc) / conf.folder, conf.format, conf.split)
    output_names: list[str] = []
    with report.collect():
        output_names = _check_outputs(config, data, leads, report)
    _check_scores(config, data, report)
    # With "latest", the new forecast is added to the forecasts of earlier calls, so the scored times are not known
    # here.
    scored_times = np.array([], dtype=np.int64)
    if conf.initial_times != "latest":
        scored_times = np.array(initial_times, dtype=np.int64)
    planned = PlannedForecasts("this run", scored_times, leads, output_names, data.calendar)
    check_other_forecasts(config, data, planned, report)
    num_cells = math.prod(data.grid.shape)
    # Uncompressed values are float32 (4 bytes), so this is an upper bound.
    return 4 * len(output_names) * num_cells * len(leads) * len(initial_times)


def _check_scores(config: Config, data: DataSummary, report: CheckReport) -> None:
    """Check the section ``verification``: its channels, grid, regions, events and climatology.

    Each check collects its error separately, so that all wrong keys are reported.
    """
    with report.collect():
        select_figure_channels(
            config.verification.figure_channels, data.channels.output, "verification.figure_channels"
        )
    with report.collect():
        grid = data.grid
        if config.verification.grid is not None:
            grid = load_grid(config.verification.grid, "verification.grid")
        region_weights(grid, scored_regions(config.verification))
    with report.collect():
        build_events(config.verification.events, data.channels.output, data.attributes)
    with report.collect():
        find_precipitation_channels(config.verification.seeps, data.channels.output, data.attributes)
    with report.collect():
        select_figure_channels(config.verification.animate, data.channels.output, "verification.animate")
    if "train" in data.samples:
        with report.collect():
            _check_climatology(config, data)


def check_realtime(config: Config, report: CheckReport) -> None:
    """Check the section ``realtime``: every variable that a forecast reads must be in an operational analysis.

    The check fetches no data.

    Args:
        config: config of the run.
        report: receives errors and notes.
    """
    if config.realtime is None:
        return
    with report.collect():
        requests = list_record_requests(config)
        offsets = list_analysis_offsets(config)
        import_eccodes()
        hours = ", ".join(f"{offset / 60:g}" for offset in offsets)
        report.add_note(
            f"realtime: {len(requests)} records of each analysis ({config.realtime.format}), at {hours} h before the "
            f"initial time: {', '.join(request.describe() for request in requests)}"
        )


def check_ensemble(config: Config, model: nn.Module, report: CheckReport) -> None:
    """Check that the network has the dropout layers and the blocks for feature noise that ``inference.ensemble`` needs.

    Args:
        config: config of the run.
        model: network of the config; `enable_dropout` sets its dropout layers to training mode.
        report: receives errors and notes.
    """
    conf = config.inference.ensemble
    # The checkpoint of a different run may contain a network that differs from `model`.
    if conf is None or config.inference.checkpoint not in ("best", "latest"):
        return
    if conf.dropout:
        with report.collect():
            enable_dropout(model)
    if conf.feature_noise is not None:
        with report.collect():
            names = find_blocks(model, conf.feature_noise.blocks)
            report.add_note(f"inference.ensemble.feature_noise: after {', '.join(names)}")


def _check_checkpoint(config: Config, report: CheckReport) -> None:
    """Check that ``inference.checkpoint`` exists if it belongs to a different run.

    A checkpoint of this run may be missing, because training may still write it.
    """
    name = config.inference.checkpoint
    if name in ("best", "latest"):
        return
    path = Path(name)
    run_checkpoints = (Path(config.save_loc) / "checkpoints").resolve()
    is_of_this_run = run_checkpoints in path.resolve().parents
    if not is_of_this_run and not path.is_dir():
        report.add(str(build_missing_checkpoint_error("inference.checkpoint", name)))


def _check_outputs(config: Config, data: DataSummary, leads: np.ndarray, report: CheckReport) -> list[str]:
    """Check the contents of the forecast files, and the products that are computed from them.

    If the data cannot be read, derived variables, pressure levels and products are not checked.

    Args:
        config: config of the run.
        data: summary of the data.
        leads: lead times to write in minutes.
        report: receives errors and notes on products.

    Returns:
        Names of the channels that the forecast files will contain.

    Raises:
        ConfigError: if a variable of ``inference.variables`` is neither an output of the model nor a derived variable,
            or if the format of the files cannot hold the forecasts.
    """
    conf = config.inference
    if data.reader is not None:
        diagnostics = OutputDiagnostics(
            conf, config.data, data.channels, data.attributes, data.reader.static(), int(leads[-1])
        )
        fields = diagnostics.output_fields(data.grid, data.calendar)
    elif conf.pressure_levels is not None or conf.derive:
        # Diagnostics need static fields, which cannot be read. The output channels give an approximate number of
        # fields.
        return [channel.name for channel in data.channels.output]
    else:
        fields = OutputFields(
            data.channels, data.grid, data.calendar, data.attributes, config.data.step_minutes, config.data.level_units
        )
    members = None if conf.ensemble is None else conf.ensemble.members
    options = OutputOptions(
        conf.format, variables=conf.variables, levels=conf.levels, grib=build_grib_options(conf, config.data)
    )
    schema = build_schema(fields, leads.tolist(), options, members)
    if conf.format != "zarr":
        # GRIB2 does not support every variable, grid and calendar.
        build_file_format(schema, options)
    if conf.products and data.reader is not None:
        # This import is local because maps need matplotlib, which is slow to import.
        from credit.cli.products.run_products import check_products

        with report.collect():
            check_products(config, schema)
            kinds = ", ".join(f"{section.name} ({section.kind})" for section in conf.products)
            report.add_note(f"inference.products: {kinds}")
    names = []
    for variable in schema.variables:
        names += [fields.channels.output[channel_index].name for channel_index in variable.channel_index]
    return names


def _check_climatology(config: Config, data: DataSummary) -> None:
    """Check the climatology of the scores, by reading its file or by planning the fit to the training period.

    Raises:
        ConfigError: if the climatology cannot be fitted to the training period.
        DataError: if the file cannot be read or does not contain all variables.
    """
    conf = config.verification.climatology
    train = data.splits["train"]
    if conf.method == "file":
        # The file must be on the grid of the data, unless all forecasts are regridded before they are scored.
        grid = data.grid if config.verification.grid is None else None
        channels = data.channels.output
        climatology, _ = load_climatology(conf, config.data, channels, data.calendar, data.attributes, grid)
        climatology.evaluate(train.first)
    else:
        plan_fit(data.times, data.calendar, train.first, train.last, conf)
