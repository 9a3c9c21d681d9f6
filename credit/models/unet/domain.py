"""Division of the U-Net among the ranks of a domain group.

The cells of each level are divided separately. Before each down-sampling and up-sampling, the ranks exchange cells to
change from the division of one level to the division of the next level.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from credit.models.layers.domain_rules import GroupNormRule, SeededDropoutRule, SphereConvRule
from credit.models.layers.norm import GroupNorm
from credit.models.layers.seeded_dropout import SeededDropout
from credit.models.layers.sphere_conv import SphereConv2d
from credit.models.noise.noise_input import NoiseInputRule
from credit.models.unet.attention import GlobalAttention, GlobalAttentionRule
from credit.models.unet.blocks import RepeatCells
from credit.models.unet.latitude import LatitudeProjection
from credit.parallel.domain.division import FieldDivision, divide_field, imbalance, require_enough_cells
from credit.parallel.domain.rules import DomainRule, NeighbourRule, Reach
from credit.parallel.domain.split import DomainPlan

if TYPE_CHECKING:
    from credit.models.unet.model import UNet


@dataclass(frozen=True)
class LatitudeProjectionRule(DomainRule):
    """Rule of `LatitudeProjection`: each rank computes only its own rows.

    Attributes:
        division: division of the grid.
    """

    division: FieldDivision

    def install(self, layer: LatitudeProjection, group: dist.ProcessGroup) -> None:
        """Set the rows that this rank computes.

        Args:
            layer: the latitude projection.
            group: the ranks that share the field.
        """
        layer.rows = self.division.held(dist.get_rank(group)).rows


def plan_unet(model: UNet, num_parts: tuple[int, int]) -> DomainPlan:
    """Plan the split of a U-Net into M x N parts: divisions of the levels and rules of the layers.

    Args:
        model: the network.
        num_parts: (M, N) numbers of parts of the latitude rows and of the longitude columns.

    Raises:
        ConfigError: if the grid has fewer rows or columns than parts.
    """
    require_enough_cells(model.spec.grid.shape, num_parts)
    levels = [divide_field(level.shape, num_parts) for level in model.levels]
    grid = levels[0]
    rules: dict[str, DomainRule] = {
        "noise": NoiseInputRule(tuple(levels)),
        "latitude": LatitudeProjectionRule(grid),
        "stem": SphereConvRule.build(model.stem, grid, grid),
    }
    # Parts of the network -> index of their level.
    level_of_part = {"middle": len(levels) - 1, "head": 0}
    for number in range(len(levels)):
        level_of_part[f"encoder.{number}"] = number
        level_of_part[f"decoder.{number}"] = len(levels) - 1 - number
    costs = [0] * len(levels)
    for part, number in level_of_part.items():
        module = model.get_submodule(part)
        for path, rule in list_rules(module, levels, number):
            rules[f"{part}.{path}"] = rule
        # The cost of a part is about the number of weights times the number of cells.
        num_weights = sum(parameter.numel() for parameter in module.parameters())
        costs[number] += num_weights * math.prod(levels[number].shape)
    return DomainPlan(grid, rules, imbalance(levels, costs))


def list_rules(module: nn.Module, levels: list[FieldDivision], number: int) -> Iterator[tuple[str, DomainRule]]:
    """Yield (path, rule) for each layer of `module` that needs a rule.

    Args:
        module: a level of the encoder or decoder, or a different part whose output has the resolution of one level.
        levels: for each level, how its field is divided among the ranks.
        number: index in `levels` of the level at which `module` ends.
    """
    level = levels[number]
    for path, layer in module.named_modules():
        if isinstance(layer, SphereConv2d):
            # Only a down-sampling convolution has a stride; it reads the next finer level.
            source = level if layer.stride == (1, 1) else levels[number - 1]
            yield path, SphereConvRule.build(layer, source, level)
        elif isinstance(layer, RepeatCells):
            yield path, NeighbourRule(levels[number + 1], level, Reach(factor=2))
        elif isinstance(layer, GroupNorm):
            yield path, GroupNormRule(level)
        elif isinstance(layer, GlobalAttention):
            yield f"{path}.collect_cells", GlobalAttentionRule(level)
        elif isinstance(layer, SeededDropout):
            yield path, SeededDropoutRule(level)
