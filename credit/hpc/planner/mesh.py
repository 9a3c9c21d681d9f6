"""A run on one mesh of GPUs: what each rank holds, computes and sends, and how long that takes.

The training step is traced once for each degree of tensor parallelism; what replicas and shards change follows from
the sharding units, so thousands of ranks cost no more than a few.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import nn

from credit.config.schema_trainer import MixedPrecisionConfig, TrainerConfig
from credit.errors import ConfigError
from credit.hpc.planner.gpus import MEMORY_SHARE, Gpu
from credit.hpc.planner.memory import (
    Memory,
    Precision,
    Schedule,
    Unit,
    buffer_bytes,
    in_flight,
    read_units,
    states,
)
from credit.hpc.planner.trace import Trace, extend, trace_step
from credit.hpc.planner.traffic import (
    Message,
    iteration_messages,
    read_iterated_bytes,
    seconds,
    sharding_messages,
    traced_messages,
)
from credit.parallel.mesh import DeviceGrid, ParallelDims, build_mesh

Checkpointing = bool | Literal["selective"]
CHECKPOINTING: tuple[Checkpointing, ...] = (False, "selective", True)
# reads and writes of an element of a rank's part: AdamW with clipping 8, the norm 1, the average 3
_UPDATE_MOVES = 12


class StepTrace(Protocol):
    """What the run is made of; the plan does not know how it is put together."""

    def network(self, mesh: DeviceGrid, sharded: bool, checkpointing: Checkpointing) -> tuple[nn.Module, bool]:
        """Return the network on the meta device on its ranks, and whether it runs under autocast."""
        ...

    def start(
        self, model: nn.Module, autocast: bool, rollout: int, micro_steps: int
    ) -> tuple[torch.optim.Optimizer, Callable[[Callable[[], None]], object]]:
        """Return the optimizer and the step of a network that has memory; see `credit.hpc.planner.trace.Start`."""
        ...


@dataclass(frozen=True)
class Run:
    """What of a config decides about the plan.

    Attributes:
        trainer: the section.
        rollout: share of the run -> steps of the training rollout from there on.
        samples: initial times of the training period.
        rehearsal: builds its network and its training step.
    """

    trainer: TrainerConfig
    rollout: Mapping[float, int]
    samples: int
    rehearsal: StepTrace

    @property
    def schedule(self) -> Schedule:
        """How the run's longest optimizer step goes through the model."""
        longest = max(self.rollout.values())
        return Schedule(self.trainer.grad_accum_every, longest, self.trainer.recompute_steps)

    @property
    def mean_rollout(self) -> float:
        """Mean of the rollout's steps over the run, as a share of the longest."""
        begins = [*sorted(self.rollout), 1.0]
        lengths = [(end - begin) * self.rollout[begin] for begin, end in zip(begins, begins[1:], strict=False)]
        return sum(lengths) / max(self.rollout.values())

    def batch(self, degrees: ParallelDims) -> int:
        """Return the samples of an optimizer step."""
        conf = self.trainer
        return degrees.replicate * degrees.shard * conf.train_batch_size * conf.grad_accum_every

    def steps(self, degrees: ParallelDims) -> int:
        """Return the optimizer steps of the run, 0 where the samples do not fill a single one."""
        per_epoch = self.samples // self.batch(degrees)
        return (self.trainer.max_steps or self.trainer.num_epoch * per_epoch) if per_epoch else 0


@dataclass(frozen=True)
class MeshPlan:
    """The run on one mesh.

    Attributes:
        data: as in ``trainer.parallelism``.
        degrees: the mesh.
        memory: of the fullest rank.
        messages: collectives of an optimizer step.
        flops: of an optimizer step on a rank.
        compute: seconds of an optimizer step that its kernels take.
        waiting: seconds of collectives that the kernels wait for.
        hidden: seconds of collectives that run beside the kernels as far as those last.
        samples: of an optimizer step, over all ranks.
        steps: optimizer steps of the run; 0 where the training period does not fill one.
        hours: of the run.
        megawatt_hours: of the run.
        fits: whether the memory does.
    """

    data: str
    degrees: ParallelDims
    memory: Memory
    messages: Mapping[Message, int]
    flops: int
    compute: float
    waiting: float
    hidden: float
    samples: int
    steps: int
    hours: float
    megawatt_hours: float
    fits: bool

    @property
    def step_seconds(self) -> float:
        """Seconds of an optimizer step with the longest rollout."""
        return self.waiting + max(self.compute, self.hidden)

    @property
    def samples_per_second(self) -> float:
        """Samples a second, over all ranks."""
        return self.samples / self.step_seconds

    @property
    def works(self) -> bool:
        """Whether the run can be made so."""
        return self.fits and self.steps > 0


@dataclass(frozen=True)
class _Network:
    """What the network is on some degree of tensor parallelism, whatever the other degrees.

    Attributes:
        units: of sharding.
        buffers: bytes of its buffers on a rank.
        iterated: bytes that power iterations sum over ranks, see `read_iterated_bytes`.
        autocast: whether it runs under autocast.
        precision: of what FSDP2 exchanges.
        dtypes: of weights and activations, and of the output, under FSDP2's mixed precision; empty without.
    """

    units: tuple[Unit, ...]
    buffers: int
    iterated: Mapping[str, tuple[int, int]]
    autocast: bool
    precision: Precision
    dtypes: tuple[torch.dtype, ...]


class Planner:
    """Plans meshes of one run; traces each degree of tensor parallelism and way of checkpointing once.

    Args:
        run: what is planned.
        world: GPUs; there is a process group of so many ranks, a fake one as a rule.
        gpu: their kind.
        kernels: whose kernels are traced: `gpu`, or `cpu` to compare with what can be measured there.
    """

    def __init__(self, run: Run, world: int, gpu: Gpu, kernels: Literal["gpu", "cpu"] = "gpu") -> None:
        self._run, self._world, self._gpu, self._on_gpu = run, world, gpu, kernels == "gpu"
        self._networks: dict[tuple[bool, int], _Network] = {}
        self._traces: dict[tuple[bool, int, Checkpointing], Trace] = {}
        self.parameters = 0

    def search(self) -> Iterator[MeshPlan]:
        """Yield the meshes of rising degree of tensor parallelism."""
        if self._world == 1:
            yield self.mesh("none", ParallelDims(), self._run.trainer.activation_checkpoint)
            return
        fastest = 0.0
        for tensor in _divisors(self._world):
            if tensor > self._gpu.per_node:
                return
            if not self._run.steps(ParallelDims(1, self._world // tensor, tensor)):
                continue  # a step would take more samples than there are
            try:
                found = [*self._of_tensor(tensor)]
            except ConfigError:
                if tensor == 1:
                    raise
                return  # so many ranks split nothing of this network
            yield from found
            now = max((mesh.samples_per_second for mesh in found if mesh.works), default=0.0)
            if now < fastest:
                return
            fastest = now

    def _of_tensor(self, tensor: int) -> Iterator[MeshPlan]:
        rest = self._world // tensor
        for replicate in _divisors(rest):
            # whole replicas on all ranks are what ddp is
            data = "ddp" if replicate == self._world else "fsdp2"
            degrees = ParallelDims(replicate, rest // replicate, tensor)
            yield self.mesh(data, degrees, self._run.trainer.activation_checkpoint)

    def mesh(self, data: str, degrees: ParallelDims, checkpointing: Checkpointing) -> MeshPlan:
        """Return the plan of one mesh."""
        run, gpu, conf = self._run, self._gpu, self._run.trainer
        sharded = data != "none"
        network = self._network(sharded, degrees.tensor)
        trace = self._trace(sharded, degrees.tensor, checkpointing)
        host = sharded and conf.parallelism.cpu_offload
        memory = states(network.units, degrees, network.buffers, average=conf.use_ema, host=host)
        memory = replace(memory, fields=trace.constants, activations=trace.activations)
        messages = traced_messages(trace) + iteration_messages(network.iterated, degrees)
        if sharded:
            gathered, reduced = in_flight(network.units, degrees, network.precision, run.schedule)
            memory = replace(memory, gathered=gathered, reduced=reduced)
            messages += sharding_messages(network.units, degrees, network.precision, run.schedule)
        kernels = sum(gpu.kernel_seconds(*kernel) * count for kernel, count in trace.kernels.items())
        update = memory.parameters * _UPDATE_MOVES / (gpu.memory_gbs * 1e9 * MEMORY_SHARE)
        made = MeshPlan(
            data=data,
            degrees=degrees,
            memory=memory,
            messages=messages,
            flops=trace.flops,
            compute=kernels + update,
            waiting=sum(seconds(m, gpu) * count for m, count in messages.items() if m.waits),
            hidden=sum(seconds(m, gpu) * count for m, count in messages.items() if not m.waits),
            samples=run.batch(degrees),
            steps=run.steps(degrees),
            hours=0.0,
            megawatt_hours=0.0,
            fits=memory.device <= gpu.usable,
        )
        hours = made.steps * made.step_seconds * run.mean_rollout / 3600
        return replace(made, hours=hours, megawatt_hours=hours * degrees.world * gpu.watts / 1e6)

    def _network(self, sharded: bool, tensor: int) -> _Network:
        if (sharded, tensor) not in self._networks:
            conf = self._run.trainer
            model, autocast = self._run.rehearsal.network(self._ranks(tensor), sharded, conf.activation_checkpoint)
            self.parameters = sum(p.numel() for p in model.parameters())
            precision, dtypes = Precision(), ()
            if conf.amp and not autocast:
                policy = conf.fsdp2_mp_policy or MixedPrecisionConfig()
                weights, reduced, output = (
                    getattr(torch, name) for name in (policy.param_dtype, policy.reduce_dtype, policy.output_dtype)
                )
                precision, dtypes = Precision(weights.itemsize, reduced.itemsize), (weights, output)
            units = read_units(model, conf.parallelism.reshard_after_forward)
            self._networks[sharded, tensor] = _Network(
                units, buffer_bytes(model), read_iterated_bytes(model), autocast, precision, dtypes
            )
        return self._networks[sharded, tensor]

    def _trace(self, sharded: bool, tensor: int, checkpointing: Checkpointing) -> Trace:
        """Return the trace of an optimizer step, without FSDP2, whose part follows from the units."""
        network, build = self._network(sharded, tensor), self._run.rehearsal

        def of(rollout: int) -> Trace:
            model, _ = build.network(self._ranks(tensor), False, checkpointing)
            return trace_step(
                model,
                functools.partial(build.start, model, network.autocast, rollout),
                micro_steps=self._run.schedule.micro_steps,
                gpu=self._on_gpu,
                autocast=network.autocast,
                dtypes=network.dtypes,
                tf32=self._run.trainer.tf32,
            )

        key = (sharded, tensor, checkpointing)
        if key not in self._traces:
            longest = self._run.schedule.rollout
            # one step alone is another matter than a rollout, as it is not computed again
            self._traces[key] = of(longest) if longest <= 3 else extend(of(2), of(3), longest - 3)
        return self._traces[key]

    def _ranks(self, tensor: int) -> DeviceGrid:
        """Return the fewest ranks that show how the network is split and what its sharding units are."""
        return build_mesh(ParallelDims(1, min(2, self._world // tensor), tensor), 0, "cpu")


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
