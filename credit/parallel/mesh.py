"""The mesh of ranks: replicas x shards x tensor-parallel ranks, checked before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from credit.errors import ConfigError

# Most settings that an error message lists.
_MAX_LISTED_SETTINGS = 12


@dataclass(frozen=True)
class ParallelDims:
    """Number of ranks along each axis of the mesh; their product is the number of all ranks.

    Attributes:
        replicate: number of groups of ranks that hold the same shards.
        shard: number of ranks over which FSDP2 shards.
        tensor: number of ranks that share the work on one sample.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        """Number of all ranks."""
        return self.replicate * self.shard * self.tensor


class ParallelismSettings(Protocol):
    """Settings from which `plan_degrees` derives the mesh; ``trainer.parallelism`` of a config has them.

    Attributes:
        data: ``fsdp2`` shards, ``ddp`` keeps whole replicas, ``none`` is tensor parallelism alone.
        replicate: number of groups of ranks that hold the same shards.
        tensor: number of ranks that share the work on one sample.
    """

    data: Literal["fsdp2", "ddp", "none"]
    replicate: int
    tensor: int


def plan_degrees(settings: ParallelismSettings, world: int) -> ParallelDims:
    """Return the length of each mesh axis for `world` ranks; `shard` is what `replicate` and `tensor` leave.

    Args:
        settings: ``trainer.parallelism`` of a config.
        world: number of ranks.

    Raises:
        ConfigError: if they do not divide the number of ranks; it lists every factor and the meshes that would do.
    """
    requested = (
        f"trainer.parallelism: data {settings.data}, replicate {settings.replicate}, tensor {settings.tensor} on "
        f"{world} ranks"
    )
    choices = "; these work: " + ", ".join(_list_valid_settings(world))
    if settings.data == "ddp":
        if settings.tensor > 1 or settings.replicate > 1:
            raise ConfigError(
                f"{requested}: ddp keeps whole replicas on all ranks, so tensor and replicate must be 1{choices}"
            )
        return ParallelDims(replicate=world)
    if settings.data == "none":
        if settings.replicate > 1 or settings.tensor != world:
            raise ConfigError(
                f"{requested}: without data parallelism replicate must be 1 and tensor the number of ranks{choices}"
            )
        return ParallelDims(tensor=world)
    ranks_per_shard = settings.replicate * settings.tensor
    shard, remainder = divmod(world, ranks_per_shard)
    if remainder or not shard:
        raise ConfigError(
            f"{requested}: replicate {settings.replicate} x shard ({world} / {ranks_per_shard}) x tensor "
            f"{settings.tensor} does not divide the number of ranks{choices}"
        )
    return ParallelDims(settings.replicate, shard, settings.tensor)


def _list_valid_settings(world: int) -> list[str]:
    """Return the settings that work for `world` ranks in words, most sharded first."""
    valid_settings = []
    for tensor in range(1, world + 1):
        if world % tensor:
            continue
        num_data_ranks = world // tensor
        for replicate in range(1, num_data_ranks + 1):
            if num_data_ranks % replicate == 0:
                shard = num_data_ranks // replicate
                valid_settings.append(f"{{data: fsdp2, replicate: {replicate}, tensor: {tensor}}} (shard {shard})")
    if len(valid_settings) > _MAX_LISTED_SETTINGS:
        valid_settings = [*valid_settings[:_MAX_LISTED_SETTINGS], "..."]
    return [*valid_settings, "{data: ddp}", f"{{data: none, tensor: {world}}}"]


@dataclass(frozen=True)
class DeviceGrid:
    """Mesh of ranks, and the position of this process in it; neighbouring ranks are tensor-parallel peers.

    Attributes:
        degrees: length of each axis.
        rank: rank of this process, from 0.
        device_mesh: axes ``replicate`` (where it is longer than 1), ``dp``, ``tp``; None for one process.
    """

    degrees: ParallelDims = ParallelDims()
    rank: int = 0
    device_mesh: DeviceMesh | None = None

    @property
    def data_rank(self) -> int:
        """Index, from 0, of the share of the samples that this rank reads; tensor-parallel peers have the same."""
        return self.rank // self.degrees.tensor

    @property
    def num_data_ranks(self) -> int:
        """Number of shares of the samples."""
        return self.degrees.replicate * self.degrees.shard

    @property
    def tensor_rank(self) -> int:
        """Position, from 0, among the ranks that work on the same sample."""
        return self.rank % self.degrees.tensor

    @property
    def tensor_group(self) -> ProcessGroup | None:
        """Process group of the ranks that work on the same sample as this one; None where there is no other."""
        if self.degrees.tensor == 1:
            return None
        return self.device_mesh["tp"].get_group()

    def describe(self) -> str:
        """Return the mesh in words: ``8 = replicate 1 x shard 4 x tensor 2``."""
        degrees = self.degrees
        return f"{degrees.world} = replicate {degrees.replicate} x shard {degrees.shard} x tensor {degrees.tensor}"


def build_mesh(degrees: ParallelDims, rank: int, device_type: str) -> DeviceGrid:
    """Collective: return the mesh of all ranks.

    Args:
        degrees: length of each axis; their product is the number of ranks.
        rank: rank of this process, from 0.
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    if degrees.world == 1:
        return DeviceGrid()
    axis_sizes = {"replicate": degrees.replicate, "dp": degrees.shard, "tp": degrees.tensor}
    # FSDP2 takes a mesh with an axis of replicas for hybrid sharding, which needs collectives of its own.
    if degrees.replicate == 1:
        del axis_sizes["replicate"]
    device_mesh = init_device_mesh(device_type, tuple(axis_sizes.values()), mesh_dim_names=tuple(axis_sizes))
    return DeviceGrid(degrees, rank, device_mesh)
