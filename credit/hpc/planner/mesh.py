"""Plan of a run on one mesh of GPUs: memory and collectives of a rank, and an estimate of the time.

The training step is traced once for each degree of tensor parallelism. The cost of replicas and shards is computed from
the sharding units (`credit.hpc.planner.memory.ShardUnit`), so planning thousands of ranks takes no longer than planning
a few.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from credit.config.sections.trainer import MixedPrecisionConfig
from credit.errors import ConfigError
from credit.hpc.planner.gpus import MEMORY_SHARE, Gpu
from credit.hpc.planner.memory import (
    Memory,
    Precision,
    ShardUnit,
    bound_in_flight_memory,
    compute_state_memory,
    count_buffer_bytes,
    count_exchange_bytes,
    read_units,
)
from credit.hpc.planner.planned_run import Checkpointing, MemberBatches, PlannedRun
from credit.hpc.planner.trace import Collective, Kernel, Trace, extrapolate_trace, trace_step
from credit.hpc.planner.traffic import (
    count_iteration_collectives,
    count_member_collectives,
    count_sequence_collectives,
    count_sharding_collectives,
    estimate_seconds,
    read_iterated_bytes,
)
from credit.parallel.mesh import DeviceGrid, ParallelDims, build_mesh

CHECKPOINTING: tuple[Checkpointing, ...] = (False, "selective", True)
# Number of times that an update reads or writes an element of each weight: 8 for AdamW with clipping, 1 for the norm of
# the gradients and 3 for the moving average.
_UPDATE_MOVES = 12


@dataclass(frozen=True)
class MeshPlan:
    """Plan of a run on one mesh. Memory, collectives and FLOP follow from the traced step; all times are estimates.

    Attributes:
        data: value of ``trainer.parallelism.data``: none, ddp or fsdp2.
        degrees: number of ranks along each axis of the mesh.
        memory: memory of the fullest rank.
        collectives: collective -> number of its calls in an optimizer step, on one rank.
        flops: floating-point operations of an optimizer step on one rank.
        kernel_seconds: estimated time of the kernels of an optimizer step, in seconds.
        launch_seconds: estimated time that the host needs to queue these kernels, in seconds.
        blocking_seconds: estimated time of the collectives of a step that the kernels wait for, in seconds.
        overlapped_seconds: estimated time of the collectives of a step that run together with kernels, in seconds.
        samples: number of samples in an optimizer step, over all ranks.
        steps: number of optimizer steps of the run; 0 if the training period does not fill one.
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
        # The host queues kernels while the GPU runs earlier ones and overlapped collectives, so the slowest of the
        # three decides.
        return self.blocking_seconds + max(self.kernel_seconds, self.launch_seconds, self.overlapped_seconds)

    @property
    def samples_per_second(self) -> float:
        """Estimated samples per second, over all ranks."""
        return self.samples / self.step_seconds

    @property
    def works(self) -> bool:
        """True if the run can use this mesh: the memory fits, and the samples fill at least one step."""
        return self.fits and self.steps > 0


@dataclass(frozen=True)
class _NetworkProperties:
    """Properties of the network that depend on the degree of tensor parallelism, but not on replicas and shards.

    Attributes:
        units: sharding units.
        buffers: bytes of the buffers on a rank.
        iterated: bytes that power iterations sum over ranks, see `read_iterated_bytes`.
        autocast: True if the network runs under autocast.
        precision: bytes of an element in FSDP2's collectives.
        dtypes: (dtype of weights and activations, dtype of the output) of FSDP2's mixed precision; empty without it.
    """

    units: tuple[ShardUnit, ...]
    buffers: int
    iterated: Mapping[str, tuple[int, int]]
    autocast: bool
    precision: Precision
    dtypes: tuple[torch.dtype, ...]


class Planner:
    """Planner of the meshes of one run, which traces each degree of tensor parallelism and kind of checkpointing once.

    Args:
        run: the run.
        world: number of GPUs; a process group of as many ranks must exist, usually a fake one.
        gpu: kind of GPU.
        kernels: ``gpu`` to trace the kernels of a GPU, ``cpu`` to trace those of a CPU, for a comparison with
            measurements there.

    Attributes:
        parameters: number of parameters of the network; 0 before the first plan.
    """

    def __init__(self, run: PlannedRun, world: int, gpu: Gpu, kernels: Literal["gpu", "cpu"] = "gpu") -> None:
        self._run = run
        self._world = world
        # The plan keeps the division of the fields that the config sets.
        self._domain = run.trainer.parallelism.num_domain_ranks
        self._sequence_parallel = run.trainer.parallelism.sequence_parallel
        self._gpu = gpu
        self._on_gpu = kernels == "gpu"
        self._properties: dict[tuple[bool, int], _NetworkProperties] = {}
        self._traces: dict[tuple[bool, int, Checkpointing, MemberBatches], Trace] = {}
        self.parameters = 0

    def search_meshes(self) -> Iterator[MeshPlan]:
        """Yield plans by rising degree of tensor parallelism within a node, and stop after a degree that is slower.

        A degree is slower if its best mesh brings fewer samples per second than that of the degree before.

        Raises:
            ConfigError: if the network cannot be built or sharded.
        """
        if self._world == 1:
            yield self.plan_mesh("none", ParallelDims(), self._run.trainer.activation_checkpoint)
            return
        best_speed = 0.0
        for tensor in divisors(self._world // self._domain):
            if tensor > self._gpu.per_node:
                return
            num_data_ranks = self._world // (self._domain * tensor)
            if num_data_ranks % self._run.trainer.parallelism.ensemble:
                # The data-parallel ranks do not form whole ensemble groups.
                continue
            if not self._run.count_steps(self._build_degrees(1, tensor)):
                # A step would take more samples than there are.
                continue
            try:
                meshes = self._plan_tensor_degree(tensor)
            except ConfigError:
                if tensor == 1:
                    raise
                # No layer of this network can be split over so many ranks.
                return
            yield from meshes
            working_speeds = [mesh.samples_per_second for mesh in meshes if mesh.works]
            speed = max(working_speeds, default=0.0)
            if speed < best_speed:
                return
            best_speed = speed

    def _plan_tensor_degree(self, tensor: int) -> list[MeshPlan]:
        """Return the plans of all meshes with `tensor` tensor-parallel ranks, one for each number of replicas."""
        meshes = []
        for replicate in divisors(self._world // (self._domain * tensor)):
            # With a whole replica on each rank FSDP2 would be DDP.
            data = "ddp" if replicate == self._world else "fsdp2"
            degrees = self._build_degrees(replicate, tensor)
            meshes.append(self.plan_mesh(data, degrees, self._run.trainer.activation_checkpoint))
        return meshes

    def _build_degrees(self, replicate: int, tensor: int) -> ParallelDims:
        """Return the degrees of a mesh of all ranks; the ensemble groups are those of the config."""
        shard = self._world // (replicate * tensor * self._domain)
        ensemble = self._run.trainer.parallelism.ensemble
        sequence_parallel = self._sequence_parallel and tensor > 1
        return ParallelDims(replicate, shard, tensor, ensemble, self._domain, sequence_parallel)

    def plan_mesh(
        self, data: str, degrees: ParallelDims, checkpointing: Checkpointing, members_at_once: int | None = None
    ) -> MeshPlan:
        """Return the plan of one mesh.

        Args:
            data: value of ``trainer.parallelism.data``: none, ddp or fsdp2.
            degrees: number of ranks along each axis of the mesh.
            checkpointing: value of ``trainer.activation_checkpoint``.
            members_at_once: value of ``trainer.members_at_once``; None for that of the config.

        Raises:
            ConfigError: if the network cannot be built, or cannot be split or checkpointed as requested.
        """
        run = self._run
        members = run.member_batches(degrees, members_at_once)
        schedule = run.schedule(members)
        gpu = self._gpu
        trainer = run.trainer
        sharded = data != "none"
        network = self._read_network(sharded, degrees.tensor)
        trace = self._trace_step(sharded, degrees.tensor, checkpointing, members)

        # Memory: the weights and the state of the optimizer, then what a step needs in passing.
        on_host = sharded and trainer.parallelism.cpu_offload
        memory = compute_state_memory(network.units, degrees, network.buffers, average=trainer.use_ema, host=on_host)
        output_bytes = run.output_bytes * members.members
        activations = trace.activations + count_exchange_bytes(output_bytes, run.gathers_members, degrees)
        memory = replace(memory, fields=trace.constants, activations=activations)
        collectives = trace.collectives + count_iteration_collectives(network.iterated, degrees)
        num_exchanges = run.num_counted_steps * schedule.micro_steps
        collectives += count_member_collectives(output_bytes, run.gathers_members, num_exchanges, degrees)
        if sharded:
            gathered, reduced = bound_in_flight_memory(network.units, degrees, network.precision, schedule)
            memory = replace(memory, gathered=gathered, reduced=reduced)
            collectives += count_sharding_collectives(network.units, degrees, network.precision, schedule)
            collectives += count_sequence_collectives(network.units, degrees)

        # Time: kernels and the update, the host that queues them, and collectives by whether the kernels wait for them.
        kernel_seconds = self._estimate_kernel_seconds(trace.kernels, memory.parameters)
        blocking_seconds, overlapped_seconds = self._estimate_collective_seconds(collectives)
        plan = MeshPlan(
            data=data,
            degrees=degrees,
            memory=memory,
            collectives=collectives,
            flops=trace.flops,
            kernel_seconds=kernel_seconds,
            launch_seconds=sum(trace.kernels.values()) * gpu.launch_seconds,
            blocking_seconds=blocking_seconds,
            overlapped_seconds=overlapped_seconds,
            samples=run.samples_per_step(degrees),
            steps=run.count_steps(degrees),
            hours=0.0,
            megawatt_hours=0.0,
            fits=memory.device <= gpu.usable_bytes,
        )
        # Shorter rollouts are taken to need proportionally less time.
        hours = plan.steps * plan.step_seconds * run.mean_rollout_fraction / 3600
        return replace(plan, hours=hours, megawatt_hours=hours * degrees.world * gpu.watts / 1e6)

    def _estimate_kernel_seconds(self, kernels: Mapping[Kernel, int], parameter_bytes: int) -> float:
        """Return the seconds of all kernels of an optimizer step, including the update, which is not traced.

        Args:
            kernels: kernel -> number of its runs in the traced step.
            parameter_bytes: bytes of this rank's shard of the weights.
        """
        gpu = self._gpu
        traced_seconds = []
        for kernel, count in kernels.items():
            seconds_per_run = gpu.estimate_kernel_seconds(kernel.rate, kernel.flops, kernel.bytes)
            traced_seconds.append(seconds_per_run * count)
        # The update does little arithmetic, so its time is that of its memory traffic.
        update_seconds = parameter_bytes * _UPDATE_MOVES / (gpu.memory_gbs * 1e9 * MEMORY_SHARE)
        return sum(traced_seconds) + update_seconds

    def _estimate_collective_seconds(self, collectives: Mapping[Collective, int]) -> tuple[float, float]:
        """Return the seconds of the collectives that kernels wait for, and of those that run together with kernels."""
        blocking_seconds = 0.0
        overlapped_seconds = 0.0
        for collective, count in collectives.items():
            if collective.blocks:
                blocking_seconds += estimate_seconds(collective, self._gpu) * count
            else:
                overlapped_seconds += estimate_seconds(collective, self._gpu) * count
        return blocking_seconds, overlapped_seconds

    def _read_network(self, sharded: bool, tensor: int) -> _NetworkProperties:
        """Return the properties of the network at a degree of tensor parallelism; they are computed once.

        Args:
            sharded: True if FSDP2 shards the network.
            tensor: number of tensor-parallel ranks.
        """
        if (sharded, tensor) not in self._properties:
            trainer = self._run.trainer
            mesh = self._build_smallest_mesh(tensor)
            model, autocast = self._run.step_builder.build_network(mesh, sharded, trainer.activation_checkpoint)
            self.parameters = sum(parameter.numel() for parameter in model.parameters())
            # The precision is either that of autocast or that of FSDP2. With autocast, or without either, FSDP2's
            # collectives have float32.
            precision = Precision()
            dtypes: tuple[torch.dtype, ...] = ()
            if trainer.amp and not autocast:
                policy = trainer.fsdp2_mp_policy or MixedPrecisionConfig()
                param_dtype = getattr(torch, policy.param_dtype)
                reduce_dtype = getattr(torch, policy.reduce_dtype)
                precision = Precision(param_dtype.itemsize, reduce_dtype.itemsize)
                dtypes = (param_dtype, getattr(torch, policy.output_dtype))
            units = read_units(model, trainer.parallelism.reshard_after_forward)
            self._properties[sharded, tensor] = _NetworkProperties(
                units=units,
                buffers=count_buffer_bytes(model),
                iterated=read_iterated_bytes(model),
                autocast=autocast,
                precision=precision,
                dtypes=dtypes,
            )
        return self._properties[sharded, tensor]

    def _trace_step(self, sharded: bool, tensor: int, checkpointing: Checkpointing, members: MemberBatches) -> Trace:
        """Return the trace of an optimizer step without FSDP2; the cost of FSDP2 is computed from the sharding units.

        Args:
            sharded: True if FSDP2 shards the network in the run, which decides on its precision.
            tensor: number of tensor-parallel ranks.
            checkpointing: value of ``trainer.activation_checkpoint``.
            members: ensemble members that the rank computes for each sample.
        """
        network = self._read_network(sharded, tensor)
        step_builder = self._run.step_builder
        schedule = self._run.schedule(members)

        def trace_rollout(rollout: int) -> Trace:
            model, _ = step_builder.build_network(self._build_smallest_mesh(tensor), False, checkpointing)
            return trace_step(
                model,
                # Only the number of micro-steps is left for `trace_step` to choose.
                functools.partial(step_builder.build_step, model, network.autocast, rollout, members),
                micro_steps=schedule.micro_steps,
                gpu=self._on_gpu,
                autocast=network.autocast,
                dtypes=network.dtypes,
                tf32=self._run.trainer.tf32,
            )

        key = (sharded, tensor, checkpointing, members)
        if key not in self._traces:
            rollout = schedule.rollout
            if rollout <= 3:
                self._traces[key] = trace_rollout(rollout)
            else:
                # The cost of a further step is that of the third. Rollouts of one and two steps would not give it,
                # because the step of a one-step rollout is never recomputed.
                self._traces[key] = extrapolate_trace(trace_rollout(2), trace_rollout(3), rollout - 3)
        return self._traces[key]

    def _build_smallest_mesh(self, tensor: int) -> DeviceGrid:
        """Return the smallest mesh with `tensor` tensor-parallel ranks that shards the network as the run does."""
        # Two shards stand for any number of them, because the units are the same.
        num_shards = min(2, self._world // (tensor * self._domain))
        degrees = ParallelDims(
            replicate=1,
            shard=num_shards,
            tensor=tensor,
            domain=self._domain,
            sequence_parallel=self._sequence_parallel and tensor > 1,
        )
        # Of the parts into which the fields are divided, that of the first rank is the largest.
        return build_mesh(degrees, rank=0, device_type="cpu")


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in increasing order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
