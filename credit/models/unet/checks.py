"""Checks that the sizes in the config section of the U-Net are consistent with each other and with the grid."""

from __future__ import annotations

from credit.errors import ConfigError
from credit.models.checks import find_nearest_divisor
from credit.models.unet.section import UNetSection

MIN_LEVELS = 2


def check_section(section: UNetSection) -> None:
    """Raise ConfigError if sizes in the config section of a U-Net contradict each other.

    Args:
        section: the config section of the model.

    Raises:
        ConfigError: if two sizes contradict each other; the message names the key, its value and a valid value.
    """
    num_levels = len(section.dim)
    if len(section.depth) != num_levels:
        raise ConfigError(
            f"model.depth: {section.depth} has {len(section.depth)} entries, but model.dim has {num_levels} levels; "
            f"one entry is needed for each level, for example {[1] * num_levels}"
        )
    for key, sizes in (("dim", section.dim), ("depth", section.depth)):
        if min(sizes) < 1:
            raise ConfigError(f"model.{key}: {sizes} must be 1 or more at every level")
    if section.attention_levels > num_levels:
        raise ConfigError(
            f"model.attention_levels: {section.attention_levels} is more than the {num_levels} levels of model.dim; "
            f"choose at most {num_levels}"
        )
    first_with_attention = num_levels - section.attention_levels
    for width in section.dim[first_with_attention:]:
        if width % section.dim_head:
            nearest = find_nearest_divisor(width, section.dim_head)
            raise ConfigError(
                f"model.dim_head: {section.dim_head} does not divide the {width} channels of a level with attention "
                f"(model.dim: {section.dim}); the nearest divisor is {nearest}"
            )


def check_grid(grid: tuple[int, int], num_levels: int) -> None:
    """Raise ConfigError if the grid cannot be halved once for each level after the first level.

    Args:
        grid: number of rows and columns.
        num_levels: number of levels of the network.

    Raises:
        ConfigError: if the grid cannot be halved; the message names the largest valid number of levels.
    """
    height, width = grid
    largest = 1
    while width % 2**largest == 0 and _count_coarsest_rows(height, largest + 1) >= 2:
        largest += 1
    if num_levels <= largest:
        return
    rule = (
        f"model.dim: {num_levels} levels need a grid with a multiple of {2 ** (num_levels - 1)} columns and at least "
        f"{2 ** (num_levels - 1) + 1} rows; this grid has {height} rows and {width} columns"
    )
    if largest < MIN_LEVELS:
        raise ConfigError(f"{rule}, which do not allow any number of levels; choose a different grid or model")
    raise ConfigError(f"{rule}; give at most {largest} entries")


def _count_coarsest_rows(height: int, num_levels: int) -> int:
    """Return the number of rows of the coarsest level of a grid with `height` rows."""
    return -(-height // 2 ** (num_levels - 1))
