"""Division of WXFormer among the ranks of a domain group.

Each stage is divided at multiples of its short window, so every short window belongs to a single rank. Before each
embedding and up-sampling, the ranks exchange cells to change from the division of one stage to the division of the
next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from credit.models.layers.domain_rules import (
    BilinearResizeRule,
    CrossScaleEmbeddingRule,
    GroupNormRule,
    LongAttentionRule,
    SeededDropoutRule,
    UpSamplingHeadRule,
)
from credit.models.layers.norm import GroupNorm
from credit.models.layers.padding import NO_PADDING, compute_stage_sizes
from credit.models.layers.seeded_dropout import SeededDropout
from credit.models.layers.transformer_layer import TransformerLayer
from credit.models.layers.up_sampling import UpBlock
from credit.models.noise.noise_input import NoiseInputRule
from credit.parallel.domain.division import FieldDivision, divide_field, imbalance, require_enough_cells
from credit.parallel.domain.rules import DomainRule, NeighbourRule, Reach, TokenCountRule
from credit.parallel.domain.split import DomainPlan

if TYPE_CHECKING:
    from credit.models.wxformer.model import WXFormer


def plan_wxformer(model: WXFormer, num_parts: tuple[int, int]) -> DomainPlan:
    """Plan the split of a WXFormer into M x N parts: divisions of the stages and rules of the layers.

    Args:
        model: the network.
        num_parts: (M, N) numbers of parts of the latitude rows and of the longitude columns.

    Raises:
        ConfigError: if the grid has fewer rows or columns than parts.
    """
    grid = model.spec.grid.shape
    require_enough_cells(grid, num_parts)
    stages = divide_stages(model, num_parts)
    grid_division = divide_field(grid, num_parts)
    # Division of the decoder output without the padding. The output has the size of the grid unless it is interpolated.
    output_division = divide_field(model.decoder_output_shape, num_parts)
    rules: dict[str, DomainRule] = {"noise": NoiseInputRule(tuple(stages))}
    for number, stage in enumerate(model.stages):
        source = grid_division if number == 0 else stages[number - 1]
        padding = model.padding if number == 0 else NO_PADDING
        before, after = stage.embed.halo
        reach = Reach(before, after, stride=stage.embed.stride)
        rules[f"stages.{number}.embed"] = CrossScaleEmbeddingRule(source, stages[number], reach, padding=padding)
        for index, layer in enumerate(stage.layers):
            for path, rule in list_layer_rules(layer, stages[number]):
                rules[f"stages.{number}.layers.{index}.{path}"] = rule
    # The first block of the decoder is between the coarsest stage and the next finer stage, and so on.
    for index, block in enumerate(model.decoder.blocks):
        coarse, fine = stages[-1 - index], stages[-2 - index]
        for path, rule in list_block_rules(block, coarse, fine):
            rules[f"decoder.blocks.{index}.{path}"] = rule
    rules["decoder.head"] = UpSamplingHeadRule(stages[0], output_division, model.padding)
    if output_division.shape != grid:
        rules["resize"] = BilinearResizeRule(output_division, grid_division)
    return DomainPlan(grid_division, rules, estimate_imbalance(model, stages))


def divide_stages(model: WXFormer, num_parts: tuple[int, int]) -> list[FieldDivision]:
    """Return the division of each encoder stage; the bounds of the parts are multiples of its short window.

    Args:
        model: the network.
        num_parts: (M, N) numbers of parts of the latitude rows and of the longitude columns.
    """
    padded_height, padded_width = model.padding.padded_shape(model.spec.grid.shape)
    strides = [stage.embed.stride for stage in model.stages]
    shapes = zip(compute_stage_sizes(padded_height, strides), compute_stage_sizes(padded_width, strides), strict=True)
    divisions = []
    for stage, shape in zip(model.stages, shapes, strict=True):
        # A stage without layers has no windows, so its bounds are free.
        window = stage.layers[0].short_attention.window if len(stage.layers) else 1
        divisions.append(divide_field(shape, num_parts, window))
    return divisions


def list_layer_rules(layer: TransformerLayer, division: FieldDivision) -> Iterator[tuple[str, DomainRule]]:
    """Yield (path, rule) for each module of a transformer layer that needs a rule.

    Args:
        layer: the transformer layer.
        division: division of the tokens of the layer.
    """
    long_window = layer.long_attention.window
    yield "long_attention", LongAttentionRule(division, long_window)
    height, width = division.shape
    num_parts = (len(division.rows.owned), len(division.columns.owned))
    short_window = layer.short_attention.window
    short_windows = divide_field((height // short_window, width // short_window), num_parts)
    # With windows of one cell, long attention does not exchange cells.
    long_windows = division
    if long_window > 1:
        long_windows = divide_field((height // long_window, width // long_window), num_parts)
    dropouts = {
        "short_attention": short_windows,
        "short_feed_forward": division,
        "long_attention": long_windows,
        "long_feed_forward": division,
    }
    tokens = {
        "short_attention.to_qkv": TokenCountRule(short_windows, short_window**2),
        "short_feed_forward.expand": TokenCountRule(division),
        "long_attention.to_qkv": TokenCountRule(long_windows, long_window**2),
        "long_feed_forward.expand": TokenCountRule(division),
    }
    rowwise_partners = {"to_qkv": "to_out", "expand": "contract"}
    for path, rule in tokens.items():
        parent, _, name = path.rpartition(".")
        yield path, rule
        yield f"{parent}.{rowwise_partners[name]}", rule
    for name, numbered in dropouts.items():
        if isinstance(layer.get_submodule(name).seeded_dropout, SeededDropout):
            yield f"{name}.seeded_dropout", SeededDropoutRule(numbered)


def list_block_rules(block: nn.Module, coarse: FieldDivision, fine: FieldDivision) -> Iterator[tuple[str, DomainRule]]:
    """Yield (path, rule) for each layer of a decoder block that needs a rule.

    Args:
        block: `UpBlock` or `UpBlockPS`.
        coarse: division of the input of the block.
        fine: division of the output of the block.
    """
    # A 2x2 transposed convolution with stride 2 reads one cell; a subpixel convolution also reads the neighbouring
    # cells.
    reach = 0 if isinstance(block, UpBlock) else 1
    yield "up", NeighbourRule(coarse, fine, Reach(reach, reach, factor=2))
    for path, layer in block.named_modules():
        if path == "up":
            continue
        if isinstance(layer, GroupNorm):
            yield path, GroupNormRule(fine)
        elif isinstance(layer, nn.Conv2d):
            pad = layer.kernel_size[0] // 2
            yield path, NeighbourRule(fine, fine, Reach(pad, pad))


def estimate_imbalance(model: WXFormer, stages: list[FieldDivision]) -> float:
    """Return the estimated computing time of the busiest rank divided by the mean time of all ranks."""
    costs = []
    for stage, division in zip(model.stages, stages, strict=True):
        num_weights = sum(parameter.numel() for parameter in stage.parameters())
        # The cost of a stage is about the number of weights times the number of tokens.
        costs.append(num_weights * math.prod(division.shape))
    return imbalance(stages, costs)
