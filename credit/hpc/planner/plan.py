"""Which mesh a run should take on a number of GPUs: every one that they can form is planned, and one recommended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from credit.errors import ConfigError
from credit.hpc.planner.gpus import Gpu, find_gpu, gpu_names
from credit.hpc.planner.mesh import CHECKPOINTING, Checkpointing, MeshPlan, Planner, Run
from credit.parallel.mesh import plan_degrees
from credit.parallel.process_info import fake_process_group

# differences of speed below this share say nothing
_TIE = 0.02


@dataclass(frozen=True)
class Plan:
    """Every mesh that was looked at.

    Attributes:
        gpu: the kind of GPU.
        parameters: of the network.
        meshes: the recommended one, those that work, fastest first, then those that do not.
        asked: the mesh that the config asks for.
        checkpointing: the recommended mesh with each kind of activation checkpointing.
    """

    gpu: Gpu
    parameters: int
    meshes: tuple[MeshPlan, ...]
    asked: MeshPlan
    checkpointing: Mapping[Checkpointing, MeshPlan]

    @property
    def best(self) -> MeshPlan:
        """The recommended mesh: the most samples a second, or so few less that it is a tie, see `_rank`."""
        return self.meshes[0]


def make_plan(run: Run, world: int, gpu: Gpu) -> Plan:
    """Plan a run on `world` GPUs.

    Degrees of tensor parallelism are tried upwards within a node, until one does not bring more samples a second.

    Raises:
        ConfigError: if the ranks do not factor as asked, fill their nodes, or if nothing fits; with what would.
    """
    if world < 1:
        raise ConfigError(f"--world-size: {world} must be 1 or more")
    if world > gpu.per_node and world % gpu.per_node:
        below = world // gpu.per_node * gpu.per_node
        raise ConfigError(
            f"--world-size: {world} GPUs do not fill nodes of {gpu.per_node}; {below} and {below + gpu.per_node} do, "
            "and --per-node says how many a node has"
        )
    asked = plan_degrees(run.trainer.parallelism, world)
    with fake_process_group(world):
        planner = Planner(run, world, gpu)
        meshes = {(mesh.data, mesh.degrees): mesh for mesh in planner.search()}
        if not any(map(_has_steps, meshes.values())):
            raise ConfigError(
                f"--world-size: with {world} GPUs a step takes more samples than the {run.samples} of the training "
                "period, whatever the mesh; take fewer, or lower trainer.train_batch_size or grad_accum_every"
            )
        key = (run.trainer.parallelism.data if world > 1 else "none", asked)
        if key not in meshes:
            meshes[key] = planner.mesh(*key, run.trainer.activation_checkpoint)
        ordered = _rank([*meshes.values()])
        # where none fits, what would help is asked of the mesh that needs least
        best = ordered[0] if ordered[0].works else min(filter(_has_steps, ordered), key=lambda m: m.memory.device)
        checkpointing = {way: planner.mesh(best.data, best.degrees, way) for way in CHECKPOINTING}
    if not best.works:
        raise ConfigError(_nothing_fits(run, best, checkpointing, gpu))
    return Plan(gpu, planner.parameters, tuple(ordered), meshes[key], checkpointing)


def _rank(meshes: list[MeshPlan]) -> list[MeshPlan]:
    """Return the meshes, those that work first and the fastest of them first of all.

    Of those that are as good as the fastest, the one with the shortest collectives leads: it depends least on their
    hiding behind the kernels.
    """
    ordered = sorted(meshes, key=lambda mesh: (not mesh.works, -mesh.samples_per_second))
    fast = [m for m in ordered if m.works and m.samples_per_second > (1 - _TIE) * ordered[0].samples_per_second]
    leader = min(fast or ordered[:1], key=lambda mesh: mesh.waiting + mesh.hidden)
    return [leader, *(mesh for mesh in ordered if mesh is not leader)]


def _has_steps(mesh: MeshPlan) -> bool:
    return mesh.steps > 0


def _nothing_fits(run: Run, least: MeshPlan, checkpointing: Mapping[Checkpointing, MeshPlan], gpu: Gpu) -> str:
    """Return that not even the mesh that needs `least` fits, and what would."""
    ways = [
        f"trainer.activation_checkpoint: {str(way).lower()}"
        for way, mesh in checkpointing.items()
        if mesh.fits and way != run.trainer.activation_checkpoint
    ]
    ways += [f"--gpu {other.name}" for other in map(find_gpu, gpu_names()) if least.memory.device <= other.usable]
    if run.trainer.train_batch_size > 1:
        ways.append("a smaller trainer.train_batch_size")
    return (
        f"--gpu: a run may use {gpu.usable / 2**30:.1f} GiB of {gpu.name}, and every mesh of {least.degrees.world} "
        f"needs more, {least.memory.device / 2**30:.1f} GiB at least; what would work: "
        + ("; ".join(ways) or "a smaller model or grid")
    )
