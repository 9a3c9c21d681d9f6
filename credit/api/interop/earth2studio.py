"""Adapter of a trained model to earth2studio 0.19 (protocol ``earth2studio.models.px.PrognosticModel``)."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from credit.api.arguments import Duration
from credit.api.interop.channel_fields import LeveledVariable, build_state, find_earth2studio_name, read_channels
from credit.api.loading import load
from credit.api.model import Model
from credit.errors import ConfigError

Coords = OrderedDict[str, np.ndarray]
Hook = Callable[[Tensor, Coords], tuple[Tensor, Coords]]
# The last dimensions of all fields; batch dimensions, such as ``ensemble``, come before them.
_DIMS = ("time", "lead_time", "variable", "lat", "lon")
# Name of the batch dimension with the numbers of the members, in the ensemble workflow of earth2studio.
_MEMBER_DIM = "ensemble"
# Keys of section `inference.ensemble` on which the noise of a network with `model.noise` depends. Other keys have no
# effect, because earth2studio perturbs the initial states.
_NOISE_KEYS = ("seed", "control", "model_noise")
# Keys of section `inference` that select all outputs of the network, independent of the config.
_PLAIN_OUTPUT = (
    "derive={}",
    "pressure_levels=null",
    "variables=null",
    "levels=null",
    "keep_bits=null",
)


def _pass_through(x: Tensor, coords: Coords) -> tuple[Tensor, Coords]:
    """Return the arguments unchanged, as the default hook."""
    return x, coords


class PrognosticModel:
    """Trained model for the workflows of earth2studio, such as ``earth2studio.run.deterministic``.

    The input contains the prognostic variables and the dynamic forcing that is read from data, such as ``sst``, at the
    input times. The output contains the prognostic and the diagnostic variables. Each batch element is forecast
    separately, so the values equal those of ``credit rollout`` with ``inference.batch_size=1``, bit for bit. With a
    hook, the state is converted to physical units and back between two steps, which changes the last digits.

    A network that was trained with noise makes ensembles if the input has the dimension ``ensemble``, whose coordinate
    contains the numbers of the members. Each member has the noise of the member of ``credit rollout`` with this number.
    Without this dimension, there is no noise.

    Args:
        model: model that `credit.load` returned. If its section ``inference`` does not select all outputs, use the
            class method `load` instead.
        names: name of a variable in the model -> its name in earth2studio without the level, for variables without a
            known name in earth2studio, or with different units in earth2studio.
        max_lead_time: largest lead time of the iterator that `create_iterator` returns.

    Attributes:
        front_hook: function of the input and its coordinates that `create_iterator` calls before each step.
        rear_hook: function of the output and its coordinates that `create_iterator` calls after each step.

    Raises:
        ConfigError: if a variable has no known name or different units in earth2studio.
    """

    def __init__(self, model: Model, names: Mapping[str, str] | None = None, max_lead_time: Duration = "3650d") -> None:
        self.front_hook: Hook = _pass_through
        self.rear_hook: Hook = _pass_through
        self._model = model
        self._max_lead_time = max_lead_time
        self._inputs: dict[str, LeveledVariable] = {}
        self._outputs: dict[str, LeveledVariable] = {}
        for variable in model.variables:
            is_prognostic = variable.group == "prognostic"
            for level in variable.levels or (None,):
                if is_prognostic or (variable.group == "dynamic_forcing" and variable.source == "data"):
                    self._inputs[find_earth2studio_name(model, variable, level, names or {})] = (variable, level)
                if is_prognostic or variable.group == "diagnostic":
                    self._outputs[find_earth2studio_name(model, variable, level, names or {})] = (variable, level)

    @classmethod
    def load(
        cls, path: str | os.PathLike, *, device: str = "auto", overrides: Iterable[str] = (), **arguments: object
    ) -> PrognosticModel:
        """Load a run, a checkpoint or an exported file with `credit.load`, and return the model for earth2studio.

        Args:
            path: see `credit.load`.
            device: see `credit.load`.
            overrides: see `credit.load`.
            arguments: other arguments of the constructor: `names` and `max_lead_time`.
        """
        plain = [f"inference.{text}" for text in _PLAIN_OUTPUT]
        return cls(load(path, device=device, overrides=[*overrides, *plain]), **arguments)

    def to(self, device: object) -> PrognosticModel:
        """Move the model to a device, and return the model."""
        self._model.to(str(device))
        return self

    def input_coords(self) -> Coords:
        """Return the coordinates of the input. The dimensions ``batch`` and ``time`` may have any length."""
        offsets = np.arange(1 - self._model.num_input_times, 1) * self._model.time_step
        return self._build_coords(offsets, self._inputs)

    def output_coords(self, input_coords: Coords) -> Coords:
        """Return the coordinates of the output one step after an input.

        Args:
            input_coords: coordinates of the input.

        Raises:
            ValueError: if the dimensions, variables, grid or lead times of the input do not fit the model.
        """
        expected = self.input_coords()
        if tuple(input_coords)[-len(_DIMS) :] != _DIMS:
            raise ValueError(f"the last dimensions must be {', '.join(_DIMS)}; they are {', '.join(input_coords)}")
        for name in ("variable", "lat", "lon"):
            if not np.array_equal(input_coords[name], expected[name]):
                raise ValueError(f"{name}: the input must have {expected[name]}, but has {input_coords[name]}")
        lead_times = np.asarray(input_coords["lead_time"])
        if not np.array_equal(lead_times - lead_times[-1], expected["lead_time"]):
            raise ValueError(f"lead_time: {lead_times} must be spaced as in {expected['lead_time']}")
        output = input_coords.copy()
        output["lead_time"] = lead_times[-1:] + self._model.time_step
        output["variable"] = np.array(list(self._outputs))
        return output

    def __call__(self, x: Tensor, coords: Coords) -> tuple[Tensor, Coords]:
        """Return the output one step after an input, (..., time, 1, variable, lat, lon), and its coordinates.

        Raises:
            ConfigError: if the step needs noise. Only `create_iterator` knows the noise of the earlier steps.
        """
        output, _ = self._step(x, coords)
        return output, self.output_coords(coords)

    def create_iterator(self, x: Tensor, coords: Coords) -> Iterator[tuple[Tensor, Coords]]:
        """Yield the initial state, with NaN for diagnostic variables, and then the output of each step.

        Raises:
            ConfigError: if the forecast has reached `max_lead_time`, or needs noise although a hook is set.
        """
        coords = coords.copy()
        output_coords = self.output_coords(coords)
        initial = torch.full((*x.shape[:-4], 1, len(self._outputs), *x.shape[-2:]), torch.nan, device=x.device)
        input_names = list(self._inputs)
        for index, name in enumerate(self._outputs):
            if name in self._inputs:
                initial[..., index, :, :] = x[..., -1:, input_names.index(name), :, :]
        yield initial, OrderedDict({**output_coords, "lead_time": np.asarray(coords["lead_time"])[-1:]})
        if self.front_hook is _pass_through and self.rear_hook is _pass_through:
            members = self._list_members(x, coords)
            states = self._build_datasets(x, coords)
            iterators = [self._iterate(state, member) for state, member in zip(states, members, strict=True)]
            for steps in zip(*iterators, strict=True):
                yield self._stack_datasets(steps, self._outputs, initial), output_coords
                output_coords = output_coords.copy()
                output_coords["lead_time"] = output_coords["lead_time"] + self._model.time_step
            raise ConfigError(f"max_lead_time: the forecast has reached {self._max_lead_time}; give a longer lead time")
        while True:
            x, coords = self.front_hook(x, coords)
            output, next_x = self._step(x, coords)
            output, output_coords = self.rear_hook(output, self.output_coords(coords))
            for index, name in enumerate(self._outputs):
                if name in self._inputs:
                    next_x[..., -1:, input_names.index(name), :, :] = output[..., index, :, :]
            yield output, output_coords
            x = next_x
            coords = coords.copy()
            coords["lead_time"] = np.asarray(coords["lead_time"]) + self._model.time_step

    def _build_coords(self, lead_times: np.ndarray, channels: Mapping[str, LeveledVariable]) -> Coords:
        """Return the coordinates of fields at given lead times, with empty batch and time dimensions."""
        grid = self._model.grid
        values = (np.empty(0), lead_times, np.array(list(channels)), grid.lat, grid.lon)
        return OrderedDict(batch=np.empty(0), **dict(zip(_DIMS, values, strict=True)))

    def _list_members(self, x: Tensor, coords: Coords) -> list[int | None]:
        """Return the number of the member of each batch element and time; None for a forecast without noise."""
        batch_names = list(coords)[: -len(_DIMS)]
        batch_shape = x.shape[: -len(_DIMS)]
        num_times = len(coords["time"])
        if not self._model.is_stochastic or _MEMBER_DIM not in batch_names:
            return [None] * (math.prod(batch_shape) * num_times)
        shape = [1] * len(batch_shape)
        shape[batch_names.index(_MEMBER_DIM)] = -1
        numbers = np.asarray(coords[_MEMBER_DIM]).astype(np.int64).reshape(shape)
        # The times of a batch element have the same member.
        return np.repeat(np.broadcast_to(numbers, batch_shape), num_times).tolist()

    def _iterate(self, state: xr.Dataset, member: int | None) -> Iterator[xr.Dataset]:
        """Return the steps of a forecast from one state, of one member or, with None, without noise."""
        if member is None:
            return self._model.iterate(state, self._max_lead_time, members=1)
        noise = {key: value for key, value in self._model.ensemble.items() if key in _NOISE_KEYS}
        # The number of members has no effect on the noise of a member; an ensemble has at least two.
        num_members = max(2, member + 1)
        return self._model.iterate(state, self._max_lead_time, members=num_members, ensemble=noise, only_member=member)

    def _step(self, x: Tensor, coords: Coords) -> tuple[Tensor, Tensor]:
        """Return the output of one step, and the input of the next step."""
        self.output_coords(coords)
        if any(member is not None for member in self._list_members(x, coords)):
            raise ConfigError(
                f"{self._model.path}: was trained with model.noise, and the noise of a member continues from step to "
                "step; make its ensembles with create_iterator and without hooks"
            )
        states = [self._model.step(state) for state in self._build_datasets(x, coords)]
        newest = [state.isel(time=[-1]) for state in states]
        return self._stack_datasets(newest, self._outputs, x), self._stack_datasets(states, self._inputs, x)

    def _build_datasets(self, x: Tensor, coords: Coords) -> list[xr.Dataset]:
        """Return one dataset with the variables of the model for each batch element and time of the input."""
        fields = x.detach().cpu().float().reshape(-1, *x.shape[-5:]).numpy()
        datasets = []
        for batch_fields in fields:
            for time, fields_TCHW in zip(np.asarray(coords["time"]), batch_fields, strict=True):
                valid_times = (time + np.asarray(coords["lead_time"])).astype("datetime64[ns]")
                datasets.append(build_state(self._model, list(self._inputs.values()), fields_TCHW, valid_times))
        return datasets

    def _stack_datasets(
        self, steps: Iterable[xr.Dataset], channels: Mapping[str, LeveledVariable], like: Tensor
    ) -> Tensor:
        """Stack datasets (one per batch element and time) into a tensor with the leading dimensions of `like`."""
        fields = [read_channels(step, list(channels.values())) for step in steps]
        stacked = torch.from_numpy(np.stack(fields)).to(like.device)
        return stacked.reshape(*like.shape[:-4], *stacked.shape[1:])
