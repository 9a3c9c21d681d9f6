"""Models that FSDP2 cannot shard are refused by name before anything is changed; others are divided into units."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from credit.errors import ConfigError
from credit.parallel import fsdp2
from tests.parallel.fsdp2_api.example_models import (
    WIDTH,
    Block,
    Net,
    build_seeded,
    gradients,
    local_share,
    mean_square_loss,
    reference_gradients,
    require_close,
    samples,
)


@pytest.fixture
def single_rank_group() -> Iterator[None]:
    """Initialise a process group whose only rank is this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build_net_with_marked_container(container: nn.Module) -> nn.Module:
    model = Net()
    container._fsdp2_shard = True
    model.extra = container
    return model


def build_net_with_two_dtypes() -> nn.Module:
    model = Net()
    model.blocks[0].norm.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
    return model


def build_net_with_list_of_another_dtype() -> nn.Module:
    model = Net()
    model.blocks[1].gains = nn.ParameterList([nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))])
    return model


def wrap_net_in_ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(Net())


def build_net_with_block_in_ddp() -> nn.Module:
    model = Net()
    model.head = nn.parallel.DistributedDataParallel(model.head)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "list": (
        lambda: build_net_with_marked_container(nn.ModuleList([Block()])),
        r"extra: a ModuleList cannot be a sharding unit.*mark the blocks",
    ),
    "dict": (
        lambda: build_net_with_marked_container(nn.ModuleDict({"a": Block()})),
        "extra: a ModuleDict cannot be a sharding unit",
    ),
    "parameters": (
        lambda: build_net_with_marked_container(nn.ParameterList([torch.ones(3)])),
        "extra: a ParameterList cannot be a sharding unit",
    ),
    "root": (lambda: nn.ModuleList([Block()]), "the model: a ModuleList cannot be a sharding unit"),
    "two dtypes": (
        build_net_with_two_dtypes,
        r"blocks\.0\.norm \(LayerNorm\): .*weight is torch\.float32, bias is torch\.float64",
    ),
    "list of another dtype": (
        build_net_with_list_of_another_dtype,
        r"OwnMark\.gains: a ParameterList of torch\.float64 among",
    ),
    "ddp": (wrap_net_in_ddp, "the model: is wrapped in DistributedDataParallel.*attribute `module`"),
    "block in ddp": (build_net_with_block_in_ddp, "head: is wrapped in DistributedDataParallel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_refused_by_name(name: str, single_rank_group: None) -> None:
    build_model, message = REFUSED[name]
    model = build_model()
    with pytest.raises(ConfigError, match=message):
        fsdp2.apply_fsdp2(model, None, {"trainer": {"activation_checkpoint": True}})
    assert not any(isinstance(module, FSDPModule | CheckpointWrapper) for module in model.modules())


class Stage(nn.ModuleList):
    """A list that has a forward."""

    _fsdp2_shard = True

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x.sin()


def test_a_list_with_a_forward_is_a_unit(single_rank_group: None) -> None:
    model = nn.Sequential(Stage([Block(), nn.Linear(WIDTH, WIDTH)]), nn.Tanh())
    expected = reference_gradients(model, mean_square_loss)
    fsdp2.apply_fsdp2(model, None, {})
    mean_square_loss(model, local_share(samples())).backward()
    require_close(gradients(model), expected)
    assert isinstance(model[0], FSDPModule) and isinstance(model[0][1].weight, DTensor)


def test_a_frozen_parameter_may_have_another_dtype(single_rank_group: None) -> None:
    model = build_seeded(Net)
    model.head.table = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64), requires_grad=False)
    expected = reference_gradients(model, mean_square_loss)
    fsdp2.apply_fsdp2(model, None, {})
    mean_square_loss(model, local_share(samples())).backward()
    require_close(gradients(model), expected)
