"""Base of the ``loss`` section. Each kind of loss registers its own section (`credit.losses.register_loss`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny

from credit.config.registry import LOSSES, RegisteredSection
from credit.config.sections.base import StrictModel

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class LossSection(StrictModel):
    """Keys that every kind of loss has: weights and scales of the errors."""

    kind: str = Field(description="Registered name of the loss.")
    scaling: Literal["tendency", "state"] = Field(
        "tendency",
        description="Unit of the error of a prognostic channel: the standard deviation of its change over a step "
        "(`tendency`; persistence then has a loss of about 1), or of its values (`state`). Diagnostic "
        "channels always use the standard deviation of their values.",
    )
    latitude_weights: bool = Field(True, description="Weight cells by area.")
    level_weights: Literal["none", "pressure"] = Field(
        "none", description="`pressure`: weight levels in proportion to pressure. `none`: weight them equally."
    )
    weight: Weight = Field(1.0, description="Factor on this loss if it is a term of a sum.")
    weights: dict[str, Weight] = Field({}, description="Weight of a variable (z) or channel (z500). Default: 1.")

    @property
    def needs_members(self) -> bool:
        """True if the loss compares ensemble members and therefore needs several members."""
        return False

    @property
    def depends_on_resolution(self) -> bool:
        """True if the loss has constants that depend on the grid but are not fields (H, W), such as spectral tables.

        Otherwise ``credit plan`` builds the loss on a coarse grid and resizes its fields, to save time and memory.
        """
        return False


# Keys that are set for a whole sum of losses and not for its terms.
SHARED_KEYS = {"scaling", "latitude_weights", "level_weights", "weights"}
LossEntry = Annotated[SerializeAsAny[LossSection], RegisteredSection(LOSSES, default="mse", base=LossSection)]
# A term of a sum. A term must not be a sum.
LossTermEntry = Annotated[
    SerializeAsAny[LossSection],
    RegisteredSection(LOSSES, default="mse", base=LossSection, excluded=("sum",)),
]


def default_loss() -> LossSection:
    """Return the loss of a config without a ``loss`` section: the mean squared error."""
    return LOSSES.find_section("mse").model_validate({"kind": "mse"})
