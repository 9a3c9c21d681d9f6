"""Tensor parallelism: the linear layers of a block are split over the ranks that work on the same sample.

A block says what may be split in its attribute ``_tp_plan``, a dict from submodule path to

- ``colwise``: a Linear whose outputs are dealt to the ranks; each rank goes on with its own,
- ``colwise:2``: the same of a fused Linear whose outputs are 2 equal parts, one behind the other (gate and up of
  SwiGLU; ``colwise:3`` for q, k, v); each rank gets its share of every part,
- ``rowwise``: a Linear that takes such outputs; the ranks' products are added up,
- ``replicated``: a submodule that is whole on every rank but whose output each rank uses for its own part (attention's
  position bias; the only k and v head of multi-query attention), so that its gradient has to be added up.

A plan lists colwise layers before the rowwise layer that takes their outputs.
The module that holds these layers may say in ``heads`` how many attention heads they have; then whole heads are dealt.
A fused projection under plain ``colwise`` is ordered head by head. Keys and values may have fewer heads than queries: a
colwise layer narrower than its rowwise partner counts heads of the same width.

Between a colwise layer and its rowwise partner, activations belong to the rank: dropout draws differently on each.
The split weights are DTensors on the ``tp`` mesh, computed with as local tensors. A parametrized weight (spectral norm)
keeps its parametrizations: ``original`` is split, and the method ``share`` of each is told how to add up over the parts
and says which of its own tensors are split with the weight. If it has a static method ``share_sums``, that is given the
model, so that it can add up for all weights of a block at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList

from credit.errors import ConfigError
from credit.parallel.blocks.sharding_units import require_unwrapped
from credit.parallel.dtensor import local
from credit.parallel.tensor.collectives import DealFusedRows, FusedRoutes, Sum, SumGradient, Total, plan_fused_routes
from credit.parallel.tensor.plan import PlannedLayer, read_plan, require_splittable


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Split every layer of every ``_tp_plan`` over `mesh`, in place, and return the paths that were split.

    A plan's attention whose heads do not divide by the number of ranks stays whole, as do layers whose width does not.

    Args:
        model: on any device, the meta device included; on a real one all ranks hold the same values.
        mesh: one-dimensional.

    Raises:
        ConfigError: if a plan names no module, a layer cannot be split, or nothing at all can. The model is as it was.
    """
    for path, module in model.named_modules():
        require_unwrapped(path, module)
    blocks = [(path, module) for path, module in model.named_modules() if getattr(module, "_tp_plan", None)]
    groups_of = {block: read_plan(path, block) for path, block in blocks}
    split = {
        block: [group for group in groups if all(layer.units % mesh.size() == 0 for layer in group)]
        for block, groups in groups_of.items()
    }
    layers = [layer for groups in split.values() for group in groups for layer in group if layer.kind != "replicated"]
    if not layers:
        widths = {layer.units for groups in groups_of.values() for group in groups for layer in group if layer.units}
        raise ConfigError(
            f"trainer.parallelism.tensor: {mesh.size()} splits nothing of {type(model).__name__}: "
            + (f"its heads and hidden units are {sorted(widths)}; choose a divisor" if blocks else "no block has a "
               "_tp_plan; set tensor to 1")
        )  # fmt: skip
    require_splittable(model, layers)
    for _, block in blocks:
        for group in split[block]:
            _split_group(group, mesh)
    return [layer.path for layer in layers]


def has_dropout(module: nn.Module) -> bool:
    """Whether a module draws random numbers in training: a Dropout inside, or a number in an attribute ``dropout``."""
    return any(drop_rate(inside) > 0 for inside in module.modules())


def drop_rate(module: nn.Module) -> float:
    """Return the rate at which a module itself drops: of a Dropout, or a number in an attribute ``dropout``; else 0."""
    rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "dropout", 0.0)
    return rate if isinstance(rate, int | float) else 0.0


def _split_group(group: list[PlannedLayer], mesh: DeviceMesh) -> None:
    """Split layers between which activations belong to the rank; they share one region of dropout of its own."""
    parent = group[0].parent
    region = _OwnRandom(mesh.get_local_rank(), parent) if has_dropout(parent) else None
    for layer in group:
        module = layer.module
        if layer.kind == "replicated":
            module.register_forward_hook(functools.partial(_sum_gradient_of_output, group=mesh.get_group()))
            continue
        _split_parameters(module, 0 if layer.kind == "colwise" else 1, mesh)
        if layer.kind == "rowwise":
            module.forward = functools.partial(_rowwise, module, mesh.get_group(), region)
            continue
        routes = plan_fused_routes(module.out_features, layer.parts, mesh.get_group()) if layer.parts > 1 else None
        module.forward = functools.partial(_colwise, module, mesh.get_group(), region, routes=routes)


def _split_parameters(layer: nn.Linear, dim: int, mesh: DeviceMesh) -> None:
    """Replace the weight by its part along `dim` (0 rows, 1 columns), a DTensor; the bias is split with the rows."""
    if parametrize.is_parametrized(layer, "weight"):
        chain = layer.parametrizations.weight
        _replace(chain, "original", Shard(dim), mesh)
        for link in chain:
            total, common = (functools.partial(f.apply, mesh.get_group()) for f in (Total, SumGradient))
            for name, along in link.share(dim, total, common).items():
                _replace(link, name, Replicate() if along is None else Shard(along), mesh)
    else:
        _replace(layer, "weight", Shard(dim), mesh)
    if layer.bias is not None and dim == 0:
        _replace(layer, "bias", Shard(0), mesh)


def share_sums(model: nn.Module) -> None:
    """Let parametrizations that offer it add up over the ranks once for all weights of a block, in place.

    Without this, and in compiled blocks, each split weight has sums of its own.
    """
    kinds = {type(link) for chain in model.modules() if isinstance(chain, ParametrizationList) for link in chain}
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        if hasattr(kind, "share_sums"):
            kind.share_sums(model)


def _replace(module: nn.Module, name: str, placement: Shard | Replicate, mesh: DeviceMesh) -> None:
    whole = getattr(module, name)
    part = whole.detach()
    if isinstance(placement, Shard):
        part = part.chunk(mesh.size(), dim=placement.dim)[mesh.get_local_rank()]
    # a layer's weight may be a view of another layout, of which FSDP2 takes none
    part = part.clone(memory_format=torch.contiguous_format)
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
    routes: FusedRoutes | None = None,
) -> Any:
    weight = local(layer.weight)
    bias = None if layer.bias is None else local(layer.bias)
    if routes is not None:
        # Each rank stores whole rows one behind the other, as checkpoints have them; it computes with its share of
        # every part. A weight is small against activations, so the exchange is cheap.
        weight = DealFusedRows.apply(weight, routes)
        bias = None if bias is None else DealFusedRows.apply(bias, routes)
    y = product(SumGradient.apply(group, x), weight, bias)
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
    y = Sum.apply(product(x, weight, None), group)
    return y if layer.bias is None else y + layer.bias.to(y.dtype)


def _sum_gradient_of_output(module: nn.Module, args: tuple, output: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    return SumGradient.apply(group, output)


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
