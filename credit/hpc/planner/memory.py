"""What a rank holds: exact for weights, gradients and optimizer state, an upper bound for what FSDP2 has in flight.

FSDP2 cuts each weight along its first dimension into equal chunks, the last of which may be short or missing; rank 0
has a full chunk of each, so what is counted here is the fullest rank's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from credit.parallel.dtensor import local, shard_dim
from credit.parallel.mesh import ParallelDims

# AdamW keeps two moments of each element, and one float32 count of steps for each weight
_MOMENTS, _COUNT_BYTES = 2, 4


@dataclass(frozen=True)
class Weight:
    """A weight as tensor parallelism leaves it to a rank.

    Attributes:
        rows: length of the dimension that FSDP2 cuts.
        row: elements of a row.
        bytes: of an element.
        trains: whether it has a gradient.
    """

    rows: int
    row: int
    bytes: int
    trains: bool

    def part(self, ranks: int) -> int:
        """Return the elements on the fullest of `ranks` ranks."""
        return math.ceil(self.rows / ranks) * self.row


@dataclass(frozen=True)
class ShardUnit:
    """What FSDP2 gathers and reduces together.

    Attributes:
        weights: of the unit.
        split: whether tensor parallelism has split some of them; if so it is sharded over the data ranks alone.
        kept: whether its weights stay whole from the forward to the backward pass.
    """

    weights: tuple[Weight, ...]
    split: bool
    kept: bool

    def ranks(self, degrees: ParallelDims) -> int:
        """Return over how many ranks it is sharded."""
        return degrees.shard if self.split else degrees.shard * degrees.tensor

    def part(self, degrees: ParallelDims, training: bool = False) -> int:
        """Return a rank's elements; those with a gradient alone if `training`."""
        return sum(w.part(self.ranks(degrees)) for w in self.weights if w.trains or not training)

    def gathered(self, degrees: ParallelDims, training: bool = False) -> int:
        """Return the elements of all parts together; uneven weights are padded, so they are more than the weights'."""
        return self.part(degrees, training) * self.ranks(degrees)

    def whole(self, training: bool = False) -> int:
        """Return the elements of the weights."""
        return sum(w.part(1) for w in self.weights if w.trains or not training)


@dataclass(frozen=True)
class Precision:
    """Bytes of an element: of gathered weights and their gradients, and of gradients while they are reduced."""

    whole: int = 4
    reduced: int = 4


@dataclass(frozen=True)
class Schedule:
    """How an optimizer step goes through the model.

    Attributes:
        micro_steps: micro-steps.
        rollout: steps of the training rollout.
        recompute: whether steps of a rollout are computed again in the backward pass.
    """

    micro_steps: int = 1
    rollout: int = 1
    recompute: bool = False

    @property
    def passes(self) -> int:
        """Forward and backward passes through the model."""
        return self.micro_steps * self.rollout

    @property
    def recomputes(self) -> bool:
        """Whether the model runs again in the backward pass."""
        return self.recompute and self.rollout > 1


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank.

    Attributes:
        parameters: the rank's part of the weights.
        gradients: of their gradients, which are there from the backward pass to the update.
        optimizer: AdamW's moments and counts.
        average: the moving average of the weights.
        buffers: spectral norm's vectors and other buffers of the model.
        fields: static fields, masks and weights of the loss.
        activations: what one micro-step keeps for its backward pass, and its samples.
        gathered: whole weights that FSDP2 holds at once, at most.
        reduced: whole gradients on their way to the ranks' parts, at most.
        host: whether parameters, gradients, optimizer state and average are in host memory.
    """

    parameters: int
    gradients: int
    optimizer: int
    average: int
    buffers: int
    fields: int = 0
    activations: int = 0
    gathered: int = 0
    reduced: int = 0
    host: bool = False

    @property
    def states(self) -> int:
        """Bytes that the update works on."""
        return self.parameters + self.gradients + self.optimizer + self.average

    @property
    def device(self) -> int:
        """Bytes on the GPU, at most."""
        others = self.buffers + self.fields + self.activations + self.gathered + self.reduced
        return others + (0 if self.host else self.states)


def read_units(model: nn.Module, reshard_after_forward: bool) -> tuple[ShardUnit, ...]:
    """Return the sharding units of a model on its ranks, late before early; one unit where it is not sharded.

    Args:
        model: after `credit.parallel.parallelize.parallelize`, on any device.
        reshard_after_forward: as it was sharded; the unit where the backward pass begins and the model itself keep
            their weights in any case.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    units: list[ShardUnit] = []
    assigned_ids: set[int] = set()
    for number, module in enumerate(reversed(sharded or [model])):
        parameters = [p for p in module.parameters() if id(p) not in assigned_ids]
        assigned_ids.update(map(id, parameters))
        stays_gathered = not reshard_after_forward or number == 0 or module is model
        is_split = any(_split_axis(p) is not None for p in parameters)
        units.append(ShardUnit(tuple(map(_read_weight, parameters)), is_split, stays_gathered))
    return tuple(units)


def states(
    units: Sequence[ShardUnit], degrees: ParallelDims, buffers: int, *, average: bool, host: bool = False
) -> Memory:
    """Return what stays with the fullest rank from step to step.

    Args:
        units: of the model.
        degrees: the mesh.
        buffers: bytes of the model's buffers on a rank.
        average: whether a moving average is kept.
        host: whether the states are in host memory.
    """

    def held(copies: int, training: bool, each: int = 0) -> int:
        return sum(
            copies * weight.bytes * weight.part(unit.ranks(degrees)) + each
            for unit in units
            for weight in unit.weights
            if weight.trains or not training
        )

    return Memory(
        parameters=held(1, False),
        gradients=held(1, True),
        optimizer=held(_MOMENTS, True, _COUNT_BYTES),
        average=held(1, True) if average else 0,
        buffers=buffers,
        host=host,
    )


def in_flight(
    units: Sequence[ShardUnit], degrees: ParallelDims, precision: Precision, schedule: Schedule
) -> tuple[int, int]:
    """Return the most bytes of whole weights and of whole gradients that FSDP2 holds at once.

    Weights: units that keep theirs (all, when a rollout step is computed again), one at work, the next one gathered
    ahead, and the buffer that it comes in. Gradients: those of the unit at work and the buffer in which they are
    reduced; and those of all units where several passes add up before the reduction.

    Args:
        units: of the model.
        degrees: the mesh.
        precision: of the exchange.
        schedule: of an optimizer step.
    """
    kept, freed, buffers = 0, [0], [0]
    for unit in units:
        whole = unit.gathered(degrees)
        # weights that one rank has alone are copied, not gathered
        ahead = whole if unit.ranks(degrees) > 1 else 0
        buffers.append(ahead)
        if unit.kept or schedule.recomputes:
            kept += whole
        else:
            freed.append(whole + ahead)
    gathered = kept + max(freed) + max(buffers)
    computed = max(unit.whole(training=True) for unit in units)
    reduced = max(unit.gathered(degrees, training=True) for unit in units)
    waiting = sum(unit.whole(training=True) for unit in units) if schedule.passes > 1 else 0
    return gathered * precision.whole, computed * precision.whole + (reduced + waiting) * precision.reduced


def buffer_bytes(model: nn.Module) -> int:
    """Return the bytes of a rank's part of the model's buffers."""
    return sum(local(buffer).numel() * buffer.element_size() for buffer in model.buffers())


def _split_axis(parameter: torch.Tensor) -> int | None:
    """Return the dimension along which tensor parallelism has cut a parameter, None where it has not."""
    if not isinstance(parameter, DTensor) or "tp" not in parameter.device_mesh.mesh_dim_names:
        return None
    return shard_dim(parameter.placements[parameter.device_mesh.mesh_dim_names.index("tp")])


def _read_weight(parameter: nn.Parameter) -> Weight:
    shape, axis = list(parameter.shape), _split_axis(parameter)
    if axis is not None:
        mesh = parameter.device_mesh
        shape[axis] //= mesh.size(mesh.mesh_dim_names.index("tp"))
    rows = shape[0] if shape else 1
    return Weight(rows, math.prod(shape[1:]), parameter.element_size(), parameter.requires_grad)
