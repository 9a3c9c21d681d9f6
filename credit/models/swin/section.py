"""Config section of the Swin-V2 transformer."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from credit.config.sections.model import ModelSection
from credit.errors import ConfigError
from credit.models.padding.section import PaddingConfig

# The transformer works at half the resolution of the patches.
DOWN_SAMPLING = 2
# `window_size: auto` chooses the preferred window if it divides the tokens, and otherwise the nearest window of
# AUTO_WINDOWS that does. In smaller windows each token has few neighbours; the cost of a window grows with its area.
PREFERRED_WINDOW = 4
AUTO_WINDOWS = range(3, 9)


class SwinPaddingConfig(PaddingConfig):
    """Config of the padding: the cells that are added around the grid before the embedding."""

    lat: list[int] | Literal["auto"] = Field(
        "auto",
        description="Rows to add: [north, south]. `auto`: the smallest padding of at least `model.patch_size` rows on "
        "each side for which all windows fit.",
    )
    lon: list[int] | Literal["auto"] = Field(
        "auto",
        description="Columns to add: [west, east]. `auto`: no columns with `model.edges: sphere`, which wraps around "
        "in longitude; otherwise the same rule as for `lat`.",
    )
    pole: Literal["published", "exact"] = Field(
        "exact",
        description="`exact`: change the sign of wind components across a pole and do not repeat a row on the pole. "
        "`published`: use the padding of the published weights; `mode: mirror` requires this value.",
    )


class SwinSection(ModelSection):
    """Config of the Swin transformer: a U-shaped transformer with Swin-V2 attention and the architecture of FuXi."""

    grid_keys: ClassVar[tuple[str, ...]] = ("padding", "window_size")

    type: Literal["swin"] = Field(description="Registered name of the model.")
    patch_size: int = Field(
        2, ge=1, description="Edge of a patch in cells. All input frames of a patch become one token."
    )
    dim: int = Field(128, ge=1, description="Number of channels of a token.")
    depth: int = Field(6, ge=1, description="Number of transformer blocks. Every second block shifts its windows.")
    heads: int = Field(4, ge=1, description="Number of attention heads; a divisor of `dim`.")
    window_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Edge of an attention window in tokens of the transformer, each of 2 x 2 patches. `auto`: 4 if 4 "
        "divides the number of tokens along longitude, otherwise the divisor from 3 to 8 that is nearest to 4.",
    )
    num_groups: int = Field(
        32, ge=1, description="Number of groups of the group norms after the convolutions; a divisor of `dim`."
    )
    attn_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout probability of the attention weights.")
    ff_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout probability in the feed-forward layers.")
    use_spectral_norm: bool = Field(
        False,
        description="Apply spectral normalisation to all weights except the weights of the embedding and of the "
        "projection to queries, keys and values.",
    )
    interp: bool = Field(
        True, description="Interpolate the output bilinearly to the grid if the patches do not cover the grid exactly."
    )
    edges: Literal["sphere", "published"] = Field(
        "sphere",
        description="`sphere`: windows and convolutions wrap around in longitude. `published`: use the edges of the "
        "published weights: windows and convolutions do not cross an edge of the padded grid, and tokens are padded "
        "with zeros until the windows fit.",
    )
    padding: SwinPaddingConfig | None = Field(
        SwinPaddingConfig(),
        description="Padding of the input across the poles and around the globe. `auto`: the defaults of all its keys. "
        "null: no padding.",
    )

    def resolve(self, grid_shape: tuple[int, int]) -> SwinSection:
        """Return a copy of the section in which `window_size` is a number, for a grid of (rows, columns)."""
        return self.model_copy(update={"window_size": choose_window(self, grid_shape[1])})


def choose_window(section: SwinSection, num_columns: int) -> int:
    """Return the edge of an attention window in tokens: ``model.window_size``, or the best fit to the grid if `auto`.

    Args:
        section: the config section of the model.
        num_columns: number of columns of the grid.

    Raises:
        ConfigError: if ``model.window_size`` is ``auto`` and no window divides the columns of the grid.
    """
    if section.window_size != "auto":
        return section.window_size
    if section.edges == "published":
        # Tokens are padded until the windows fit, so any window is valid.
        return PREFERRED_WINDOW
    num_tokens, remaining_cells = divmod(num_columns, DOWN_SAMPLING * section.patch_size)
    fitting = [window for window in AUTO_WINDOWS if num_tokens % window == 0]
    if remaining_cells or not fitting:
        raise ConfigError(
            f"model.window_size: auto finds no window of {AUTO_WINDOWS[0]} to {AUTO_WINDOWS[-1]} tokens of "
            f"{DOWN_SAMPLING * section.patch_size} cells that divides the {num_columns} columns of the grid; choose "
            "a different model.patch_size, or set model.edges: published"
        )
    # If two windows are equally near, choose the larger one.
    return min(fitting, key=lambda window: (abs(window - PREFERRED_WINDOW), -window))
