"""Layer that prepares noise (`model.noise`) for a network whose stages have different resolutions.

`global` and `cell` noise change the norms, `spherical` noise is added to the first embedding, and `dropout` noise
replaces the dropout of torch.

Shape suffixes: B batch, H and W rows and columns, K channels of the noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from credit.config.sections.model import ModelSection
from credit.errors import ConfigError
from credit.models.layers.norm import NO_CONDITIONS, ConditionDims, Conditions
from credit.models.layers.padding import SpherePadding
from credit.models.layers.seeded_dropout import use_seeded_dropout
from credit.models.noise.noise_embedding import CellNoiseEmbedding, average_noise
from credit.parallel.domain.division import FieldDivision, FieldPart
from credit.parallel.domain.rules import DomainRule

# Kinds of noise that a network supports if it uses all functions of this module.
NOISE_KINDS = ("dropout", "global", "cell", "spherical")
# Dropout rate of the feed-forward layers if the config sets no rate (U-Cast, arXiv 2604.09041).
DEFAULT_DROPOUT_RATE = 0.1


def count_noise_channels(section: ModelSection, kind: str) -> int:
    """Return the number of channels of a kind of noise; 0 if the config of the model lacks this kind.

    Args:
        section: the config section of the model.
        kind: kind of noise, such as ``cell``.
    """
    entry = section.find_noise(kind)
    return 0 if entry is None else entry.channels


def build_condition_dims(section: ModelSection) -> ConditionDims:
    """Return the lengths of the `global` and `cell` noise vectors on which the norms of a network depend."""
    return ConditionDims(
        vector=count_noise_channels(section, "global"),
        cells=count_noise_channels(section, "cell"),
    )


def add_dropout_noise(
    model: nn.Module, section: ModelSection, attention_rate: float = 0.0, feed_forward_rate: float = 0.0
) -> None:
    """Replace the dropout of torch in a network with seeded dropout, in place, if the config has `dropout` noise.

    Args:
        model: the network.
        section: the config section of the model.
        attention_rate: dropout rate of attention layers.
        feed_forward_rate: dropout rate of feed-forward layers; the key ``rate`` of the noise overrides it.

    Raises:
        ConfigError: if ``memory`` has more values than the network has layers with dropout.
    """
    entry = section.find_noise("dropout")
    if entry is None:
        return
    feed_forward_rate = entry.rate or feed_forward_rate
    # The default applies only to a network without any dropout.
    if not feed_forward_rate and not attention_rate:
        feed_forward_rate = DEFAULT_DROPOUT_RATE
    num_layers = use_seeded_dropout(model, attention_rate, feed_forward_rate)
    # Each layer uses one value, so a value beyond the last layer would have no effect.
    if len(entry.memory) > num_layers:
        raise ConfigError(
            f"model.noise: {len(entry.memory)} values of memory share {num_layers} layers with dropout; give fewer "
            "values"
        )


class NoiseInput(nn.Module):
    """Layer that converts noise on the grid to the inputs of the stages of a network: conditions and padded fields.

    Args:
        section: the config section of the model.
        padding: padding of the network input; noise is padded in the same way.
        strides: for each stage, the factor by which its resolution is coarser than that of the previous stage; 1 for
            the same resolution.

    Attributes:
        cell_embedding: embedding of `cell` noise; None without `cell` noise.
        stage_parts: for each stage, the cells of this rank; None if this rank has the complete fields.
    """

    def __init__(self, section: ModelSection, padding: SpherePadding, strides: Sequence[int]) -> None:
        super().__init__()
        self._strides = tuple(strides)
        # Noise is a scalar, which keeps its sign across a pole.
        self._padding = replace(padding, vector_channels=())
        cell_channels = count_noise_channels(section, "cell")
        self.cell_embedding = CellNoiseEmbedding(cell_channels) if cell_channels else None
        self.stage_parts: list[FieldPart] | None = None

    def forward(self, condition: Mapping[str, Tensor] | None, dtype: torch.dtype) -> list[Conditions]:
        """Return, for each stage, the conditions on which the layers of the stage depend.

        Cell noise is averaged to the resolution of each stage, scaled to variance 1 and then embedded.

        Args:
            condition: dict from each kind of noise to its tensor (B, ...); None for a forecast without noise.
            dtype: dtype in which the network computes without autocast.
        """
        if not condition:
            return [NO_CONDITIONS] * len(self._strides)
        conditions = Conditions(vector_BK=condition.get("global"), dropout_seeds_BM=condition.get("dropout"))
        if "cell" not in condition:
            return [conditions] * len(self._strides)
        stage_conditions = []
        noise_BKHW = self._padding.pad(condition["cell"].to(dtype))
        # The noise of each stage is an average of the noise of the previous stage.
        for stage, stride in enumerate(self._strides):
            noise_BKHW = average_noise(noise_BKHW, stride)
            part_BKHW = noise_BKHW
            if self.stage_parts is not None:
                part_BKHW = noise_BKHW[(..., *self.stage_parts[stage].slices)]
            cells_BHWK = self.cell_embedding(part_BKHW.permute(0, 2, 3, 1))
            stage_conditions.append(conditions._replace(cells_BHWK=cells_BHWK))
        return stage_conditions

    def pad_fields(self, condition: Mapping[str, Tensor] | None, dtype: torch.dtype) -> Tensor | None:
        """Return the padded fields (B, K, H, W) of `spherical` noise, or this rank's part; None without this noise.

        Args:
            condition: kind of noise -> its tensor; None for a forecast without noise.
            dtype: dtype in which the network computes without autocast.
        """
        if not condition or "spherical" not in condition:
            return None
        noise_BKHW = self._padding.pad(condition["spherical"].to(dtype))
        if self.stage_parts is None:
            return noise_BKHW
        # This rank gets the cells under its tokens of the first stage.
        rows, columns = self.stage_parts[0].slices
        stride = self._strides[0]
        rows = slice(rows.start * stride, rows.stop * stride)
        return noise_BKHW[..., rows, columns.start * stride : columns.stop * stride]


@dataclass(frozen=True)
class NoiseInputRule(DomainRule):
    """Rule of `NoiseInput`: every rank samples noise for the complete grid and then selects the cells of its part.

    Attributes:
        stages: division of the cells of each stage among ranks.
    """

    stages: tuple[FieldDivision, ...]

    def install(self, layer: NoiseInput, group: dist.ProcessGroup) -> None:
        """Set the cells of this rank for each stage.

        Args:
            layer: the noise input.
            group: the ranks that share the field.
        """
        rank = dist.get_rank(group)
        layer.stage_parts = [division.held(rank) for division in self.stages]
