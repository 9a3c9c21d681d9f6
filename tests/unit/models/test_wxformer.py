"""WXFormer as a whole: sizes, options, initial weights, and errors that suggest valid values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from credit.errors import ConfigError
from credit.models.initialise import initial_values
from credit.models.layers.transformer_layer import TransformerLayer
from credit.models.layers.up_sampling import SubpixelConv, pixel_shuffle
from credit.models.wxformer import WXFormer

from .small import SETTINGS, build, fields

STARTER = {
    "image_height": 181,
    "image_width": 360,
    "in_channels": 80,
    "out_channels": 84,
    "dim": [32, 64, 128, 256],
    "global_window_size": [8, 4, 2, 1],
    "local_window_size": 4,
    "decoder": "pixel_shuffle",
    "padding": {"lat": "auto", "lon": "auto"},
}
PUBLISHED_6H = {"image_height": 640, "image_width": 1280, "in_channels": 74, "out_channels": 71, "padding": {}}


def test_sizes_of_the_starter_and_the_published_model() -> None:
    with torch.device("meta"):
        starter = WXFormer.from_kwargs(**STARTER)
        published = WXFormer.from_kwargs(**PUBLISHED_6H)
    # The reference also counts an embedding that it never uses: 80 x 32 weights, a bias and a norm.
    assert sum(p.numel() for p in starter.parameters()) == 10_311_984 - (80 * 32 + 32 + 2 * 32)
    assert (starter.padding.lat, starter.padding.lon) == ((37, 38), (12, 12))
    assert round(sum(p.numel() for p in published.parameters()) / 1e6, 1) == 124.4
    assert (published.padding.lat, published.padding.lon) == ((80, 80), (80, 80))
    assert all(tensor.is_meta for tensor in published.state_dict().values())
    assert starter(torch.empty(1, 80, 1, 181, 360, device="meta")).shape == (1, 84, 1, 181, 360)


@pytest.mark.parametrize("decoder", ["pixel_shuffle", "transposed"])
@pytest.mark.parametrize("spectral", [True, False])
def test_several_frames_go_in_and_out(decoder: str, spectral: bool) -> None:
    model = build(frames=2, output_frames=3, out_channels=4, decoder=decoder, use_spectral_norm=spectral)
    y = model(torch.randn(2, 3, 2, 16, 24))
    assert y.shape == (2, 4, 3, 16, 24)
    assert y.is_contiguous()
    y.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_channels_vary_slower_than_frames() -> None:
    """The first convolution sees channel c of frame t at c * T + t."""
    model = build(frames=2, use_spectral_norm=False).eval()
    x = torch.randn(1, 3, 2, 16, 24)
    folded = build(in_channels=6, use_spectral_norm=False).eval()
    folded.load_state_dict(model.state_dict())
    channels = torch.stack([x[:, c, t] for c in range(3) for t in range(2)], dim=1)
    torch.testing.assert_close(model(x), folded(channels[:, :, None]), rtol=0, atol=0)


def test_pixel_shuffle_and_icnr() -> None:
    x = torch.randn(2, 12, 3, 5)
    assert torch.equal(pixel_shuffle(x), F.pixel_shuffle(x, 2))
    conv = build(use_spectral_norm=False).decoder.blocks[0].up
    assert isinstance(conv, SubpixelConv)
    with torch.no_grad():
        y = conv(torch.randn(1, conv.in_channels, 4, 4))
    for row, column in ((0, 1), (1, 0), (1, 1)):
        assert torch.equal(y[..., row::2, column::2], y[..., ::2, ::2])


def test_weights_depend_on_seed_and_name_alone() -> None:
    state = build(seed=0).state_dict()
    same_seed_state = build(seed=0).state_dict()
    other_seed_state = build(seed=1).state_dict()
    assert all(torch.equal(state[name], same_seed_state[name]) for name in state)
    assert not torch.equal(
        state["stages.0.embed.convs.0.parametrizations.weight.original"],
        other_seed_state["stages.0.embed.convs.0.parametrizations.weight.original"],
    )
    # A deeper model shares the layers that both have, and so does one without spectral norm.
    deeper_state = build(depth=[1, 2, 1, 1]).state_dict()
    plain_state = build(use_spectral_norm=False).state_dict()
    assert all(torch.equal(state[name], deeper_state[name]) for name in state)
    for name, value in plain_state.items():
        # Spectral norm moves a weight to the list of its parametrizations.
        parametrized_name = name.replace("weight", "parametrizations.weight.original")
        assert torch.equal(value, state.get(name, state.get(parametrized_name)))


def test_initial_values_of_a_meta_model_are_those_of_a_real_one() -> None:
    expected = build(seed=7).state_dict()
    with torch.device("meta"):
        model = WXFormer.from_kwargs(**SETTINGS)
        values = dict(initial_values(model, 7))
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], expected[name]) for name in expected)


def test_a_fresh_model_gives_fields_of_order_one() -> None:
    y = build().eval()(fields(batch=2))
    assert 0.01 < y.std() < 3


def test_construction_follows_the_global_seed() -> None:
    models = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        models.append(next(WXFormer.from_kwargs(**SETTINGS).parameters()))
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


def test_blocks_declare_how_they_may_be_split() -> None:
    model = build()
    units = [m for m in model.modules() if getattr(m, "_fsdp2_shard", False)]
    assert len(units) == sum(SETTINGS["depth"]) + len(model.decoder.blocks)
    layer = next(m for m in units if isinstance(m, TransformerLayer))
    linear_layers = {
        name for name, m in layer.named_modules() if isinstance(m, torch.nn.Linear) and "position_bias" not in name
    }
    split_layers = {name for name, kind in TransformerLayer._tp_plan.items() if kind != "replicated"}
    assert split_layers == linear_layers
    assert TransformerLayer._tp_plan.keys() - split_layers == {
        "short_attention.position_bias",
        "long_attention.position_bias",
    }


def test_exact_options_change_the_function() -> None:
    x = fields()
    padding = {**SETTINGS["padding"], "pole": "exact"}
    outputs = [
        build(**changes).eval()(x)
        for changes in (
            {},
            {"position_bias_index": "exact"},
            {"padding": padding, "vector_channels": [0, 1]},
            {"padding": padding, "pole_points": True},
        )
    ]
    for i, output in enumerate(outputs):
        assert not any(torch.allclose(output, other) for other in outputs[:i])


def test_interpolates_where_strides_do_not_cover_the_grid() -> None:
    changes = {"image_height": 17, "padding": {"mode": "mirror", "lat": [8, 8], "lon": [4, 4]}}
    assert build(**changes)(torch.randn(1, 3, 1, 17, 24)).shape == (1, 3, 1, 17, 24)
    with pytest.raises(ConfigError, match=r"model\.interp: False.*16 x 24 cells for a grid of 17 x 24"):
        build(**changes, interp=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"padding": {"lat": [8, 4], "lon": [4, 4]}},
            r"model\.local_window_size: window 4 does not divide the 14 cells of stage 0, from 16 \+ 8 \+ 4 = 28 cells "
            r"along lat padded; .* multiple of 16; the nearest is model\.padding\.lat: \[8, 8\]",
        ),
        (
            {"padding": {"lat": [8, 8], "lon": [8, 8]}},
            r"stage 2 has 5 .*stage 3 has 2, .*model\.padding\.lon: \[12, 12\]",
        ),
        ({"global_window_size": [3, 2, 1, 1]}, r"model\.global_window_size: window 3 .* stage 0.*multiple of 48"),
        ({"dim": [8, 16, 32, 48]}, r"model\.dim: \[8, 16, 32, 48\] must double.*\[8, 16, 32, 64\]"),
        ({"dim_head": 3}, r"model\.dim_head: 3 does not divide the 8 channels .* nearest divisor is 2"),
        ({"depth": [1, 1, 1]}, r"model\.depth: \[1, 1, 1\]: List should have at least 4 items"),
        ({"depth": [1, 1, 0, 1]}, r"model\.depth: .* 1 or more"),
        ({"cross_embed_strides": [2, 4, 2, 2]}, r"model\.cross_embed_strides: .* stage 1 must have stride 2"),
        ({"cross_embed_kernel_sizes": [[1], [2], [2], [2]]}, r"model\.cross_embed_kernel_sizes: \[1\] in stage 0"),
        ({"decoder": "pixelshuffle"}, r"model\.decoder: 'pixelshuffle': .*'pixel_shuffle'"),
        ({"position_bias_index": "exactly"}, r"model\.position_bias_index"),
        ({"vector_channels": [3]}, r"vector_channels: \[3\] are not among the 3 input channels"),
    ],
)
def test_errors_name_what_would_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**changes)


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(ConfigError, match='use_spectral_nrom: unknown argument.*"use_spectral_norm"'):
        WXFormer.from_kwargs(**SETTINGS, use_spectral_nrom=False)


def test_input_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"input is \(1, 3, 1, 16, 20\), expected a batch of \(3, 1, 16, 24\)"):
        build()(torch.randn(1, 3, 1, 16, 20))
