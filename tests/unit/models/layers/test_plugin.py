"""A small network built only from `credit.models.layers`, as in a plugin."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor, nn

from credit.models import layers
from credit.models.initialise import initialise_


class WindowNetwork(nn.Module):
    """One stage of window attention between an embedding and a pixel-shuffle head; three input channels."""

    def __init__(self) -> None:
        super().__init__()
        self.padding = layers.SpherePadding(lat=(4, 4), lon=(8, 8), vector_channels=(0, 1))
        self.embed = layers.CrossScaleEmbedding(3, 16, (2, 4, 8), stride=2, padding=self.padding)
        self.layers = nn.ModuleList(layers.TransformerLayer(16, 8, local_window=4, global_window=2) for _ in range(2))
        self.norm = layers.LayerNorm(16, layers.ConditionDims(vector=4))
        self.head = layers.SubpixelHead(16, 3)
        layers.apply_spectral_norm(self)

    def forward(self, x_BCHW: Tensor, noise_BK: Tensor) -> Tensor:
        x_BHWC = self.embed(x_BCHW)
        for layer in self.layers:
            x_BHWC = layer(x_BHWC)
        x_BHWC = self.norm(x_BHWC, layers.Conditions(noise_BK))
        return self.padding.crop(self.head(x_BHWC.permute(0, 3, 1, 2)))


class KeepTokens(nn.Module):
    """Replacement for an attention layer that returns the tokens as its update."""

    def forward(self, x_BHWC: Tensor, conditions: layers.Conditions) -> Tensor:
        return x_BHWC


def test_a_network_of_shared_layers_trains() -> None:
    torch.manual_seed(0)
    model = WindowNetwork()
    initialise_(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x_BCHW = torch.randn(2, 3, 16, 24)
    noise_BK = torch.randn(2, 4)
    losses = []
    for _ in range(5):
        layers.advance_power_iterations(model)
        y_BCHW = model(x_BCHW, noise_BK)
        assert y_BCHW.shape == x_BCHW.shape
        loss = (y_BCHW - x_BCHW).square().mean()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_network_without_attention_commutes_with_a_shift_in_longitude() -> None:
    """Attention is replaced, because its windows end at the edges of the padded grid and break the symmetry."""
    model = WindowNetwork().eval()
    initialise_(model, seed=0)
    for layer in model.layers:
        layer.short_attention = KeepTokens()
        layer.long_attention = KeepTokens()
    x_BCHW = torch.randn(1, 3, 16, 24)
    noise_BK = torch.zeros(1, 4)
    with torch.no_grad():
        shifted_BCHW = model(x_BCHW.roll(8, -1), noise_BK)
        torch.testing.assert_close(shifted_BCHW, model(x_BCHW, noise_BK).roll(8, -1))


def test_layers_need_no_weather_packages_and_no_config() -> None:
    script = """
import sys
import credit.models.layers
refused = ("xarray", "netCDF4", "zarr", "dask", "pydantic", "matplotlib", "credit.config", "credit.data")
print([name for name in refused if name in sys.modules])
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"
