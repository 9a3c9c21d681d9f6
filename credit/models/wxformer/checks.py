"""Checks that the sizes in the config section of WXFormer are consistent. The messages suggest valid values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from credit.errors import ConfigError
from credit.models.checks import find_nearest_divisor
from credit.models.layers.padding import SpherePadding, compute_stage_sizes, window_multiple
from credit.models.wxformer.section import WXFormerSection


def check_section(section: WXFormerSection, local_windows: Sequence[int], num_stages: int) -> None:
    """Raise ConfigError if sizes in the config section contradict each other.

    Args:
        section: the config section of the model.
        local_windows: edge of the local window of each stage, in cells.
        num_stages: number of stages of the encoder.

    Raises:
        ConfigError: if sizes contradict each other; the message names the key and, if possible, a valid value.
    """
    sizes_by_stage = {
        "dim": section.dim,
        "depth": section.depth,
        "global_window_size": section.global_window_size,
        "local_window_size": local_windows,
        "cross_embed_kernel_sizes": section.cross_embed_kernel_sizes,
        "cross_embed_strides": section.cross_embed_strides,
    }
    for key, sizes in sizes_by_stage.items():
        if len(sizes) != num_stages:
            raise ConfigError(
                f"model.{key}: {list(sizes)} has {len(sizes)} entries, but one entry is needed for each of the "
                f"{num_stages} stages"
            )
        # An entry of the kernel sizes is a list, which `_check_embedding` compares with the stride.
        if key != "cross_embed_kernel_sizes" and min(sizes) < 1:
            raise ConfigError(f"model.{key}: {list(sizes)} must be 1 or more in every stage")
    _check_widths(section.dim, section.dim_head)
    _check_embedding(section.cross_embed_kernel_sizes, section.cross_embed_strides)


def check_output_size(grid: tuple[int, int], padding: SpherePadding, strides: Sequence[int], interp: bool) -> None:
    """Raise ConfigError if the size of the decoder output, without the padding, does not match the grid.

    The output must have at least one cell. If `interp` is False, the output must have the size of the grid.

    Args:
        grid: number of rows and columns.
        padding: cells that are added on each side.
        strides: stride of the embedding of each stage.
        interp: ``model.interp``, True if the output may be interpolated to the grid.

    Raises:
        ConfigError: if the output is empty or must have the size of the grid; the message names both sizes.
    """
    sizes = find_output_shape(grid, padding, strides)
    is_empty = min(sizes) < 1
    fits_grid = sizes == tuple(grid)
    if is_empty or not (fits_grid or interp):
        raise ConfigError(
            f"model.interp: {interp}, but the decoder returns {sizes[0]} x {sizes[1]} cells for a grid of "
            f"{grid[0]} x {grid[1]}; set it to true, or choose strides of 2 and even padded sizes"
        )


def find_output_shape(grid: tuple[int, int], padding: SpherePadding, strides: Sequence[int]) -> tuple[int, int]:
    """Return the number of rows and columns of the decoder output without the padding.

    Args:
        grid: number of rows and columns.
        padding: cells that are added on each side.
        strides: stride of the embedding of each stage.
    """
    sizes = []
    for size, pads in zip(grid, (padding.lat, padding.lon), strict=True):
        # The decoder doubles the size of the first stage.
        first_stage_size = compute_stage_sizes(size + sum(pads), strides)[0]
        sizes.append(2 * first_stage_size - sum(pads))
    height, width = sizes
    return height, width


def _check_widths(dim: Sequence[int], dim_head: int) -> None:
    """Raise ConfigError if the channels do not double from stage to stage, or are not multiples of `dim_head`.

    Args:
        dim: number of channels of each stage.
        dim_head: number of channels of an attention head.

    Raises:
        ConfigError: if a number is invalid; the message names a valid number.
    """
    doubled_dim = [dim[0] * 2**stage for stage in range(len(dim))]
    if list(dim) != doubled_dim:
        raise ConfigError(
            f"model.dim: {list(dim)} must double from stage to stage, because each decoder block halves the channels; "
            f"for example {doubled_dim}"
        )
    # The channels of later stages are multiples of the channels of the first stage, so a divisor of the channels of the
    # first stage divides the channels of all stages.
    if dim[0] % dim_head:
        nearest = find_nearest_divisor(dim[0], dim_head)
        raise ConfigError(
            f"model.dim_head: {dim_head} does not divide the {dim[0]} channels of the first stage; the nearest divisor "
            f"is {nearest}"
        )
    # The hidden layers of the position bias have dim // 4 channels.
    if dim[0] < 4:
        raise ConfigError(
            f"model.dim: {list(dim)} is too narrow: the position bias needs at least 4 channels in the first stage"
        )


def _check_embedding(kernel_sizes: Sequence[Sequence[int]], strides: Sequence[int]) -> None:
    """Raise ConfigError if the decoder cannot invert a stride, or if a kernel is smaller than its stride.

    Args:
        kernel_sizes: kernel edges of the embedding of each stage, in cells.
        strides: stride of the embedding of each stage.

    Raises:
        ConfigError: if a stride or kernel is invalid; the message names the stage.
    """
    for stage, (kernels, stride) in enumerate(zip(kernel_sizes, strides, strict=True)):
        # Any first stride is valid, because the output of the decoder may be interpolated to the grid.
        if stage and stride != 2:
            raise ConfigError(
                f"model.cross_embed_strides: {list(strides)}: stage {stage} must have stride 2, "
                "because each decoder block doubles the size"
            )
        if not kernels or min(kernels) < stride:
            raise ConfigError(
                f"model.cross_embed_kernel_sizes: {list(kernels)} in stage {stage}: every kernel must be at least the "
                f"stride, {stride}"
            )


def check_windows(
    axis: str, size: int, pads: tuple[int, int], strides: Sequence[int], windows: Sequence[Sequence[int]]
) -> None:
    """Raise ConfigError if a window does not divide its padded stage, or a stage does not have half the previous size.

    Args:
        axis: `lat` or `lon`, for the message.
        size: number of rows or columns of the grid.
        pads: number of rows or columns added on the two sides.
        strides: stride of each stage.
        windows: (global, local) window edges of each stage, in cells.

    Raises:
        ConfigError: if the size of a stage is invalid; the message names the stage and the nearest valid pads.
    """
    sizes = compute_stage_sizes(size + sum(pads), strides)
    multiple = window_multiple(strides, windows)
    # Parts of the messages.
    padded_size = f"{size} + {pads[0]} + {pads[1]} = {size + sum(pads)} cells along {axis}"
    nearest_fit = _describe_nearest_fit(axis, size, pads, multiple)
    for stage, cells in enumerate(sizes):
        for key, window in zip(("global_window_size", "local_window_size"), windows[stage], strict=True):
            # Every window divides 0, but a stage without cells computes nothing.
            if cells == 0 or cells % window:
                raise ConfigError(
                    f"model.{key}: window {window} does not divide the {cells} cells of stage {stage}, "
                    f"from {padded_size} padded; {nearest_fit}"
                )
        if stage and sizes[stage - 1] != 2 * cells:
            raise ConfigError(
                f"model.padding.{axis}: {list(pads)} makes {padded_size} padded, of which stage {stage - 1} has "
                f"{sizes[stage - 1]} and stage {stage} has {cells}, but the decoder needs exactly half; {nearest_fit}"
            )


def _describe_nearest_fit(axis: str, size: int, pads: tuple[int, int], multiple: int) -> str:
    """Return a clause for error messages that names the nearest pads with which every window fits.

    Args:
        axis: `lat` or `lon`.
        size: number of rows or columns of the grid.
        pads: number of rows or columns added on the two sides.
        multiple: the padded size must be a multiple of this number.
    """
    padded = size + sum(pads)
    # Nearest valid padded sizes above and below `padded`. Pads cannot shrink the grid.
    above = math.ceil(padded / multiple) * multiple
    below = above - multiple
    is_below_nearer = padded - below < above - padded
    nearest = above
    if below >= size and is_below_nearer:
        nearest = below
    before = (nearest - size) // 2
    after = nearest - size - before
    return (
        f"every window fits a padded size that is a multiple of {multiple}; "
        f"the nearest is model.padding.{axis}: [{before}, {after}]"
    )
