"""Class `Model`, a trained model that makes forecasts from xarray datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

from credit.api.arguments import Duration, convert_to_minutes, find_device
from credit.api.forecast_dataset import ForecastDataset, add_forcing
from credit.api.prepared_forecast import LoadedModel, PreparedForecast, prepare_forecast
from credit.api.variables import Variable, list_variables
from credit.config import Config, build_config
from credit.config.sections.data import DataConfig
from credit.errors import ConfigError
from credit.grid import LatLonGrid
from credit.train.build.forecaster import apply_trained_settings


class Model:
    """Trained model that makes forecasts from xarray datasets. `credit.load` returns it.

    Args:
        loaded: the network with its weights, and the assets of the checkpoint.
        raw_config: config of the checkpoint with overrides, before validation.
        trained_config: config with which the weights were trained.

    Attributes:
        variables: all input and output variables of the model.
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
        """Path of the checkpoint or exported file from which the model was loaded."""
        return self._loaded.path

    @property
    def grid(self) -> LatLonGrid:
        """Grid of the fields, with rows from north to south and columns eastward."""
        return self._loaded.assets.grid

    @property
    def device(self) -> torch.device:
        """Torch device of the network."""
        return self._loaded.device

    @property
    def time_step(self) -> np.timedelta64:
        """Length of one time step of the model."""
        return np.timedelta64(self._trained_config.data.step_minutes, "m")

    @property
    def num_input_times(self) -> int:
        """Number of times that the initial state must contain; they are one time step apart."""
        return self._trained_config.data.history_len

    @property
    def level_units(self) -> str:
        """Units of the levels, which are ``hPa``, ``Pa`` or ``model_level``."""
        return self._trained_config.data.level_units

    @property
    def is_stochastic(self) -> bool:
        """True if the network was trained with noise (``model.noise``), so members differ."""
        return bool(self._trained_config.model.noise)

    @property
    def ensemble(self) -> dict[str, Any]:
        """Keys of the section ``inference.ensemble`` of the config; empty if the config has no ensemble."""
        return dict((self._raw_config.get("inference") or {}).get("ensemble") or {})

    def to(self, device: str) -> Model:
        """Move the network to a device, and return the model.

        Args:
            device: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` for the GPU if there is one.

        Raises:
            ConfigError: if the host does not have this device.
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
        only_member: int | None = None,
        device: str | None = None,
        progress: bool = False,
    ) -> xr.Dataset:
        """Return a forecast as a dataset in memory with all lead times. For long forecasts, use `iterate`.

        Args:
            initial: dataset with the initial state, the dimension ``time``, and the names, levels and grid of the model
                (`variables`, `grid`). It must contain the prognostic variables at `num_input_times` times up to the
                initial time, and the dynamic forcing that is read from data. Units are converted if the config
                requests a conversion.
            lead_time: length of the forecast, such as ``"10d"`` or ``np.timedelta64(240, "h")``.
            initial_time: time from which the forecast starts, as a string or a date; by default the last time of
                `initial`.
            members: number of ensemble members; 1 for a forecast without members; by default the number in the config.
            ensemble: keys of the section ``inference.ensemble``, which define how the members are perturbed, such as
                ``{"stochastic": {}}``. A network that was trained with noise needs no keys.
            only_member: number of a member, from 0: only this member of the ensemble is computed, and the dataset has
                no dimension ``member``. So the members of a large ensemble can be computed one after another.
            device: device to which the model is moved first, see `to`; None to keep the present device.
            progress: True to show a progress bar.

        Returns:
            Dataset with the dimensions time (valid time), member (only for an ensemble), level, latitude and longitude,
            and the coordinates ``forecast_reference_time`` (initial time) and ``forecast_period`` (lead time), as in
            the files of ``credit rollout``.

        Raises:
            DataError: if `initial` lacks a variable, level or time, or has a different grid or unsuitable units.
            ConfigError: if the lead time is not a multiple of the time step, all members would be equal, or the
                ensemble does not have the member `only_member`.
        """
        prepared = self._prepare(initial, lead_time, initial_time, members, ensemble, only_member, device)
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
        only_member: int | None = None,
        device: str | None = None,
        progress: bool = False,
    ) -> Iterator[xr.Dataset]:
        """Return an iterator over the steps of a forecast, so that memory does not limit the lead time.

        The arguments and errors are the same as for `forecast`. Each step is a dataset with one valid time.
        ``xarray.concat(steps, "time")`` combines several steps.
        """
        prepared = self._prepare(initial, lead_time, initial_time, members, ensemble, only_member, device)

        def iterate_steps() -> Iterator[xr.Dataset]:
            for lead_index, fields_MCHW in prepared.read_steps(progress):
                lead = prepared.lead_minutes[lead_index : lead_index + 1]
                result = ForecastDataset(prepared.schema, prepared.initial_minutes, lead)
                result.set_fields(0, fields_MCHW)
                yield result.build()

        return iterate_steps()

    def step(self, state: xr.Dataset) -> xr.Dataset:
        """Return the state one time step later; it can be the argument of the next call.

        Use this method to change fields between two steps. It makes one step without ensemble perturbations and without
        noise. `forecast` and `iterate` are faster.

        Args:
            state: dataset with the same content as the argument `initial` of `forecast`.

        Returns:
            Dataset with the outputs and the dynamic forcing from data at the new time. The forcing continues as in a
            forecast. If the model has several input times, the dataset also contains the earlier times that the next
            step needs; diagnostic variables are NaN at these times.

        Raises:
            DataError: for the same reasons as `forecast`.
            ConfigError: if the value of a forcing at the new time is unknown.
        """
        config, data = self._build_configs(1, None)
        self._require_forcing_for_step(config.data)
        lead_minutes = np.array([config.data.step_minutes])
        prepared = prepare_forecast(self._loaded, config, data, state, lead_minutes, with_diagnostics=False)
        # With several input times, the next input contains all times of this input except the first.
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
        """Return the input arrays of a forecast with a network that ``credit convert --export NAME.pt2`` exported.

        ``numpy.savez(path, **model.network_inputs(...))`` writes the arrays to a file for the script ``NAME.py``.

        Args:
            initial: dataset with the initial state, see `forecast`.
            lead_time: length of the forecast.
            initial_time: time from which the forecast starts; by default the last time of `initial`.

        Returns:
            Dictionary of float32 arrays in physical units, NaN where missing. ``state`` contains the C prognostic
            channels at the T input frames, (C, T, H, W). ``forcing`` contains the F channels of dynamic forcing at the
            frames of all N steps, (F, T + N - 1, H, W).

        Raises:
            DataError: for the same reasons as `forecast`.
        """
        prepared = self._prepare(initial, lead_time, initial_time, 1, None, None, None)
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
        only_member: int | None,
        device: str | None,
    ) -> PreparedForecast:
        """Prepare a forecast. The arguments and errors are the same as for `forecast`."""
        if device is not None:
            self.to(device)
        config, data = self._build_configs(members, ensemble)
        _require_member(only_member, config)
        step_minutes = config.data.step_minutes
        last_lead = convert_to_minutes(lead_time, "lead_time")
        if last_lead % step_minutes:
            raise ConfigError(f"lead_time: {lead_time} is not a multiple of the time step {config.data.timestep}")
        lead_minutes = np.arange(step_minutes, last_lead + 1, step_minutes)
        return prepare_forecast(
            self._loaded, config, data, initial, lead_minutes, initial_time, only_member=only_member
        )

    def _build_configs(self, members: int | None, ensemble: Mapping[str, Any] | None) -> tuple[Config, DataConfig]:
        """Return the config of a forecast, and the section ``data`` with which the initial state is read.

        Settings on which the weights depend are copied from the config of training.

        Args:
            members: number of ensemble members, see `forecast`.
            ensemble: keys of section ``inference.ensemble``, see `forecast`.

        Raises:
            ConfigError: if the arguments contradict each other, or a key of the ensemble is invalid.
        """
        if members == 1 and ensemble is not None:
            raise ConfigError(
                f"members: 1 is a forecast without perturbations, so ensemble {dict(ensemble)} has no effect; remove it"
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
        return apply_trained_settings(config, self._trained_config), config.data

    def _require_forcing_for_step(self, data: DataConfig) -> None:
        """Raise ConfigError if `step` cannot provide a forcing from data at the new time.

        Args:
            data: section ``data`` of the forecast.

        Raises:
            ConfigError: if a forcing is a mean or sum over the time step, or must be observed after the initial time.
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
                    f"step: {channel.variable} is a {options.temporal} over the time step, which a state does not "
                    "contain; use forecast or iterate"
                )


def _require_member(only_member: int | None, config: Config) -> None:
    """Raise ConfigError if the ensemble of a config does not have the member `only_member`; None is always valid."""
    if only_member is None:
        return
    ensemble = config.inference.ensemble
    if ensemble is None:
        raise ConfigError(
            f"only_member: {only_member} is the number of a member, but this forecast has no members; give `members`"
        )
    if not 0 <= only_member < ensemble.members:
        raise ConfigError(
            f"only_member: {only_member} is not a member of an ensemble of {ensemble.members} members; give a number "
            f"from 0 to {ensemble.members - 1}"
        )
