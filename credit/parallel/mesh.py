"""The grid of ranks: replicas x shards x tensor-parallel ranks, checked before anything is built."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from credit.config.schema_trainer import ParallelismConfig
from credit.errors import ConfigError


@dataclass(frozen=True)
class ParallelDims:
    """How many ranks lie along each axis; their product is the number of ranks.

    Attributes:
        replicate: groups that hold the same shards.
        shard: ranks over which FSDP2 shards.
        tensor: ranks that share the work on one sample.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard * self.tensor


def plan_degrees(conf: ParallelismConfig, world: int) -> ParallelDims:
    """Return the degrees for `world` ranks.

    Raises:
        ConfigError: if they do not factor, with every factor and what would work.
    """
    asked = f"trainer.parallelism: data {conf.data}, replicate {conf.replicate}, tensor {conf.tensor} on {world} ranks"
    works = "; these work: " + ", ".join(_choices(world))
    if conf.data == "ddp" and (conf.tensor > 1 or conf.replicate > 1):
        raise ConfigError(f"{asked}: ddp keeps whole replicas on all ranks, so tensor and replicate must be 1{works}")
    if conf.data == "none":
        if conf.replicate > 1 or conf.tensor != world:
            raise ConfigError(
                f"{asked}: without data parallelism replicate must be 1 and tensor the number of ranks{works}"
            )
        return ParallelDims(tensor=world)
    if conf.data == "ddp":
        return ParallelDims(replicate=world)
    shard, rest = divmod(world, conf.replicate * conf.tensor)
    if rest or not shard:
        raise ConfigError(
            f"{asked}: replicate {conf.replicate} x shard ({world} / {conf.replicate * conf.tensor}) x tensor "
            f"{conf.tensor} is no whole grid{works}"
        )
    return ParallelDims(conf.replicate, shard, conf.tensor)


def _choices(world: int) -> list[str]:
    """Return the grids of `world` ranks, most sharded first, in words."""
    grids = [
        f"{{data: fsdp2, replicate: {replicate}, tensor: {tensor}}} (shard {world // replicate // tensor})"
        for tensor in range(1, world + 1)
        if world % tensor == 0
        for replicate in range(1, world // tensor + 1)
        if (world // tensor) % replicate == 0
    ]
    kept = grids if len(grids) <= 12 else [*grids[:12], "..."]
    return [*kept, "{data: ddp}", f"{{data: none, tensor: {world}}}"]


@dataclass(frozen=True)
class DeviceGrid:
    """The run's ranks as a grid; neighbouring ranks are tensor-parallel peers.

    Attributes:
        degrees: length of each axis.
        rank: of this process.
        device_mesh: axes ``replicate`` (where it is longer than 1), ``dp``, ``tp``; None for one process.
        whole_mesh: the same ranks with ``dp`` and ``tp`` as one axis ``shard``: units without split weights are sharded
            over it, so that tensor parallelism costs them no memory.
    """

    degrees: ParallelDims = ParallelDims()
    rank: int = 0
    device_mesh: DeviceMesh | None = None
    whole_mesh: DeviceMesh | None = None

    @property
    def data_rank(self) -> int:
        """Which share of the samples this rank reads."""
        return self.rank // self.degrees.tensor

    @property
    def data_ranks(self) -> int:
        """Number of shares."""
        return self.degrees.replicate * self.degrees.shard

    @property
    def tensor_rank(self) -> int:
        """Position among the ranks that work on the same sample."""
        return self.rank % self.degrees.tensor

    @property
    def tensor_peers(self) -> ProcessGroup | None:
        """The ranks that work on the same sample as this one; None where there is no other."""
        return None if self.degrees.tensor == 1 else self.device_mesh["tp"].get_group()

    def describe(self) -> str:
        """Return the grid in words."""
        d = self.degrees
        return f"{d.world} = replicate {d.replicate} x shard {d.shard} x tensor {d.tensor}"

    @property
    def split_mesh(self) -> DeviceMesh:
        """Where the units with split weights are sharded: ``dp``, after ``replicate`` where there is one."""
        assert self.device_mesh is not None, "one process has no mesh"
        return self.device_mesh["replicate", "dp"] if self.degrees.replicate > 1 else self.device_mesh["dp"]


def build_mesh(degrees: ParallelDims, rank: int, device_type: str) -> DeviceGrid:
    """Return the mesh of the ranks; collective where there are several."""
    if degrees.world == 1:
        return DeviceGrid()
    sizes = {"replicate": degrees.replicate, "dp": degrees.shard, "tp": degrees.tensor}
    joined = {"replicate": degrees.replicate, "shard": degrees.shard * degrees.tensor}
    if degrees.replicate == 1:
        del sizes["replicate"], joined["replicate"]
    meshes = [
        init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes)) for axes in (sizes, joined)
    ]
    return DeviceGrid(degrees, rank, *meshes)
