"""Interface of models: the description of the data that each is built from, and the base class.

Shape suffixes: B batch, C channels, T time frames, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from credit.channels import Channel, ChannelMap
from credit.config.sections.model import ModelSection
from credit.errors import ConfigError
from credit.grid import LatLonGrid


@dataclass(frozen=True)
class ModelSpec:
    """Everything about the data that a model is built from.

    Attributes:
        channels: the channels with their names, variables, levels and groups; ``channels.input`` and
            ``channels.output`` are in the order of the tensors.
        grid: latitudes, longitudes, cell areas, and whether the outermost rows are the poles.
        input_frames: number of time frames of the input.
        output_frames: number of time frames of the output.
        timestep_minutes: minutes from one frame to the next.
        vector_channels: indices of the input channels that hold a component of a vector, such as wind; it changes its
            sign across a pole.
        vector_pairs: indices of (eastward, northward) input channels of the vectors that have both components.
    """

    channels: ChannelMap
    grid: LatLonGrid
    input_frames: int = 1
    output_frames: int = 1
    timestep_minutes: int = 360
    vector_channels: tuple[int, ...] = ()
    vector_pairs: tuple[tuple[int, int], ...] = ()

    @property
    def in_channels(self) -> int:
        """Number of channels of one input frame."""
        return len(self.channels.input)

    @property
    def out_channels(self) -> int:
        """Number of channels of one output frame."""
        return len(self.channels.output)

    @property
    def in_shape(self) -> tuple[int, int, int, int]:
        """Shape (C, T, H, W) of the input, without the batch."""
        return self.in_channels, self.input_frames, *self.grid.shape

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Shape (C, T, H, W) of the output, without the batch."""
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
        """Return the spec of a model whose channels have no meaning: for published weights, tests and other projects.

        The first channels of the input are predicted; what the input has beyond the output is forcing, what the output
        has beyond the input is diagnostic. The grid's rows are equally spaced.

        Args:
            image_height: number of latitude rows.
            image_width: number of longitude columns.
            in_channels: number of channels of an input frame.
            out_channels: number of channels of an output frame.
            frames: number of input frames.
            output_frames: number of output frames.
            vector_channels: see the class.
            pole_points: True if the outermost rows are the poles.
        """
        num_prognostic = min(in_channels, out_channels)
        # Forcing is what the input has beyond the output, diagnostics are the reverse; one of the two is empty.
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

    A subclass is built from a `ModelSpec` and its own config section, and knows nothing of ranks, normalisation or the
    rest of the config. Its fields are normalised; the stepper adds the residual, feeds the output back and applies the
    post-processing.

    A model may also declare:

    - ``_fsdp2_shard = True`` in the class of a block: the block is a unit of sharding, activation checkpointing and
      compilation, and its output may get noise in an ensemble (`inference.ensemble.feature_noise`).
    - ``_tp_plan = {"attention.to_qkv": "colwise", ...}`` in the class of a block: its linear layers may be split over
      tensor-parallel ranks (docs/parallelism.md).
    - ``_fsdp2_forward_methods = ("encode",)``: entry points beside `forward` that are sharded as `forward` is.

    Args:
        spec: channels, grid and frames of the data.
        section: the model's section of the config.

    Attributes:
        spec: channels, grid and frames of the data.
        output_is_new: True if each call returns a new tensor of which the model keeps nothing. Forecasts then write the
            next state into it, which saves the memory of one state.
        casts_weights: True if linear layers and convolutions use their weights in the autocast dtype alone. Forecasts
            under `inference.amp` then cast them once.
        conditions: names of the conditions that `forward` takes: kinds of noise (``model.noise``); empty for a model
            that depends on its input alone. `credit.models.registry.build_model` refuses other kinds of noise.
    """

    output_is_new: ClassVar[bool] = False
    casts_weights: ClassVar[bool] = False
    conditions: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: ModelSpec, section: ModelSection) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, x_BCTHW: Tensor, condition: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the normalised output.

        Args:
            x_BCTHW: (batch, in_channels, input_frames, rows, columns), normalised.
            condition: kind of noise -> tensor (batch, ...), for each kind in the config; None for a forecast without
                noise.

        Returns:
            (batch, out_channels, output_frames, rows, columns), normalised.
        """
        raise NotImplementedError

    @classmethod
    def convert_published_state(cls, state: Mapping[str, Tensor], section: ModelSection) -> dict[str, Tensor]:
        """Return the state dict of this class for a published one, for ``credit convert``.

        Args:
            state: name -> tensor, with the names and layouts of another implementation.
            section: the model's section of the config.

        Raises:
            ConfigError: if there are no published weights of this model.
            CheckpointError: naming keys that are unknown or missing.
        """
        raise ConfigError(
            f"model.type: {section.type}: credit convert knows no published weights of this model; begin with a state "
            "dict of its own by trainer.resume: FILE"
        )


def require_input_shape(x_BCTHW: Tensor, spec: ModelSpec) -> None:
    """Refuse an input of another shape than the model was built for.

    Args:
        x_BCTHW: input of the model, of any shape.
        spec: description of the data that the model was built from.

    Raises:
        ValueError: naming both shapes.
    """
    if tuple(x_BCTHW.shape[1:]) != spec.in_shape:
        raise ValueError(
            f"input is {tuple(x_BCTHW.shape)}, expected a batch of {spec.in_shape} (channel, time, latitude, longitude)"
        )
