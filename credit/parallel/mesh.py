"""Mesh of ranks (replicas x shards x domain ranks x tensor-parallel ranks), and checks of the number of ranks.

The axes of replicas and shards together form the data-parallel ranks. The data-parallel ranks may be divided into
ensemble groups: the ranks of a group compute different members of the same samples. Sharding does not depend on the
ensemble groups, so a larger group needs no more memory. Each rank of a domain group has a different part of the fields
of the same samples; weights are sharded over the ranks of a domain group as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from credit.errors import ConfigError
from credit.parallel.groups.axis_groups import build_axis_mesh, build_group, merge_mesh_axes

# Largest number of settings that an error message lists.
_MAX_LISTED_SETTINGS = 12


@dataclass(frozen=True)
class ParallelDims:
    """Number of ranks along each axis of the mesh; replicate x shard x domain x tensor is the number of all ranks.

    Attributes:
        replicate: number of replicas. A replica is a group of ranks that together store all shards of the weights.
        shard: number of data-parallel ranks in a replica; FSDP2 shards the weights over shard x domain ranks.
        tensor: number of ranks over which tensor parallelism splits the layers.
        ensemble: number of neighbouring data-parallel ranks that share the members of a sample. It is a divisor of
            replicate x shard, not a further factor of the number of ranks.
        domain: number of ranks of a domain group, which share the fields of a sample.
        sequence_parallel: True if the tensor-parallel ranks also share the fields of a sample.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    ensemble: int = 1
    domain: int = 1
    sequence_parallel: bool = False

    @property
    def num_field_parts(self) -> int:
        """Number of parts into which the fields of a sample are divided, with one part on each rank."""
        return self.domain * self.tensor if self.sequence_parallel else self.domain

    @property
    def world(self) -> int:
        """Total number of ranks of the run."""
        return self.num_data_ranks * self.domain * self.tensor

    @property
    def ranks_per_sample(self) -> int:
        """Number of ranks that together compute the members of one sample, or the forecasts from one initial time."""
        return self.ensemble * self.domain * self.tensor

    @property
    def num_data_ranks(self) -> int:
        """Number of data-parallel ranks, replicate x shard."""
        return self.replicate * self.shard

    @property
    def num_sample_ranks(self) -> int:
        """Number of sample groups (groups of ranks that train on the same samples)."""
        return self.num_data_ranks // self.ensemble


class ParallelismSettings(Protocol):
    """Settings from which `plan_degrees` computes the mesh: the section ``trainer.parallelism`` of a config.

    Attributes:
        data: ``fsdp2`` shards the weights, ``ddp`` keeps whole replicas, ``none`` is tensor parallelism alone.
        replicate: number of replicas.
        tensor: number of ranks over which tensor parallelism splits the layers.
        ensemble: number of data-parallel ranks that share the members of a sample.
        num_domain_ranks: number of ranks of a domain group, which share the fields of a sample.
        sequence_parallel: True if the tensor-parallel ranks also share the fields of a sample.
    """

    data: Literal["fsdp2", "ddp", "none"]
    replicate: int
    tensor: int
    ensemble: int
    sequence_parallel: bool

    @property
    def num_domain_ranks(self) -> int:
        """Number of ranks of a domain group, which share the fields of a sample."""
        ...


def plan_degrees(settings: ParallelismSettings, world: int) -> ParallelDims:
    """Return the length of each mesh axis for `world` ranks.

    With FSDP2, `shard` is world / (replicate x domain x tensor).

    Args:
        settings: ``trainer.parallelism`` of a config.
        world: number of ranks.

    Raises:
        ConfigError: if the settings and the number of ranks form no mesh; the message lists the valid settings.
    """
    num_domain_ranks = settings.num_domain_ranks
    if num_domain_ranks == 1:
        degrees = _plan_axes(settings, world)
    else:
        _require_domain_fits(settings, world)
        # First plan a mesh in which each domain group is a single rank, then add the domain axis.
        degrees = replace(_plan_axes(settings, world, num_domain_ranks), domain=num_domain_ranks)
    num_data_ranks = degrees.num_data_ranks
    if num_data_ranks % settings.ensemble:
        divisors = [str(size) for size in range(1, num_data_ranks + 1) if num_data_ranks % size == 0]
        raise ConfigError(
            f"trainer.parallelism.ensemble: {settings.ensemble} does not divide the {num_data_ranks} "
            f"data-parallel ranks (replicate {degrees.replicate} x shard {degrees.shard}); possible values: "
            f"{', '.join(divisors)}"
        )
    return replace(degrees, ensemble=settings.ensemble, sequence_parallel=settings.sequence_parallel)


def _require_domain_fits(settings: ParallelismSettings, world: int) -> None:
    """Require that a run with domain parallelism uses FSDP2 and can divide its ranks into domain groups of equal size.

    Raises:
        ConfigError: if one of the two conditions is not met; the message names the key and the valid values.
    """
    num_domain_ranks = settings.num_domain_ranks
    if settings.data != "fsdp2":
        raise ConfigError(
            f"trainer.parallelism.domain: {num_domain_ranks} ranks need data: fsdp2, which sums the gradients over "
            f"these ranks; data is {settings.data}"
        )
    if world % num_domain_ranks:
        divisors = [str(size) for size in range(1, world + 1) if world % size == 0]
        raise ConfigError(
            f"trainer.parallelism.domain: {num_domain_ranks} does not divide the {world} ranks that were started; "
            f"possible values: {', '.join(divisors)}"
        )


def _plan_axes(settings: ParallelismSettings, world: int, num_domain_ranks: int = 1) -> ParallelDims:
    """Return the lengths of the axes `replicate`, `shard` and `tensor` for `world` ranks; other axes have length 1.

    Args:
        settings: ``trainer.parallelism`` of a config.
        world: number of ranks.
        num_domain_ranks: number of ranks of a domain group, a divisor of `world`.

    Raises:
        ConfigError: if the settings and the number of ranks form no mesh; the message lists the valid settings.
    """
    ranks = f"{world} ranks"
    if num_domain_ranks > 1:
        ranks = f"{world} ranks in groups of domain {num_domain_ranks}"
    degrees = f"data {settings.data}, replicate {settings.replicate}, tensor {settings.tensor}"
    requested = f"trainer.parallelism: {degrees} on {ranks}"
    # From here on, each domain group is treated as one rank.
    world //= num_domain_ranks
    valid_settings = _list_valid_settings(world)
    if num_domain_ranks > 1:
        valid_settings = [text for text in valid_settings if "fsdp2" in text]
    choices = "; valid settings: " + ", ".join(valid_settings)
    if settings.data == "ddp":
        if settings.tensor > 1 or settings.replicate > 1:
            raise ConfigError(
                f"{requested}: ddp keeps a whole replica on each rank, so tensor and replicate must be 1{choices}"
            )
        return ParallelDims(replicate=world)
    if settings.data == "none":
        if settings.replicate > 1 or settings.tensor != world:
            raise ConfigError(
                f"{requested}: without data parallelism, replicate must be 1 and tensor must be the number of "
                f"ranks{choices}"
            )
        return ParallelDims(tensor=world)
    # The config does not give the number of shards. It follows from the number of ranks and the other axes.
    ranks_per_shard = settings.replicate * settings.tensor
    shard, remainder = divmod(world, ranks_per_shard)
    if remainder or not shard:
        raise ConfigError(
            f"{requested}: replicate {settings.replicate} x shard ({world} / {ranks_per_shard}) x tensor "
            f"{settings.tensor} does not divide the number of ranks{choices}"
        )
    return ParallelDims(settings.replicate, shard, settings.tensor)


def _list_valid_settings(world: int) -> list[str]:
    """Return the valid settings for `world` ranks as strings; settings with the most shards come first."""
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
    """Mesh of ranks, and the position of this process in it.

    Neighbouring ranks are tensor-parallel peers, which share the layers. Neighbouring groups of tensor-parallel peers
    form a domain group, which shares the fields. Neighbouring data-parallel ranks form an ensemble group, which shares
    the members.

    Attributes:
        degrees: length of each axis.
        rank: rank of this process, from 0.
        device_mesh: mesh with the axes ``replicate``, ``dp``, ``domain`` and ``tp``. Axes of length 1 other than ``dp``
            are omitted. None if every rank has the whole network.
        ensemble_group: ranks that share the members of the same samples, in the order of the members; None if this
            rank computes all members.
        same_fields_group: ranks that get the same fields as this rank: the ranks of its ensemble group and, without
            sequence parallelism, the tensor-parallel peers of these ranks. The other ranks of a domain group have
            different parts of the fields and are not included. None if no other rank gets the fields of this rank.
    """

    degrees: ParallelDims = ParallelDims()
    rank: int = 0
    device_mesh: DeviceMesh | None = None
    ensemble_group: ProcessGroup | None = None
    same_fields_group: ProcessGroup | None = None

    @property
    def data_rank(self) -> int:
        """Index of this rank, from 0, among the data-parallel ranks.

        All ranks of a domain group and all tensor-parallel peers have the same index.
        """
        return self.rank // (self.degrees.domain * self.degrees.tensor)

    @property
    def num_data_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.degrees.num_data_ranks

    @property
    def sample_rank(self) -> int:
        """Index of this rank's sample group, from 0; the ranks of a sample group train on the same samples."""
        return self.data_rank // self.degrees.ensemble

    @property
    def num_sample_ranks(self) -> int:
        """Number of sample groups (groups of ranks that train on the same samples)."""
        return self.degrees.num_sample_ranks

    @property
    def ensemble_rank(self) -> int:
        """Index of this rank, from 0, in its ensemble group."""
        return self.data_rank % self.degrees.ensemble

    @property
    def tensor_rank(self) -> int:
        """Index of this rank, from 0, among its tensor-parallel peers."""
        return self.rank % self.degrees.tensor

    @property
    def field_rank(self) -> int:
        """Index of this rank, from 0, among the tensor-parallel peers with the same part of the fields."""
        return 0 if self.degrees.sequence_parallel else self.tensor_rank

    @property
    def domain_rank(self) -> int:
        """Index of this rank, from 0, among the ranks that share the fields of a sample."""
        if self.degrees.sequence_parallel:
            return self.rank % self.degrees.num_field_parts
        return self.rank // self.degrees.tensor % self.degrees.domain

    @property
    def gets_forecasts(self) -> bool:
        """True if this rank is the first of the ranks that share a forecast.

        Unless every rank writes its own part, this rank gets the fields of the forecast and writes them.
        """
        return self.rank % self.degrees.ranks_per_sample == 0

    @property
    def reads_samples(self) -> bool:
        """True if this rank reads its part of the samples; False if it receives this part from another rank."""
        return self.field_rank == 0 and self.ensemble_rank == 0

    @property
    def domain_group(self) -> ProcessGroup | None:
        """Process group of the ranks that share the fields of a sample; None if each rank has whole fields."""
        if self.degrees.num_field_parts == 1:
            return None
        if not self.degrees.sequence_parallel:
            return self.device_mesh["domain"].get_group()
        if self.degrees.domain == 1:
            return self.device_mesh["tp"].get_group()
        return merge_mesh_axes(self.device_mesh["domain", "tp"], "domain_tp").get_group()

    @property
    def field_group(self) -> ProcessGroup | None:
        """Process group of the tensor-parallel peers with the same part of the fields; None if there are no such peers.

        Other ranks of the ensemble group have the same part of the fields too, but are not in this group.
        """
        if self.degrees.tensor == 1 or self.degrees.sequence_parallel:
            return None
        return self.device_mesh["tp"].get_group()

    def describe(self) -> str:
        """Return the mesh as a string, such as ``8 = replicate 1 x shard 4 x tensor 2, members shared by 2``."""
        degrees = self.degrees
        text = f"{degrees.world} = replicate {degrees.replicate} x shard {degrees.shard}"
        if degrees.domain > 1:
            text += f" x domain {degrees.domain}"
        text += f" x tensor {degrees.tensor}"
        if degrees.sequence_parallel:
            text += " (sequence parallel)"
        if degrees.ensemble > 1:
            text += f", members shared by {degrees.ensemble}"
        return text


def build_mesh(degrees: ParallelDims, rank: int, device_type: str, *, shares_weights: bool = True) -> DeviceGrid:
    """Collective: build the mesh of all ranks and its process groups, which have the timeout of the group of all ranks.

    Args:
        degrees: length of each axis; replicate x shard x domain x tensor is the number of ranks.
        rank: rank of this process, from 0.
        device_type: ``"cpu"`` or ``"cuda"``.
        shares_weights: False if every rank has the whole network, and only ensemble members are divided among ranks.
    """
    if degrees.world == 1:
        return DeviceGrid()
    device_mesh = None
    if shares_weights:
        axis_sizes = {
            "replicate": degrees.replicate,
            "dp": degrees.shard,
            "domain": degrees.domain,
            "tp": degrees.tensor,
        }
        # An axis of length 1 needs no communicator, so it is omitted. FSDP2 always needs the axis `dp`.
        for axis in ("replicate", "domain", "tp"):
            if axis_sizes[axis] == 1:
                del axis_sizes[axis]
        device_mesh = build_axis_mesh(device_type, axis_sizes)
    grid = DeviceGrid(degrees, rank, device_mesh)
    if degrees.ensemble == 1:
        return replace(grid, same_fields_group=grid.field_group)
    # S sample groups, E ranks that share the members, D ranks that share the fields, T tensor-parallel ranks.
    ranks_SEDT = torch.arange(degrees.world).view(-1, degrees.ensemble, degrees.domain, degrees.tensor)
    # Only ranks with the same part of the fields and of the split layers exchange members: S x D x T groups of E ranks.
    ensemble_ranks_GN = ranks_SEDT.permute(0, 2, 3, 1).flatten(0, 2)
    ensemble_group = build_group(ensemble_ranks_GN, device_type, "ensemble")
    same_fields_group = ensemble_group
    if degrees.tensor > 1 and not degrees.sequence_parallel:
        sample_ranks_GN = ranks_SEDT.transpose(1, 2).flatten(0, 1).flatten(1)
        same_fields_group = build_group(sample_ranks_GN, device_type, "sample")
    return replace(grid, ensemble_group=ensemble_group, same_fields_group=same_fields_group)
