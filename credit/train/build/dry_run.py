"""Dry run of a training step: it finds the errors of a run's first step, and needs neither memory nor other ranks.

Tensors on the meta device have a shape but no values, so a dry run of the largest model takes seconds on a login node.
torch's fake process group replaces the other ranks, so the network is split over all ranks without communication.

Shape suffixes: B samples of a batch, C channels, T time frames, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor

from credit.config import Config
from credit.data.samples.batch import Batch
from credit.data.store.statistics import Statistics
from credit.errors import ConfigError, CreditError
from credit.forecast.objectives.base import MicroStep, Objective, build_objective
from credit.forecast.store_part import StorePart
from credit.grid import LatLonGrid
from credit.models.layers.spectral_norm import advance_power_iterations
from credit.models.lora import checkpoint_state_dict
from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks
from credit.parallel.domain.split import DomainPlan, plan_domain
from credit.parallel.mesh import ParallelDims, build_mesh
from credit.parallel.process_info import fake_process_group
from credit.parallel.tensor.dropout import remove_dropout
from credit.train.build.assets import ModelAssets, build_budget_layers
from credit.train.build.domain_support import require_domain_support
from credit.train.build.model import build_network, build_parallel_model
from credit.train.build.stepper import build_objective_context, build_run_loss, build_stepper
from credit.train.learning_rates import select_trained_weights
from credit.train.optim import build_optimizer, optimizer_tensors

_META = torch.device("meta")
# Errors that torch raises when an operation needs the values of a tensor on the meta device.
_NO_VALUES = (
    NotImplementedError,
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)
# Parts of further error messages of torch about the meta device, which has neither values nor autocast.
_META_MESSAGES = ("meta tensor", "unsupported scalarType", "unsupported autocast device_type 'meta'")


@dataclass(frozen=True)
class DryRunResult:
    """Result of a dry run.

    Attributes:
        model: the network on the meta device, with adapters if the config sets ``trainer.lora``.
        skip_reason: the reason why the step could not be computed; empty if it was computed.
        optimizer_bytes: bytes of the optimizer state.
    """

    model: nn.Module
    skip_reason: str
    optimizer_bytes: int

    @property
    def num_parameters(self) -> int:
        """Number of all parameters, including adapters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_trained_parameters(self) -> int:
        """Number of parameters that are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint's tensors: current weights, averaged weights and optimizer state."""
        tensors = checkpoint_state_dict(self.model).values()
        weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        # A checkpoint contains the weights of the last step and their moving average.
        return 2 * weight_bytes + self.optimizer_bytes


def build_placeholder_assets(
    config: Config,
    grid: LatLonGrid,
    attributes: Mapping[str, Mapping[str, str]],
    masks: Mapping[str, np.ndarray] | None = None,
) -> ModelAssets:
    """Return assets with placeholder statistics and static fields; a dry run needs only their shapes.

    Args:
        config: the config of the run.
        grid: the grid of the data.
        attributes: variable -> its attributes units, standard_name and long_name.
        masks: variable -> (H, W) bool, True where missing; None if the data are unknown.
    """
    channels = config.data.channel_map()
    stored_channels = channels.time_varying_stored + channels.static_stored
    names = tuple(channel.name for channel in stored_channels)
    # Standard deviations of 1 avoid divisions by zero in the normalization.
    zeros_C = np.zeros(len(names))
    ones_C = np.ones(len(names))
    statistics = Statistics(
        names=names,
        mean=zeros_C,
        std=ones_C,
        minimum=zeros_C,
        maximum=ones_C,
        tendency_mean=zeros_C,
        tendency_std=ones_C,
        count=ones_C.astype(np.int64),
    )
    if masks is None:
        # The config declares the variables with masks. The masked cells do not matter for shapes.
        masks = {}
        for channel in channels.input:
            if channel.source == "mask":
                masks[channel.variable] = np.zeros(grid.shape, dtype=bool)
    return ModelAssets(
        channels=channels,
        grid=grid,
        statistics=statistics,
        attributes=attributes,
        static_CHW=np.zeros((len(channels.group("static")), *grid.shape), dtype=np.float32),
        masks=masks,
        climatology=None,
        layers=build_budget_layers(config),
    )


# With early stop, torch ends a recomputation by an exception, which would look like an error of the model.
@torch.utils.checkpoint.set_checkpoint_early_stop(False)
def try_step(config: Config, assets: ModelAssets) -> DryRunResult:
    """Build the network, and compute the rollout, the loss and the backward pass of a training step without memory.

    The step is computed in float32, because shapes do not depend on ``trainer.amp``; `try_bfloat16` checks dtypes.
    Blocks are not compiled.

    Args:
        config: the config of the run.
        assets: assets from `build_placeholder_assets`.

    Returns:
        The result; its `skip_reason` is not empty if the step could not be computed without the values of tensors.

    Raises:
        ConfigError: if the model, the loss or the objective cannot be built, or the forward or backward pass fails.
    """
    model_type = config.model.type
    trainer = config.trainer
    # The network has adapters and activation checkpointing, like in a run, but is not sharded or compiled.
    with _convert_model_errors(model_type, "cannot be built"), _META:
        model = build_network(config, assets.channels, assets.grid, assets.attributes)
    select_trained_weights(model, trainer)
    optimizer_state = optimizer_tensors(model, build_optimizer(model, trainer))
    optimizer_bytes = sum(tensor.nbytes for tensor in optimizer_state.values())
    if trainer.activation_checkpoint:
        checkpoint_blocks(model, trainer.activation_checkpoint)
    model.train()

    checked_model = _CheckedModel(model, model_type, len(assets.channels.output))
    # Later steps of a rollout have the same shapes as the second step.
    num_steps = min(config.data.forecast_len, 2)
    batch = _build_placeholder_batch(config, assets, num_steps)
    # Every training step begins with the power iterations.
    advance_power_iterations(model)

    # Each part has a separate error message, which names the section of the config that the user must change.
    try:
        # For a channel that is missing in every cell, the area weights are 0 / 0.
        with _convert_errors(f"loss.kind: {config.loss.kind} cannot be built"), np.errstate(invalid="ignore"):
            loss = build_run_loss(config, assets, _META)
        # Building the stepper checks the post-processing, which depends on the grid and on units.
        with _convert_errors("model.postprocess: an entry cannot be built"):
            stepper = build_stepper(config, assets, checked_model, _META, amp=False)
        with _convert_errors(f"trainer.objective.kind: {trainer.objective.kind} cannot be built"):
            objective = build_objective(trainer.objective, build_objective_context(config, assets, stepper, loss))
        micro_step = MicroStep(0, range(1, num_steps + 1))
        with _convert_step_errors(config):
            training_loss = objective.training_loss(batch, micro_step)
        with _convert_model_errors(model_type, "fails in the backward pass"):
            training_loss.backward()
        # Training calls `accumulate_gradients`, which an objective may override, for example to compute single members.
        if type(objective).accumulate_gradients is not Objective.accumulate_gradients:
            with _convert_step_errors(config):
                objective.accumulate_gradients(batch, micro_step)
    except _MissingValuesError as error:
        return DryRunResult(model, str(error), optimizer_bytes)
    return DryRunResult(model, "", optimizer_bytes)


def try_bfloat16(config: Config, assets: ModelAssets) -> None:
    """Compute a forecast step under bfloat16 autocast of a CPU, without memory or values.

    torch checks the dtypes of some operations only if the tensors have values, so a run may still fail later.

    Args:
        config: the config of the run.
        assets: assets from `build_placeholder_assets`.

    Raises:
        ConfigError: if the model cannot compute in bfloat16.
    """
    with _META:
        model = build_network(config, assets.channels, assets.grid, assets.attributes).eval()
    stepper = build_stepper(config, assets, model, torch.device("cpu"), amp=True)
    batch_size = config.trainer.train_batch_size
    num_frames = config.data.history_len
    num_prognostic = len(assets.channels.group("prognostic"))
    num_forcing = len(assets.channels.group("dynamic_forcing"))
    # The meta device has no autocast. Fake tensors have no values, too, but they report the device that they imitate.
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for module in model.modules():
            _replace_with_fakes(module._parameters)
            _replace_with_fakes(module._buffers)
        state_BCTHW = torch.empty(batch_size, num_prognostic, num_frames, *assets.grid.shape)
        forcing_BCTHW = torch.empty(batch_size, num_forcing, num_frames, *assets.grid.shape)
        with suppress(_MissingValuesError), _convert_model_errors(config.model.type, "fails in bfloat16 (amp)"):
            stepper.step(state_BCTHW, forcing_BCTHW)


def try_mesh(config: Config, assets: ModelAssets, degrees: ParallelDims) -> None:
    """Split the network over a mesh as in a training run; this needs no other processes and no memory.

    Args:
        config: the config of the run.
        assets: assets from `build_placeholder_assets`.
        degrees: number of ranks along each mesh axis.

    Raises:
        ConfigError: if the network cannot be split over this mesh.
    """
    require_domain_support(config)
    # Offloaded parameters would be allocated in host memory, but a dry run must not allocate memory.
    parallelism = config.trainer.parallelism.model_copy(update={"cpu_offload": False})
    trainer = config.trainer.model_copy(update={"parallelism": parallelism})
    with fake_process_group(degrees.world):
        mesh = build_mesh(degrees, 0, "cpu")
        with _convert_model_errors(config.model.type, f"cannot be split over {degrees.world} ranks"):
            build_parallel_model(config.model_copy(update={"trainer": trainer}), assets, mesh, _META)


def try_divided_forecasts(config: Config, assets: ModelAssets) -> DomainPlan:
    """Divide the fields among the ranks of ``inference.parallelism.domain`` in a single process; return the plan.

    Args:
        config: the config of the run.
        assets: assets of the model, or assets from `build_placeholder_assets`.

    Raises:
        ConfigError: if the network or the grid cannot be divided, or the parts do not fit ``inference.format``.
    """
    inference = config.inference
    with _convert_model_errors(config.model.type, "cannot be built"), _META:
        model = build_network(config, assets.channels, assets.grid, assets.attributes)
    # Forecasts also remove dropout, because dropout is not active in forecasts.
    remove_dropout(model)
    plan = plan_domain(model, inference.parallelism.num_domain_ranks, inference.parallelism.domain_parts)
    if inference.format == "zarr":
        StorePart(plan.grid, rank=0).choose_chunks()
    return plan


def _replace_with_fakes(tensors: dict[str, Tensor | None]) -> None:
    """Replace the tensors of a module with fake tensors of the same shape and dtype, in place.

    Call this function within a `FakeTensorMode`, in which new tensors are fake.

    Args:
        tensors: name -> parameter or buffer of the module; None if the module does not have this tensor.
    """
    for name, tensor in tensors.items():
        if tensor is not None:
            tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)


def _build_placeholder_batch(config: Config, assets: ModelAssets, num_steps: int) -> Batch:
    """Return a batch on the meta device, with the shapes of the run and targets for `num_steps` rollout steps."""
    batch_size = config.trainer.train_batch_size
    history_len = config.data.history_len

    def empty_fields(group: str, num_frames: int) -> Tensor:
        num_channels = len(assets.channels.group(group))
        return torch.empty(batch_size, num_channels, num_frames, *assets.grid.shape, device=_META)

    prognostic_BCTHW = empty_fields("prognostic", num_steps)
    diagnostic_BCTHW = empty_fields("diagnostic", num_steps)
    # The first step needs the forcing of the history frames, and each further step needs one more frame.
    return Batch(
        history_BCTHW=empty_fields("prognostic", history_len),
        forcing_BCTHW=empty_fields("dynamic_forcing", history_len + num_steps - 1),
        target_BCTHW=torch.cat([prognostic_BCTHW, diagnostic_BCTHW], dim=1),
        initial_minutes=(0,) * batch_size,
    )


class _CheckedModel(nn.Module):
    """Wrapper that checks the shape of a model's output, and names the model in the messages of its errors.

    Args:
        model: the network.
        model_type: value of ``model.type``.
        out_channels: number of channels that the output of the network must have.
    """

    def __init__(self, model: nn.Module, model_type: str, out_channels: int) -> None:
        super().__init__()
        self.model = model
        self._model_type = model_type
        self._out_channels = out_channels

    def forward(self, x_BCTHW: Tensor, *condition: Mapping[str, Tensor]) -> Tensor:
        """Return the model's output (B, C_out, 1, H, W).

        Args:
            x_BCTHW: input of the model, (B, C_in, T, H, W).
            *condition: noise, for a model with noise.

        Raises:
            ConfigError: if the model fails, or its output has a wrong shape.
        """
        with _convert_model_errors(self._model_type, "fails in the forward pass"):
            out_BCTHW = self.model(x_BCTHW, *condition)
        expected_shape = (x_BCTHW.shape[0], self._out_channels, 1, *x_BCTHW.shape[3:])
        if out_BCTHW.shape != expected_shape:
            raise ConfigError(
                f"model.type: {self._model_type} returns {tuple(out_BCTHW.shape)} for an input of "
                f"{tuple(x_BCTHW.shape)}; it must be {expected_shape} (batch, output channels, 1, rows, columns)"
            )
        return out_BCTHW


class _MissingValuesError(Exception):
    """Error in a dry run if an operation needs values of tensors or a real device; the model may still be correct."""


@contextmanager
def _convert_model_errors(model_type: str, problem: str) -> Iterator[None]:
    """Context manager that converts an error of the model's code into a `ConfigError` with one line.

    Args:
        model_type: value of ``model.type``.
        problem: description of the failure, such as "cannot be built".

    Raises:
        ConfigError: for every error in the ``with`` block that does not come from this package.
        _MissingValuesError: if the block needs the values of a tensor without values.
    """
    with _convert_errors(f"model.type: {model_type} {problem}"):
        yield


@contextmanager
def _convert_step_errors(config: Config) -> Iterator[None]:
    """Context manager that converts an error of objective, loss or post-process into a `ConfigError` with one line.

    Raises:
        ConfigError: for every error in the block that does not come from this package. The message names the configured
            kinds of objective, loss and post-processing.
        _MissingValuesError: if the block needs the values of a tensor without values.
    """
    kinds = [f"trainer.objective.kind: {config.trainer.objective.kind}", f"loss.kind: {config.loss.kind}"]
    entries = config.model.postprocess_entries
    if entries:
        postprocess_kinds = [entry.kind for entry in entries.values()]
        kinds.append(f"model.postprocess: {', '.join(postprocess_kinds)}")
    with _convert_errors(f"the training step outside the model fails ({'; '.join(kinds)})"):
        yield


@contextmanager
def _convert_errors(beginning: str) -> Iterator[None]:
    """Context manager that converts an error that does not come from this package into a `ConfigError` with one line.

    Args:
        beginning: beginning of the message; the first line of the error follows.

    Raises:
        ConfigError: for every error in the ``with`` block that does not come from this package.
        _MissingValuesError: if the block needs the values of a tensor without values.
    """
    try:
        yield
    except (CreditError, _MissingValuesError):
        raise
    except Exception as error:
        # The model of a plugin may raise any exception, and the messages of torch have many lines.
        first_line = str(error).partition("\n")[0]
        message = f"{type(error).__name__}: {first_line}"
        # Notes contain the origin of the error, such as the entry of a list.
        for note in getattr(error, "__notes__", ()):
            message += f" ({note})"
        # torch raises RuntimeError for some missing values; only the message distinguishes it from other errors.
        is_about_meta_device = any(text in message for text in _META_MESSAGES)
        if isinstance(error, _NO_VALUES) or is_about_meta_device:
            raise _MissingValuesError(message) from error
        raise ConfigError(f"{beginning}: {message}") from error
