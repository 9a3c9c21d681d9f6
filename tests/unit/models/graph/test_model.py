"""The whole network: shapes, gradients, symmetry, noise, errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from credit.errors import ConfigError
from credit.models.base import ModelSpec
from credit.models.graph import GraphNetwork
from credit.models.graph.section import GraphSection
from credit.models.initialise import find_addable_parameters, initial_values
from credit.models.registry import build_model

from .small import PROCESSORS, build, build_grid, build_section, build_spec, draw_noise, fields

NOISE_CHANNELS = 4


@pytest.mark.parametrize("processor", PROCESSORS)
def test_shape_and_a_gradient_for_every_parameter(processor: str) -> None:
    model = build(processor=processor)
    y = model(fields(batch=2))
    assert y.shape == (2, 3, 2, 9, 24)
    assert y.is_contiguous()
    y.square().mean().backward()
    without_gradient = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None or not parameter.grad.abs().max() > 0:
            without_gradient.append(name)
    assert without_gradient == []


@pytest.mark.parametrize("processor", PROCESSORS)
def test_samples_of_a_batch_are_independent(processor: str) -> None:
    model = build(processor=processor).double()
    x = fields(batch=3, dtype=torch.float64)
    single = torch.cat([model(x[b : b + 1]) for b in range(3)])
    torch.testing.assert_close(model(x), single, rtol=0, atol=1e-12)
    assert (single[0] - single[1]).abs().max() > 1e-3


def test_default_sizes_on_the_quickstart_grid() -> None:
    spec = ModelSpec.from_sizes(image_height=32, image_width=64, in_channels=14, out_channels=7)
    with torch.device("meta"):
        model = build_model(spec, type(build_section())(type="graph"))
    assert model.refinements == 2
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 3e6
    assert model(torch.empty(2, 14, 1, 32, 64, device="meta")).shape == (2, 7, 1, 32, 64)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_initial_values_of_a_meta_model_are_those_of_a_real_one(processor: str) -> None:
    expected = build(seed=7, processor=processor).state_dict()
    with torch.device("meta"):
        model = GraphNetwork(build_spec(), build_section(processor=processor))
        values = dict(initial_values(model, 7))
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], expected[name]) for name in expected)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_fresh_model_is_near_persistence(processor: str) -> None:
    y = build(processor=processor)(fields(batch=2))
    assert 0.003 < y.std() < 0.3


def ignore_longitude(model: GraphNetwork) -> None:
    """Set the weights of the sine and cosine of the longitude to zero, in place."""
    with torch.no_grad():
        for layer in (model.encoder.embed_grid.expand[1], model.encoder.embed_mesh.expand[0]):
            layer.weight[:, 1:] = 0


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_third_of_a_turn_turns_the_output(processor: str) -> None:
    """The mesh has a threefold axis through the poles. Only the longitudes among the features break this symmetry."""
    # With the first column at 5 degrees no point except the poles lies on an edge between two faces.
    spec = replace(build_spec(), grid=build_grid(5.0))
    model = build(spec, processor=processor).double()
    x = fields(batch=2, dtype=torch.float64)
    assert (model(x.roll(8, -1)) - model(x).roll(8, -1)).abs().max() > 1e-3
    ignore_longitude(model)
    torch.testing.assert_close(model(x.roll(8, -1)), model(x).roll(8, -1), rtol=0, atol=1e-10)
    # A rotation by another angle does not map the mesh onto itself.
    assert (model(x.roll(4, -1)) - model(x).roll(4, -1)).abs().max() > 1e-3


@pytest.mark.parametrize("processor", PROCESSORS)
def test_an_output_depends_on_the_whole_globe(processor: str) -> None:
    """With the edges of the icosahedron, or enough layers of attention, an output depends on every grid point."""
    model = build(processor=processor, depth=4)
    x = fields().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[0, 0, 0, 4, 12], x)
    assert (gradient.abs().amax(dim=(0, 1, 2)) > 0).all()


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("kind", GraphNetwork.conditions)
def test_noise(kind: str, processor: str) -> None:
    noise_section = {"kind": kind, "channels": NOISE_CHANNELS}
    model = build(processor=processor, noise=[noise_section])
    plain = build(processor=processor)
    x = fields(batch=2)
    noise = draw_noise(kind, 2, NOISE_CHANNELS)
    # The new weights start as zeros, and the others have the values of a network without noise.
    addable = find_addable_parameters(model)
    assert model.state_dict().keys() - plain.state_dict().keys() == addable.keys()
    torch.testing.assert_close(model(x, noise), plain(x), rtol=0, atol=1e-6)
    with torch.no_grad():
        for parameter in addable.values():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    changed = model(x, noise)
    assert (changed - plain(x)).abs().amax(dim=(1, 2, 3, 4)).min() > 1e-4
    # Noise of zeros, and no noise at all, give the output of the network without noise.
    torch.testing.assert_close(model(x, {kind: torch.zeros_like(noise[kind])}), plain(x), rtol=0, atol=1e-6)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-6)
    changed.square().mean().backward()
    assert all(parameter.grad is not None for parameter in addable.values())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"refinements": 4}, r"model\.refinements: 4: .* 9 x 24 .*2562 nodes.*choose 2 or less"),
        (
            {"processor": "transformer", "dim_head": 5},
            r"model\.dim_head: 5 does not divide the 16 .*nearest divisor is 4",
        ),
        ({"noise": "dropout"}, r"model\.noise: dropout .*global, cell, spherical"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(build_spec(), build_section(**keys))


def test_the_value_that_an_error_names_works() -> None:
    assert build(refinements=2)(fields()).isfinite().all()


@pytest.mark.parametrize("keys", [{"refinements": 9}, {"processor": "gnn"}, {"hops": 0}, {"dim": 0}])
def test_section_refuses_invalid_values(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        build_section(**keys)


def test_an_input_of_another_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a batch of"):
        build()(torch.zeros(1, 4, 2, 9, 23))


def test_keys_of_the_transformer_are_refused_with_message_passing() -> None:
    GraphSection(type="graph", hops=4)
    with pytest.raises(ValidationError, match="hops: 9: only processor: transformer reads this key"):
        GraphSection(type="graph", hops=9)
