"""Example of a post-process: it limits the change of the global mean of a variable in a step."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from credit.config.sections.data import DataConfig
from credit.config.sections.postprocess import PostprocessSection, require_variable_in
from credit.forecast.postprocess.base import Postprocess, PostprocessContext, register_postprocess


class MeanAnchorSection(PostprocessSection):
    """Config section of the limit on the change of a global mean."""

    kind: Literal["mean_anchor"] = Field(description="Limits the change of a global mean over a step.")
    variable: str = Field(description="A prognostic variable without levels.")
    limit: float = Field(gt=0, description="Largest change of the global mean over a step, in the variable's units.")

    def require_variables(self, data: DataConfig, key: str) -> None:
        """See the base class."""
        allowed = set(data.variables.prognostic.vars_2D)
        require_variable_in(f"{key}.variable", self.variable, allowed, "in prognostic.vars_2D")


@register_postprocess("mean_anchor", MeanAnchorSection)
class MeanAnchor(Postprocess):
    """Shifts a field so that its global mean changes by no more than the limit."""

    def __init__(self, context: PostprocessContext, section: MeanAnchorSection) -> None:
        super().__init__(context, section)
        names = [channel.variable for channel in context.channels.output]
        self._row = names.index(section.variable)
        self._area_HW = torch.from_numpy(context.grid.area_weights()).to(context.device)
        self.corrected_channels = (self._row,)
        # The limit in normalised units is the difference between the encoded values of 0 and of the limit.
        values_2C = torch.zeros(2, len(names), device=context.device)
        values_2C[1] = section.limit
        encoded = context.normalizer.encode(values_2C[:, :, None, None], "output")[:, self._row, 0, 0]
        self._limit = (encoded[1] - encoded[0]).double()

    def forward(self, output_BCHW, previous_BCHW, forcing_BCHW):
        """See the base class."""
        change_BHW = (output_BCHW[:, self._row] - previous_BCHW[:, self._row]).double()
        mean_B = (change_BHW * self._area_HW).sum(dim=(1, 2))
        excess_B = mean_B - mean_B.clamp(-self._limit, self._limit)
        shifted_BHW = output_BCHW[:, self._row] - excess_B.float()[:, None, None]
        return output_BCHW.slice_scatter(shifted_BHW[:, None], 1, self._row, self._row + 1)
