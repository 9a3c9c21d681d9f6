"""Losses of complete fields and of parts.

This module is separate, so that ranks which import it do not need the reference packages of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from credit.config.registry import LOSSES
from credit.grid import LatLonGrid
from credit.losses.base import Loss
from credit.losses.build import build_loss_context, build_loss_from_context
from credit.losses.member_loss import LossPart
from tests.unit.losses.test_losses import CHANNELS, GRID

NUM_CHANNELS = 3


def build_losses(conf: dict, masks: dict | None = None, grid: LatLonGrid = GRID) -> tuple[Loss, object]:
    """Return the loss of complete fields, and the function that builds losses of parts."""
    section = LOSSES.find_section(conf["kind"]).model_validate({"scaling": "state", **conf})
    context = build_loss_context(section, CHANNELS, grid, np.array([0.5, 0.1, 0.02]), masks or {})

    def build_part_losses(parts: Sequence[LossPart]) -> list[Loss]:
        return [build_loss_from_context(section, context.select(part.channels, part.rows)) for part in parts]

    return build_loss_from_context(section, context), build_part_losses
