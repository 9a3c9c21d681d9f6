"""Search for meshes of a number of GPUs, which omits meshes that are certainly slower."""

from __future__ import annotations

import math
from collections.abc import Iterator

from credit.errors import ConfigError
from credit.hpc.planner.mesh import MeshPlan, Planner, list_divisors
from credit.hpc.planner.planned_run import PlannedRun
from credit.parallel.mesh import ParallelDims


class MeshSearch:
    """Search over the numbers of replicas, shards, tensor-parallel ranks and parts of the fields.

    Each degree of tensor and domain parallelism needs a trace of the step, which takes seconds. The search therefore
    raises a degree only while the speed increases.

    Args:
        run: settings of the run.
        world: number of GPUs.
        gpus_per_node: number of GPUs in a node.
        planner: planner of the run on `world` GPUs.

    Attributes:
        domain_refusal: reason why the fields cannot be divided into more parts; None if they can be divided, or if this
            was not tried.
    """

    def __init__(self, run: PlannedRun, world: int, gpus_per_node: int, planner: Planner) -> None:
        self._run = run
        self._world = world
        self._gpus_per_node = gpus_per_node
        self._planner = planner
        self._refused_domains: set[int] = set()
        self._first_refusal: ConfigError | None = None
        self.domain_refusal: str | None = None

    def list_meshes(self) -> list[MeshPlan]:
        """Return plans of meshes, sorted by the number of ranks that share a sample.

        The search stops when the best mesh for a number of ranks has fewer samples per second than the best mesh for
        the previous number. The ranks that share a sample are on one node, unless no mesh of this kind is usable.

        Raises:
            ConfigError: if the network cannot be built or sharded.
        """
        if self._world == 1:
            return [self._planner.plan_mesh("none", ParallelDims(), self._run.trainer.activation_checkpoint)]
        meshes: list[MeshPlan] = []
        best_speed = 0.0
        for num_ranks in list_divisors(self._world):
            if num_ranks > self._gpus_per_node and best_speed > 0:
                break
            if not self._can_share_sample(num_ranks):
                continue
            candidates = list(self._search_divisions(num_ranks))
            meshes += candidates
            speed = _find_speed(candidates)
            if speed < best_speed:
                break
            best_speed = speed
        if not meshes and self._first_refusal is not None:
            raise self._first_refusal
        return meshes

    def _can_share_sample(self, num_ranks: int) -> bool:
        """Return True if `num_ranks` ranks can share a sample or, in an ensemble, a member of a sample.

        The remaining ranks must form whole ensemble groups, and a step must not need too many samples.
        """
        if (self._world // num_ranks) % self._run.trainer.parallelism.ensemble:
            return False
        return self._run.count_steps(self._build_degrees(1, num_ranks, 1)) > 0

    def _search_divisions(self, num_ranks: int) -> Iterator[MeshPlan]:
        """Yield plans of meshes in which `num_ranks` ranks share a sample with domain and tensor parallelism.

        The first meshes use only domain parallelism. The degree of tensor parallelism is then raised, until the best
        mesh of a degree has fewer samples per second than the best mesh of the previous degree.

        Args:
            num_ranks: number of ranks that share a sample, domain x tensor.

        Raises:
            ConfigError: if the network cannot be built or sharded.
        """
        best_speed = 0.0
        for tensor in list_divisors(num_ranks):
            domain = num_ranks // tensor
            if tensor > self._gpus_per_node:
                return
            if not self._can_divide(domain):
                continue
            try:
                meshes = self._plan_replicas(tensor, domain)
            except ConfigError as error:
                if tensor == 1:
                    raise
                # No layer of this network can be split over `tensor` ranks with `domain` parts of the fields.
                self._first_refusal = self._first_refusal or error
                return
            yield from meshes
            speed = _find_speed(meshes)
            if speed < best_speed:
                return
            best_speed = speed

    def _can_divide(self, domain: int) -> bool:
        """Return True if `domain` is the number in the config or a power of two, and the network supports it."""
        if domain == 1:
            return True
        if domain != self._run.trainer.parallelism.num_domain_ranks and not math.log2(domain).is_integer():
            return False
        if domain in self._refused_domains:
            return False
        try:
            self._planner.require_divisible_fields(domain)
        except ConfigError as error:
            self._refused_domains.add(domain)
            self._first_refusal = self._first_refusal or error
            self.domain_refusal = self.domain_refusal or str(error)
            return False
        return True

    def _plan_replicas(self, tensor: int, domain: int) -> list[MeshPlan]:
        """Return the plans of all meshes with these degrees, one plan for each possible number of replicas."""
        meshes = []
        for replicate in list_divisors(self._world // (domain * tensor)):
            # With a whole replica on each rank, FSDP2 has no advantage over DDP.
            data = "ddp" if replicate == self._world else "fsdp2"
            degrees = self._build_degrees(replicate, tensor, domain)
            meshes.append(self._planner.plan_mesh(data, degrees, self._run.trainer.activation_checkpoint))
        return meshes

    def _build_degrees(self, replicate: int, tensor: int, domain: int) -> ParallelDims:
        """Return the degrees of a mesh of all ranks; the size of the ensemble groups is from the config."""
        shard = self._world // (replicate * tensor * domain)
        parallelism = self._run.trainer.parallelism
        sequence_parallel = parallelism.sequence_parallel and tensor > 1
        return ParallelDims(replicate, shard, tensor, parallelism.ensemble, domain, sequence_parallel)


def _find_speed(meshes: list[MeshPlan]) -> float:
    """Return the samples per second of the fastest usable mesh; 0 if no mesh is usable."""
    return max((mesh.samples_per_second for mesh in meshes if mesh.is_usable), default=0.0)
