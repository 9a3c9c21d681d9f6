"""Computation and checks of the sizes of the fields and tokens of a Swin transformer.

The padded grid of H x W cells has H / p x W / p patches of p x p cells. The transformer has half as many tokens along
each axis.
"""

from __future__ import annotations

from dataclasses import dataclass

from credit.errors import ConfigError
from credit.models.base import ModelSpec
from credit.models.checks import find_nearest_divisor
from credit.models.layers.padding import NO_PADDING, SpherePadding, auto_padding
from credit.models.padding.build import build_padding
from credit.models.swin.section import DOWN_SAMPLING, SwinSection, choose_window


@dataclass(frozen=True)
class TokenLayout:
    """Sizes of the fields and tokens of a Swin transformer.

    Attributes:
        window: edge of an attention window in tokens.
        padding: cells that are added around the grid before the embedding.
        patches: number of rows and columns of patches of the padded grid.
        tokens: number of rows and columns of tokens after the down-sampling.
        token_pads: rows (north, south) and columns (west, east) of zeros that are added to the tokens to complete
            windows; all 0 unless ``model.edges`` is ``published``.
        output: number of rows and columns of the output without the padding, before the interpolation to the grid.
    """

    window: int
    padding: SpherePadding
    patches: tuple[int, int]
    tokens: tuple[int, int]
    token_pads: tuple[tuple[int, int], tuple[int, int]]
    output: tuple[int, int]

    @property
    def padded_tokens(self) -> tuple[int, int]:
        """Number of rows and columns of tokens in the transformer, including added zeros."""
        return self.tokens[0] + sum(self.token_pads[0]), self.tokens[1] + sum(self.token_pads[1])


def build_layout(spec: ModelSpec, section: SwinSection) -> TokenLayout:
    """Return the sizes of all fields and tokens for a grid and a config section.

    Args:
        spec: channels, grid and frames of the data.
        section: the config section of the model.

    Raises:
        ConfigError: if windows do not divide the padded grid (``model.edges: sphere``), the padded grid is smaller than
            a patch, or the size of the output differs from the grid and ``model.interp`` is false.
    """
    check_section(section)
    grid = spec.grid.shape
    window = choose_window(section, grid[1])
    # Number of cells of a window along an axis.
    multiple = DOWN_SAMPLING * section.patch_size * window
    padding = _build_padding(spec, section, multiple)
    patches: list[int] = []
    tokens: list[int] = []
    token_pads: list[tuple[int, int]] = []
    output: list[int] = []
    for axis, size, pads in zip(("lat", "lon"), grid, (padding.lat, padding.lon), strict=True):
        padded_size = size + sum(pads)
        # The embedding drops cells that do not fill a patch. The down-sampling rounds up.
        num_patches = padded_size // section.patch_size
        num_tokens = -(-num_patches // DOWN_SAMPLING)
        if num_tokens == 0:
            raise ConfigError(
                f"model.patch_size: {section.patch_size} is larger than the {padded_size} cells along {axis}; choose "
                f"at most {padded_size}"
            )
        if section.edges == "sphere":
            _require_whole_windows(axis, size, pads, section, window)
        # Number of tokens to add until the number of tokens is a multiple of the window.
        remainder = -num_tokens % window
        patches.append(num_patches)
        tokens.append(num_tokens)
        token_pads.append((remainder // 2, remainder - remainder // 2))
        output.append(DOWN_SAMPLING * num_tokens * section.patch_size - sum(pads))
    if output != list(grid) and not section.interp:
        raise ConfigError(
            f"model.interp: {section.interp}, but the patches cover {output[0]} x {output[1]} cells of a grid of "
            f"{grid[0]} x {grid[1]}; set it to true, or choose padded sizes that are multiples of "
            f"{DOWN_SAMPLING * section.patch_size}"
        )
    # Each list has one entry for rows and one entry for columns.
    return TokenLayout(window, padding, (*patches,), (*tokens,), (*token_pads,), (*output,))


def check_section(section: SwinSection) -> None:
    """Raise ConfigError if the number of heads or of groups does not divide the number of channels.

    Raises:
        ConfigError: if ``heads`` or ``num_groups`` does not divide ``dim``; the message names the nearest divisor.
    """
    for key, number in (("heads", section.heads), ("num_groups", section.num_groups)):
        if section.dim % number:
            nearest = find_nearest_divisor(section.dim, number)
            raise ConfigError(
                f"model.{key}: {number} does not divide model.dim: {section.dim}; the nearest divisor is {nearest}"
            )


def _build_padding(spec: ModelSpec, section: SwinSection, multiple: int) -> SpherePadding:
    """Return the padding that ``model.padding`` describes.

    Args:
        spec: channels, grid and frames of the data.
        section: the config section of the model.
        multiple: number of cells of a window along an axis.

    Raises:
        ConfigError: if keys of ``model.padding`` contradict each other, or the grid is smaller than the pads.
    """
    if section.padding is None:
        return NO_PADDING
    keys = section.padding.model_dump()
    if keys["lon"] == "auto" and section.edges == "sphere":
        keys["lon"] = [0, 0]
    return build_padding(
        keys,
        grid=spec.grid.shape,
        strides=(section.patch_size, DOWN_SAMPLING),
        multiple=multiple,
        vector_channels=spec.vector_inputs,
        pole_points=spec.grid.has_pole_points,
    )


def _require_whole_windows(axis: str, size: int, pads: tuple[int, int], section: SwinSection, window: int) -> None:
    """Check, for ``model.edges: sphere``, that windows divide the padded grid and that no columns are padded.

    Args:
        axis: `lat` or `lon`.
        size: number of rows or columns of the grid.
        pads: number of rows or columns added on the two sides.
        section: the config section of the model.
        window: edge of a window in tokens.

    Raises:
        ConfigError: if windows do not divide the padded grid or columns are padded; the message names a valid value.
    """
    cells_per_token = DOWN_SAMPLING * section.patch_size
    multiple = cells_per_token * window
    if axis == "lon" and any(pads):
        raise ConfigError(
            f"model.padding.lon: {list(pads)}: with model.edges: sphere the columns wrap around without padding; set "
            "it to [0, 0], or set model.edges: published"
        )
    padded_size = size + sum(pads)
    if padded_size % multiple == 0:
        return
    message = (
        f"model.window_size: {window} tokens of {cells_per_token} cells do not divide the {padded_size} "
        f"cells of the padded grid along {axis}"
    )
    # Rows can be padded across the poles until the windows fit. Columns cannot be padded, so the window must change.
    if axis == "lat":
        before, after = auto_padding(size, multiple, (section.patch_size, DOWN_SAMPLING))
        raise ConfigError(f"{message}; model.padding.lat: [{before}, {after}] fits")
    if size % cells_per_token:
        raise ConfigError(
            f"{message}; choose a model.patch_size such that {DOWN_SAMPLING} * patch_size divides {size}, or set "
            "model.edges: published"
        )
    nearest = find_nearest_divisor(size // cells_per_token, window)
    raise ConfigError(f"{message}; the nearest window that fits is {nearest}; or set model.edges: published")


def check_noise(layout: TokenLayout, section: SwinSection) -> None:
    """Raise ConfigError if the config has cell noise that cannot be averaged from patches to tokens.

    Args:
        layout: sizes of the fields and tokens.
        section: the config section of the model.

    Raises:
        ConfigError: if the section has cell noise and an axis does not have exactly twice as many patches as tokens.
    """
    fits = layout.patches == tuple(DOWN_SAMPLING * size for size in layout.padded_tokens)
    if section.find_noise("cell") is not None and not fits:
        raise ConfigError(
            f"model.noise: cell: {layout.patches[0]} x {layout.patches[1]} patches are not twice the "
            f"{layout.padded_tokens[0]} x {layout.padded_tokens[1]} tokens of the transformer, so noise cannot be "
            "averaged to tokens; choose a different kind of noise, or pads with which all windows fit, such as auto"
        )
