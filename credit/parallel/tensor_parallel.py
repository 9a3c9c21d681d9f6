"""Tensor parallelism: the linear layers of a block are split over the ranks that work on the same sample.

A block says what may be split in its class attribute ``_tp_plan``, from submodule path to

- ``colwise``: a Linear whose outputs are dealt to the ranks; each rank goes on with its own,
- ``rowwise``: a Linear that takes such outputs; the ranks' products are added up,
- ``replicated``: a submodule that is whole on every rank but whose output each rank uses for its own part (attention's
  position bias), so that its gradient has to be added up.

Between a colwise layer and its rowwise partner, activations belong to the rank: dropout draws differently on each.
The split weights are DTensors on the ``tp`` mesh, computed with as local tensors. A parametrized weight (spectral norm)
keeps its parametrizations: ``original`` is split, and the method ``share`` of each is told how to add up over the parts
and says which of its own tensors are split with the weight. If it has a static method ``share_sums``, that is given the
block, so that it can add up for all its weights at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import parametrize

from credit.errors import ConfigError
from credit.parallel.reduce import local

KINDS = ("colwise", "rowwise", "replicated")


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Split every layer of every ``_tp_plan`` over `mesh`, in place, and return the paths that were split.

    A plan's attention whose heads do not divide by the number of ranks stays whole, as do layers whose width does not.

    Args:
        model: on any device, the meta device included; on a real one all ranks hold the same values.
        mesh: one-dimensional.

    Raises:
        ConfigError: if a plan names no module, or nothing at all can be split.
    """
    plans = [(path, module) for path, module in model.named_modules() if getattr(module, "_tp_plan", None)]
    split = []
    for path, block in plans:
        plan = _checked_plan(path, block)
        for parent in dict.fromkeys(name.rpartition(".")[0] for name in plan):
            group = {name: kind for name, kind in plan.items() if name.rpartition(".")[0] == parent}
            if _divides(block, group, mesh.size()):
                _split_group(block, group, mesh)
                split += [f"{path}.{name}" if path else name for name, kind in group.items() if kind != "replicated"]
        _share_sums(block)
    if not split:
        widths = {n for _, block in plans for n in _units(block, block._tp_plan)}
        raise ConfigError(
            f"trainer.parallelism.tensor: {mesh.size()} splits nothing of {type(model).__name__}: "
            + (f"its heads and hidden units are {sorted(widths)}; choose a divisor" if plans else "no block has a "
               "_tp_plan; set tensor to 1")
        )  # fmt: skip
    return split


def has_dropout(module: nn.Module) -> bool:
    """Whether a module draws random numbers in training: a Dropout inside, or a number in an attribute ``dropout``."""
    return any(drop_rate(inside) > 0 for inside in module.modules())


def drop_rate(module: nn.Module) -> float:
    """Return the rate at which a module itself drops: of a Dropout, or a number in an attribute ``dropout``; else 0."""
    rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "dropout", 0.0)
    return rate if isinstance(rate, int | float) else 0.0


def _checked_plan(path: str, block: nn.Module) -> Mapping[str, str]:
    """Return the block's plan.

    Raises:
        ConfigError: if a name matches no module or a kind is unknown.
    """
    modules = dict(block.named_modules())
    for name, kind in block._tp_plan.items():
        where = f"{type(block).__name__}._tp_plan[{name!r}] (at {path or 'the model'})"
        if name not in modules:
            raise ConfigError(f"{where}: there is no such submodule; it has {', '.join(filter(None, modules))}")
        if kind not in KINDS:
            raise ConfigError(f"{where}: {kind!r} is not one of {', '.join(KINDS)}")
        if kind != "replicated" and not isinstance(modules[name], nn.Linear):
            raise ConfigError(f"{where}: only Linear layers are split, this is a {type(modules[name]).__name__}")
    return block._tp_plan


def _units(block: nn.Module, group: Mapping[str, str]) -> list[int]:
    """Return, for each layer of a plan, how many things there are to deal: heads, or hidden units."""
    units = []
    for name, kind in group.items():
        if kind == "replicated":
            continue
        layer = block.get_submodule(name)
        # the parent knows how many of the fused outputs make one head
        parent = block.get_submodule(name.rpartition(".")[0])
        rows = layer.out_features if kind == "colwise" else layer.in_features
        units.append(getattr(parent, "heads", rows))
    return units


def _divides(block: nn.Module, group: Mapping[str, str], ranks: int) -> bool:
    return all(n % ranks == 0 for n in _units(block, group))


def _split_group(block: nn.Module, group: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Split the layers below one parent; they share one region where ranks draw their own dropout."""
    parent = block.get_submodule(next(iter(group)).rpartition(".")[0])
    region = _OwnRandom(mesh.get_local_rank(), parent) if has_dropout(parent) else None
    for name, kind in group.items():
        module = block.get_submodule(name)
        if kind == "replicated":
            module.register_forward_hook(functools.partial(_sum_gradient_of_output, group=mesh.get_group()))
            continue
        _split_parameters(module, 0 if kind == "colwise" else 1, mesh)
        forward = _colwise if kind == "colwise" else _rowwise
        module.forward = functools.partial(forward, module, mesh.get_group(), region)


def _split_parameters(layer: nn.Linear, dim: int, mesh: DeviceMesh) -> None:
    """Replace the weight by its part along `dim` (0 rows, 1 columns), a DTensor; the bias is split with the rows."""
    if parametrize.is_parametrized(layer, "weight"):
        chain = layer.parametrizations.weight
        _replace(chain, "original", Shard(dim), mesh)
        for link in chain:
            if not hasattr(link, "share"):
                raise ConfigError(
                    f"trainer.parallelism.tensor: the parametrization {type(link).__name__} does not know how to "
                    "treat a part of a weight (method share); set tensor to 1"
                )
            total, common = (functools.partial(f.apply, mesh.get_group()) for f in (_Total, _SumGradient))
            for name, along in link.share(dim, total, common).items():
                _replace(link, name, Replicate() if along is None else Shard(along), mesh)
    else:
        _replace(layer, "weight", Shard(dim), mesh)
    if layer.bias is not None and dim == 0:
        _replace(layer, "bias", Shard(0), mesh)


def _share_sums(block: nn.Module) -> None:
    """Tell the parametrizations that can to add up for all of the block's weights at once."""
    chains = [m.parametrizations.weight for m in block.modules() if parametrize.is_parametrized(m, "weight")]
    for share_sums in {getattr(link, "share_sums", None): None for chain in chains for link in chain}:
        if share_sums is not None:
            share_sums(block)


def _replace(module: nn.Module, name: str, placement: Shard | Replicate, mesh: DeviceMesh) -> None:
    whole = getattr(module, name)
    part = whole.detach()
    if isinstance(placement, Shard):
        part = part.chunk(mesh.size(), dim=placement.dim)[mesh.get_local_rank()].clone()
    new = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )
    if isinstance(whole, nn.Parameter):
        module._parameters[name] = nn.Parameter(new, requires_grad=whole.requires_grad)
    else:
        module._buffers[name] = new


def _colwise(
    layer: nn.Linear,
    group: dist.ProcessGroup,
    region: _OwnRandom | None,
    x: Tensor,
    product: Callable[..., Any] = F.linear,
) -> Any:
    bias = None if layer.bias is None else local(layer.bias)
    y = product(_SumGradient.apply(group, x), local(layer.weight), bias)
    if region is not None and region.is_needed():
        region.enter(x.device)
    return y


def _rowwise(
    layer: nn.Linear,
    group: dist.ProcessGroup,
    region: _OwnRandom | None,
    x: Any,
    product: Callable[..., Tensor] = F.linear,
) -> Tensor:
    weight = local(layer.weight)
    if region is not None:
        region.leave(weight.device)
    y = _Sum.apply(product(x, weight, None), group)
    return y if layer.bias is None else y + layer.bias.to(y.dtype)


def _sum_gradient_of_output(module: nn.Module, args: tuple, output: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    return _SumGradient.apply(group, output)


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks, a new tensor."""
    if torch.compiler.is_compiling():
        # the sum in place is traced, too, but in torch 2.11 every gradient before it is lost, without an error
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


class _SumGradient(torch.autograd.Function):
    """Identity whose gradient is the sum over the ranks: the input of parts that each rank holds alone."""

    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:
        return None, _summed(gradient, ctx.group)


class _Sum(torch.autograd.Function):
    """Sum over the ranks whose gradient is handed to each rank as it is."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Total(torch.autograd.Function):
    """Sum over the ranks of which each rank uses the result for its own part: the gradient is summed, too."""

    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:
        return None, _summed(gradient, ctx.group)


class _OwnRandom:
    """Random numbers that differ between tensor-parallel ranks, between a colwise layer and its rowwise partner.

    Outside, all ranks draw alike. Inside, a rank draws from a stream that is seeded by one common draw and its rank; a
    recomputed block starts from the same state and so meets the same numbers.
    """

    def __init__(self, rank: int, parent: nn.Module) -> None:
        self._rank, self._parent = rank, parent
        self._outside: Tensor | None = None

    def is_needed(self) -> bool:
        """Whether dropout draws: in training, or in an ensemble, where it alone is in training."""
        return any(inside.training and drop_rate(inside) > 0 for inside in self._parent.modules())

    def enter(self, device: torch.device) -> None:
        seed = int(torch.randint(2**62, ()))
        self._outside = _get_state(device)
        _seed(device, seed + self._rank)

    def leave(self, device: torch.device) -> None:
        if self._outside is not None:
            _set_state(device, self._outside)
            self._outside = None


def _get_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(device: torch.device, state: Tensor) -> None:
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


def _seed(device: torch.device, seed: int) -> None:
    torch.cuda.manual_seed(seed) if device.type == "cuda" else torch.random.default_generator.manual_seed(seed)
