"""Plans of all meshes that a number of GPUs can form, and the recommended mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from credit.errors import ConfigError
from credit.hpc.planner.gpus import Gpu, find_gpu, list_gpu_names
from credit.hpc.planner.mesh import CHECKPOINTING, MeshPlan, Planner, list_divisors
from credit.hpc.planner.planned_run import Checkpointing, PlannedRun
from credit.hpc.planner.search import MeshSearch
from credit.parallel.mesh import plan_degrees

# Estimated speeds that differ by less than this fraction are treated as equal.
_SPEED_TOLERANCE = 0.02


@dataclass(frozen=True)
class Plan:
    """Plans of all meshes.

    Attributes:
        gpu: GPU of each rank.
        parameters: number of parameters of the network.
        meshes: plans of all meshes. The recommended mesh is the first, followed by the other usable meshes (fastest
            first) and the meshes that the run cannot use.
        configured: plan of the mesh that the config sets.
        checkpointing: value of ``trainer.activation_checkpoint`` -> plan of the recommended mesh with this value; only
            values that the network supports.
        members_at_once: value of ``trainer.members_at_once`` -> plan of the recommended mesh with this value; only
            divisors of the number of members that a rank computes.
        domain_refusal: reason why the fields cannot be divided into more parts; None if they can be divided, or if this
            was not tried.
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
        """Fastest value of ``trainer.members_at_once`` that fits into memory; None if no value fits."""
        fitting = {number: mesh for number, mesh in self.members_at_once.items() if mesh.fits}
        return min(fitting, key=lambda number: fitting[number].step_seconds, default=None)

    @property
    def best(self) -> MeshPlan:
        """Plan of the recommended mesh: the fastest mesh, or a mesh with the same speed within `_SPEED_TOLERANCE`."""
        return self.meshes[0]


def make_plan(run: PlannedRun, world: int, gpu: Gpu) -> Plan:
    """Return the plan of a run on `world` GPUs.

    Degrees of domain and tensor parallelism are tried in ascending order. The search stops when the best mesh of a
    degree has fewer samples per second than the best mesh of the previous degree.

    Args:
        run: settings of the run, and the builder of its training step.
        world: number of GPUs.
        gpu: GPU of each rank.

    Raises:
        ConfigError: if the GPUs do not fill their nodes, the degrees in the config do not divide the number of GPUs, a
            step needs more samples than there are, or no mesh fits into memory. The message describes a remedy.
    """
    _require_valid_request(run, world, gpu)
    configured_degrees = plan_degrees(run.trainer.parallelism, world)
    planner = Planner(run, world, gpu)
    search = MeshSearch(run, world, gpu.per_node, planner)
    meshes = {(mesh.data, mesh.degrees): mesh for mesh in search.list_meshes()}
    if not any(mesh.steps for mesh in meshes.values()):
        raise ConfigError(
            f"--world-size: with {world} GPUs a step needs more samples than {_describe_limit(run)} on every mesh; "
            "use fewer GPUs, or lower trainer.train_batch_size or grad_accum_every"
        )
    # The search may have omitted the mesh of the config.
    configured_data = run.trainer.parallelism.data if world > 1 else "none"
    configured_key = (configured_data, configured_degrees)
    if configured_key not in meshes:
        meshes[configured_key] = planner.plan_mesh(*configured_key, run.trainer.activation_checkpoint)
    ordered_meshes = _order_meshes(list(meshes.values()))
    best = ordered_meshes[0]
    if not best.is_usable:
        # If no mesh fits, the message suggests changes for the mesh that needs the least memory.
        possible_meshes = [mesh for mesh in ordered_meshes if mesh.steps]
        best = min(possible_meshes, key=lambda mesh: mesh.memory.device_bytes)
    checkpointing = {}
    for kind in CHECKPOINTING:
        try:
            checkpointing[kind] = planner.plan_mesh(best.data, best.degrees, kind)
        except ConfigError:
            # A network without marked blocks does not support checkpointing; only the configured kind must work.
            if kind == run.trainer.activation_checkpoint:
                raise
    members_at_once = {}
    for number in list_divisors(run.member_batches(best.degrees).members):
        members_at_once[number] = planner.plan_mesh(
            best.data, best.degrees, run.trainer.activation_checkpoint, members_at_once=number
        )
    if not best.is_usable:
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
    """Require valid values of the options ``--world-size`` and ``--samples-per-step``.

    Raises:
        ConfigError: if a number is less than 1 or the GPUs do not fill their nodes; the message names the option and
            valid values.
    """
    if world < 1:
        raise ConfigError(f"--world-size: {world} must be 1 or more")
    if run.max_samples_per_step is not None and run.max_samples_per_step < 1:
        raise ConfigError(f"--samples-per-step: {run.max_samples_per_step} must be 1 or more")
    if world > gpu.per_node and world % gpu.per_node:
        smaller_world = world // gpu.per_node * gpu.per_node
        larger_world = smaller_world + gpu.per_node
        raise ConfigError(
            f"--world-size: {world} GPUs do not fill nodes of {gpu.per_node} GPUs; {smaller_world} and {larger_world} "
            "GPUs do; set the number of GPUs per node with --per-node"
        )


def _describe_limit(run: PlannedRun) -> str:
    """Return a description of the largest number of samples in a step, for a message."""
    limit = f"the {run.samples} of the training period"
    if run.max_samples_per_step is not None:
        limit += f" or the {run.max_samples_per_step} of --samples-per-step"
    return limit


def _order_meshes(meshes: list[MeshPlan]) -> list[MeshPlan]:
    """Return the meshes in the order of `Plan.meshes`.

    Of all meshes within `_SPEED_TOLERANCE` of the highest speed, the mesh with the shortest time of collectives is the
    first. Its speed depends least on the assumption that collectives and kernels run at the same time.
    """
    # Meshes that work come first, because False sorts before True; among them, the fastest comes first.
    ordered = sorted(meshes, key=lambda mesh: (not mesh.is_usable, -mesh.samples_per_second))
    least_speed = (1 - _SPEED_TOLERANCE) * ordered[0].samples_per_second
    ties = [mesh for mesh in ordered if mesh.is_usable and mesh.samples_per_second > least_speed]
    # If no mesh is usable, there are no ties, and the order does not change.
    candidates = ties or ordered[:1]
    leader = min(candidates, key=lambda mesh: mesh.blocking_seconds + mesh.overlapped_seconds)
    return [leader, *(mesh for mesh in ordered if mesh is not leader)]


def _describe_misfit(
    run: PlannedRun, smallest: MeshPlan, checkpointing: Mapping[Checkpointing, MeshPlan], gpu: Gpu
) -> str:
    """Return the error message for a run that fits on no mesh, with changes after which the run would fit.

    Args:
        run: settings of the run.
        smallest: plan of the mesh that needs the least memory.
        checkpointing: value of ``trainer.activation_checkpoint`` -> plan of this mesh with the value.
        gpu: GPU of each rank.
    """
    remedies = []
    for kind, mesh in checkpointing.items():
        if mesh.fits and kind != run.trainer.activation_checkpoint:
            remedies.append(f"trainer.activation_checkpoint: {str(kind).lower()}")
    for name in list_gpu_names():
        if smallest.memory.device_bytes <= find_gpu(name).usable_bytes:
            remedies.append(f"--gpu {name}")
    if run.trainer.train_batch_size > 1:
        remedies.append("a smaller trainer.train_batch_size")
    remedies = remedies or ["a smaller model or grid"]
    usable_gib = gpu.usable_bytes / 2**30
    needed_gib = smallest.memory.device_bytes / 2**30
    return (
        f"--gpu: a run may use {usable_gib:.1f} GiB of {gpu.name}, but every mesh of {smallest.degrees.world} GPUs "
        f"needs at least {needed_gib:.1f} GiB; possible changes: {'; '.join(remedies)}"
    )
