"""Interface of models: the base class, and the description of the data that a model is built from.

Shape suffixes: B batch, C channels, T time frames, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from credit.channels import Channel, ChannelMap
from credit.config.sections.model import ModelSection
from credit.errors import ConfigError
from credit.grid import LatLonGrid
from credit.models.initialise import initialise_
from credit.models.kernels.autocast import autocast_dtype
from credit.parallel.domain.domain import Domain


@dataclass(frozen=True)
class ModelSpec:
    """Channels, grid and time frames of the data, from which a model is built.

    Attributes:
        channels: the channels with their names, variables, levels and groups; ``channels.input`` and
            ``channels.output`` list them in the order of the channel dimension of the input and of the output tensor.
        grid: latitudes, longitudes, cell areas, and whether the outermost rows are the poles.
        input_frames: number of time frames of the input.
        output_frames: number of time frames of the output.
        timestep_minutes: minutes from one frame to the next.
        vector_channels: indices of the input channels that hold one component of a vector, such as the eastward wind.
            Padding across a pole changes the sign of these channels.
        vector_pairs: (eastward, northward) indices of the two input channels of each vector that has both components.
    """

    channels: ChannelMap
    grid: LatLonGrid
    input_frames: int = 1
    output_frames: int = 1
    timestep_minutes: int = 360
    vector_channels: tuple[int, ...] = ()
    vector_pairs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Check that the input has all channels in `vector_channels`.

        Raises:
            ConfigError: if an index is out of range; the message names these indices.
        """
        outside = [channel for channel in self.vector_channels if not 0 <= channel < self.in_channels]
        if outside:
            raise ConfigError(
                f"vector_channels: {outside} are not among the {self.in_channels} input channels, counted from 0"
            )

    @property
    def in_channels(self) -> int:
        """Number of channels of one input frame."""
        return len(self.channels.input)

    @property
    def out_channels(self) -> int:
        """Number of channels of one output frame."""
        return len(self.channels.output)

    @property
    def vector_inputs(self) -> tuple[int, ...]:
        """Indices of the vector channels in the result of `ForecastModel.flatten_frames`.

        Frame t of channel c has the index c * input_frames + t.
        """
        indices: list[int] = []
        for channel in self.vector_channels:
            indices += range(channel * self.input_frames, (channel + 1) * self.input_frames)
        return tuple(indices)

    @property
    def in_shape(self) -> tuple[int, int, int, int]:
        """Shape (C channels, T frames, H rows, W columns) of the input, without the batch."""
        return self.in_channels, self.input_frames, *self.grid.shape

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Shape (C channels, T frames, H rows, W columns) of the output, without the batch."""
        return self.out_channels, self.output_frames, *self.grid.shape

    @classmethod
    def from_sizes(
        cls,
        *,
        image_height: int,
        image_width: int,
        in_channels: int,
        out_channels: int,
        frames: int = 1,
        output_frames: int = 1,
        vector_channels: tuple[int, ...] = (),
        pole_points: bool = False,
    ) -> ModelSpec:
        """Return a spec with numbered channels instead of named variables.

        Use it where there is no list of variables: for published weights, in tests and in other projects.

        The first min(in_channels, out_channels) channels of input and output are prognostic. Any further input channels
        are forcings, and any further output channels are diagnostic. The rows of the grid are equally spaced in
        latitude.

        Args:
            image_height: number of latitude rows.
            image_width: number of longitude columns.
            in_channels: number of channels of an input frame.
            out_channels: number of channels of an output frame.
            frames: number of input frames.
            output_frames: number of output frames.
            vector_channels: indices of the input channels that hold one component of a vector.
            pole_points: True if the first and the last row lie on the poles.

        Raises:
            ConfigError: if an index in `vector_channels` is out of range.
        """
        num_prognostic = min(in_channels, out_channels)
        # Only one kind of extra channels exists: forcings if the input is longer, diagnostics if the output is longer.
        group_of_name: dict[str, str] = {}
        for number in range(num_prognostic):
            group_of_name[f"channel{number}"] = "prognostic"
        for number in range(in_channels - num_prognostic):
            group_of_name[f"forcing{number}"] = "dynamic_forcing"
        for number in range(out_channels - num_prognostic):
            group_of_name[f"diagnostic{number}"] = "diagnostic"
        channels = [Channel(name, name, None, group) for name, group in group_of_name.items()]
        grid = LatLonGrid.equiangular(image_height, image_width, pole_points)
        return cls(ChannelMap(channels), grid, frames, output_frames, vector_channels=tuple(vector_channels))


class ForecastModel(nn.Module):
    """Base class of all models.

    A subclass is built from a `ModelSpec` and its own config section. It does not depend on ranks, normalisation or the
    rest of the config. Its input and output are normalised fields. `credit.forecast.stepper.Stepper` calls the model in
    a forecast: the stepper adds the predicted change to the state, applies the post-processing and feeds the new state
    back as input.

    The networks of this package end their constructor with `initialise_unless_meta`. A network on the meta device
    is left without values. Any other network gets initial values from a random seed.

    A model may also declare:

    - ``_fsdp2_shard = True`` in the class of a block: the block is a unit of sharding, activation checkpointing and
      compilation, and an ensemble may add noise to its output (`inference.ensemble.feature_noise`).
    - ``_tp_plan = {"attention.to_qkv": "colwise", ...}`` in the class of a block: its linear layers may be split over
      tensor-parallel ranks (docs/parallelism.md).
    - ``plan_domain(num_parts)``: method that describes how the network is split over ranks that each have a part of the
      grid (`credit.parallel.domain`). A network without this method does not support domain parallelism.
    - ``_fsdp2_forward_methods = ("encode",)``: methods that may be called instead of `forward`. FSDP2 gathers sharded
      weights for them as it does for `forward`.

    Args:
        spec: channels, grid and frames of the data.
        section: the model's section of the config.

    Attributes:
        spec: channels, grid and frames of the data.
        domain: the ranks that divide the grid among them, and this rank's part of the grid. Domain parallelism sets it;
            None if this rank has the whole grid.
        output_is_new: True if each call returns a new tensor and the model keeps no reference to it. A forecast then
            writes its next state into this tensor, which saves the memory of one state.
        casts_weights: True if linear layers and convolutions use their weights only in the autocast dtype. Forecasts
            with ``inference.amp`` then cast these weights once instead of in each call.
        conditions: kinds of noise (``model.noise``) that `forward` accepts in its argument `condition`; empty for a
            model without noise. `credit.models.registry.build_model` raises an error for all other kinds.
    """

    output_is_new: ClassVar[bool] = False
    casts_weights: ClassVar[bool] = False
    conditions: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: ModelSpec, section: ModelSection) -> None:
        super().__init__()
        self.spec = spec
        self.domain: Domain | None = None

    def forward(self, x_BCTHW: Tensor, condition: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the normalised output.

        Args:
            x_BCTHW: (batch, in_channels, input_frames, rows, columns), normalised.
            condition: kind of noise -> its tensor, for each kind in the config: ``global`` (batch, noise channels),
                ``cell`` and ``spherical`` (batch, noise channels, rows, columns), ``dropout`` (batch, M)
                int64, a seed for each of the M values of ``memory``. None for a forecast without noise.

        Returns:
            (batch, out_channels, output_frames, rows, columns), normalised.

        Raises:
            ValueError: if channels, frames, rows or columns of the input differ from `spec`.
        """
        raise NotImplementedError

    def initialise(self, seed: int) -> None:
        """Fill every parameter and buffer in place with values that depend only on the seed and the tensor's name.

        For a sharded model, use `credit.models.initialise.initial_values` instead.
        """
        initialise_(self, seed)

    def initialise_unless_meta(self) -> None:
        """Initialise the model from a random seed, unless it is on the meta device. Call it last in a constructor.

        The seed comes from torch's global generator. A model on the meta device gets its values after sharding.
        """
        if not next(self.parameters()).is_meta:
            self.initialise(int(torch.randint(2**62, (), device="cpu")))

    def flatten_frames(self, x_BCTHW: Tensor) -> Tensor:
        """Return the input with its frames as channels (B, C * T, H, W), in the dtype in which the network computes.

        The T frames of a channel become T neighbouring channels.

        Args:
            x_BCTHW: (batch, in_channels, input_frames, rows, columns), normalised.

        Raises:
            ValueError: if channels, frames, rows or columns of the input differ from `spec`.
        """
        require_input_shape(x_BCTHW, self.spec, self.domain)
        x_BCHW = x_BCTHW.flatten(1, 2)
        if autocast_dtype(x_BCHW) is None:
            # FSDP2 already casts the input to the dtype of the weights, unless
            # trainer.fsdp2_mp_policy.cast_forward_inputs is false.
            x_BCHW = x_BCHW.to(next(self.parameters()).dtype)
        return x_BCHW

    @classmethod
    def convert_published_state(cls, state: Mapping[str, Tensor], section: ModelSection) -> dict[str, Tensor]:
        """Convert a published state dict to the names and layouts of this class, for ``credit convert``.

        Args:
            state: published state dict, with the tensor names and layouts of another implementation.
            section: the model's section of the config.

        Returns:
            State dict of this class.

        Raises:
            ConfigError: if no weights of this model have been published.
            CheckpointError: if names are unknown or missing; the message lists them.
        """
        raise ConfigError(
            f"model.type: {section.type}: credit convert supports no published weights of this model; to start from a "
            "state dict with the names of this model, set trainer.resume: FILE"
        )


def require_input_shape(x_BCTHW: Tensor, spec: ModelSpec, domain: Domain | None = None) -> None:
    """Check that an input has the shape for which the model was built; the batch may have any size.

    Args:
        x_BCTHW: input to check, of any shape.
        spec: description of the data that the model was built from.
        domain: the ranks that divide the grid, and this rank's part of the grid; None if the input has the whole grid.

    Raises:
        ValueError: if the shapes differ; the message contains both shapes.
    """
    in_shape = spec.in_shape
    if domain is not None:
        in_shape = (*in_shape[:2], *domain.part.shape)
    if tuple(x_BCTHW.shape[1:]) != in_shape:
        raise ValueError(
            f"input is {tuple(x_BCTHW.shape)}, expected a batch of {in_shape} (channel, time, latitude, longitude)"
        )
