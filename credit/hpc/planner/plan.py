"""Plans of every mesh that a number of GPUs can form, and the recommended one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from credit.errors import ConfigError
from credit.hpc.planner.gpus import Gpu, find_gpu, list_gpu_names
from credit.hpc.planner.mesh import CHECKPOINTING, MeshPlan, Planner, divisors
from credit.hpc.planner.planned_run import Checkpointing, PlannedRun
from credit.hpc.planner.search import MeshSearch
from credit.parallel.mesh import plan_degrees

# Estimated speeds that differ by less than this share count as equal.
_SPEED_TOLERANCE = 0.02


@dataclass(frozen=True)
class Plan:
    """Plans of all meshes.

    Attributes:
        gpu: kind of GPU.
        parameters: number of parameters of the network.
        meshes: plans of all meshes: first the recommended one, then the others that work, fastest first, then those
            that do not work.
        configured: plan of the mesh that the config sets.
        checkpointing: value of ``trainer.activation_checkpoint`` -> plan of the recommended mesh with this value; only
            values that the network supports.
        members_at_once: value of ``trainer.members_at_once`` -> plan of the recommended mesh with this value; only
            divisors of the number of members that a rank computes.
        domain_refusal: why the fields are not divided into more parts; None if they can be, or if it was not tried.
    """

    gpu: Gpu
    parameters: int
    meshes: tuple[MeshPlan, ...]
    configured: MeshPlan
    checkpointing: Mapping[Checkpointing, MeshPlan]
    members_at_once: Mapping[int, MeshPlan]
    domain_refusal: str | None = None

    @property
    def best_members_at_once(self) -> int | None:
        """Value of ``trainer.members_at_once`` that is fastest among those that fit into memory; None if none fits."""
        fitting = {number: mesh for number, mesh in self.members_at_once.items() if mesh.fits}
        return min(fitting, key=lambda number: fitting[number].step_seconds, default=None)

    @property
    def best(self) -> MeshPlan:
        """Plan of the recommended mesh: the fastest one, or one that is as fast within `_SPEED_TOLERANCE`."""
        return self.meshes[0]


def make_plan(run: PlannedRun, world: int, gpu: Gpu) -> Plan:
    """Return the plan of a run on `world` GPUs.

    Degrees of domain and tensor parallelism are tried upwards, until one is slower than the degree before it.

    Args:
        run: the run.
        world: number of GPUs.
        gpu: kind of GPU.

    Raises:
        ConfigError: if the GPUs do not fill their nodes, the config's degrees do not divide their number, a step takes
            more samples than there are, or no mesh fits into memory. The message says what would work.
    """
    _require_valid_request(run, world, gpu)
    configured_degrees = plan_degrees(run.trainer.parallelism, world)
    planner = Planner(run, world, gpu)
    search = MeshSearch(run, world, gpu.per_node, planner)
    meshes = {(mesh.data, mesh.degrees): mesh for mesh in search.list_meshes()}
    if not any(mesh.steps for mesh in meshes.values()):
        raise ConfigError(
            f"--world-size: with {world} GPUs a step takes more samples than {_describe_limit(run)} on every mesh; "
            "use fewer GPUs, or lower trainer.train_batch_size or grad_accum_every"
        )
    # The search may have left out the mesh of the config.
    configured_data = run.trainer.parallelism.data if world > 1 else "none"
    configured_key = (configured_data, configured_degrees)
    if configured_key not in meshes:
        meshes[configured_key] = planner.plan_mesh(*configured_key, run.trainer.activation_checkpoint)
    ordered_meshes = _order_meshes(list(meshes.values()))
    best = ordered_meshes[0]
    if not best.works:
        # If no mesh fits, the message suggests changes for the one that needs the least memory.
        possible_meshes = [mesh for mesh in ordered_meshes if mesh.steps]
        best = min(possible_meshes, key=lambda mesh: mesh.memory.device)
    checkpointing = {}
    for kind in CHECKPOINTING:
        try:
            checkpointing[kind] = planner.plan_mesh(best.data, best.degrees, kind)
        except ConfigError:
            # A network that marks no blocks cannot recompute them; only the configured kind has to work.
            if kind == run.trainer.activation_checkpoint:
                raise
    members_at_once = {}
    for number in divisors(run.member_batches(best.degrees).members):
        members_at_once[number] = planner.plan_mesh(
            best.data, best.degrees, run.trainer.activation_checkpoint, members_at_once=number
        )
    if not best.works:
        raise ConfigError(_describe_misfit(run, best, checkpointing, gpu))
    return Plan(
        gpu,
        planner.parameters,
        tuple(ordered_meshes),
        meshes[configured_key],
        checkpointing,
        members_at_once,
        search.domain_refusal,
    )


def _require_valid_request(run: PlannedRun, world: int, gpu: Gpu) -> None:
    """Refuse numbers of GPUs or samples that cannot be planned; see `make_plan`.

    Raises:
        ConfigError: naming the option of the command and what would work.
    """
    if world < 1:
        raise ConfigError(f"--world-size: {world} must be 1 or more")
    if run.max_samples_per_step is not None and run.max_samples_per_step < 1:
        raise ConfigError(f"--samples-per-step: {run.max_samples_per_step} must be 1 or more")
    if world > gpu.per_node and world % gpu.per_node:
        smaller_world = world // gpu.per_node * gpu.per_node
        larger_world = smaller_world + gpu.per_node
        raise ConfigError(
            f"--world-size: {world} GPUs do not fill nodes of {gpu.per_node}; {smaller_world} and {larger_world} do, "
            "and --per-node says how many a node has"
        )


def _describe_limit(run: PlannedRun) -> str:
    """Return the largest number of samples of a step as text."""
    limit = f"the {run.samples} of the training period"
    if run.max_samples_per_step is not None:
        limit += f" or the {run.max_samples_per_step} of --samples-per-step"
    return limit


def _order_meshes(meshes: list[MeshPlan]) -> list[MeshPlan]:
    """Return the meshes in the order of `Plan.meshes`.

    Among the meshes that are as fast as the fastest within `_SPEED_TOLERANCE`, the one whose collectives take the least
    time comes first: its speed depends least on the assumption that collectives and kernels run at the same time.
    """
    # Meshes that work come first, because False sorts before True; among them, the fastest comes first.
    ordered = sorted(meshes, key=lambda mesh: (not mesh.works, -mesh.samples_per_second))
    least_speed = (1 - _SPEED_TOLERANCE) * ordered[0].samples_per_second
    ties = [mesh for mesh in ordered if mesh.works and mesh.samples_per_second > least_speed]
    # If no mesh works, there are no ties, and the first mesh of the order stays first.
    candidates = ties or ordered[:1]
    leader = min(candidates, key=lambda mesh: mesh.blocking_seconds + mesh.overlapped_seconds)
    return [leader, *(mesh for mesh in ordered if mesh is not leader)]


def _describe_misfit(
    run: PlannedRun, smallest: MeshPlan, checkpointing: Mapping[Checkpointing, MeshPlan], gpu: Gpu
) -> str:
    """Return the error message for a run that fits on no mesh, with the changes that would make it fit.

    Args:
        run: the run.
        smallest: plan of the mesh that needs the least memory.
        checkpointing: value of ``trainer.activation_checkpoint`` -> plan of this mesh with the value.
        gpu: kind of GPU.
    """
    remedies = []
    for kind, mesh in checkpointing.items():
        if mesh.fits and kind != run.trainer.activation_checkpoint:
            remedies.append(f"trainer.activation_checkpoint: {str(kind).lower()}")
    for name in list_gpu_names():
        if smallest.memory.device <= find_gpu(name).usable_bytes:
            remedies.append(f"--gpu {name}")
    if run.trainer.train_batch_size > 1:
        remedies.append("a smaller trainer.train_batch_size")
    remedies = remedies or ["a smaller model or grid"]
    usable_gib = gpu.usable_bytes / 2**30
    needed_gib = smallest.memory.device / 2**30
    return (
        f"--gpu: a run may use {usable_gib:.1f} GiB of {gpu.name}, and every mesh of {smallest.degrees.world} needs at "
        f"least {needed_gib:.1f} GiB; what would work: {'; '.join(remedies)}"
    )
