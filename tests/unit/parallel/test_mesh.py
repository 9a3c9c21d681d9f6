"""Degrees of parallelism: valid and invalid settings, and messages that list valid ones."""

from __future__ import annotations

import pytest

from credit.config.sections.execution import ParallelismConfig
from credit.errors import ConfigError
from credit.parallel.mesh import DeviceGrid, ParallelDims, plan_degrees


@pytest.mark.parametrize(
    ("conf", "world", "degrees"),
    [
        ({}, 1, (1, 1, 1)),
        ({}, 8, (1, 8, 1)),
        ({"tensor": 4}, 8, (1, 2, 4)),
        ({"replicate": 2, "tensor": 2}, 8, (2, 2, 2)),
        ({"data": "ddp"}, 8, (8, 1, 1)),
        ({"data": "none", "tensor": 4}, 4, (1, 1, 4)),
        ({"data": "none"}, 1, (1, 1, 1)),
    ],
)
def test_degrees(conf: dict, world: int, degrees: tuple[int, int, int]) -> None:
    assert plan_degrees(ParallelismConfig(**conf), world) == ParallelDims(*degrees)


@pytest.mark.parametrize(
    ("conf", "world", "message"),
    [
        (
            {"tensor": 3},
            8,
            r"tensor 3 on 8 ranks: replicate 1 x shard \(8 / 3\) x tensor 3 does not divide the number of ranks",
        ),
        ({"tensor": 16}, 8, "does not divide the number of ranks"),
        ({"data": "ddp", "tensor": 2}, 4, "ddp keeps a whole replica"),
        ({"data": "none"}, 4, "tensor must be the number of ranks"),
        ({"data": "none", "tensor": 2}, 1, "tensor must be the number of ranks"),
    ],
)
def test_invalid_settings_are_refused_with_a_list_of_valid_ones(conf: dict, world: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error_info:
        plan_degrees(ParallelismConfig(**conf), world)
    choices = str(error_info.value).split("valid settings: ")[1]
    assert "{data: ddp}" in choices and "{data: fsdp2, replicate: 1, tensor: 1}" in choices


def test_neighbours_are_tensor_peers_and_share_samples() -> None:
    positions = [DeviceGrid(ParallelDims(replicate=2, shard=2, tensor=2), rank) for rank in range(8)]
    assert [position.data_rank for position in positions] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [position.tensor_rank for position in positions] == [0, 1] * 4
    assert positions[0].num_data_ranks == 4


def test_sequence_parallel_ranks_have_their_own_fields() -> None:
    """Eight ranks form two data-parallel ranks. Four ranks divide a sample; each of them reads its own part."""
    degrees = plan_degrees(ParallelismConfig(tensor=2, domain=2, sequence_parallel=True), 8)
    assert (degrees.shard, degrees.num_field_parts) == (2, 4)
    positions = [DeviceGrid(degrees, rank) for rank in range(8)]
    assert [position.domain_rank for position in positions] == [0, 1, 2, 3] * 2
    assert [position.data_rank for position in positions] == [0] * 4 + [1] * 4
    assert [position.tensor_rank for position in positions] == [0, 1] * 4
    assert all(position.reads_samples and position.field_group is None for position in positions)
    assert positions[0].describe() == "8 = replicate 1 x shard 2 x domain 2 x tensor 2 (sequence parallel)"


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"tensor": 1}, "sequence_parallel: needs tensor above 1.*tensor is 1, data is fsdp2"),
        ({"tensor": 2, "data": "none"}, "sequence_parallel: needs.*data is none"),
        ({"tensor": 2, "domain": {"lat": 2}}, "domain: .*does not work with sequence_parallel"),
    ],
)
def test_settings_that_sequence_parallelism_refuses(conf: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelismConfig(sequence_parallel=True, **conf)


def test_positions_in_ensemble_groups() -> None:
    """Eight ranks: two groups of two data-parallel ranks share members, each of two tensor-parallel ranks."""
    degrees = plan_degrees(ParallelismConfig(tensor=2, ensemble=2), 8)
    assert degrees == ParallelDims(1, 4, 2, ensemble=2)
    assert (degrees.num_data_ranks, degrees.num_sample_ranks) == (4, 2)
    positions = [DeviceGrid(degrees, rank) for rank in range(8)]
    assert [position.sample_rank for position in positions] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [position.ensemble_rank for position in positions] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [position.reads_samples for position in positions] == [True, False, False, False] * 2
    assert positions[0].describe() == "8 = replicate 1 x shard 4 x tensor 2, members shared by 2"


def test_an_ensemble_group_must_divide_the_data_ranks() -> None:
    with pytest.raises(ConfigError, match="3 does not divide the 4 data-parallel ranks.*possible values: 1, 2, 4"):
        plan_degrees(ParallelismConfig(ensemble=3), 4)
