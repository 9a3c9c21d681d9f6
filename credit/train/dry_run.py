"""Tries a run's network without memory and without other ranks: what would fail on its first step fails here.

Tensors on the meta device have a shape and no values, so the largest model takes seconds on a login node. torch's fake
process group stands for the other ranks: it lets the network be split as on so many, and communicates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.utils.checkpoint import checkpoint

from credit.channels import ChannelMap
from credit.config import Config
from credit.data.store.statistics import Statistics
from credit.errors import ConfigError, CreditError
from credit.forecast.stepper import forcing_windows
from credit.grid import LatLonGrid
from credit.losses.base import Loss
from credit.models.layers.spectral_norm import advance_power_iterations
from credit.models.lora import apply_lora, checkpoint_state_dict
from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks
from credit.parallel.mesh import ParallelDims, build_mesh
from credit.parallel.process_info import fake_process_group
from credit.train.assets import ModelAssets, find_run_layers
from credit.train.build import build_run_loss, build_stepper
from credit.train.build_model import build_network, build_parallel_model

_META = torch.device("meta")
# what a tensor without values raises where it is asked for one
_NO_VALUES = (
    NotImplementedError,
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)


@dataclass(frozen=True)
class DryRunResult:
    """What came of a try.

    Attributes:
        model: the network on the meta device, with adapters where only those train.
        untried: why a step could not be tried, empty where it was.
    """

    model: nn.Module
    untried: str

    @property
    def parameters(self) -> int:
        """Number of parameters, adapters included."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def trained_parameters(self) -> int:
        """Number of those that train."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint's tensors: live weights, those that forecast, and the optimizer's two moments."""
        saved = sum(tensor.numel() * tensor.element_size() for tensor in checkpoint_state_dict(self.model).values())
        return 2 * saved + 8 * self.trained_parameters


def dummy_assets(
    config: Config,
    grid: LatLonGrid,
    attributes: Mapping[str, Mapping[str, str]],
    masks: Mapping[str, np.ndarray] | None = None,
) -> ModelAssets:
    """Return the assets of a try: in it only shapes count, so statistics and static fields stand for any.

    Args:
        config: the run's.
        grid: of the data.
        attributes: variable -> units, standard_name, long_name.
        masks: variable -> (H, W) bool, True where missing; None where the data are not known.
    """
    channels = config.data.channel_map()
    names = tuple(c.name for c in channels.stored + channels.static_stored)
    zero, one = np.zeros(len(names)), np.ones(len(names))
    statistics = Statistics(names, zero, one, zero, one, zero, one, one.astype(np.int64))
    static = np.zeros((len(channels.group("static")), *grid.shape), dtype=np.float32)
    if masks is None:
        masks = {c.variable: np.zeros(grid.shape, dtype=bool) for c in channels.input if c.source == "mask"}
    return ModelAssets(channels, grid, statistics, attributes, static, masks, None, find_run_layers(config))


def try_step(config: Config, assets: ModelAssets) -> DryRunResult:
    """Build the network and take a step without memory: the rollout, the loss, the backward pass.

    Shapes do not depend on trainer.amp; `try_bfloat16` looks at what does. Blocks are not compiled.

    Args:
        config: the run's.
        assets: from `dummy_assets`.

    Raises:
        ConfigError: if the model cannot be built, or fails.
    """
    kind, trainer = config.model.type, config.trainer
    with _blame(kind, "cannot be built"), _META:
        model = build_network(config, assets.channels, assets.grid, assets.attributes)
    if trainer.lora is not None:
        apply_lora(model, trainer.lora.targets, trainer.lora.rank, trainer.lora.alpha)
    if trainer.activation_checkpoint:
        checkpoint_blocks(model, trainer.activation_checkpoint)
    model.train()
    # Building the stepper checks the post-processing, which depends on the grid and on units.
    build_stepper(config, assets, model, torch.device("cpu"), amp=False)
    with np.errstate(invalid="ignore"):
        loss = build_run_loss(config, assets, _META)
    advance_power_iterations(model)
    try:
        with _blame(kind, "fails in the forward pass"):
            total = _rollout_loss(config, assets.channels, model, loss, assets.grid.shape)
        with _blame(kind, "fails in the backward pass"):
            total.backward()
    except _NeedsValues as error:
        return DryRunResult(model, str(error))
    return DryRunResult(model, "")


def try_bfloat16(config: Config, assets: ModelAssets) -> None:
    """Take a forecast step in bfloat16, as on a CPU but without memory or values.

    torch looks at dtypes in some operations only where there are values, so not all that fails later fails here.

    Raises:
        ConfigError: if the model cannot compute in it.
    """
    cpu = torch.device("cpu")
    with _META:
        model = build_network(config, assets.channels, assets.grid, assets.attributes).eval()
    stepper = build_stepper(config, assets, model, cpu, amp=True)
    channels, batch, frames = assets.channels, config.trainer.train_batch_size, config.data.history_len
    # the meta device has no autocast; tensors of this mode are the meta device's and pass for another's
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for module in model.modules():
            for own in (module._parameters, module._buffers):
                own.update({k: torch.empty(t.shape, dtype=t.dtype) for k, t in own.items() if t is not None})
        state, forcing = (
            torch.empty(batch, len(channels.group(group)), frames, *assets.grid.shape)
            for group in ("prognostic", "dynamic_forcing")
        )
        with suppress(_NeedsValues), _blame(config.model.type, "fails in bfloat16 (amp)"):
            stepper.step(state, forcing)


def try_mesh(config: Config, assets: ModelAssets, degrees: ParallelDims) -> None:
    """Split the network as on the ranks of `degrees`, without them.

    Raises:
        ConfigError: what the run itself would raise.
    """
    parallelism = config.trainer.parallelism.model_copy(update={"cpu_offload": False})
    trainer = config.trainer.model_copy(update={"parallelism": parallelism})
    with fake_process_group(degrees.world):
        mesh = build_mesh(degrees, 0, "cpu")
        with _blame(config.model.type, f"cannot be split over {degrees.world} ranks"):
            build_parallel_model(config.model_copy(update={"trainer": trainer}), assets, mesh, _META)


def _rollout_loss(config: Config, channels: ChannelMap, model: nn.Module, loss: Loss, grid: tuple[int, int]) -> Tensor:
    """Return the loss of a batch, by the shapes of `credit.forecast.stepper.Stepper` and `credit.train.step`."""
    data, trainer = config.data, config.trainer
    # the third step of a rollout is like the second
    length = min(data.forecast_len, 2)

    def empty(group: str, frames: int) -> Tensor:
        return torch.empty(trainer.train_batch_size, len(channels.group(group)), frames, *grid, device=_META)

    state, static = empty("prognostic", data.history_len), empty("static", data.history_len)
    windows = forcing_windows(empty("dynamic_forcing", data.history_len + length - 1), data.history_len)
    target = torch.cat([empty("prognostic", 1), empty("diagnostic", 1)], dim=1)
    losses = []
    for number in range(length):
        groups = {"prognostic": state, "dynamic_forcing": windows(number), "static": static}
        x_BCTHW = torch.cat([groups[name] for name in channels.input_order], dim=1)
        recompute = trainer.recompute_steps and length > 1
        out_BCTHW = checkpoint(model, x_BCTHW, use_reentrant=False) if recompute else model(x_BCTHW)
        if out_BCTHW.shape != target.shape:
            raise ConfigError(
                f"model.type: {config.model.type} returns {tuple(out_BCTHW.shape)} for an input of "
                f"{tuple(x_BCTHW.shape)}; it must be {tuple(target.shape)} (batch, output channels, 1, rows, columns)"
            )
        losses.append(loss(out_BCTHW[:, None, :, 0], target[:, :, 0]))
        state = torch.cat([state[:, :, 1:], out_BCTHW[:, channels.output_slice("prognostic")]], dim=2)
    return torch.stack(losses).mean()


class _NeedsValues(Exception):
    """The model asks for a value or an operation that the meta device does not have; it may still be right."""


@contextmanager
def _blame(kind: str, what: str) -> Iterator[None]:
    """Say that a model failed, in one line.

    Raises:
        ConfigError: for whatever the block raises that was not made for the user.
    """
    try:
        yield
    except CreditError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        if isinstance(error, _NO_VALUES) or "meta tensor" in str(error):
            raise _NeedsValues(said) from error
        raise ConfigError(f"model.type: {kind} {what}: {said}") from error
