"""Example of a model: a small window-attention network with spherical padding, built from the shared layers."""

from __future__ import annotations

from pydantic import Field
from torch import nn

from credit.config.sections.model import ModelSection
from credit.models.base import ForecastModel, ModelSpec
from credit.models.layers import (
    CrossScaleEmbedding,
    SpherePadding,
    SubpixelHead,
    TransformerLayer,
    apply_spectral_norm,
    auto_padding,
)
from credit.models.registry import register_model


class WindowNetworkSection(ModelSection):
    """Config section of the network."""

    width: int = Field(16, gt=0, description="Channels of a token.")
    layers: int = Field(2, ge=1, description="Number of transformer layers.")
    window: int = Field(4, ge=1, description="Edge of an attention window in tokens.")


@register_model("window_network", WindowNetworkSection)
class WindowNetwork(ForecastModel):
    """Network that computes window attention at half the resolution of the grid."""

    output_is_new = True

    def __init__(self, spec: ModelSpec, section: WindowNetworkSection) -> None:
        super().__init__(spec, section)
        rows, columns = spec.grid.shape
        # The padded field must contain whole windows of tokens. A token has 2 x 2 cells.
        multiple = 2 * section.window
        vector_channels = []
        for channel in spec.vector_channels:
            vector_channels += [channel * spec.input_frames + frame for frame in range(spec.input_frames)]
        self.padding = SpherePadding(
            lat=auto_padding(rows, multiple, (2,)),
            lon=auto_padding(columns, multiple, (2,)),
            skip=int(spec.grid.has_pole_points),
            vector_channels=tuple(vector_channels),
        )
        in_channels = spec.in_channels * spec.input_frames
        self.embedding = CrossScaleEmbedding(in_channels, section.width, (2, 4), 2, self.padding)
        self.layers = nn.ModuleList(
            TransformerLayer(
                section.width,
                4,
                local_window=section.window,
                global_window=section.window,
                bias_index="exact",
            )
            for _ in range(section.layers)
        )
        self.head = SubpixelHead(section.width, spec.out_channels * spec.output_frames)
        apply_spectral_norm(self)

    def forward(self, x_BCTHW, condition=None):
        """Return (B, out_channels, output_frames, H, W)."""
        tokens_BHWC = self.embedding(x_BCTHW.flatten(1, 2))
        for layer in self.layers:
            tokens_BHWC = layer(tokens_BHWC)
        y_BCHW = self.head(tokens_BHWC.permute(0, 3, 1, 2), (self.padding.lat, self.padding.lon))
        return y_BCHW.unflatten(1, (self.spec.out_channels, self.spec.output_frames)).contiguous()

    @classmethod
    def convert_published_state(cls, state, section):
        """Return a state dict of this class: the other implementation calls the embedding ``stem``."""
        return {name.replace("stem.", "embedding.", 1): value for name, value in state.items()}
