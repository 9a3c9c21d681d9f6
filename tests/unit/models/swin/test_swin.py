"""Swin as a whole: shapes, gradients, shifts in longitude, noise, wrappers, errors that suggest valid values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from credit.errors import ConfigError
from credit.models.base import ModelSpec
from credit.models.inference import prepare_for_inference
from credit.models.initialise import initial_values
from credit.models.layers.norm import GroupNorm
from credit.models.lora import apply_lora, initial_adapters
from credit.models.noise.noise_embedding import NoiseFieldEmbedding
from credit.models.registry import build_model
from credit.models.swin import Swin
from credit.models.swin.section import SwinSection
from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks
from credit.parallel.domain.split import plan_domain
from credit.train.build.model import compile_blocks

SETTINGS: dict[str, Any] = {
    "image_height": 16,
    "image_width": 24,
    "in_channels": 4,
    "out_channels": 3,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "num_groups": 4,
    "window_size": 2,
}
NOISE = [
    {"kind": "global", "channels": 3},
    {"kind": "cell", "channels": 2},
    {"kind": "spherical", "channels": 2, "lengths": [1000, 3000]},
    {"kind": "dropout", "rate": 0.3},
]


def build(seed: int = 0, **changes: Any) -> Swin:
    """Return a small network with weights of `seed`."""
    model = Swin.from_kwargs(**{**SETTINGS, **changes})
    model.initialise(seed)
    return model


def draw_fields(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def draw_noise(batch: int = 2) -> dict[str, torch.Tensor]:
    """Return noise of every kind in `NOISE`."""
    return {
        "global": draw_fields(batch, 3),
        "cell": draw_fields(batch, 2, 16, 24),
        "spherical": draw_fields(batch, 2, 16, 24),
        "dropout": torch.arange(1, batch + 1)[:, None],
    }


@pytest.mark.parametrize("spectral", [True, False])
@pytest.mark.parametrize("edges", ["sphere", "published"])
def test_odd_rows_several_frames_and_vectors(edges: str, spectral: bool) -> None:
    model = build(
        image_height=17, pole_points=True, frames=2, output_frames=2, vector_channels=(0, 1, 3), edges=edges,
        use_spectral_norm=spectral,
    )  # fmt: skip
    y_BCTHW = model(draw_fields(2, 4, 2, 17, 24))
    assert y_BCTHW.shape == (2, 3, 2, 17, 24)
    assert y_BCTHW.is_contiguous()
    y_BCTHW.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize(
    ("grid", "settings"),
    [
        ((32, 64), {}),
        ((181, 360), {}),
        ((181, 360), {"window_size": 9}),
        ((721, 1440), {}),
        ((721, 1440), {"patch_size": 4, "window_size": 10}),
        ((721, 1440), {"patch_size": 4, "window_size": 7, "edges": "published", "padding": None}),
    ],
)
def test_grids(grid: tuple[int, int], settings: dict[str, Any]) -> None:
    """Check the sizes of the defaults on grids with and without rows on the poles, on the meta device."""
    with torch.device("meta"):
        sizes = {"image_height": grid[0], "image_width": grid[1], "in_channels": 20, "out_channels": 10}
        model = Swin.from_kwargs(**sizes, pole_points=grid[0] % 2 == 1, **settings)
        assert model(torch.empty(1, 20, 1, *grid)).shape == (1, 10, 1, *grid)
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 3e6


@pytest.mark.parametrize(
    ("columns", "settings", "window"),
    [
        (64, {}, 4),
        (1440, {}, 4),
        (1440, {"patch_size": 4}, 4),
        # 90 tokens: 3 and 5 are equally near to 4, and the larger one is chosen.
        (360, {}, 5),
        (72, {}, 3),
        (28, {}, 7),
        (30, {"edges": "published", "padding": None}, 4),
        (360, {"window_size": 9}, 9),
    ],
)
def test_window_of_auto(columns: int, settings: dict[str, Any], window: int) -> None:
    with torch.device("meta"):
        model = build(**{**SETTINGS, "image_width": columns, "window_size": "auto", **settings})
    assert model.layout.window == window
    assert {block.attention.window for block in model.blocks} == {window}
    # A run stores the number, so that a continued run has the same windows whatever `auto` would choose.
    section = SwinSection.model_validate({"type": "swin", **{"window_size": "auto", **settings}})
    assert section.resolve((16, columns)).window_size == window


def test_sizes_of_the_paper() -> None:
    """FuXi has 48 blocks of 1536 channels. No unit of sharding holds a large share of the parameters."""
    with torch.device("meta"):
        model = Swin.from_kwargs(
            image_height=721, image_width=1440, in_channels=70, out_channels=70, frames=2, patch_size=4, dim=1536,
            depth=48, heads=8, window_size=9,
        )  # fmt: skip
    units = [module for module in model.modules() if getattr(module, "_fsdp2_shard", False)]
    sizes = [sum(parameter.numel() for parameter in unit.parameters()) for unit in units]
    total = sum(parameter.numel() for parameter in model.parameters())
    assert 1.4e9 < total < 1.6e9
    assert len(units) == 52 and sum(sizes) == total
    assert max(sizes) < 0.05 * total


def test_a_shift_by_a_window_in_longitude_shifts_the_output() -> None:
    """The columns are periodic: a shift of the input by a window of tokens shifts the output by as many columns."""
    model = build().eval()
    x_BCTHW = draw_fields(1, 4, 1, 16, 24)
    columns_of_window = 2 * SETTINGS["window_size"] * model.embedding.patch_size
    shifted = model(x_BCTHW.roll(columns_of_window, -1))
    torch.testing.assert_close(shifted, model(x_BCTHW).roll(columns_of_window, -1), rtol=0, atol=1e-6)
    # With the published masks at the edges, the output depends on the first longitude.
    published = build(edges="published").eval()
    shifted = published(x_BCTHW.roll(columns_of_window, -1))
    difference = shifted - published(x_BCTHW).roll(columns_of_window, -1)
    assert difference.abs().max() > 1e-3


def test_frames_are_neighbouring_channels() -> None:
    model = build(frames=2).eval()
    folded = build(in_channels=8).eval()
    folded.load_state_dict(model.state_dict())
    x_BCTHW = draw_fields(1, 4, 2, 16, 24)
    torch.testing.assert_close(model(x_BCTHW), folded(x_BCTHW.flatten(1, 2)[:, :, None]), rtol=0, atol=0)


def test_the_first_output_is_small_but_not_zero() -> None:
    y_BCTHW = build()(draw_fields(2, 4, 1, 16, 24))
    assert 0.01 < y_BCTHW.std() < 0.3


def test_initial_values_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Swin.from_kwargs(**SETTINGS, use_spectral_norm=True, noise=NOISE)
    values = dict(initial_values(model, 3))
    assert values.keys() == model.state_dict().keys()
    expected = build(3, use_spectral_norm=True, noise=NOISE).state_dict()
    assert all(torch.equal(values[name], expected[name]) for name in expected)


def test_new_noise_has_no_effect_and_trained_noise_has_one() -> None:
    plain = build().eval()
    model = build(noise=NOISE).eval()
    x_BCTHW = draw_fields(2, 4, 1, 16, 24)
    condition = draw_noise()
    # Dropout acts without training, so its seed is set to 0, which drops nothing.
    without_dropout = {**condition, "dropout": torch.zeros(2, 1, dtype=torch.int64)}
    torch.testing.assert_close(model(x_BCTHW, without_dropout), plain(x_BCTHW), rtol=0, atol=1e-6)
    assert (model(x_BCTHW, condition) - plain(x_BCTHW)).abs().max() > 1e-3
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "may_be_added", False):
                module.weight.normal_(std=0.3)
    reference = model(x_BCTHW, without_dropout)
    for kind in ("global", "cell", "spherical"):
        changed = model(x_BCTHW, {**without_dropout, kind: -condition[kind]})
        assert (changed - reference).abs().max() > 1e-3, kind
    assert isinstance(model.noise_embed, NoiseFieldEmbedding)


def test_norms_compute_in_float32_under_autocast() -> None:
    model = build()
    x_BCTHW = draw_fields(2, 4, 1, 16, 24)
    with torch.autocast("cpu", torch.bfloat16):
        y_BCTHW = model(x_BCTHW)
    assert any(isinstance(module, GroupNorm) for module in model.modules())
    torch.testing.assert_close(y_BCTHW.float(), model(x_BCTHW), rtol=0, atol=0.03)


# torch asks for the gradient of each input of a graph, and hides the warning by a filter that pytest replaces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_and_checkpointed_blocks_compute_the_same() -> None:
    x_BCTHW = draw_fields(1, 4, 1, 16, 24)
    model = build()
    model(x_BCTHW).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for wrap_blocks in (lambda copied: compile_blocks(copied, "aot_eager"), checkpoint_blocks):
        wrapped_model = copy.deepcopy(model)
        wrapped_model.zero_grad()
        wrap_blocks(wrapped_model)
        y_BCTHW = wrapped_model(x_BCTHW)
        torch.testing.assert_close(y_BCTHW, model(x_BCTHW), rtol=0, atol=1e-6)
        y_BCTHW.square().mean().backward()
        for parameter, gradient in zip(wrapped_model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_network_that_is_prepared_for_forecasts_computes_the_same_bits(dtype: torch.dtype | None) -> None:
    model = build(use_spectral_norm=True).eval()
    x_BCTHW = draw_fields(1, 4, 1, 16, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        expected = model(x_BCTHW)
        prepare_for_inference(model, dtype)
        assert torch.equal(model(x_BCTHW), expected)
    assert model.blocks[1].attention.position_bias.cached_bias is not None


def test_lora() -> None:
    model = build()
    x_BCTHW = draw_fields(1, 4, 1, 16, 24)
    expected = model(x_BCTHW)
    apply_lora(model, ["*.to_qkv", "*.contract", "embedding.project", "head"], rank=2, alpha=2.0)
    state = model.state_dict()
    for name, value in initial_adapters(model, 0):
        state[name].copy_(value)
    y_BCTHW = model(x_BCTHW)
    torch.testing.assert_close(y_BCTHW, expected, rtol=0, atol=1e-6)
    y_BCTHW.square().mean().backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert len(trained) == 2 * (2 + 2 + 2 + 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "model.heads: 3 does not divide model.dim: 16; the nearest divisor is 2"),
        ({"num_groups": 5}, "model.num_groups: 5 does not divide model.dim: 16; the nearest divisor is 4"),
        ({"window_size": 4}, r"model.window_size: 4 .* along lon; the nearest window that fits is 3"),
        ({"padding": {"lat": [1, 1]}}, r"18 cells of the padded grid along lat; model.padding.lat: \[4, 4\] fits"),
        ({"padding": {"lon": [4, 4]}}, r"model.padding.lon: \[4, 4\]: with model.edges: sphere .* \[0, 0\]"),
        (
            {"image_width": 44, "window_size": "auto"},
            "auto finds no window .* 44 columns .* different model.patch_size",
        ),
        ({"image_width": 22, "window_size": "auto"}, "auto finds no window .* 22 columns"),
        ({"image_width": 22}, r"choose a model.patch_size such that 2 \* patch_size divides 22"),
        ({"padding": None, "edges": "published", "patch_size": 20}, "model.patch_size: 20 is larger than the 16 cells"),
        (
            {"image_height": 17, "padding": None, "edges": "published", "interp": False},
            "model.interp: False, but .* 16",
        ),
        ({"padding": {"mode": "mirror"}}, "model.padding.pole: exact needs model.padding.mode: earth"),
        ({"padding": None, "image_height": 20, "edges": "published", "noise": NOISE}, "model.noise: cell: 10 x 12"),
        ({"vector_channels": (4,)}, r"vector_channels: \[4\] are not among the 4 input channels"),
    ],
)
def test_sizes_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**changes)


def test_torch_dropout_is_refused_on_divided_fields() -> None:
    with pytest.raises(ConfigError, match="attn_dropout, ff_dropout"):
        plan_domain(build(ff_dropout=0.1), 2)
    plan_domain(build(ff_dropout=0.1, noise=["dropout"]), 2)


def test_plan_has_a_rule_for_each_layer_that_reads_other_cells() -> None:
    plan = build(noise=NOISE, attn_dropout=0.1).plan_domain((2, 1))
    assert {"embedding", "down.conv", "up.conv", "crop", "noise", "blocks.1.attention"} <= plan.rules.keys()
    # The windows of the first block are not shifted.
    assert "blocks.0.attention" not in plan.rules
    assert "blocks.0.attention.seeded_dropout" in plan.rules


def test_the_registry_builds_it_with_defaults() -> None:
    spec = ModelSpec.from_sizes(image_height=32, image_width=64, in_channels=15, out_channels=6)
    with torch.device("meta"):
        assert isinstance(build_model(spec, SwinSection(type="swin")), Swin)
