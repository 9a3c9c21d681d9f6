"""Sharding units, tensor parallelism, checkpointing, compilation, precision and adapters."""

from __future__ import annotations

import copy

import pytest
import torch

from credit.models.graph import GraphNetwork, tables
from credit.models.lora import apply_lora
from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks
from credit.parallel.tensor.plan import read_plan, require_splittable
from credit.train.build.model import compile_blocks

from .small import PROCESSORS, build, fields

# The embeddings of inputs and geometric features are not split.
UNSPLIT_PREFIXES = ("embed_",)


def compute_gradients(model: GraphNetwork, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the output, and the gradients of all parameters of a loss."""
    y = model(x)
    return [y, *torch.autograd.grad((y - 1).square().mean(), list(model.parameters()))]


@pytest.mark.parametrize("processor", PROCESSORS)
def test_blocks_are_units_and_their_layers_may_be_split(processor: str) -> None:
    model = build(processor=processor)
    units = {path: module for path, module in model.named_modules() if getattr(module, "_fsdp2_shard", False)}
    assert list(units) == ["encoder", "layers.0", "layers.1", "decoder"]
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_outside_parameters = num_parameters - sum(p.numel() for unit in units.values() for p in unit.parameters())
    assert num_outside_parameters < 0.1 * num_parameters
    for path, unit in units.items():
        layers = [layer for group in read_plan(path, unit) for layer in group]
        require_splittable(model, layers)
        linear = {name for name, module in unit.named_modules() if isinstance(module, torch.nn.Linear)}
        assert unit._tp_plan.keys() == {name for name in linear if not name.startswith(UNSPLIT_PREFIXES)}


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("mode", [True, "selective"])
def test_checkpointing_changes_nothing(processor: str, mode: bool | str) -> None:
    model = build(processor=processor)
    expected = compute_gradients(model, fields(batch=2))
    checkpoint_blocks(model, mode)
    torch.testing.assert_close(compute_gradients(model, fields(batch=2)), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("processor", PROCESSORS)
# Dynamo itself raises these warnings.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_blocks_give_the_same_values(processor: str) -> None:
    noise = [{"kind": "global", "channels": 2}]
    plain = build(processor=processor, noise=noise)
    model = copy.deepcopy(plain)
    compile_blocks(model, backend="aot_eager")
    noise_BK = torch.randn(2, 2)
    x = fields(batch=2)
    outputs = [network(x, {"global": noise_BK}) for network in (plain, model)]
    torch.testing.assert_close(*outputs)
    gradients = []
    for network, y in zip((plain, model), outputs, strict=True):
        gradients.append(torch.autograd.grad((y - 1).square().mean(), list(network.parameters())))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_bfloat16(processor: str) -> None:
    model = build(processor=processor)
    x = fields(batch=2)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    y.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    difference = (y.float() - expected).abs().max()
    assert 0 < difference < 0.05 * expected.abs().max() + 0.01
    # FSDP2's mixed precision casts the weights in this way.
    assert model.bfloat16()(x).dtype == torch.bfloat16


def test_adapters_begin_from_the_base_model() -> None:
    model = build()
    x = fields()
    expected = model(x)
    apply_lora(model, ["layers.*.message.expand.*", "*.contract"], rank=2)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-7)
    model(x).square().mean().backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert any("layers.1.message.expand.2" in name for name in trained)
    assert all(".parametrizations." in name for name in trained)


def test_a_model_that_was_used_in_inference_mode_can_be_trained() -> None:
    tables._build_cached_constants.cache_clear()
    model = build()
    with torch.inference_mode():
        # Compute the same constants again, in inference mode.
        tables._build_cached_constants.cache_clear()
        model.constants = tables.build_constants(model.spec.grid, model.refinements, None)
        model(fields())
    compute_gradients(model, fields())


def test_constants_are_no_part_of_the_state() -> None:
    model = build()
    assert list(model.buffers()) == []
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()
    # The meta device serves as a device other than the CPU.
    on_device = model.constants.on_device(torch.device("meta"))
    assert on_device.mesh.index.senders.index.is_meta
    assert model.constants.on_device(torch.device("meta")) is on_device
