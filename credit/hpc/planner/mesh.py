"""Plan of a run on one mesh of GPUs: memory and collectives of a rank, and estimated times.

The training step is traced once for each degree of tensor and domain parallelism. The cost of replicas and shards is
computed from the sharding units (`credit.hpc.planner.memory.ShardUnit`). Planning therefore takes the same time for a
few ranks and for thousands of ranks.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch

from credit.config.sections.execution import MixedPrecisionConfig
from credit.hpc.planner.collectives import Collective
from credit.hpc.planner.gpus import Gpu
from credit.hpc.planner.matrices import (
    MuonMatrix,
    bound_update_bytes,
    count_matrix_collectives,
    estimate_matrix_seconds,
    read_matrices,
)
from credit.hpc.planner.memory import (
    ElementBytes,
    Memory,
    ShardUnit,
    bound_in_flight_memory,
    compute_state_memory,
    count_buffer_bytes,
    count_exchange_bytes,
    read_sharding_units,
)
from credit.hpc.planner.planned_run import Checkpointing, MemberBatches, PlannedRun
from credit.hpc.planner.times import estimate_collective_seconds, estimate_step_seconds
from credit.hpc.planner.trace import Trace, extrapolate_trace, trace_step
from credit.hpc.planner.traffic import (
    count_member_collectives,
    count_power_iteration_bytes,
    count_power_iteration_collectives,
    count_sequence_collectives,
    count_sharding_collectives,
)
from credit.models.matrices import find_muon_matrices
from credit.parallel.domain.division import FieldDivision
from credit.parallel.mesh import DeviceGrid, ParallelDims, build_mesh
from credit.parallel.process_info import fake_process_group

logger = logging.getLogger(__name__)

CHECKPOINTING: tuple[Checkpointing, ...] = (False, "selective", True)


@dataclass(frozen=True)
class MeshPlan:
    """Plan of a run on one mesh.

    Memory, collectives and FLOP are computed from the traced step. All times are estimates.

    Attributes:
        data: value of ``trainer.parallelism.data``: none, ddp or fsdp2.
        degrees: number of ranks along each axis of the mesh.
        memory: memory of the fullest rank.
        collectives: collective -> number of its calls in an optimizer step, on one rank.
        flops: floating-point operations of an optimizer step on one rank.
        kernel_seconds: estimated time of the kernels of an optimizer step, in seconds.
        launch_seconds: estimated time that the host needs to queue these kernels, in seconds.
        blocking_seconds: estimated time of the collectives in a step for which kernels wait, in seconds.
        overlapped_seconds: estimated time of the collectives in a step that run together with kernels, in seconds.
        samples: number of samples in an optimizer step, over all ranks.
        steps: number of optimizer steps of the run; 0 if the training period has too few samples for a step.
        hours: estimated time of the whole run in hours, without loading, validation and checkpoints.
        megawatt_hours: estimated energy of the whole run in MWh, with all GPUs at full power.
        fits: True if `memory` fits into the GPU.
    """

    data: str
    degrees: ParallelDims
    memory: Memory
    collectives: Mapping[Collective, int]
    flops: int
    kernel_seconds: float
    launch_seconds: float
    blocking_seconds: float
    overlapped_seconds: float
    samples: int
    steps: int
    hours: float
    megawatt_hours: float
    fits: bool

    @property
    def step_seconds(self) -> float:
        """Estimated seconds of an optimizer step with the run's longest rollout."""
        # The host queues kernels while the GPU runs earlier kernels and overlapped collectives. The slowest of these
        # three activities determines the time.
        return self.blocking_seconds + max(self.kernel_seconds, self.launch_seconds, self.overlapped_seconds)

    @property
    def samples_per_second(self) -> float:
        """Estimated samples per second, over all ranks."""
        return self.samples / self.step_seconds

    @property
    def is_usable(self) -> bool:
        """True if the run can use this mesh: the memory fits, and there are enough samples for a step."""
        return self.fits and self.steps > 0


@dataclass(frozen=True)
class _NetworkProperties:
    """Properties of the network that depend on tensor and domain parallelism, but not on replicas and shards.

    Attributes:
        units: sharding units.
        buffers: bytes of the buffers on a rank.
        power_iteration_bytes: bytes that power iterations of spectral norm sum over ranks, see
            `count_power_iteration_bytes`.
        autocast: True if the network runs under autocast.
        precision: bytes of an element in FSDP2's collectives.
        dtypes: (dtype of weights and activations, dtype of the output) of FSDP2's mixed precision; empty without it.
        field_ranks: ranks of the domain group whose steps are traced, see `list_busy_ranks`.
        matrices: matrices that Muon updates; empty without Muon.
    """

    units: tuple[ShardUnit, ...]
    buffers: int
    power_iteration_bytes: Mapping[str, tuple[int, int]]
    autocast: bool
    precision: ElementBytes
    dtypes: tuple[torch.dtype, ...]
    field_ranks: tuple[int, ...]
    matrices: tuple[MuonMatrix, ...]


class Planner:
    """Planner of the meshes of one run; it traces each degree of tensor and domain parallelism once.

    The planner creates fake process groups, so no process group may exist during planning.

    Args:
        run: settings of the run, and the builder of its training step.
        world: number of GPUs.
        gpu: GPU of each rank.
        kernels: ``gpu`` to trace the kernels of a GPU, ``cpu`` to trace the kernels of a CPU, for comparisons with
            measurements on a CPU.

    Attributes:
        parameters: number of parameters of the network; 0 before the first plan.
    """

    def __init__(self, run: PlannedRun, world: int, gpu: Gpu, kernels: Literal["gpu", "cpu"] = "gpu") -> None:
        self._run = run
        self._world = world
        self._sequence_parallel = run.trainer.parallelism.sequence_parallel
        self._gpu = gpu
        self._on_gpu = kernels == "gpu"
        self._properties: dict[tuple[bool, int, int], _NetworkProperties] = {}
        self._traces: dict[tuple[bool, int, int, Checkpointing, MemberBatches], Trace] = {}
        self.parameters = 0

    def plan_mesh(
        self, data: str, degrees: ParallelDims, checkpointing: Checkpointing, members_at_once: int | None = None
    ) -> MeshPlan:
        """Return the plan of one mesh.

        Args:
            data: value of ``trainer.parallelism.data``: none, ddp or fsdp2.
            degrees: number of ranks along each axis of the mesh.
            checkpointing: value of ``trainer.activation_checkpoint``.
            members_at_once: value of ``trainer.members_at_once``; None for the value in the config.

        Raises:
            ConfigError: if the network cannot be built, or cannot be split or checkpointed as requested.
        """
        run = self._run
        members = run.member_batches(degrees, members_at_once)
        schedule = run.build_pass_schedule(members)
        trainer = run.trainer
        sharded = data != "none"
        network = self._get_network_properties(sharded, degrees.tensor, degrees.domain)
        trace = self._trace_step(sharded, degrees.tensor, degrees.domain, checkpointing, members)

        # Memory: weights and optimizer state, then the temporary tensors of a step.
        on_host = sharded and trainer.parallelism.cpu_offload
        memory = compute_state_memory(network.units, degrees, network.buffers, average=trainer.use_ema, host=on_host)
        output_bytes = run.output_bytes * members.members
        activations = trace.activations + count_exchange_bytes(output_bytes, run.gathers_members, degrees)
        activations = max(activations, bound_update_bytes(network.matrices, degrees))  # free before the update
        memory = replace(memory, fields=trace.constants, activations=activations)
        collectives = trace.collectives + count_power_iteration_collectives(network.power_iteration_bytes, degrees)
        collectives += count_matrix_collectives(network.matrices, degrees)
        exchanges = run.num_loss_steps * schedule.micro_steps
        collectives += count_member_collectives(output_bytes, run.gathers_members, exchanges, degrees)
        if sharded:
            gathered, reduced = bound_in_flight_memory(network.units, degrees, network.precision, schedule)
            memory = replace(memory, gathered=gathered, reduced=reduced)
            collectives += count_sharding_collectives(network.units, degrees, network.precision, schedule)
            collectives += count_sequence_collectives(network.units, degrees)

        # Time: kernels and the update, launches by the host, blocking collectives and overlapped collectives.
        kernel_seconds = estimate_step_seconds(trace.kernels, memory.parameters, self._gpu)
        kernel_seconds += estimate_matrix_seconds(network.matrices, degrees, trainer, self._gpu)
        blocking_seconds, overlapped_seconds = estimate_collective_seconds(collectives, self._gpu)
        plan = MeshPlan(
            data=data,
            degrees=degrees,
            memory=memory,
            collectives=collectives,
            flops=trace.flops,
            kernel_seconds=kernel_seconds,
            launch_seconds=sum(trace.kernels.values()) * self._gpu.launch_seconds,
            blocking_seconds=blocking_seconds,
            overlapped_seconds=overlapped_seconds,
            samples=run.samples_per_step(degrees),
            steps=run.count_steps(degrees),
            hours=0.0,
            megawatt_hours=0.0,
            fits=memory.device_bytes <= self._gpu.usable_bytes,
        )
        return self._with_hours(plan)

    def _with_hours(self, plan: MeshPlan) -> MeshPlan:
        """Return a copy of a mesh plan that includes the hours and the energy of the whole run."""
        # The time of a rollout is assumed to be proportional to its length.
        hours = plan.steps * plan.step_seconds * self._run.mean_rollout_fraction / 3600
        return replace(plan, hours=hours, megawatt_hours=hours * plan.degrees.world * self._gpu.watts / 1e6)

    def require_divisible_fields(self, domain: int) -> None:
        """Require that the fields of the network can be divided among `domain` ranks.

        Raises:
            ConfigError: if this division is not possible; the message contains the reason.
        """
        if domain > 1:
            self._get_network_properties(True, 1, domain)

    def _get_network_properties(self, sharded: bool, tensor: int, domain: int) -> _NetworkProperties:
        """Return the properties of the network for these degrees of tensor and domain parallelism; results are cached.

        Args:
            sharded: True if FSDP2 shards the network.
            tensor: number of tensor-parallel ranks.
            domain: number of ranks of a domain group.
        """
        if (sharded, tensor, domain) not in self._properties:
            self._properties[sharded, tensor, domain] = self._build_network_properties(sharded, tensor, domain)
        return self._properties[sharded, tensor, domain]

    def _build_network_properties(self, sharded: bool, tensor: int, domain: int) -> _NetworkProperties:
        """Build the network on the meta device, and return its properties.

        For the arguments see `_get_network_properties`.
        """
        trainer = self._run.trainer
        with self._open_fake_mesh(tensor, domain) as mesh:
            model, autocast = self._run.step_builder.build_network(mesh, sharded, trainer.activation_checkpoint)
            self.parameters = sum(parameter.numel() for parameter in model.parameters())
            # Mixed precision is done by either autocast or FSDP2. With autocast, FSDP2's collectives use float32.
            precision = ElementBytes()
            dtypes: tuple[torch.dtype, ...] = ()
            if trainer.amp and not autocast:
                policy = trainer.fsdp2_mp_policy or MixedPrecisionConfig()
                param_dtype = getattr(torch, policy.param_dtype)
                reduce_dtype = getattr(torch, policy.reduce_dtype)
                precision = ElementBytes(param_dtype.itemsize, reduce_dtype.itemsize)
                dtypes = (param_dtype, getattr(torch, policy.output_dtype))
            matrices = find_muon_matrices(model) if trainer.optimizer == "muon" else {}
            units = read_sharding_units(model, trainer.parallelism.reshard_after_forward, matrices)
            return _NetworkProperties(
                units=units,
                buffers=count_buffer_bytes(model),
                power_iteration_bytes=count_power_iteration_bytes(model),
                autocast=autocast,
                precision=precision,
                dtypes=dtypes,
                field_ranks=(0,) if model.domain is None else list_busy_ranks(model.domain.grid),
                matrices=read_matrices(matrices),
            )

    def _trace_step(
        self, sharded: bool, tensor: int, domain: int, checkpointing: Checkpointing, members: MemberBatches
    ) -> Trace:
        """Return the trace of an optimizer step without FSDP2; the cost of FSDP2 is computed from the sharding units.

        Args:
            sharded: True if FSDP2 shards the network in the run, which determines the precision.
            tensor: number of tensor-parallel ranks.
            domain: number of ranks of a domain group.
            checkpointing: value of ``trainer.activation_checkpoint``.
            members: ensemble members that the rank computes for each sample.
        """
        network = self._get_network_properties(sharded, tensor, domain)
        step_builder = self._run.step_builder
        schedule = self._run.build_pass_schedule(members)

        def trace_field_rank(field_rank: int, rollout: int) -> Trace:
            with self._open_fake_mesh(tensor, domain, field_rank) as mesh:
                model, _ = step_builder.build_network(mesh, False, checkpointing)
                return trace_step(
                    model,
                    # `trace_step` calls this function with the last argument, the number of micro-steps.
                    functools.partial(step_builder.build_step, model, network.autocast, rollout, members),
                    micro_steps=schedule.micro_steps,
                    gpu=self._on_gpu,
                    autocast=network.autocast,
                    dtypes=network.dtypes,
                    tf32=self._run.trainer.tf32,
                )

        def trace_rollout(rollout: int) -> Trace:
            traces = []
            for field_rank in network.field_ranks:
                logger.info(
                    "trace of a step: tensor %d, domain %d (rank %d), activation_checkpoint %s, rollout %d",
                    *(tensor, domain, field_rank, str(checkpointing).lower(), rollout),
                )
                traces.append(trace_field_rank(field_rank, rollout))
            return combine_traces(traces)

        key = (sharded, tensor, domain, checkpointing, members)
        if key not in self._traces:
            rollout = schedule.rollout
            if rollout <= 3:
                self._traces[key] = trace_rollout(rollout)
            else:
                # Each step after the third has the cost of the third step. This cost is not the difference between
                # rollouts of two steps and one step, because the step of a one-step rollout is never recomputed.
                self._traces[key] = extrapolate_trace(trace_rollout(2), trace_rollout(3), rollout - 3)
        return self._traces[key]

    @contextmanager
    def _open_fake_mesh(self, tensor: int, domain: int, field_rank: int = 0) -> Iterator[DeviceGrid]:
        """Context that opens a fake process group, and yields the smallest mesh with the run's kinds of parallelism.

        On this mesh, the network is split and sharded as in the run.

        Args:
            tensor: number of tensor-parallel ranks.
            domain: number of ranks of a domain group.
            field_rank: index of this process among the ranks that share the fields.
        """
        # Two shards are enough, because the sharding units do not depend on the number of shards.
        num_shards = min(2, self._world // (tensor * domain))
        sequence_parallel = self._sequence_parallel and tensor > 1
        degrees = ParallelDims(1, num_shards, tensor, domain=domain, sequence_parallel=sequence_parallel)
        # Tensor-parallel ranks are neighbours. Without sequence parallelism, they have the same part of the fields.
        rank = field_rank if sequence_parallel else field_rank * tensor
        with fake_process_group(self._world, rank):
            yield build_mesh(degrees, rank, device_type="cpu")


def list_busy_ranks(division: FieldDivision) -> tuple[int, ...]:
    """Return the ranks of a domain group that are expected to have the most memory, the most work or the most traffic.

    Along each axis, the first part is the largest. A middle part has one more neighbour, from which it receives cells.
    All middle parts are assumed to be like the second part. If the stages of a network are divided unevenly, another
    middle part may receive slightly more (1 % in a test with four parts).
    """
    num_columns = len(division.columns.owned)
    positions = []
    for axis in (division.rows, division.columns):
        has_middle = len(axis.owned) > 2
        positions.append((0, 1) if has_middle else (0,))
    return tuple(i * num_columns + j for i, j in itertools.product(*positions))


def combine_traces(traces: Sequence[Trace]) -> Trace:
    """Combine the traces of several ranks into a trace with the largest memory, work and traffic of these ranks."""

    def count_work(trace: Trace) -> tuple[int, int]:
        return trace.flops, sum(kernel.bytes * count for kernel, count in trace.kernels.items())

    def count_traffic(trace: Trace) -> int:
        return sum(collective.bytes * count for collective, count in trace.pass_collectives.items())

    return Trace(
        activations=max(trace.activations for trace in traces),
        constants=max(trace.constants for trace in traces),
        kernels=max(traces, key=count_work).kernels,
        pass_collectives=max(traces, key=count_traffic).pass_collectives,
        norm_collective=traces[0].norm_collective,
    )


def list_divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in increasing order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
