"""Cases of sharding: calls without gradients, dtypes, memory formats, and options of the config."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations

from credit.config.sections.execution import MixedPrecisionConfig
from credit.config.sections.trainer import TrainerConfig
from credit.models.wxformer import WXFormer
from credit.parallel import fsdp2
from credit.train.build.model import build_mixed_precision_policy
from tests.parallel.fsdp2_api.example_models import (
    WIDTH,
    Block,
    EntryPointModel,
    Net,
    build_seeded,
    describe_error,
    gradients,
    local_share,
    mean_square_loss,
    reference_gradients,
    require_close,
    samples,
    weights,
)
from tests.parallel.fsdp2_api.gradient_cases import BF16, register_case, require_same_gradients
from tests.unit.models.small import SETTINGS

KEEP_GATHERED = {"trainer": {"parallelism": {"reshard_after_forward": False}}}


class ForwardWithEntryPoints(EntryPointModel):
    """Model with a forward that calls the entry points, and a layer of the model itself."""

    def forward(self, x: Tensor) -> Tensor:
        return self.generate(self.encode(x)) + self.head(x)


def call_forward(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def call_entry_points(model: nn.Module, x: Tensor) -> Tensor:
    return model.generate(model.encode(x))


@register_case
def optimizer_after_calls_without_gradients() -> None:
    """After a call without gradients, the optimizer must get the sharded parameters and not gathered weights."""
    for build, call in (
        (Net, call_forward),
        (EntryPointModel, call_entry_points),
        (ForwardWithEntryPoints, call_entry_points),
        (ForwardWithEntryPoints, call_forward),
    ):
        for conf in ({}, KEEP_GATHERED):
            model = fsdp2.apply_fsdp2(build_seeded(build), None, conf)
            with torch.no_grad():
                call(model, local_share(samples()))
            assert all(isinstance(p, DTensor) for p in model.parameters())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            weights_before = weights(model)
            call(model, local_share(samples())).square().mean().backward()
            optimizer.step()
            unchanged_names = {
                name for name, value in weights(model).items() if torch.equal(value, weights_before[name])
            }
            assert unchanged_names <= {"unused.weight", "unused.bias"}, f"{unchanged_names} did not train"
            with torch.inference_mode():
                call(model, local_share(samples()))
            assert all(isinstance(p, DTensor) for p in model.parameters())


@register_case
def a_call_without_gradients_before_the_backward_pass() -> None:
    """The backward pass gathers weights that a call in between has freed, also after a call that failed."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        first_loss = mean_square_loss(model, x)
        with torch.no_grad():
            target = model(2 * x)
            describe_error(lambda: model(x[..., :1]))
        return first_loss + (model(x) - target).square().mean()

    for conf in ({}, KEEP_GATHERED, {"trainer": {"activation_checkpoint": True}}):
        require_same_gradients(build_seeded(Net), None, conf, loss)


@register_case
def weights_stay_whole_for_the_backward_pass() -> None:
    for conf, stays_gathered in ((KEEP_GATHERED, True), ({}, False)):
        model = build_seeded(Net)
        expected = reference_gradients(model, mean_square_loss)
        fsdp2.apply_fsdp2(model, None, conf)
        loss = mean_square_loss(model, local_share(samples()))
        assert isinstance(model.blocks[0].expand.weight, DTensor) != stays_gathered
        loss.backward()
        require_close(gradients(model), expected)


class NoiseLevel(nn.Module):
    """Model with an input number that a cast to bfloat16 would change."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.seen = Block(), torch.zeros(())

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        self.seen = level
        return self.block(x.to(self.block.norm.weight.dtype)) * level


@register_case
def inputs_keep_their_dtypes_on_request() -> None:
    level = torch.tensor([0.0123456])
    for cast in (True, False):
        conf = {"trainer": {"amp": True, "fsdp2_mp_policy": {"cast_forward_inputs": cast}}}
        model = fsdp2.apply_fsdp2(build_seeded(NoiseLevel), None, conf)
        model(local_share(samples()), level).square().mean().backward()
        assert model.seen.dtype == (torch.bfloat16 if cast else torch.float32)
        assert torch.equal(model.seen, level) != cast
        assert model.block.expand.weight.grad is not None


@register_case
def the_trainers_policy_reaches_its_model() -> None:
    """The key in a checked config has the same effect. WXFormer casts its input itself, so gradients stay the same."""
    mesh = init_device_mesh("cpu", (4,))
    results = []
    for cast in (True, False):
        precision = MixedPrecisionConfig(cast_forward_inputs=cast)
        policy = build_mixed_precision_policy(
            TrainerConfig(max_steps=1, amp=True, fsdp2_mp_policy=precision), sharded=True
        )
        assert policy.cast_forward_inputs == cast and policy.param_dtype == torch.bfloat16
        model = build_seeded(partial(WXFormer.from_kwargs, **SETTINGS))
        fsdp2.shard_units(model, mesh, mesh, policy)
        x = torch.randn(4, *model.spec.in_shape, generator=torch.Generator().manual_seed(2))
        mean_square_loss(model, local_share(x)).backward()
        results.append(gradients(model))
    assert all(torch.equal(value, results[0][name]) for name, value in results[1].items())


def build_parametrized_net() -> Net:
    model = Net()
    for block in model.blocks:
        parametrizations.spectral_norm(block.expand)
        parametrizations.spectral_norm(block.contract)
    # A hook on a weight with another name.
    model.head.kernel = nn.Parameter(torch.eye(WIDTH))
    nn.utils.spectral_norm(model.head, "kernel")
    model.head.forward = lambda x: nn.functional.linear(x, model.head.kernel, model.head.bias)
    del model.head.weight
    return model


@register_case
def parametrized_spectral_norm_in_bfloat16() -> None:
    conf = {"trainer": {"amp": True, "fsdp2_mp_policy": {}}, "model": {"use_spectral_norm": True}}
    model, reference_model = build_seeded(build_parametrized_net), build_seeded(build_parametrized_net)
    mean_square_loss(reference_model, samples()).backward()
    fsdp2.apply_fsdp2(model, None, conf)
    mean_square_loss(model, local_share(samples())).backward()
    require_close(gradients(model), gradients(reference_model), 0.1)


class MixedDtypeBlock(nn.Module):
    """Block whose own weight is float64 and whose layers are float32, except a float64 norm inside a layer."""

    _fsdp2_shard = True

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5, dtype=torch.float64))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.first(x))
        return x + self.last.norm(self.gain * y.to(self.last.norm.weight.dtype)).to(x.dtype)


class MarkedAndUnmarkedBlocks(nn.Module):
    """Model with a marked block and an unmarked block of mixed dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.middle = nn.Linear(WIDTH, WIDTH), MixedDtypeBlock()
        self.middle._fsdp2_shard = False
        self.block = MixedDtypeBlock()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.block(x))).sin()


@register_case
def dtypes_inside_each_other() -> None:
    for conf in ({}, {"trainer": {"activation_checkpoint": True}}):
        require_same_gradients(build_seeded(MarkedAndUnmarkedBlocks), None, conf)
    require_same_gradients(build_seeded(MarkedAndUnmarkedBlocks), None, BF16, tolerance=0.1)


def build_channels_last() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, WIDTH, 3), nn.Conv2d(WIDTH, WIDTH, 3), nn.Flatten(1))
    return model.to(memory_format=torch.channels_last)


@register_case
def weights_in_another_memory_format() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.repeat(1, 2, 1).unsqueeze(1).to(memory_format=torch.channels_last)
        return model(x).square().mean()

    require_same_gradients(build_seeded(build_channels_last), None, {}, loss)
    transposed = build_seeded(Net)
    transposed.head.weight = nn.Parameter(transposed.head.weight.detach().t())
    require_same_gradients(transposed, None, {})
