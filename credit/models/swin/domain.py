"""Division of a Swin transformer among the ranks of a domain group.

The tokens are divided at multiples of the window, so every window of an unshifted block belongs to a single rank.
Before a shifted block, the ranks exchange tokens so that each rank has complete windows. After the block, they send the
results back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from credit.models.layers.domain_rules import (
    BilinearResizeRule,
    CrossScaleEmbeddingRule,
    GroupNormRule,
    SeededDropoutRule,
)
from credit.models.layers.norm import GroupNorm
from credit.models.layers.padding import NO_PADDING
from credit.models.layers.seeded_dropout import SeededDropout
from credit.models.noise.noise_input import NoiseInputRule
from credit.models.swin.attention import ShiftedWindowAttention
from credit.models.swin.blocks import SwinBlock, WrapConv
from credit.models.swin.layout import DOWN_SAMPLING
from credit.parallel.domain.division import FieldDivision, FieldPart, divide_field, imbalance, require_enough_cells
from credit.parallel.domain.exchange import ZERO, CellExchange, Cells, as_cells
from credit.parallel.domain.rules import DomainRule, NeighbourRule, Reach, TokenCountRule, build_exchange
from credit.parallel.domain.split import DomainPlan

if TYPE_CHECKING:
    from credit.models.swin.model import Swin


@dataclass(frozen=True)
class ShiftedWindowRule(DomainRule):
    """Rule of attention in shifted windows: the ranks exchange tokens so that each rank has complete windows.

    The rolled grid is the grid of tokens moved by the shift. Each rank computes the windows of the rolled grid that
    lie in its rows and columns.

    Attributes:
        division: division of the tokens among ranks; the bounds of the parts are multiples of the window.
        shift: number of rows and columns by which the windows are shifted.
    """

    division: FieldDivision
    shift: tuple[int, int]

    def install(self, layer: ShiftedWindowAttention, group: dist.ProcessGroup) -> None:
        """Replace the roll with an exchange of tokens before and after the layer, and set the windows of each rank.

        Args:
            layer: the attention layer.
            group: the ranks that share the grid.
        """
        rank = dist.get_rank(group)
        ranks = range(self.division.num_ranks)
        # A rank that owns no tokens computes a copy of the windows of its neighbour, and does not send results.
        computed = [self._find_unrolled_cells(self.division.held(other)) for other in ranks]
        owned = [self._find_unrolled_cells(self.division.owned(other)) for other in ranks]
        to_windows = build_exchange(group, self.division, [[cells] for cells in computed])
        tokens = [[as_cells(self.division.held(other))] for other in ranks]
        to_tokens = CellExchange(group, owned, computed, tokens)
        layer.rolls_input = False
        # The attention mask depends on the position of a window in the complete grid.
        layer.parts = tuple(self.division.held(other) for other in ranks)
        layer.field_ranks = range(rank, rank + 1)

        def collect(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (to_windows(args[0]), *args[1:])

        def return_results(layer: nn.Module, args: tuple[Any, ...], y_BHWC: Tensor) -> Tensor:
            return to_tokens(y_BHWC)

        layer.register_forward_pre_hook(collect)
        layer.register_forward_hook(return_results)

    def _find_unrolled_cells(self, part: FieldPart) -> Cells:
        """Return the tokens of a part of the rolled grid as rows and columns of the unrolled grid."""
        height, width = self.division.shape
        rows = [(row + self.shift[0]) % height for row in part.rows]
        columns = [(column + self.shift[1]) % width for column in part.columns]
        return Cells(rows, columns)


@dataclass(frozen=True)
class PeriodicNeighbourRule(NeighbourRule):
    """Rule of a convolution that is periodic in longitude and reads zeros beyond the first and last row."""

    def remove_padding(self, layer: WrapConv) -> None:
        """Switch off the padding of the layer, because its input already contains the cells around the field."""
        super().remove_padding(layer)
        layer.wrap = NO_PADDING

    def find_cells_and_zeros(self, part: FieldPart) -> list[Cells]:
        """Return the cells of a part of the layer's input. Rows beyond the first and last row of the field are `ZERO`.

        Args:
            part: rows and columns of the input; they may be outside of the field.
        """
        height, width = self.input_shape()
        # The first and last rows of the padded field are near the poles, so the field has no rows beyond them.
        rows = [row if 0 <= row < height else ZERO for row in part.rows]
        return [Cells(rows, [column % width for column in part.columns])]


@dataclass(frozen=True)
class PadCropRule(DomainRule):
    """Rule of a layer that adds zeros around a field, or removes rows and columns at its edges.

    Attributes:
        source: division of the field.
        target: division of the result.
        offset: row and column of the field at which the result begins; negative to add zeros before the field.
        input_is_tokens: True if the input of the layer has the shape (B, H, W, C), False for (B, C, H, W).
    """

    source: FieldDivision
    target: FieldDivision
    offset: tuple[int, int]
    input_is_tokens: bool = False

    def install(self, layer: nn.Module, group: dist.ProcessGroup) -> None:
        """Replace `forward` with an exchange that returns the part of the result that belongs to this rank.

        Args:
            layer: the layer.
            group: the ranks that share the field.
        """
        needed = []
        for rank in range(self.target.num_ranks):
            part = self.target.held(rank)
            rows = _offset_cells(part.rows, self.offset[0], self.source.shape[0])
            columns = _offset_cells(part.columns, self.offset[1], self.source.shape[1])
            needed.append([Cells(rows, columns)])
        exchange = build_exchange(group, self.source, needed)
        layer.forward = exchange if self.input_is_tokens else exchange.exchange_fields


def _offset_cells(cells: range, offset: int, size: int) -> list[int]:
    """Return the indices in `cells` plus an offset, with `ZERO` for results outside of an axis of `size` cells."""
    moved_cells = [cell + offset for cell in cells]
    return [cell if 0 <= cell < size else ZERO for cell in moved_cells]


@dataclass(frozen=True)
class Divisions:
    """Divisions of the fields and tokens of a Swin transformer among ranks.

    Attributes:
        grid: division of the input and output.
        patches: division of the patches after the embedding.
        down_sampled: division of the tokens after the down-sampling.
        tokens: division of the tokens in the transformer, including zeros that are added to complete windows.
        up_sampled: division of the patches after the up-sampling.
        patch_cells: division of the cells that the head computes from the patches.
        output: division of the output without the padding, before it is interpolated to the grid.
    """

    grid: FieldDivision
    patches: FieldDivision
    down_sampled: FieldDivision
    tokens: FieldDivision
    up_sampled: FieldDivision
    patch_cells: FieldDivision
    output: FieldDivision

    @classmethod
    def build(cls, model: Swin, num_parts: tuple[int, int]) -> Divisions:
        """Return the divisions of all fields and tokens of `model` into M x N parts, given as `num_parts`."""
        layout = model.layout
        window = model.blocks[0].attention.window
        patch_size = model.embedding.patch_size
        tokens = divide_field(layout.padded_tokens, num_parts, window)
        # If zeros complete the windows, the tokens with and without the zeros have different divisions.
        down = tokens
        if layout.tokens != layout.padded_tokens:
            down = divide_field(layout.tokens, num_parts)
        # The up-sampling turns each token into 2 x 2 patches. If no zeros were added, the bounds of the parts are twice
        # the bounds of the tokens, so ranks exchange only cells at the edges of their parts.
        up_shape = (DOWN_SAMPLING * layout.tokens[0], DOWN_SAMPLING * layout.tokens[1])
        multiple = 1 if down is not tokens else window
        up = divide_field(up_shape, num_parts, DOWN_SAMPLING * multiple)
        # The down-sampling rounds an odd number of patches up.
        patches = up
        if layout.patches != up_shape:
            patches = divide_field(layout.patches, num_parts)
        cells_shape = (up_shape[0] * patch_size, up_shape[1] * patch_size)
        return cls(
            grid=divide_field(model.spec.grid.shape, num_parts),
            patches=patches,
            down_sampled=down,
            tokens=tokens,
            up_sampled=up,
            patch_cells=divide_field(cells_shape, num_parts, DOWN_SAMPLING * multiple * patch_size),
            output=divide_field(layout.output, num_parts),
        )


def plan_swin(model: Swin, num_parts: tuple[int, int]) -> DomainPlan:
    """Plan the split of a Swin transformer into M x N parts: divisions of the fields and rules of the layers.

    Args:
        model: the network.
        num_parts: (M, N) numbers of parts of the latitude rows and of the longitude columns.

    Raises:
        ConfigError: if the grid has fewer rows or columns than parts.
    """
    require_enough_cells(model.spec.grid.shape, num_parts)
    layout = model.layout
    divisions = Divisions.build(model, num_parts)
    patch_reach = Reach(stride=model.embedding.patch_size)
    north, west = layout.padding.lat[0], layout.padding.lon[0]
    (token_north, _), (token_west, _) = layout.token_pads
    # Rules of the layers outside the transformer.
    rules: dict[str, DomainRule] = {
        "noise": NoiseInputRule((divisions.patches, divisions.tokens)),
        # Patches do not overlap, so the embedding reads no cells outside of a patch. Like a cross-scale embedding, it
        # pads the field and returns tokens.
        "embedding": CrossScaleEmbeddingRule(divisions.grid, divisions.patches, patch_reach, padding=layout.padding),
        # A 3x3 convolution with stride 2 reads one cell before the 2 x 2 cells of its output.
        "down.conv": _build_conv_rule(
            model.down.conv, divisions.patches, divisions.down_sampled, Reach(before=1, stride=DOWN_SAMPLING)
        ),
        "up.conv": NeighbourRule(divisions.down_sampled, divisions.up_sampled, Reach(factor=DOWN_SAMPLING)),
        "crop": PadCropRule(divisions.patch_cells, divisions.output, (north, west)),
    }
    for path, division in (("down", divisions.down_sampled), ("up", divisions.up_sampled)):
        for index, layer in enumerate(model.get_submodule(path).refine):
            if isinstance(layer, WrapConv):
                rules[f"{path}.refine.{index}"] = _build_conv_rule(layer, division, division, Reach(1, 1))
            elif isinstance(layer, GroupNorm):
                rules[f"{path}.refine.{index}"] = GroupNormRule(division)
    if layout.tokens != layout.padded_tokens:
        rules["pad_tokens"] = PadCropRule(
            divisions.down_sampled, divisions.tokens, (-token_north, -token_west), input_is_tokens=True
        )
        rules["crop_tokens"] = PadCropRule(divisions.tokens, divisions.down_sampled, (token_north, token_west))
    for number, block in enumerate(model.blocks):
        for path, rule in list_block_rules(block, divisions.tokens):
            rules[f"blocks.{number}.{path}"] = rule
    if layout.output != model.spec.grid.shape:
        rules["resize"] = BilinearResizeRule(divisions.output, divisions.grid)
    return DomainPlan(divisions.grid, rules, estimate_imbalance(model, divisions))


def list_block_rules(block: SwinBlock, tokens: FieldDivision) -> Iterator[tuple[str, DomainRule]]:
    """Yield (path, rule) for each layer of a transformer block that needs a rule.

    Args:
        block: the block.
        tokens: division of the tokens.
    """
    attention = block.attention
    window = attention.window
    num_parts = (len(tokens.rows.owned), len(tokens.columns.owned))
    windows = divide_field((tokens.shape[0] // window, tokens.shape[1] // window), num_parts)
    # Each unshifted window belongs to a single rank, so attention without a shift needs no rule.
    if any(attention.shift):
        yield "attention", ShiftedWindowRule(tokens, attention.shift)
    # The projections of attention receive tokens in windows. The number of windows may differ between ranks.
    for path in ("attention.to_qkv", "attention.to_out"):
        yield path, TokenCountRule(windows, window**2)
    for path in ("feed_forward.expand", "feed_forward.contract"):
        yield path, TokenCountRule(tokens)
    if isinstance(attention.seeded_dropout, SeededDropout):
        yield "attention.seeded_dropout", SeededDropoutRule(windows)
    if isinstance(block.feed_forward.seeded_dropout, SeededDropout):
        yield "feed_forward.seeded_dropout", SeededDropoutRule(tokens)


def estimate_imbalance(model: Swin, divisions: Divisions) -> float:
    """Return the estimated computing time of the busiest rank divided by the mean time of all ranks."""
    modules_by_division = (
        (divisions.patches, model.embedding),
        (divisions.down_sampled, model.down),
        (divisions.tokens, model.blocks),
        (divisions.up_sampled, model.up),
        (divisions.up_sampled, model.head),
    )
    costs = []
    for division, module in modules_by_division:
        num_weights = sum(parameter.numel() for parameter in module.parameters())
        # The cost of a module is about the number of weights times the number of tokens.
        costs.append(num_weights * math.prod(division.shape))
    return imbalance([division for division, _ in modules_by_division], costs)


def _build_conv_rule(layer: WrapConv, source: FieldDivision, target: FieldDivision, reach: Reach) -> NeighbourRule:
    """Return the rule of a convolution: with periodic columns if the layer wraps its columns, otherwise with zeros."""
    if layer.wrap == NO_PADDING:
        return NeighbourRule(source, target, reach)
    return PeriodicNeighbourRule(source, target, reach)
