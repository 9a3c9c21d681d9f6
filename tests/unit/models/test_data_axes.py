"""Extension of weights to new channels: trained channels keep their outputs, and new channels can be trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from credit.channels import Channel, ChannelMap
from credit.config.registry import MODELS
from credit.grid import LatLonGrid
from credit.models.base import ForecastModel, ModelSpec
from credit.models.data_axes import ChannelAxis, extend_channels, find_channel_axes, find_row_dims, interpolate_rows
from credit.models.layers.spectral_norm import advance_power_iterations
from credit.models.registry import build_model

FRAMES = 2
# Config sections of all networks. Variants differ in the options that change layers which read or write channels.
WXFORMER = {
    "type": "wxformer",
    "dim": [8, 16, 32, 64],
    "depth": [1, 1, 1, 1],
    "dim_head": 8,
    "global_window_size": [4, 2, 2, 1],
    "local_window_size": [4, 2, 2, 1],
}
SECTIONS: dict[str, dict[str, Any]] = {
    "wxformer": WXFORMER,
    "wxformer transposed": {**WXFORMER, "decoder": "transposed"},
    "wxformer without spectral norm": {**WXFORMER, "use_spectral_norm": False},
    "unet": {"type": "unet", "dim": [8, 16], "depth": [1, 1], "dim_head": 8, "attention_levels": 1},
    "swin": {"type": "swin", "dim": 16, "depth": 2, "heads": 2, "window_size": 2, "num_groups": 4},
    "swin with spectral norm": {
        "type": "swin", "dim": 16, "depth": 2, "heads": 2, "window_size": 2, "num_groups": 4, "use_spectral_norm": True
    },
    "sfno": {"type": "sfno", "dim": 16, "depth": 2},
    "graph": {"type": "graph", "dim": 16, "depth": 1, "refinements": 1},
}  # fmt: skip


def build_channels(prognostic: str, forcing: str, diagnostic: str) -> ChannelMap:
    """Return a channel map; each letter is the name of a channel."""
    channels = []
    for names, group in ((prognostic, "prognostic"), (forcing, "dynamic_forcing"), (diagnostic, "diagnostic")):
        channels += [Channel(name, name, None, group) for name in names]
    return ChannelMap(channels)


def build_network(section: dict[str, Any], channels: ChannelMap) -> ForecastModel:
    """Return a network with two input frames and two output frames on 16 x 32 cells."""
    spec = ModelSpec(channels, LatLonGrid.equiangular(16, 32, False), FRAMES, FRAMES)
    return build_model(spec, MODELS.find_section(section["type"]).model_validate(section))


@pytest.mark.parametrize("name", SECTIONS)
def test_trained_channels_keep_their_outputs_and_new_ones_can_be_trained(name: str) -> None:
    torch.manual_seed(0)
    trained_channels = build_channels("abc", "f", "y")
    # The extended map has new channels before, between and after the trained ones, and the forcing f is prognostic.
    extended_channels = build_channels("nabcfm", "gh", "xyz")
    base = build_network(SECTIONS[name], trained_channels).eval()
    network = build_network(SECTIONS[name], extended_channels).eval()

    stored = base.state_dict()
    axes = find_channel_axes(network)
    assert axes.keys() == find_channel_axes(base).keys()
    extended = extend_channels(axes, stored, trained_channels, extended_channels)
    network.load_state_dict({**stored, **extended})

    x_BCTHW = torch.randn(2, *network.spec.in_shape)
    input_names = [channel.name for channel in extended_channels.input]
    output_names = [channel.name for channel in extended_channels.output]
    base_inputs = [input_names.index(channel.name) for channel in trained_channels.input]
    base_outputs = [output_names.index(channel.name) for channel in trained_channels.output]
    with torch.no_grad():
        y_BCTHW = network(x_BCTHW)
        torch.testing.assert_close(y_BCTHW[:, base_outputs], base(x_BCTHW[:, base_inputs]), rtol=1e-5, atol=1e-6)
    new_outputs = [index for index in range(len(output_names)) if index not in base_outputs]
    assert not y_BCTHW[:, new_outputs].any()

    # A few optimizer steps change the entries of every channel in every tensor.
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    for _ in range(3):
        advance_power_iterations(network)
        optimizer.zero_grad()
        (network(x_BCTHW) - torch.randn_like(y_BCTHW)).square().mean().backward()
        optimizer.step()
    for key, tensor_axes in axes.items():
        is_singular_vector = key.endswith((".u", ".v"))
        for axis in tensor_axes:
            names = input_names if axis.group == "input" else output_names
            size = axis.outer * len(names) * axis.inner
            change = (network.state_dict()[key] - before[key]).narrow(axis.dim, axis.start, size)
            change = change.unflatten(axis.dim, (axis.outer, len(names), axis.inner)).movedim(axis.dim + 1, 0)
            for channel, channel_name in enumerate(names):
                assert is_singular_vector or change[channel].any(), (key, channel_name)


def test_entries_are_copied_by_name() -> None:
    # There is one entry before the channels and one after them. Between them, the channels occur twice, with three
    # entries each.
    stored = torch.arange(1.0, 15.0)
    axis = ChannelAxis("input", 0, start=1, outer=2, inner=3)
    extended = axis.extend(stored, ["b", "a"], ["a", "new", "b"])
    expected = [1, 5, 6, 7, 0, 0, 0, 2, 3, 4, 11, 12, 13, 0, 0, 0, 8, 9, 10, 14]
    assert extended.tolist() == expected


def test_spectral_norm_of_an_extended_weight_stays_the_same() -> None:
    trained_channels, extended_channels = build_channels("abc", "", ""), build_channels("anbcm", "", "")
    base = build_network(SECTIONS["wxformer"], trained_channels)
    network = build_network(SECTIONS["wxformer"], extended_channels)
    for _ in range(50):
        advance_power_iterations(base)
    stored = base.state_dict()
    network.load_state_dict(
        {**stored, **extend_channels(find_channel_axes(network), stored, trained_channels, extended_channels)}
    )
    for (path, module), (_, extended_module) in zip(base.named_modules(), network.named_modules(), strict=True):
        if hasattr(module, "parametrizations"):
            norm = torch.linalg.matrix_norm(module.weight.flatten(1), ord=2)
            extended_norm = torch.linalg.matrix_norm(extended_module.weight.flatten(1), ord=2)
            torch.testing.assert_close(extended_norm, norm, rtol=1e-4, atol=0, msg=path)


@pytest.mark.parametrize("name", ["wxformer", "unet", "swin", "sfno", "graph"])
def test_weights_do_not_depend_on_the_grid_or_can_be_interpolated(name: str) -> None:
    section = SECTIONS[name]
    section_changes = {
        "wxformer": {"padding": {"lat": [12, 12], "lon": [8, 8]}},
        "sfno": {"max_degree": 10},
    }
    channels = build_channels("abc", "f", "y")
    trained_grid = LatLonGrid.equiangular(16, 32, False)
    new_grid = LatLonGrid.equiangular(24, 48, False)
    network = build_network(section, channels)
    spec = ModelSpec(channels, new_grid, FRAMES, FRAMES)
    finer = build_model(spec, MODELS.find_section(name).model_validate({**section, **section_changes.get(name, {})}))
    stored = network.state_dict()
    interpolated = interpolate_rows(find_row_dims(finer), stored, trained_grid, new_grid)
    assert interpolated.keys() == ({"row_embedding.vectors"} if name == "sfno" else set())
    finer.load_state_dict({**stored, **interpolated})


def test_rows_are_interpolated_in_latitude() -> None:
    trained_grid, new_grid = LatLonGrid.equiangular(6, 12, False), LatLonGrid.equiangular(9, 18, True)
    stored = {"vectors": torch.from_numpy(trained_grid.lat.copy())[None].repeat(2, 1)}
    (rows,) = interpolate_rows({"vectors": 1}, stored, trained_grid, new_grid).values()
    # The rows on the poles lie beyond the outermost rows of the trained grid.
    expected = torch.from_numpy(new_grid.lat.copy()).clamp(-75, 75)
    torch.testing.assert_close(rows, expected[None].repeat(2, 1))
