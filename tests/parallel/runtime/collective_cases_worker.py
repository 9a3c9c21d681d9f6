"""Worker of test_object_collectives: results, sums and errors of four ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from credit.data.error_collector import MultipleErrors
from credit.errors import CheckpointError, ConfigError, DataError
from credit.parallel.groups.axis_groups import build_axis_mesh
from credit.parallel.object_collectives import gather_on_rank0, reduce_over_ranks, run_on_all_ranks, run_on_rank0
from credit.parallel.process_info import process_group, read_process_info


def catch(function: object, *arguments: object) -> str:
    """Return the class and the text of the error that a collective raises."""
    try:
        function(*arguments)
    except (CheckpointError, ConfigError, DataError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error is raised")


def fail_on(ranks: set[int]) -> int:
    """Return the rank, or raise an error on some ranks."""
    rank = dist.get_rank()
    if rank in ranks:
        raise ConfigError(f"rank {rank} has failed")
    return rank


def fail_twice() -> None:
    """Raise an error with more than a message."""
    raise MultipleErrors("two problems", ["one", "two"])


def main() -> None:
    launch = read_process_info()
    rank = launch.rank
    with process_group(launch, torch.device("cpu"), 1):
        assert run_on_all_ranks(lambda: rank) == [0, 1, 2, 3]
        assert run_on_all_ranks(lambda: "equal") == ["equal"] * 4
        assert run_on_all_ranks(lambda: rank // 2) == [0, 0, 1, 1]
        assert run_on_rank0(lambda: {"rank": rank}) == {"rank": 0}
        assert reduce_over_ranks(lambda: str(rank), lambda low, high: low + high) == "0123"
        assert gather_on_rank0(rank) == ([0, 1, 2, 3] if rank == 0 else None)
        # Neighbours, and the groups of a mesh.
        first = rank // 2 * 2
        assert run_on_all_ranks(lambda: rank, range(first, first + 2)) == [first, first + 1]
        mesh = build_axis_mesh("cpu", {"dp": 2, "tp": 2})
        assert run_on_all_ranks(lambda: rank, mesh["tp"].get_group()) == [first, first + 1]
        assert run_on_all_ranks(lambda: rank, mesh["dp"].get_group()) == [rank % 2, rank % 2 + 2]
        # The lowest rank's error is raised everywhere, except on other ranks that have errors of their own.
        expected = "ConfigError: rank 3 has failed" if rank == 3 else "ConfigError: rank 1 has failed"
        assert catch(run_on_all_ranks, lambda: fail_on({1, 3})) == expected
        assert catch(run_on_rank0, lambda: fail_on({0})) == "ConfigError: rank 0 has failed"
        # An error of another kind, and a result that cannot be sent.
        assert catch(run_on_all_ranks, lambda: 1 // (rank - 2)).startswith("CheckpointError: ZeroDivisionError")
        assert "pickle" in catch(run_on_rank0, lambda: lambda: None)
        # A failure to combine two results, and an error whose class takes more than the message.
        assert "TypeError" in catch(reduce_over_ranks, lambda: None, lambda low, high: low + high)
        for function in (run_on_rank0, run_on_all_ranks):
            assert catch(function, fail_twice).endswith(": two problems")
        assert run_on_all_ranks(lambda: None) == [None] * 4, "the ranks still work together"
        print(f"rank {rank} is through", flush=True)


if __name__ == "__main__":
    main()
