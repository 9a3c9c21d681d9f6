"""`Model`: a trained model that makes forecasts from xarray datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

from credit.api.arguments import Duration, find_device, to_minutes
from credit.api.forecast_dataset import ForecastDataset, add_forcing
from credit.api.prepared_forecast import LoadedModel, PreparedForecast, prepare_forecast
from credit.api.variables import Variable, list_variables
from credit.config import Config, build_config
from credit.config.sections.data import DataConfig
from credit.errors import ConfigError
from credit.grid import LatLonGrid
from credit.train.build.forecaster import with_trained_settings


class Model:
    """Trained model that makes forecasts from xarray datasets. `credit.load` returns it.

    Args:
        loaded: the network with its weights.
        raw_config: config of the checkpoint with overrides, not yet validated.
        trained_config: config that the weights were trained with.

    Attributes:
        variables: all variables of the inputs and outputs.
    """

    def __init__(self, loaded: LoadedModel, raw_config: Mapping[str, Any], trained_config: Config) -> None:
        self.variables: tuple[Variable, ...] = list_variables(loaded.assets)
        self._loaded = loaded
        self._raw_config = raw_config
        self._trained_config = trained_config

    def __repr__(self) -> str:
        rows, columns = self.grid.shape
        outputs = [variable.name for variable in self.variables if variable.group in ("prognostic", "diagnostic")]
        return (
            f"<credit.Model {self._trained_config.model.type} of {self.path}: {rows} x {columns} cells, time step "
            f"{self._trained_config.data.timestep}, output {', '.join(outputs)}>"
        )

    @property
    def path(self) -> Path:
        """Checkpoint or exported file."""
        return self._loaded.path

    @property
    def grid(self) -> LatLonGrid:
        """Grid of the fields, from north to south and eastward."""
        return self._loaded.assets.grid

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return self._loaded.device

    @property
    def time_step(self) -> np.timedelta64:
        """Time step of the model."""
        return np.timedelta64(self._trained_config.data.step_minutes, "m")

    @property
    def num_input_times(self) -> int:
        """Number of times, one time step apart, that the initial state must have."""
        return self._trained_config.data.history_len

    @property
    def level_units(self) -> str:
        """Return the units of the levels, which are ``hPa``, ``Pa`` or ``model_level``."""
        return self._trained_config.data.level_units

    @property
    def is_stochastic(self) -> bool:
        """True if the network was trained with noise (``model.noise``), so that it makes ensembles by itself."""
        return bool(self._trained_config.model.noise)

    def to(self, device: str) -> Model:
        """Move the network to a device, ``cpu``, ``cuda``, ``cuda:N`` or ``auto``, and return the model.

        Raises:
            ConfigError: if there is no such device.
        """
        self._loaded.move(find_device(device))
        return self

    def forecast(
        self,
        initial: xr.Dataset,
        lead_time: Duration,
        *,
        initial_time: object = None,
        members: int | None = None,
        ensemble: Mapping[str, Any] | None = None,
        device: str | None = None,
        progress: bool = False,
    ) -> xr.Dataset:
        """Return a forecast, with all its lead times in memory; see `iterate` for long forecasts.

        Args:
            initial: the initial state, with the names, levels and grid of the model (`variables`, `grid`) and the
                dimension ``time``. It needs the prognostic variables at `num_input_times` times up to the initial time,
                and the dynamic forcing from data. Units are converted if the config says so.
            lead_time: length of the forecast, such as ``"10d"`` or ``np.timedelta64(240, "h")``.
            initial_time: time to start from, as text or a date; by default the last one of `initial`.
            members: number of ensemble members, 1 for a single forecast; by default that of the config.
            ensemble: keys of the section ``inference.ensemble``, which say how the members differ, such as
                ``{"stochastic": {}}``. A network that was trained with noise needs none.
            device: device to which the model is moved first, see `to`; None to leave it where it is.
            progress: True to show a progress bar.

        Returns:
            Dataset with the dimensions time (valid time), member (only for an ensemble), level, latitude and longitude,
            and the coordinates ``forecast_reference_time`` (initial time) and ``forecast_period`` (lead time), as in
            the files of ``credit rollout``.

        Raises:
            DataError: if `initial` lacks a variable, level or time, or has another grid or other units.
            ConfigError: if the lead time is not a multiple of the time step, or the members would be equal.
        """
        prepared = self._prepare(initial, lead_time, initial_time, members, ensemble, device)
        result = ForecastDataset(prepared.schema, prepared.initial_minutes, prepared.lead_minutes)
        for lead_index, fields_MCHW in prepared.read_steps(progress):
            result.set_fields(lead_index, fields_MCHW)
        return result.build()

    def iterate(
        self,
        initial: xr.Dataset,
        lead_time: Duration,
        *,
        initial_time: object = None,
        members: int | None = None,
        ensemble: Mapping[str, Any] | None = None,
        device: str | None = None,
        progress: bool = False,
    ) -> Iterator[xr.Dataset]:
        """Return an iterator of the steps of a forecast, so that its length is not limited by memory.

        The arguments and errors are those of `forecast`. Each dataset has one time; ``xarray.concat(steps, "time")``
        puts some of them together.
        """
        prepared = self._prepare(initial, lead_time, initial_time, members, ensemble, device)

        def iterate_steps() -> Iterator[xr.Dataset]:
            for lead_index, fields_MCHW in prepared.read_steps(progress):
                lead = prepared.lead_minutes[lead_index : lead_index + 1]
                result = ForecastDataset(prepared.schema, prepared.initial_minutes, lead)
                result.set_fields(0, fields_MCHW)
                yield result.build()

        return iterate_steps()

    def step(self, state: xr.Dataset) -> xr.Dataset:
        """Return the state one time step later, which can be the argument of the next call.

        Use this method to change fields between two steps. It makes a single forecast without noise. `forecast` and
        `iterate` are faster.

        Args:
            state: as `initial` in `forecast`.

        Returns:
            Dataset with the outputs at the new time, and the dynamic forcing from data as a forecast continues it. With
            several input times, it also has the earlier times of the next input, where diagnostic variables are NaN.

        Raises:
            DataError: see `forecast`.
            ConfigError: if the model has forcing whose value at the new time is not known.
        """
        config, data = self._build_configs(1, None)
        self._require_steps(config.data)
        lead_minutes = np.array([config.data.step_minutes])
        prepared = prepare_forecast(self._loaded, config, data, state, lead_minutes, with_diagnostics=False)
        # With several input times, the next input begins with the later ones of this input.
        offsets = np.arange(2 - self.num_input_times, 2) * config.data.step_minutes
        result = ForecastDataset(prepared.schema, prepared.initial_minutes, offsets)
        num_diagnostic = len(self._loaded.assets.channels.group("diagnostic"))
        no_values_CHW = np.full((num_diagnostic, *self.grid.shape), np.nan, dtype=np.float32)
        forcing = []
        for number, minutes in enumerate((prepared.initial_minutes + offsets).tolist()):
            forcing.append(prepared.frames.forcing(minutes, initial=prepared.initial_minutes))
            if minutes <= prepared.initial_minutes:
                fields_CHW = np.concatenate([prepared.frames.prognostic(minutes), no_values_CHW])
                result.set_fields(number, fields_CHW[None])
        for _, fields_MCHW in prepared.read_steps():
            result.set_fields(len(offsets) - 1, fields_MCHW)
        output = result.build().reset_coords(drop=True)
        return add_forcing(output, prepared.schema, self._loaded.assets, np.stack(forcing))

    def network_inputs(
        self, initial: xr.Dataset, lead_time: Duration, *, initial_time: object = None
    ) -> dict[str, np.ndarray]:
        """Return the arrays that a network exported by ``credit convert --export NAME.pt2`` needs for a forecast.

        ``numpy.savez(path, **model.network_inputs(...))`` writes them for the script beside the exported file.

        Args:
            initial: see `forecast`.
            lead_time: length of the forecast.
            initial_time: time to start from; by default the last one of `initial`.

        Returns:
            ``state``: prognostic channels of the T input frames, (C, T, H, W). ``forcing``: dynamic forcing of the
            frames of all N steps, (F, T + N - 1, H, W). Both are float32 in physical units, NaN where missing.

        Raises:
            DataError: see `forecast`.
        """
        prepared = self._prepare(initial, lead_time, initial_time, 1, None, None)
        step_minutes = self._trained_config.data.step_minutes
        num_frames = self.num_input_times
        first = prepared.initial_minutes - (num_frames - 1) * step_minutes
        num_forcing = num_frames + len(prepared.lead_minutes) - 1
        state = [prepared.frames.prognostic(first + number * step_minutes) for number in range(num_frames)]
        forcing = []
        for number in range(num_forcing):
            minutes = first + number * step_minutes
            forcing.append(prepared.frames.forcing(minutes, initial=prepared.initial_minutes))
        return {"state": np.stack(state, axis=1), "forcing": np.stack(forcing, axis=1)}

    def _prepare(
        self,
        initial: xr.Dataset,
        lead_time: Duration,
        initial_time: object,
        members: int | None,
        ensemble: Mapping[str, Any] | None,
        device: str | None,
    ) -> PreparedForecast:
        """Prepare a forecast; the arguments and errors are those of `forecast`."""
        if device is not None:
            self.to(device)
        config, data = self._build_configs(members, ensemble)
        step_minutes = config.data.step_minutes
        last_lead = to_minutes(lead_time, "lead_time")
        if last_lead % step_minutes:
            raise ConfigError(f"lead_time: {lead_time} is not a multiple of the time step {config.data.timestep}")
        lead_minutes = np.arange(step_minutes, last_lead + 1, step_minutes)
        return prepare_forecast(self._loaded, config, data, initial, lead_minutes, initial_time)

    def _build_configs(self, members: int | None, ensemble: Mapping[str, Any] | None) -> tuple[Config, DataConfig]:
        """Return the config of a forecast with its ensemble, and the section ``data`` that reads the initial state.

        Settings that the weights depend on are taken from training. Arguments are those of `forecast`.

        Raises:
            ConfigError: if the arguments contradict each other, or the ensemble is wrong.
        """
        if members == 1 and ensemble is not None:
            raise ConfigError(
                f"members: 1 is a single forecast, so ensemble {dict(ensemble)} has no effect; leave it out"
            )
        raw = dict(self._raw_config)
        inference = dict(raw.get("inference") or {})
        if members == 1:
            inference.pop("ensemble", None)
        elif members is not None or ensemble is not None:
            section = dict(ensemble if ensemble is not None else inference.get("ensemble") or {})
            if members is not None:
                section["members"] = members
            inference["ensemble"] = section
        raw["inference"] = inference
        config = build_config(raw, origin=str(self.path))
        return with_trained_settings(config, self._trained_config), config.data

    def _require_steps(self, data: DataConfig) -> None:
        """Refuse single steps if a forcing from data is not an instant, or must be known after the initial time.

        Args:
            data: section ``data`` of the forecast.

        Raises:
            ConfigError: naming the variable.
        """
        for channel in self._loaded.assets.channels.group("dynamic_forcing"):
            options = data.options_of(channel.variable)
            if channel.source != "data":
                continue
            if options.in_forecast == "observed":
                raise ConfigError(
                    f"step: the value of {channel.variable} at the new time must be observed; load the model with "
                    f"overrides=['data.variable_options.{channel.variable}.in_forecast=persist'], or use forecast"
                )
            if options.temporal != "instant":
                raise ConfigError(
                    f"step: {channel.variable} is a {options.temporal} over the time step, which a state cannot hold; "
                    "use forecast or iterate"
                )
