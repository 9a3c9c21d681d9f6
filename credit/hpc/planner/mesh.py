"""Plan of a run on one mesh of GPUs: memory and collectives of a rank, and an estimate of the time.

The training step is traced once for each degree of tensor parallelism. The effect of replicas and shards follows from
the sharding units, so that planning thousands of ranks costs no more than planning a few.
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
from credit.hpc.planner.trace import Collective, Trace, extrapolate_trace, trace_step
from credit.hpc.planner.traffic import (
    count_iteration_collectives,
    count_member_collectives,
    count_sharding_collectives,
    estimate_seconds,
    read_iterated_bytes,
)
from credit.parallel.mesh import DeviceGrid, ParallelDims, build_mesh

CHECKPOINTING: tuple[Checkpointing, ...] = (False, "selective", True)
# Reads and writes of each element of a rank's weights in an update: AdamW with clipping 8, the norm 1, the average 3.
_UPDATE_MOVES = 12


@dataclass(frozen=True)
class MeshPlan:
    """Plan of a run on one mesh. Memory, collectives and FLOP follow from the traced step; all times are estimates.

    Attributes:
        data: value of ``trainer.parallelism.data``.
        degrees: number of ranks along each axis of the mesh.
        memory: memory of the fullest rank.
        collectives: number of each collective of an optimizer step.
        flops: FLOP of an optimizer step on a rank.
        kernel_seconds: estimated time of the kernels of an optimizer step, in seconds.
        launch_seconds: estimated time that the host needs to queue these kernels, in seconds.
        blocking_seconds: estimated time of the collectives of a step that the kernels wait for, in seconds.
        overlapped_seconds: estimated time of the collectives of a step that run beside the kernels, in seconds.
        samples: number of samples in an optimizer step, over all ranks.
        steps: number of optimizer steps of the run; 0 if the training period does not fill one.
        hours: estimated time of the run.
        megawatt_hours: estimated energy of the run.
        fits: whether the memory fits into the GPU.
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
        """Estimated seconds of an optimizer step with the longest rollout."""
        return self.blocking_seconds + max(self.kernel_seconds, self.launch_seconds, self.overlapped_seconds)

    @property
    def samples_per_second(self) -> float:
        """Estimated samples per second, over all ranks."""
        return self.samples / self.step_seconds

    @property
    def works(self) -> bool:
        """True if the run can use this mesh."""
        return self.fits and self.steps > 0


@dataclass(frozen=True)
class _Network:
    """Facts of the network at one degree of tensor parallelism; they do not depend on the other degrees.

    Attributes:
        units: sharding units.
        buffers: bytes of the buffers on a rank.
        iterated: bytes that power iterations sum over ranks, see `read_iterated_bytes`.
        autocast: whether it runs under autocast.
        precision: element sizes of FSDP2's collectives.
        dtypes: dtypes of weights and activations, and of the output, under FSDP2's mixed precision; else empty.
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
        kernels: trace the kernels of a ``gpu``, or those of a ``cpu`` to compare them with measurements there.

    Attributes:
        parameters: number of parameters of the network; 0 before the first plan.
    """

    def __init__(self, run: PlannedRun, world: int, gpu: Gpu, kernels: Literal["gpu", "cpu"] = "gpu") -> None:
        self._run = run
        self._world = world
        self._gpu = gpu
        self._on_gpu = kernels == "gpu"
        self._networks: dict[tuple[bool, int], _Network] = {}
        self._traces: dict[tuple[bool, int, Checkpointing, MemberBatches], Trace] = {}
        self.parameters = 0

    def search_meshes(self) -> Iterator[MeshPlan]:
        """Yield meshes of rising degree of tensor parallelism, until a degree brings no more samples per second.

        Raises:
            ConfigError: if the network cannot be built or sharded.
        """
        if self._world == 1:
            yield self.plan_mesh("none", ParallelDims(), self._run.trainer.activation_checkpoint)
            return
        best_speed = 0.0
        for tensor in divisors(self._world):
            if tensor > self._gpu.per_node:
                return
            if self._world // tensor % self._run.trainer.parallelism.ensemble:
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
            speed = max((mesh.samples_per_second for mesh in meshes if mesh.works), default=0.0)
            if speed < best_speed:
                return
            best_speed = speed

    def _plan_tensor_degree(self, tensor: int) -> list[MeshPlan]:
        """Return the plans of all numbers of replicas at one degree of tensor parallelism."""
        meshes = []
        for replicate in divisors(self._world // tensor):
            # With a whole replica on each rank FSDP2 would be DDP.
            data = "ddp" if replicate == self._world else "fsdp2"
            degrees = self._build_degrees(replicate, tensor)
            meshes.append(self.plan_mesh(data, degrees, self._run.trainer.activation_checkpoint))
        return meshes

    def _build_degrees(self, replicate: int, tensor: int) -> ParallelDims:
        """Return the degrees of a mesh of all ranks, with the ensemble groups of the config."""
        shard = self._world // (replicate * tensor)
        return ParallelDims(replicate, shard, tensor, self._run.trainer.parallelism.ensemble)

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
            ConfigError: if the network cannot be built, split or checkpointed so.
        """
        run = self._run
        members = run.member_batches(degrees, members_at_once)
        schedule = run.schedule(members)
        gpu = self._gpu
        trainer = run.trainer
        sharded = data != "none"
        network = self._describe_network(sharded, degrees.tensor)
        trace = self._trace_step(sharded, degrees.tensor, checkpointing, members)

        # Memory: states of the optimizer and weights, then what the step needs for a while.
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

        # Time: kernels and the update, the host that queues them, and collectives by whether the kernels wait for them.
        kernel_seconds = sum(gpu.estimate_kernel_seconds(*kernel) * count for kernel, count in trace.kernels.items())
        update_seconds = memory.parameters * _UPDATE_MOVES / (gpu.memory_gbs * 1e9 * MEMORY_SHARE)
        blocking_seconds, overlapped_seconds = self._estimate_collective_seconds(collectives)
        plan = MeshPlan(
            data=data,
            degrees=degrees,
            memory=memory,
            collectives=collectives,
            flops=trace.flops,
            kernel_seconds=kernel_seconds + update_seconds,
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

    def _estimate_collective_seconds(self, collectives: Mapping[Collective, int]) -> tuple[float, float]:
        """Return the seconds of the collectives that the kernels wait for, and of those that run beside them."""
        blocking_seconds = 0.0
        overlapped_seconds = 0.0
        for collective, count in collectives.items():
            if collective.blocks:
                blocking_seconds += estimate_seconds(collective, self._gpu) * count
            else:
                overlapped_seconds += estimate_seconds(collective, self._gpu) * count
        return blocking_seconds, overlapped_seconds

    def _describe_network(self, sharded: bool, tensor: int) -> _Network:
        """Return the facts of the network at a degree of tensor parallelism, which is built once."""
        if (sharded, tensor) not in self._networks:
            trainer = self._run.trainer
            model, autocast = self._run.step_builder.build_network(
                self._smallest_mesh(tensor), sharded, trainer.activation_checkpoint
            )
            self.parameters = sum(p.numel() for p in model.parameters())
            # Without FSDP2's mixed precision, its collectives have float32.
            precision = Precision()
            dtypes: tuple[torch.dtype, ...] = ()
            if trainer.amp and not autocast:
                policy = trainer.fsdp2_mp_policy or MixedPrecisionConfig()
                param_dtype = getattr(torch, policy.param_dtype)
                reduce_dtype = getattr(torch, policy.reduce_dtype)
                precision = Precision(param_dtype.itemsize, reduce_dtype.itemsize)
                dtypes = (param_dtype, getattr(torch, policy.output_dtype))
            units = read_units(model, trainer.parallelism.reshard_after_forward)
            self._networks[sharded, tensor] = _Network(
                units, count_buffer_bytes(model), read_iterated_bytes(model), autocast, precision, dtypes
            )
        return self._networks[sharded, tensor]

    def _trace_step(self, sharded: bool, tensor: int, checkpointing: Checkpointing, members: MemberBatches) -> Trace:
        """Return the trace of an optimizer step without FSDP2, whose cost follows from the units."""
        network = self._describe_network(sharded, tensor)
        step_builder = self._run.step_builder
        schedule = self._run.schedule(members)

        def trace_rollout(rollout: int) -> Trace:
            model, _ = step_builder.build_network(self._smallest_mesh(tensor), False, checkpointing)
            return trace_step(
                model,
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
                # A rollout of one step is no basis: it is not recomputed.
                self._traces[key] = extrapolate_trace(trace_rollout(2), trace_rollout(3), rollout - 3)
        return self._traces[key]

    def _smallest_mesh(self, tensor: int) -> DeviceGrid:
        """Return the smallest mesh on which the network is split and sharded as on the run's own."""
        return build_mesh(ParallelDims(1, min(2, self._world // tensor), tensor), 0, "cpu")


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, increasing."""
    return [n for n in range(1, number + 1) if number % n == 0]
