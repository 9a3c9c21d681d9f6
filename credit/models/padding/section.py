"""Config section of the padding of a network's grid (``model.padding``)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from credit.config.sections.base import StrictModel


class PaddingConfig(StrictModel):
    """Cells that are added around the grid before the first stage of the network."""

    mode: Literal["earth", "mirror"] = Field(
        "earth",
        description="`earth`: continue each meridian across the pole. `mirror`: reflect rows at the edges.",
    )
    lat: list[int] | Literal["auto"] = Field(
        "auto", description="Rows to add: [north, south]. `auto`: the smallest padding for which all windows fit."
    )
    lon: list[int] | Literal["auto"] = Field(
        "auto", description="Columns to add: [west, east]. `auto`: the smallest padding for which all windows fit."
    )
    pole: Literal["published", "exact"] = Field(
        "published",
        description="`exact`: change the sign of wind components across a pole and do not repeat a row on the pole; "
        "use it for new models. `published`: as in the training of the published weights.",
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_auto(cls, section: Any) -> Any:
        """Return an empty section for ``padding: auto``, so that all keys have their defaults."""
        return {} if section == "auto" else section
