"""SFNO as a whole: shapes, gradients, symmetry, noise, execution modes, and errors that suggest valid values."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from credit.errors import ConfigError
from credit.models.initialise import initial_values
from credit.models.lora import LoRA
from credit.models.registry import build_model
from credit.models.sfno.model import SFNO, SFNOBlock
from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks
from credit.parallel.domain.split import plan_domain
from credit.parallel.tensor.plan import read_plan
from credit.train.build.model import compile_blocks

from .small import NOISES, build, build_section, draw_fields, draw_noise, perturb

TWO_GRIDS = {"scale_factor": 2, "depth": 3}


@pytest.mark.parametrize("keys", [{}, TWO_GRIDS, {"row_embedding": False, "mlp_ratio": 0.5, "depth": 1}])
@pytest.mark.parametrize(
    "sizes",
    [
        {"image_height": 13, "pole_points": True, "frames": 2, "output_frames": 3, "vector_channels": (0, 1)},
        {"image_height": 8, "image_width": 17, "pole_points": False},
    ],
)
def test_shapes_and_a_gradient_for_every_parameter(keys: dict[str, Any], sizes: dict[str, Any]) -> None:
    model = perturb(build(sizes, **keys))
    y_BCTHW = model(draw_fields(model))
    assert y_BCTHW.shape == (2, *model.spec.out_shape)
    assert y_BCTHW.is_contiguous()
    y_BCTHW.square().mean().backward()
    without_gradient = [name for name, weight in model.named_parameters() if not weight.grad.abs().max() > 0]
    assert without_gradient == []


def test_default_sizes_on_the_grid_of_the_quickstart() -> None:
    sizes = {"image_height": 32, "image_width": 64, "in_channels": 16, "out_channels": 6, "pole_points": False}
    model = build(sizes, dim=None, depth=None)
    num_parameters = sum(weight.numel() for weight in model.parameters())
    assert 1e6 < num_parameters < 3e6
    # The output is small compared with true changes, which have variance 1, so training starts close to persistence.
    assert 0.02 < model(draw_fields(model, batch=1)).std() < 0.5
    assert model.transforms[0].max_degree == 21


@pytest.mark.parametrize("keys", [{}, {"scale_factor": 2, "depth": 2}])
def test_rotation_in_longitude(keys: dict[str, Any]) -> None:
    """The shift may be any number of columns. With an inner grid, it must be a number of columns of this grid."""
    model = perturb(build(**keys)).double()
    x_BCTHW = draw_fields(model).double()
    shift = 3 * keys.get("scale_factor", 1)
    rotated_BCTHW = model(x_BCTHW.roll(shift, dims=-1))
    torch.testing.assert_close(rotated_BCTHW, model(x_BCTHW).roll(shift, dims=-1), rtol=0, atol=1e-12)


def test_blocks_change_the_variance_little() -> None:
    """Each block multiplies the variance by 0.95 to 1.35; the first tokens have variance 1."""
    model = build({"image_height": 16, "image_width": 32, "pole_points": False}, dim=48, depth=4)
    x_BCHW = draw_fields(model)[:, :, 0]
    for transform in model.transforms:
        transform.load_tables(x_BCHW)
    x_BHWC = torch.randn(2, 16, 32, 48, generator=torch.Generator().manual_seed(0))
    for block in model.blocks:
        y_BHWC = block(x_BHWC)
        assert 0.95 < (y_BHWC.var() / x_BHWC.var()).item() < 1.35
        x_BHWC = y_BHWC


@pytest.mark.parametrize("keys", [{}, TWO_GRIDS])
def test_noise(keys: dict[str, Any]) -> None:
    plain = build(**keys)
    model = build(**keys, noise=NOISES)
    x_BCTHW = draw_fields(model)
    noise = draw_noise(model)
    # The layers of noise start as zeros. Dropout has no such layers, and drops nothing for seeds of 0.
    noise_without_dropout = noise | {"dropout": torch.zeros_like(noise["dropout"])}
    assert torch.equal(model(x_BCTHW, noise_without_dropout), plain(x_BCTHW))
    assert torch.equal(model(x_BCTHW), plain(x_BCTHW))
    perturb(model)
    zero_noise = {kind: torch.zeros_like(values) for kind, values in noise.items()}
    without_noise = model(x_BCTHW, zero_noise)
    torch.testing.assert_close(without_noise, model(x_BCTHW))
    for kind, values in noise.items():
        assert not torch.allclose(model(x_BCTHW, zero_noise | {kind: values}), without_noise, atol=1e-4), kind
    model(x_BCTHW, noise).square().mean().backward()
    assert all(weight.grad.abs().max() > 0 for weight in model.parameters())


# Warnings are errors in tests. Dynamo itself raises these two.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("checkpoint", "keys"),
    [
        (False, TWO_GRIDS),
        pytest.param(True, {}, marks=pytest.mark.slow),
        pytest.param("selective", TWO_GRIDS, marks=pytest.mark.slow),
    ],
)
def test_compiled_and_recomputed_blocks_give_the_same(checkpoint: bool | str, keys: dict[str, Any]) -> None:
    torch._dynamo.reset()
    expected_model = perturb(build(**keys, noise=NOISES[:2]))
    model = perturb(build(**keys, noise=NOISES[:2]))
    if checkpoint:
        checkpoint_blocks(model, checkpoint)
    compile_blocks(model, backend="aot_eager")
    x_BCTHW = draw_fields(model)
    noise = {kind: draw_noise(model)[kind] for kind in ("global", "cell")}
    expected_BCTHW = expected_model(x_BCTHW, noise)
    y_BCTHW = model(x_BCTHW, noise)
    torch.testing.assert_close(y_BCTHW, expected_BCTHW)
    y_BCTHW.square().mean().backward()
    expected_BCTHW.square().mean().backward()
    for weight, expected in zip(model.parameters(), expected_model.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, expected.grad)


def test_bfloat16_autocast() -> None:
    model = build(**TWO_GRIDS)
    x_BCTHW = draw_fields(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_BCTHW = model(x_BCTHW)
        y_BCTHW.float().square().mean().backward()
    torch.testing.assert_close(y_BCTHW.float(), model(x_BCTHW), rtol=0.05, atol=0.02)
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


def test_initial_values_of_a_meta_model_are_those_of_a_real_one() -> None:
    expected = build(seed=7, noise=NOISES).state_dict()
    with torch.device("meta"):
        model = SFNO(build().spec, build_section(noise=NOISES))
    assert model(draw_fields(model).to("meta")).is_meta
    values = dict(initial_values(model, 7))
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], expected[name]) for name in expected)


def test_lora_adapts_the_mlps() -> None:
    model = build()
    linear = model.blocks[0].feed_forward.expand
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", LoRA(linear.weight, rank=2, alpha=2.0))
    x_BCTHW = draw_fields(model)
    torch.testing.assert_close(model(x_BCTHW), build()(x_BCTHW))
    model(x_BCTHW).square().mean().backward()
    assert linear.parametrizations.weight[0].b.grad.abs().max() > 0


def test_blocks_declare_how_they_may_be_split() -> None:
    model = build(depth=3)
    assert sum(isinstance(module, SFNOBlock) for module in model.modules()) == 3
    groups = read_plan("blocks.0", model.blocks[0])
    layers = [(layer.path, layer.kind, layer.num_units) for group in groups for layer in group]
    assert layers == [
        ("blocks.0.feed_forward.expand", "colwise", 16),
        ("blocks.0.feed_forward.contract", "rowwise", 16),
    ]


@pytest.mark.parametrize(
    ("sizes", "keys", "message"),
    [
        (
            {},
            {"scale_factor": 3},
            r"model\.scale_factor: 3 leaves 3 x 5 cells of 9 x 16 for the inner grid, .* 4 x 8; .* valid value is 2",
        ),
        ({}, {"scale_factor": 2, "depth": 1}, r"model\.depth: 1 block .*model\.depth to 2 or more"),
        ({}, {"max_degree": 8}, r"model\.max_degree: 8 is more than 7, .*9 x 16 cells.*set it to 7 or less"),
        ({}, {"max_degree": 4, "scale_factor": 2}, r"model\.max_degree: 4 is more than 3, .*4 x 8 cells"),
        (
            {},
            {"noise": [{"kind": "dropout", "memory": ["step", "6h", "forecast"]}]},
            r"model\.noise: 3 values of memory share 2 layers",
        ),
    ],
)
def test_errors_name_what_would_work(sizes: dict[str, Any], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(sizes, **keys)


@pytest.mark.parametrize("key", ["dim", "depth", "max_degree", "scale_factor", "mlp_ratio"])
def test_sizes_of_zero_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        build_section(**{key: 0})


def test_values_that_an_error_proposes_work() -> None:
    for keys in ({"scale_factor": 2}, {"max_degree": 7}, {"max_degree": 3, "scale_factor": 2}):
        model = build(**keys)
        assert model(draw_fields(model)).isfinite().all()


def test_domain_parallelism_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=re.escape("domain parallelism: SFNO does not declare")):
        plan_domain(build(), 2)


def test_input_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"input is \(1, 3, 1, 9, 20\), expected a batch of \(3, 1, 9, 16\)"):
        build()(torch.randn(1, 3, 1, 9, 20))


def test_the_registry_builds_it() -> None:
    section = build_section(noise=NOISES)
    assert type(build_model(build().spec, section)) is SFNO
