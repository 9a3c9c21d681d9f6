"""Cases of outputs and gradients of `credit.parallel.fsdp2` on four ranks, as other programs call it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from credit.config.sections.execution import ParallelismConfig
from credit.errors import ConfigError
from credit.models.layers import spectral_norm
from credit.models.wxformer import WXFormer
from credit.parallel import fsdp2
from credit.parallel.blocks.marks import strip_wrapper_prefixes
from credit.parallel.mesh import build_mesh, plan_degrees
from credit.parallel.parallelize import parallelize
from credit.parallel.tensor.tensor_parallel import apply_tensor_parallel
from credit.train.build.model import compile_blocks
from tests.parallel.fsdp2_api.example_models import (
    Block,
    EntryPointModel,
    Latent,
    MixedDtypeModel,
    Nested,
    NestedInputModel,
    Net,
    Note,
    Planned,
    ReversedBlocks,
    TwoDtypeBlock,
    build_seeded,
    describe_error,
    gradients,
    local_share,
    mean_square_loss,
    reference_gradients,
    require_close,
    samples,
    take_step,
    weights,
)
from tests.parallel.training.cases import to_full_tensor
from tests.unit.models.small import SETTINGS

CHECKPOINTED = {"trainer": {"activation_checkpoint": True}}
BF16 = {"trainer": {"amp": True}}
CASES: dict[str, Callable[[], None]] = {}


def register_case(function: Callable[[], None]) -> Callable[[], None]:
    """Add a function to the cases. Its assertions may differ between ranks, but its collectives may not."""
    CASES[function.__name__] = function
    return function


def require_same_gradients(
    model: nn.Module, mesh: Any, conf: dict, loss: Callable = mean_square_loss, tolerance: float = 1e-5
):
    """Shard `model`, and require that its gradients of the shares of all ranks are those of the whole batch."""
    expected = reference_gradients(model, loss)
    assert fsdp2.apply_fsdp2(model, mesh, conf) is model
    loss(model, local_share(samples())).backward()
    require_close(gradients(model), expected, tolerance)


@register_case
def conf_may_lack_anything() -> None:
    for conf in ({}, {"trainer": None, "model": {}}, {"trainer": {"amp": False}, "data": {"x": 1}}, CHECKPOINTED):
        require_same_gradients(build_seeded(Net), None, conf)


@register_case
def every_kind_of_mesh() -> None:
    hybrid_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    dp_mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))["dp"]
    for mesh in (hybrid_mesh, init_device_mesh("cpu", (4,)), dp_mesh):
        model = build_seeded(Net)
        require_same_gradients(model, mesh, CHECKPOINTED)
        assert fsdp2.fsdp2_is_applied(model)
    # With a data-parallel axis of one rank, each rank computes the whole batch.
    single_rank_mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))["dp"]
    model = build_seeded(Net)
    expected = reference_gradients(model, mean_square_loss)
    fsdp2.apply_fsdp2(model, single_rank_mesh, CHECKPOINTED)
    mean_square_loss(model, samples()).backward()
    require_close(gradients(model), expected)
    assert isinstance(model.head.weight, DTensor)


@register_case
def wxformer() -> None:
    for norm in (False, True):
        for conf in ({"model": {"use_spectral_norm": norm}}, CHECKPOINTED):
            torch.manual_seed(3)
            model = WXFormer.from_kwargs(**SETTINGS, use_spectral_norm=norm)
            x = torch.randn(4, *model.spec.in_shape, generator=torch.Generator().manual_seed(2))
            reference_model = copy.deepcopy(model)
            mean_square_loss(reference_model, x).backward()
            fsdp2.apply_fsdp2(model, None, conf)
            mean_square_loss(model, local_share(x)).backward()
            require_close(gradients(model), gradients(reference_model), 1e-4)
            num_marked_blocks = sum(fsdp2._has_fsdp2_shard(m) for m in reference_model.modules())
            assert sum(isinstance(m, FSDPModule) for m in model.modules()) == num_marked_blocks + 1


@register_case
def blocks_in_blocks() -> None:
    for conf in ({}, CHECKPOINTED):
        model = build_seeded(Nested)
        require_same_gradients(model, None, conf)
        assert sum(isinstance(m, FSDPModule) for m in model.modules()) == 4, "inner blocks, outer one, model"


@register_case
def checkpointing_recomputes_once() -> None:
    model = build_seeded(Net)
    fsdp2._apply_activation_checkpointing(model)
    fsdp2.apply_fsdp2(model, None, CHECKPOINTED)
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    mean_square_loss(model, local_share(samples())).backward()
    assert [block.calls for block in blocks] == [2, 2]
    assert not any(isinstance(block, FSDPModule) for block in blocks), "the wrapper is sharded, not the block in it"
    assert sum(isinstance(m, FSDPModule) for m in model.modules()) == 3


def build_net_with_spectral_norm() -> Net:
    model = Net()
    for block in model.blocks:
        nn.utils.spectral_norm(block.expand)
        nn.utils.spectral_norm(block.contract)
    return model


@register_case
def hooked_spectral_norm_in_bfloat16() -> None:
    trainer = {"amp": True, "fsdp2_mp_policy": {"param_dtype": "bfloat16"}}
    conf = {"trainer": trainer, "model": {"use_spectral_norm": True}}
    require_same_gradients(build_seeded(build_net_with_spectral_norm), None, conf, tolerance=0.1)
    model_without_fix = build_seeded(build_net_with_spectral_norm)
    original_fix, fsdp2._fix_spectral_norm_dtype = fsdp2._fix_spectral_norm_dtype, lambda *_: None
    try:
        fsdp2.apply_fsdp2(model_without_fix, None, conf)
    finally:
        fsdp2._fix_spectral_norm_dtype = original_fix
    assert "RuntimeError" in describe_error(lambda: mean_square_loss(model_without_fix, local_share(samples())))


@register_case
def hooked_spectral_norm_checkpointed() -> None:
    """A recomputed block uses the singular vectors of its first pass, also after a second forward."""
    for conf in ({}, CHECKPOINTED):
        require_same_gradients(
            build_seeded(build_net_with_spectral_norm),
            None,
            conf,
            lambda model, x: mean_square_loss(model, x) + mean_square_loss(model, 2 * x),
        )


@register_case
def another_order_than_registered() -> None:
    """Weights that were gathered in a validation may not be used after the weights have changed."""

    model, model_of_new_weights = (
        fsdp2.apply_fsdp2(build_seeded(ReversedBlocks), None, {}),
        build_seeded(ReversedBlocks, seed=5),
    )
    x = local_share(samples())
    with torch.no_grad():
        model(x)
        fsdp2.reshard(model)
        for parameter, new_weight in zip(model.parameters(), model_of_new_weights.parameters(), strict=True):
            parameter.copy_(
                torch.distributed.tensor.distribute_tensor(new_weight, parameter.device_mesh, parameter.placements)
            )
        torch.testing.assert_close(model(x), model_of_new_weights(x))


def compute_entry_point_loss(model: EntryPointModel, x: Tensor) -> Tensor:
    """Return the loss of several calls. Some results are used twice, and in another order than that of the calls."""
    first, other = model.encode(x), model.encode(x + 1.0)
    second = model.generate(first)
    third = model.generate(model.encode(second))
    mixed = model.generate(replace(other, note=first.note))
    loss = (second + third).square().mean() + mixed.sin().mean() + other.note.weights.mean()
    return loss + first.parts["tokens"][0].square().mean()


@register_case
def several_entries_one_backward() -> None:
    for conf in ({}, CHECKPOINTED):
        require_same_gradients(build_seeded(EntryPointModel), None, conf, compute_entry_point_loss)
    require_same_gradients(build_seeded(EntryPointModel), None, BF16, compute_entry_point_loss, 0.1)


@register_case
def rollout_reduced_once() -> None:
    """Gradients are reduced once for two micro-steps, when the last backward pass reaches its first forward."""

    def compute_rollout_loss(model: nn.Module, x: Tensor, last: bool = True) -> Tensor:
        fsdp2.set_gradient_sync(model, False)
        loss = 0.0
        for number in range(3):
            x = model(x)
            if last and number == 0:
                x.register_hook(lambda _: fsdp2.set_gradient_sync(model, True))
            loss = loss + x.square().mean()
        return loss

    for conf in ({}, CHECKPOINTED):
        model, reference_model = build_seeded(Net), build_seeded(Net)
        for seed in (1, 2):
            compute_rollout_loss(reference_model, samples(seed)).backward()
        fsdp2.apply_fsdp2(model, None, conf)
        for seed in (1, 2):
            compute_rollout_loss(model, local_share(samples(seed)), last=seed == 2).backward()
            assert (model.head.weight.grad is None) == (seed == 1)
        require_close(gradients(model), gradients(reference_model))


def compute_nested_loss(model: NestedInputModel, x: Tensor) -> Tensor:
    note = Note(3, x.double())
    out = model(Latent({"x": [x]}, note), {"y": [x.square()]}, count=torch.arange(3))["out"]
    assert out.note.count == 3 and out.note.weights.dtype == torch.float32
    return out.note.weights.square().mean() + out.parts["x"][0].mean()


@register_case
def nested_inputs_and_outputs() -> None:
    bf16_checkpointed = {"trainer": {"amp": True, "activation_checkpoint": True}}
    for conf, tolerance in ((BF16, 0.1), (bf16_checkpointed, 0.1), ({}, 1e-5)):
        model = build_seeded(NestedInputModel)
        require_same_gradients(model, None, conf, compute_nested_loss, tolerance)
        floats = [torch.bfloat16] * 3 if tolerance == 0.1 else [torch.float32, torch.float64, torch.float32]
        assert model.seen == [*floats, torch.int64]


@register_case
def several_dtypes() -> None:
    for conf, tolerance in (({}, 0.02), (BF16, 0.1)):
        model = build_seeded(MixedDtypeModel)
        dtypes = {name: p.dtype for name, p in model.named_parameters()}
        require_same_gradients(model, None, conf, tolerance=tolerance)
        assert {p.dtype for p in model.parameters()} == {torch.float64, torch.bfloat16, torch.float32}
        weights_before = weights(model)
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
        for name, value in weights(model).items():
            assert value.dtype == dtypes[name] and not torch.equal(value, weights_before[name]), name


@register_case
def frozen_beside_trainable() -> None:
    def build_partly_frozen_net() -> Net:
        model = Net()
        model.blocks.append(TwoDtypeBlock())
        for module in (model.embed, model.blocks[0], model.blocks[1].expand, model.blocks[2].norm):
            module.requires_grad_(False)
        return model

    for conf in ({}, CHECKPOINTED):
        model = build_seeded(build_partly_frozen_net)
        require_same_gradients(model, None, conf)
        assert model.blocks[0].expand.weight.grad is None
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        weights_before = weights(model)
        optimizer.step()
        saved_state = fsdp2.fsdp2_optimizer_state_dict(model, optimizer)
        fsdp2.fsdp2_load_optimizer_state_dict(model, optimizer, saved_state)
        changed_names = {name for name, value in weights(model).items() if not torch.equal(value, weights_before[name])}
        assert "blocks.1.contract.weight" in changed_names and not any(
            name.startswith("embed") for name in changed_names
        )


@register_case
def offloaded_or_kept() -> None:
    mesh = init_device_mesh("cpu", (4,))
    results = []
    for options in ({}, {"cpu_offload": True}, {"reshard_after_forward": False}):
        model = build_seeded(Net)
        expected = reference_gradients(model, mean_square_loss)
        fsdp2.shard_units(model, mesh, mesh, **options)
        block = model.blocks[0]
        gathered_flags = []
        block.register_forward_hook(lambda module, *_: gathered_flags.append(isinstance(module.expand.weight, DTensor)))  # noqa: B023
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        mean_square_loss(model, local_share(samples())).backward()
        require_close(gradients(model), expected)
        optimizer.step()
        optimizer.zero_grad()
        take_step(model, optimizer, 2)
        results.append(weights(model))
        assert gathered_flags == [options != {"reshard_after_forward": False}] * 2
        with torch.no_grad():
            model(local_share(samples()))
        assert all(isinstance(p, DTensor) for p in model.parameters()), "no backward pass comes that would free them"
    for other_weights in results[1:]:
        assert all(torch.equal(value, results[0][name]) for name, value in other_weights.items())


@register_case
def wrong_plans() -> None:
    mesh = init_device_mesh("cpu", (4,))
    for plan, hidden, fragments in (
        ({"upp": "colwise"}, 12, ("Planned._tp_plan['upp']", "no such submodule", "up, down")),
        ({"up": "columns"}, 12, ("Planned._tp_plan['up']", "'columns' is not one of colwise, rowwise")),
        ({"norm": "colwise"}, 12, ("Planned._tp_plan['norm']", "only Linear", "LayerNorm")),
        ({"up": "colwise", "down": "rowwise"}, 6, ("trainer.parallelism.tensor: 4 splits no layer", "[6]")),
        ({}, 12, ("trainer.parallelism.tensor", "no block has a _tp_plan")),
    ):
        message = describe_error(lambda plan=plan, hidden=hidden: apply_tensor_parallel(Planned(plan, hidden), mesh))
        assert message.startswith(ConfigError.__name__) and all(word in message for word in fragments), message


@register_case
def split_and_sharded() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build_seeded(lambda: Planned({"up": "colwise", "down": "rowwise"}))
    reference_model = copy.deepcopy(model)
    mean_square_loss(reference_model, samples()).backward()
    assert apply_tensor_parallel(model, mesh["tp"]) == ["up", "down"]
    assert model.up.weight.placements == model.up.bias.placements == (Shard(0),)
    assert model.down.weight.placements == (Shard(1),)
    assert not isinstance(model.down.bias, DTensor) and model.up.weight.to_local().shape == (6, 8)
    # Split parameters and parameters that are not split belong to the same sharding unit.
    fsdp2.apply_fsdp2(model, mesh["dp"], {})
    assert model.down.weight.placements[1] == Shard(1) and model.down.weight.device_mesh.mesh_dim_names == ("dp", "tp")
    assert Replicate() not in model.down.weight.placements
    mean_square_loss(model, samples().chunk(2)[mesh["dp"].get_local_rank()]).backward()
    require_close(gradients(model), gradients(reference_model))


def build_planned_blocks() -> nn.Module:
    """Return two spectrally normalised blocks with a plan, in training mode."""
    model = nn.Sequential(*[Planned({"up": "colwise", "down": "rowwise"}) for _ in range(2)])
    for block in model:
        block._fsdp2_shard = True
    spectral_norm.apply_spectral_norm(model)
    return model.train()


@register_case
def split_normalised_and_compiled() -> None:
    """Each of two steps has two forwards before one backward. The recomputation may not change the singular vectors."""
    mesh = build_mesh(plan_degrees(ParallelismConfig(tensor=2), 4), dist.get_rank(), "cpu")
    for checkpoint in (False, True):
        model = build_seeded(build_planned_blocks)
        reference_model = copy.deepcopy(model)
        compile_function = partial(compile_blocks, backend="aot_eager")
        parallelize(model, mesh.device_mesh, checkpoint=checkpoint, compile_blocks=compile_function)
        for seed in (1, 2):
            for compared_model, x in (
                (reference_model, samples(seed)),
                (model, samples(seed).chunk(2)[mesh.data_rank]),
            ):
                spectral_norm.advance_power_iterations(compared_model)
                compared_model.zero_grad()
                (mean_square_loss(compared_model, x) + mean_square_loss(compared_model, 2 * x)).backward()
            require_close(gradients(model), gradients(reference_model))
        vectors, expected = (
            {
                strip_wrapper_prefixes(name): to_full_tensor(vector)
                for name, vector in spectral_norm.find_singular_vectors(compared_model).items()
            }
            for compared_model in (model, reference_model)
        )
        require_close(vectors, expected)
