"""Worker of test_object_collectives: checks results, reductions and errors of collectives on four ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from credit.data.error_collector import MultipleErrors
from credit.errors import CheckpointError, ConfigError, DataError
from credit.parallel.groups.axis_groups import build_axis_mesh, merge_mesh_axes
from credit.parallel.object_collectives import gather_on_rank0, reduce_over_ranks, run_on_all_ranks, run_on_rank0
from credit.parallel.process_info import process_group, read_process_info


def catch_error(function: object, *arguments: object) -> str:
    """Call a collective and return the class and the text of the error that it raises."""
    try:
        function(*arguments)
    except (CheckpointError, ConfigError, DataError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error is raised")


def fail_on_ranks(ranks: set[int]) -> int:
    """Return the rank, or raise an error on the given ranks."""
    rank = dist.get_rank()
    if rank in ranks:
        raise ConfigError(f"rank {rank} has failed")
    return rank


def raise_multiple_errors() -> None:
    """Raise an error whose class takes more arguments than a message."""
    raise MultipleErrors("two problems", ["one", "two"])


def main() -> None:
    process_info = read_process_info()
    rank = process_info.rank
    # With this level, torch would require equal numbers of messages on all ranks.
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    with process_group(process_info, torch.device("cpu"), 1):
        assert dist.get_debug_level() == dist.DebugLevel.INFO
        assert run_on_all_ranks(lambda: rank) == [0, 1, 2, 3]
        assert run_on_all_ranks(lambda: "equal") == ["equal"] * 4
        assert run_on_all_ranks(lambda: rank // 2) == [0, 0, 1, 1]
        assert run_on_rank0(lambda: {"rank": rank}) == {"rank": 0}
        assert reduce_over_ranks(lambda: str(rank), lambda lower, higher: lower + higher) == "0123"
        assert gather_on_rank0(rank) == ([0, 1, 2, 3] if rank == 0 else None)
        # Some of the ranks: neighbours, and the groups of a mesh.
        first_rank = rank // 2 * 2
        assert run_on_all_ranks(lambda: rank, range(first_rank, first_rank + 2)) == [first_rank, first_rank + 1]
        mesh = build_axis_mesh("cpu", {"dp": 2, "tp": 2})
        assert run_on_all_ranks(lambda: rank, mesh["tp"].get_group()) == [first_rank, first_rank + 1]
        assert run_on_all_ranks(lambda: rank, mesh["dp"].get_group()) == [rank % 2, rank % 2 + 2]
        # The groups of a mesh have the timeout of the group of all ranks.
        for axis_mesh in (mesh["tp"], merge_mesh_axes(mesh)):
            backend = axis_mesh.get_group()._get_backend(torch.device("cpu"))
            assert backend.options._timeout == timedelta(minutes=1)
        # A rank that has failed raises its own error. The other ranks raise the error of the lowest rank.
        expected = "ConfigError: rank 3 has failed" if rank == 3 else "ConfigError: rank 1 has failed"
        assert catch_error(run_on_all_ranks, lambda: fail_on_ranks({1, 3})) == expected
        assert catch_error(run_on_rank0, lambda: fail_on_ranks({0})) == "ConfigError: rank 0 has failed"
        # Errors that are not errors of credit, and results that cannot be pickled, are raised as CheckpointError.
        assert catch_error(run_on_all_ranks, lambda: 1 // (rank - 2)).startswith("CheckpointError: ZeroDivisionError")
        assert "pickle" in catch_error(run_on_rank0, lambda: lambda: None)
        # An error in the combination of two results, and an error whose class takes more arguments than a message.
        assert "TypeError" in catch_error(reduce_over_ranks, lambda: None, lambda lower, higher: lower + higher)
        for function in (run_on_rank0, run_on_all_ranks):
            assert catch_error(function, raise_multiple_errors).endswith(": two problems")
        assert run_on_all_ranks(lambda: None) == [None] * 4, "the ranks still work together"
        print(f"rank {rank} is through", flush=True)


if __name__ == "__main__":
    main()
