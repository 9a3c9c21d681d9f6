"""Memory of a rank: exact for weights, gradients and optimizer state, an upper bound for FSDP2's temporary tensors.

FSDP2 divides each weight along its first dimension into equal chunks; the last chunks may be shorter or missing. Rank 0
has a full chunk of each weight, so this module computes the memory of rank 0 and calls rank 0 the fullest rank.

A sharding unit is a group of weights that FSDP2 gathers and reduces together, usually a block of the network. The
argument `degrees` is the number of ranks along each axis of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from credit.parallel.dtensor import shard_dim, to_local
from credit.parallel.mesh import ParallelDims

# AdamW stores two moments of each element, and one float32 step count for each weight. Muon stores one moment of each
# element and no step count.
ADAMW_MOMENTS = 2
MUON_MOMENTS = 1
_STEP_COUNT_BYTES = 4


@dataclass(frozen=True)
class Weight:
    """Local size of a weight under tensor parallelism, before FSDP2 shards it.

    Attributes:
        rows: length of the first dimension, which FSDP2 divides.
        row_elements: number of elements in a row.
        element_bytes: bytes of an element.
        is_trained: True if the weight has a gradient, False if it is frozen.
        needs_gradient_average: True if sequence parallelism must average the gradient over the tensor-parallel ranks.
            This is necessary only in units with split weights. False for split weights, and for whole weights that
            belong to a split weight, such as adapters.
        moments: number of optimizer tensors with the size of the weight.
    """

    rows: int
    row_elements: int
    element_bytes: int
    is_trained: bool
    needs_gradient_average: bool
    moments: int = ADAMW_MOMENTS

    def elements_per_rank(self, num_ranks: int) -> int:
        """Return the number of elements on the fullest rank after FSDP2 has sharded the weight over `num_ranks`."""
        return math.ceil(self.rows / num_ranks) * self.row_elements


@dataclass(frozen=True)
class ShardUnit:
    """Sharding unit: group of weights that FSDP2 gathers and reduces together.

    Attributes:
        weights: weights of the unit.
        has_split_weights: True if tensor parallelism has split at least one of the weights. FSDP2 then shards the unit
            only over the axes `shard` and `domain`. Units without split weights are also sharded over the
            tensor-parallel ranks.
        stays_gathered: True if the gathered weights are kept from the forward pass to the backward pass, False if they
            are freed and gathered again.
    """

    weights: tuple[Weight, ...]
    has_split_weights: bool
    stays_gathered: bool

    def num_ranks(self, degrees: ParallelDims) -> int:
        """Return the number of ranks over which FSDP2 shards the unit."""
        num_shards = degrees.shard * degrees.domain
        if self.has_split_weights:
            return num_shards
        return num_shards * degrees.tensor

    def elements_per_rank(self, degrees: ParallelDims, training: bool = False) -> int:
        """Return the number of elements of the unit on the fullest rank.

        Args:
            degrees: number of ranks along each axis of the mesh.
            training: True to count only the weights that have a gradient.
        """
        ranks = self.num_ranks(degrees)
        num_elements = 0
        for weight in self.weights:
            if weight.is_trained or not training:
                num_elements += weight.elements_per_rank(ranks)
        return num_elements

    def gathered_elements(self, degrees: ParallelDims, training: bool = False) -> int:
        """Return the number of elements of the gathered unit, including the padding of weights to equal chunks.

        Args:
            degrees: number of ranks along each axis of the mesh.
            training: True to count only the weights that have a gradient.
        """
        return self.elements_per_rank(degrees, training) * self.num_ranks(degrees)

    def total_elements(self, training: bool = False) -> int:
        """Return the number of elements of the unit without padding.

        Args:
            training: True to count only the weights that have a gradient.
        """
        num_elements = 0
        for weight in self.weights:
            if weight.is_trained or not training:
                num_elements += weight.elements_per_rank(1)
        return num_elements


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of an element in the collectives of FSDP2; 4 is float32, 2 is bfloat16.

    Attributes:
        gathered: bytes of an element of the gathered weights, and of their gradients before the reduction.
        reduced: bytes of an element of the gradients during the reduction.
    """

    gathered: int = 4
    reduced: int = 4


@dataclass(frozen=True)
class PassSchedule:
    """Numbers of micro-steps, rollout steps and member batches, which determine the passes of an optimizer step.

    Attributes:
        micro_steps: number of micro-steps in which gradients are accumulated.
        rollout: number of forecast steps in the training rollout.
        recompute: True if rollout steps are computed again in the backward pass (``trainer.recompute_steps``).
        member_batches: number of batches in which a rank computes its ensemble members, one batch after another.
    """

    micro_steps: int = 1
    rollout: int = 1
    recompute: bool = False
    member_batches: int = 1

    @property
    def passes(self) -> int:
        """Number of forward passes with a gradient; each has one backward pass."""
        return self.micro_steps * self.rollout * self.member_batches

    @property
    def forwards_without_gradient(self) -> int:
        """Number of forward passes without a backward pass.

        The loss needs the outputs of all members. If the members need several batches, all outputs are computed first.
        The last batch keeps its autograd graph. The other batches are computed without a gradient, and then again with
        a gradient (see `credit.forecast.objectives.ensemble`).
        """
        return self.micro_steps * self.rollout * (self.member_batches - 1)

    @property
    def recomputes(self) -> bool:
        """True if rollout steps are computed again in the backward pass; never true for a rollout of a single step."""
        return self.recompute and self.rollout > 1


@dataclass(frozen=True)
class Memory:
    """Memory of the fullest rank; all attributes except `host` are in bytes.

    Attributes:
        parameters: this rank's shard of the weights.
        gradients: this rank's shard of the gradients, which exist from the backward pass to the update.
        optimizer: moments and step counts of the optimizer.
        average: moving average of the weights.
        buffers: vectors of spectral norm and other buffers of the model.
        fields: static fields, masks and weights of the loss.
        activations: peak of the activations and samples of one micro-step, and the copies for the exchange of ensemble
            members between ranks.
        gathered: upper bound of the weights that FSDP2 has gathered at the same time.
        reduced: upper bound of the gradients that FSDP2 has not yet reduced to shards.
        host: True if parameters, gradients, optimizer state and average are in host memory.
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
    def state_bytes(self) -> int:
        """Bytes of weights, gradients, optimizer state and moving average, which an update reads or writes."""
        return self.parameters + self.gradients + self.optimizer + self.average

    @property
    def device_bytes(self) -> int:
        """Upper bound of the bytes in GPU memory."""
        always_on_device = self.buffers + self.fields + self.activations + self.gathered + self.reduced
        if self.host:
            return always_on_device
        return always_on_device + self.state_bytes


def read_sharding_units(
    model: nn.Module, reshard_after_forward: bool, matrices: Collection[nn.Parameter] = ()
) -> tuple[ShardUnit, ...]:
    """Return the sharding units of a model, last layers first; a model without FSDP2 is a single unit.

    Args:
        model: model that `credit.parallel.parallelize.parallelize` has processed, on any device.
        reshard_after_forward: value with which the model was sharded; False keeps every unit gathered. Two units always
            stay gathered: the unit with which the backward pass begins, and the weights outside all blocks.
        matrices: weights that Muon updates; AdamW updates all other weights.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    # FSDP2 assigns each weight to the innermost sharded module around it, so inner modules are visited first.
    units: list[ShardUnit] = []
    assigned_ids: set[int] = set()
    for number, module in enumerate(reversed(sharded or [model])):
        parameters = [parameter for parameter in module.parameters() if id(parameter) not in assigned_ids]
        assigned_ids.update(id(parameter) for parameter in parameters)
        # In the reversed order, the backward pass begins with the first unit.
        begins_backward = number == 0
        is_outside_blocks = module is model
        unit = ShardUnit(
            weights=tuple(_describe_weight(parameter, parameter in matrices) for parameter in parameters),
            has_split_weights=any(_split_dim(parameter) is not None for parameter in parameters),
            stays_gathered=not reshard_after_forward or begins_backward or is_outside_blocks,
        )
        units.append(unit)
    return tuple(units)


def compute_state_memory(
    units: Sequence[ShardUnit], degrees: ParallelDims, buffers: int, *, average: bool, host: bool = False
) -> Memory:
    """Return the memory of the fullest rank for weights, gradients, optimizer state, moving average and buffers.

    The attributes `fields`, `activations`, `gathered` and `reduced` of the result are 0.

    Args:
        units: sharding units of the model.
        degrees: number of ranks along each axis of the mesh.
        buffers: bytes of the model's buffers on a rank.
        average: True if the run has a moving average of the weights.
        host: True if parameters, gradients, optimizer state and average are in host memory.
    """
    all_bytes = 0
    trained_bytes = 0
    optimizer_bytes = 0
    for unit in units:
        for weight in unit.weights:
            shard_bytes = weight.element_bytes * weight.elements_per_rank(unit.num_ranks(degrees))
            all_bytes += shard_bytes
            if weight.is_trained:
                trained_bytes += shard_bytes
                optimizer_bytes += weight.moments * shard_bytes
                if weight.moments == ADAMW_MOMENTS:
                    optimizer_bytes += _STEP_COUNT_BYTES
    # Gradients, moments and moving average have the dtype of the weight. Frozen weights have none of these tensors.
    average_bytes = trained_bytes if average else 0
    return Memory(
        parameters=all_bytes,
        gradients=trained_bytes,
        optimizer=optimizer_bytes,
        average=average_bytes,
        buffers=buffers,
        host=host,
    )


def bound_in_flight_memory(
    units: Sequence[ShardUnit], degrees: ParallelDims, precision: ElementBytes, schedule: PassSchedule
) -> tuple[int, int]:
    """Return upper bounds, in bytes, of the gathered weights and of the unreduced gradients of FSDP2.

    The bound of the gathered weights is the sum of three parts:

    - all units that stay gathered; if the backward pass recomputes rollout steps, these are all units of the model;
    - the current unit, and the next unit, which FSDP2 gathers in advance;
    - the buffer of an all-gather.

    The bound of the unreduced gradients is the sum of the gradients of the current unit and the buffer of their
    reduction. If a step has several passes, the gradients of all units are added to the bound, because they are summed
    over the passes before the reduction.

    Args:
        units: sharding units of the model.
        degrees: number of ranks along each axis of the mesh.
        precision: bytes of an element in the collectives.
        schedule: number of passes through the model.
    """
    # All sizes except the returned ones are numbers of elements.
    num_staying = 0
    max_freed = 0
    max_buffer = 0
    for unit in units:
        unit_elements = unit.gathered_elements(degrees)
        # Weights on a single rank are copied, not gathered, so they need no buffer.
        buffer_elements = unit_elements if unit.num_ranks(degrees) > 1 else 0
        max_buffer = max(max_buffer, buffer_elements)
        if unit.stays_gathered or schedule.recomputes:
            num_staying += unit_elements
        else:
            # The current unit, and the next unit, which is assumed to have the same size.
            max_freed = max(max_freed, unit_elements + buffer_elements)
    gathered = num_staying + max_freed + max_buffer
    # Gradients that the backward pass has computed, gradients in the buffer of the reduction, and sums over passes.
    computed = max(unit.total_elements(training=True) for unit in units)
    reduced = max(unit.gathered_elements(degrees, training=True) for unit in units)
    accumulated = 0
    if schedule.passes > 1:
        accumulated = sum(unit.total_elements(training=True) for unit in units)
    gradient_bytes = computed * precision.gathered + (reduced + accumulated) * precision.reduced
    return gathered * precision.gathered, gradient_bytes


def count_exchange_bytes(output_bytes: int, gathers_members: bool, degrees: ParallelDims) -> int:
    """Return the bytes of the copies for the exchange of members in an ensemble group; 0 without ensemble groups.

    Args:
        output_bytes: bytes of the outputs of all members that a rank computes, at one step of the rollout.
        gathers_members: True if every rank gathers the whole fields of all members, False if the ranks exchange parts.
        degrees: number of ranks along each axis of the mesh.
    """
    if degrees.ensemble == 1:
        return 0
    # One copy of the sent members and one of the received members. With whole fields, each rank receives the members of
    # all ranks.
    num_copies = 2 * degrees.ensemble if gathers_members else 2
    return num_copies * output_bytes


def count_buffer_bytes(model: nn.Module) -> int:
    """Return the bytes of this rank's part of all buffers of the model."""
    return sum(to_local(buffer).numel() * buffer.element_size() for buffer in model.buffers())


def _split_dim(parameter: torch.Tensor) -> int | None:
    """Return the dimension along which tensor parallelism has split a parameter; None if it is not split."""
    if not isinstance(parameter, DTensor) or "tp" not in parameter.device_mesh.mesh_dim_names:
        return None
    tensor_axis = parameter.device_mesh.mesh_dim_names.index("tp")
    return shard_dim(parameter.placements[tensor_axis])


def _describe_weight(parameter: nn.Parameter, is_matrix: bool) -> Weight:
    """Return the `Weight` record of a parameter: its local size under tensor parallelism and its number of moments.

    Args:
        parameter: weight of the model, which may be a DTensor.
        is_matrix: True if Muon updates the weight, False if AdamW updates it.
    """
    shape = list(parameter.shape)
    split_dim = _split_dim(parameter)
    if split_dim is not None:
        mesh = parameter.device_mesh
        shape[split_dim] //= mesh.size(mesh.mesh_dim_names.index("tp"))
    # A scalar is treated as a single row with one element.
    rows = shape[0] if shape else 1
    row_elements = math.prod(shape[1:])
    is_on_tensor_mesh = isinstance(parameter, DTensor) and "tp" in parameter.device_mesh.mesh_dim_names
    moments = MUON_MOMENTS if is_matrix else ADAMW_MOMENTS
    return Weight(rows, row_elements, parameter.element_size(), parameter.requires_grad, not is_on_tensor_mesh, moments)
