"""Preparation of a forecast from a dataset: the initial state, the network and the description of the outputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from torch import nn

from credit.api.arguments import convert_to_calendar_minutes
from credit.api.datasets import open_dataset_reader
from credit.config import Config
from credit.config.sections.data import DataConfig
from credit.data.reader import FieldReader
from credit.data.samples.frames import FrameReader
from credit.errors import DataError
from credit.forecast.ensemble.perturbations import compute_member_lag, enable_dropout
from credit.forecast.forecast_function import build_forecast_function
from credit.forecast.io.schema import ForecastSchema, OutputOptions, build_schema
from credit.forecast.online import ForecastBatching, OnlineForecasts
from credit.forecast.rollout import ForecastInputs
from credit.train.build.assets import ModelAssets, build_model_spec
from credit.train.build.forecaster import Forecaster, build_output_diagnostics, build_run_attributes
from credit.train.build.initial_condition_checks import describe_distribution_shift, find_cells_missing_in_training
from credit.train.build.model import set_tf32
from credit.train.build.open_data import build_frame_reader
from credit.train.build.stepper import build_stepper
from credit.train.checkpoint.trained_fields import require_same_fields
from credit.utils.progress import ProgressBar

logger = logging.getLogger(__name__)

# Settings of section `inference` that select all outputs of the network, without changes.
_PLAIN_OUTPUT = {"derive": {}, "pressure_levels": None, "variables": None, "levels": None, "keep_bits": None}


class LoadedModel:
    """Network with its weights, and the assets of its checkpoint.

    A checkpoint with weights that were imported from published files contains no attributes of the variables, such as
    the standard names that identify wind components. In this case the network is built at the first forecast, with the
    attributes of the data.

    Args:
        assets: channels, grid, statistics and static fields of the model.
        build_network: function of the assets (with all attributes) and a device that returns the network on the
            device.
        path: path of the checkpoint or exported file.
        trained_steps: number of optimizer steps with which the weights were trained.
        weights_checksum: checksum of the weights.
        device: device of the network.

    Attributes:
        assets: the argument `assets`; when the network is built, the attributes of the data are added.
        network: the network in eval mode, on `device`; None before it is built.
    """

    def __init__(
        self,
        assets: ModelAssets,
        build_network: Callable[[ModelAssets, torch.device], nn.Module],
        path: Path,
        trained_steps: int,
        weights_checksum: str,
        device: torch.device,
    ) -> None:
        self.assets = assets
        self.path = path
        self.trained_steps = trained_steps
        self.weights_checksum = weights_checksum
        self.device = device
        self.network: nn.Module | None = None
        self._build_network = build_network
        variables = {channel.variable for channel in (*assets.channels.input, *assets.channels.output)}
        computed = {channel.variable for channel in assets.channels.input if channel.source != "data"}
        if variables - computed <= assets.attributes.keys():
            self.network = build_network(assets, device)

    def move(self, device: torch.device) -> None:
        """Move the network to a torch device."""
        self.device = device
        if self.network is not None:
            self.network.to(device)

    def get_or_build_network(self, reader: FieldReader) -> nn.Module:
        """Return the network. At the first call, build the network with the attributes of the data if necessary."""
        if self.network is None:
            self.assets = replace(self.assets, attributes={**reader.attributes, **self.assets.attributes})
            self.network = self._build_network(self.assets, self.device)
        return self.network


@dataclass(frozen=True)
class PreparedForecast:
    """Forecast whose inputs have been checked, ready to run.

    Attributes:
        forecasts: source of the forecast fields, which runs the network step by step.
        network: network that makes the forecast.
        uses_dropout: True if dropout is active during the forecast.
        schema: variables and dimensions of the dataset of the forecast.
        frames: reader of the initial state and the forcing.
        initial_minutes: initial time in minutes.
        lead_minutes: (N,) lead times in minutes.
    """

    forecasts: OnlineForecasts
    network: nn.Module
    uses_dropout: bool
    schema: ForecastSchema
    frames: FrameReader
    initial_minutes: int
    lead_minutes: np.ndarray

    def read_steps(self, progress: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the index of each lead time and the fields (M, C, H, W) of M members and C output channels.

        Args:
            progress: True to show a progress bar.
        """
        with ProgressBar(total=len(self.lead_minutes), desc="forecast", unit="step", disable=not progress) as bar:
            for lead_index in range(len(self.lead_minutes)):
                # Set the mode at every step, because a different forecast may use the network between two steps.
                self.network.eval()
                if self.uses_dropout:
                    enable_dropout(self.network)
                yield lead_index, self.forecasts.read_members(self.initial_minutes, lead_index)
                bar.update()


def prepare_forecast(
    model: LoadedModel,
    config: Config,
    data: DataConfig,
    initial: xr.Dataset,
    lead_minutes: np.ndarray,
    initial_time: object = None,
    with_diagnostics: bool = True,
    only_member: int | None = None,
) -> PreparedForecast:
    """Check the initial state and prepare a forecast from this state.

    Args:
        model: network with its weights and assets.
        config: config of the forecast with its ensemble; settings on which the weights depend are those of training.
        data: section ``data`` with which the initial state is read; its units may differ from the units in training.
        initial: dataset with the initial state.
        lead_minutes: (N,) lead times in minutes.
        initial_time: time from which the forecast starts; None for the last time of `initial`.
        with_diagnostics: True for the outputs that section ``inference`` selects and derives; False for all outputs of
            the network without changes.
        only_member: number of the only member that is computed; None for all members.

    Raises:
        DataError: if `initial` lacks a variable, level or time, or has a different grid or unsuitable units.
        ConfigError: if the network cannot make the ensemble of the config.
    """
    # Read the fields of the dataset, and compare them with the fields in training.
    reader = open_dataset_reader(data, initial, "initial")
    require_same_fields(model.assets, reader, model.path, data.channel_map())
    network = model.get_or_build_network(reader)
    assets = model.assets
    frames = build_frame_reader(
        config, reader, assets, None, find_cells_missing_in_training(assets, reader, model.path)
    )
    initial_minutes = _choose_initial_time(reader, initial_time)
    _require_observed_forcing(config.data, assets, reader, initial_minutes, int(lead_minutes[-1]))

    # Describe the outputs.
    inference = config.inference
    if not with_diagnostics:
        inference = inference.model_copy(update=_PLAIN_OUTPUT)
        config = config.model_copy(update={"inference": inference})
    set_tf32(config.trainer.tf32, model.device)
    stepper = build_stepper(config, assets, network, model.device, inference.amp)
    time_text = reader.calendar.format(initial_minutes)
    warning = describe_distribution_shift(assets, stepper.normalizer, frames.prognostic(initial_minutes), time_text)
    if warning:
        logger.warning("%s", warning)
    forecaster = Forecaster(
        config, assets, stepper, frames, frames, model.trained_steps, model.path, model.weights_checksum
    )
    schema, forecasts = _build_schema_and_forecasts(forecaster, reader, initial_minutes, lead_minutes, only_member)
    uses_dropout = inference.ensemble is not None and inference.ensemble.dropout
    return PreparedForecast(forecasts, network, uses_dropout, schema, frames, initial_minutes, lead_minutes)


def _build_schema_and_forecasts(
    forecaster: Forecaster,
    reader: FieldReader,
    initial_minutes: int,
    lead_minutes: np.ndarray,
    only_member: int | None,
) -> tuple[ForecastSchema, OnlineForecasts]:
    """Return the schema of a forecast, and a source of its fields that runs the network when fields are read.

    Args:
        forecaster: model with the reader of the initial state.
        reader: reader of the dataset.
        initial_minutes: initial time in minutes.
        lead_minutes: (N,) lead times in minutes.
        only_member: number of the only member that is computed, which gives fields without a dimension of members; None
            for all members.
    """
    config = forecaster.config
    assets = forecaster.assets
    inference = config.inference
    diagnostics = build_output_diagnostics(forecaster, int(lead_minutes[-1]))
    fields = diagnostics.output_fields(assets.grid, reader.calendar)
    attributes = build_run_attributes(forecaster) | diagnostics.global_attributes
    num_members = None
    if inference.ensemble is not None and only_member is None:
        num_members = inference.ensemble.members
    options = OutputOptions(variables=inference.variables, levels=inference.levels, keep_bits=inference.keep_bits)
    schema = build_schema(fields, lead_minutes.tolist(), options, num_members, attributes)
    spec = build_model_spec(config.data, assets.channels, assets.grid, assets.attributes)
    inputs = ForecastInputs(forecaster.frames, config.data.step_minutes, config.data.history_len)
    forecasts = OnlineForecasts(
        build_forecast_function(inference.ensemble, forecaster.stepper, inputs, spec, config.model, forecaster.path),
        fields,
        [initial_minutes],
        lead_minutes.tolist(),
        ForecastBatching(
            inference.batch_size, num_members, compute_member_lag(inference.ensemble), first_member=only_member or 0
        ),
        origin=forecaster.path,
        attributes=attributes,
        diagnostics=diagnostics,
    )
    return schema, forecasts


def _choose_initial_time(reader: FieldReader, initial_time: object) -> int:
    """Return the initial time in minutes; if `initial_time` is None, return the last time of the data.

    Raises:
        DataError: if the data do not contain the initial time.
    """
    if initial_time is None:
        return int(reader.times[-1])
    minutes = convert_to_calendar_minutes(initial_time, reader.calendar, "initial_time")
    if reader.index_of(minutes) is None:
        first, last = reader.calendar.format(int(reader.times[0])), reader.calendar.format(int(reader.times[-1]))
        raise DataError(
            f"initial_time: {reader.calendar.format(minutes)} is not among the {len(reader.times)} times of initial, "
            f"{first} to {last}"
        )
    return minutes


def _require_observed_forcing(
    data: DataConfig, assets: ModelAssets, reader: FieldReader, initial_minutes: int, last_lead: int
) -> None:
    """Raise DataError if the dataset lacks observed forcing after the initial time that the forecast needs.

    Args:
        data: section ``data`` of the forecast.
        assets: channels of the model.
        reader: reader of the dataset.
        initial_minutes: initial time in minutes.
        last_lead: longest lead time in minutes.

    Raises:
        DataError: if values are missing; the message names the variable and the time.
    """
    for channel in assets.channels.group("dynamic_forcing"):
        if channel.source != "data" or data.options_of(channel.variable).in_forecast != "observed":
            continue
        # The last step starts one step before the last lead time.
        for minutes in range(initial_minutes, initial_minutes + last_lead, data.step_minutes):
            if reader.index_of(minutes) is None:
                raise DataError(
                    f"initial: {channel.variable}: its values after the initial time are observed "
                    f"(data.variable_options.{channel.variable}.in_forecast), but initial has no values at "
                    f"{reader.calendar.format(minutes)}; add this time, or load the model with "
                    f"overrides=['data.variable_options.{channel.variable}.in_forecast=persist']"
                )
