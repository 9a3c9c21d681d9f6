"""U-Net as a whole: comparison with a second implementation, sizes, symmetry, initial values, execution modes."""

from __future__ import annotations

import copy

import pytest
import torch

from credit.models.base import ModelSpec
from credit.models.initialise import initial_values
from credit.models.lora import apply_lora
from credit.models.registry import build_model
from credit.models.unet.section import UNetSection
from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks
from credit.train.build.model import compile_blocks

from . import reference
from .small import SETTINGS, SIZES, build, draw_fields

NO_POLES = {"image_height": 16, "image_width": 24, "pole_points": False}


@pytest.mark.parametrize("sizes", [{}, NO_POLES, {"frames": 2, "output_frames": 2}])
def test_the_network_equals_the_second_implementation(sizes: dict) -> None:
    network = build(sizes).double().eval()
    x_BCTHW = draw_fields(network, batch=1, dtype=torch.float64)
    expected = reference.compute(network, x_BCTHW, SETTINGS["depth"], SETTINGS["dim_head"])
    torch.testing.assert_close(network(x_BCTHW), expected, rtol=0, atol=1e-12)


def test_frames_shapes_and_gradients() -> None:
    network = build({"frames": 2, "output_frames": 3})
    y_BCTHW = network(draw_fields(network))
    assert y_BCTHW.shape == (2, 3, 3, 27, 20)
    assert y_BCTHW.is_contiguous()
    y_BCTHW.square().mean().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in network.parameters())


def test_a_shift_in_longitude_shifts_the_output() -> None:
    network = build().double().eval()
    x_BCTHW = draw_fields(network, dtype=torch.float64)
    y_BCTHW = network(x_BCTHW)
    # One column of the coarsest level is four columns of the grid.
    shifted = network(x_BCTHW.roll(4, -1))
    torch.testing.assert_close(shifted, y_BCTHW.roll(4, -1), rtol=0, atol=1e-12)
    shifted_by_less = network(x_BCTHW.roll(2, -1))
    assert (shifted_by_less - y_BCTHW.roll(2, -1)).abs().max() > 1e-4


def test_latitude_is_an_input() -> None:
    """With input of the same value everywhere, rows differ by their latitude only, and columns do not differ."""
    network = build().double().eval()
    x_BCTHW = torch.ones(1, 4, 1, 27, 20, dtype=torch.float64)
    # The vector channels are zero, because their sign changes beyond the poles.
    x_BCTHW[:, 1:3] = 0
    y_BCTHW = network(x_BCTHW)
    torch.testing.assert_close(y_BCTHW, y_BCTHW.roll(4, -1), rtol=0, atol=1e-12)
    assert y_BCTHW[..., 8:18, 0].std() > 1e-4
    with torch.no_grad():
        network.latitude.weight.zero_()
    rows = network(x_BCTHW)[..., 8:18, 0]
    torch.testing.assert_close(rows[..., :1].expand_as(rows), rows, rtol=0, atol=1e-12)


def test_initial_values_of_a_meta_model_are_those_of_a_real_one() -> None:
    expected = build().state_dict()
    section = UNetSection.model_validate({"type": "unet", **SETTINGS})
    with torch.device("meta"):
        network = build_model(ModelSpec.from_sizes(**SIZES), section)
        values = dict(initial_values(network, 0))
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], expected[name]) for name in expected)


def test_sizes_of_the_default_and_of_the_published_network() -> None:
    spec = ModelSpec.from_sizes(image_height=121, image_width=240, in_channels=175, out_channels=83, pole_points=True)
    published = {"dim": [320, 640, 960, 1280], "depth": [4, 4, 4, 4], "dim_head": 64}
    with torch.device("meta"):
        default_network = build_model(spec, UNetSection(type="unet"))
        published_network = build_model(spec, UNetSection(type="unet", **published))
        x_BCTHW = torch.empty(1, 175, 1, 121, 240)
    assert default_network(x_BCTHW).shape == (1, 83, 1, 121, 240)
    assert [level.shape for level in default_network.levels] == [(121, 240), (61, 120), (31, 60), (16, 30)]
    assert 1e6 < count_parameters(default_network) < 3e6
    units = [module for module in published_network.modules() if getattr(module, "_fsdp2_shard", False)]
    assert len(units) == 16 + 3 + 2 + 20 + 3
    # No unit holds a large share of the parameters, and little is left outside of the units.
    total = count_parameters(published_network)
    sizes = [count_parameters(unit) for unit in units]
    assert max(sizes) < 0.1 * total
    assert sum(sizes) > 0.99 * total


def count_parameters(module: torch.nn.Module) -> int:
    """Return the number of values of all parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def test_a_new_network_predicts_small_changes() -> None:
    network = build().eval()
    y_BCTHW = network(draw_fields(network))
    assert 0.005 < y_BCTHW.std() < 0.1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # raised by dynamo itself
@pytest.mark.parametrize("checkpoint", [False, True, "selective"])
def test_compiled_and_checkpointed_blocks_give_the_same_values(checkpoint: bool | str) -> None:
    network = build({"image_height": 7, "image_width": 8}, dim=[4, 8], depth=[1, 1]).double()
    wrapped_network = copy.deepcopy(network)
    if checkpoint:
        checkpoint_blocks(wrapped_network, checkpoint)
    else:
        compile_blocks(wrapped_network, "aot_eager")
    x_BCTHW = draw_fields(network, dtype=torch.float64)
    for model in (network, wrapped_network):
        model(x_BCTHW).square().sum().backward()
    for expected, parameter in zip(network.parameters(), wrapped_network.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=0, atol=1e-12)


def test_bfloat16_autocast() -> None:
    network = build()
    x_BCTHW = draw_fields(network)
    expected = network(x_BCTHW)
    with torch.autocast("cpu", torch.bfloat16):
        y_BCTHW = network(x_BCTHW)
    assert y_BCTHW.dtype == torch.bfloat16
    y_BCTHW.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())
    assert 0 < (y_BCTHW - expected).norm() / expected.norm() < 0.05


def test_lora_begins_with_the_base_model_and_trains_the_adapters() -> None:
    network = build()
    x_BCTHW = draw_fields(network)
    expected = network(x_BCTHW)
    apply_lora(network, ["*.to_qkv", "*.to_out"], 2, 4.0)
    y_BCTHW = network(x_BCTHW)
    torch.testing.assert_close(y_BCTHW, expected, rtol=1e-5, atol=1e-6)
    y_BCTHW.square().mean().backward()
    trained = [name for name, parameter in network.named_parameters() if parameter.grad is not None]
    # Two adapters of two factors for each of the nine layers of attention.
    assert len(trained) == 9 * 2 * 2


def test_input_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"input is \(1, 4, 1, 26, 20\), expected a batch of \(4, 1, 27, 20\)"):
        build()(torch.randn(1, 4, 1, 26, 20))
