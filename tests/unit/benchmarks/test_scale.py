"""Scale model: the work of a rank does not grow faster than the logarithm of the number of ranks."""

from __future__ import annotations

import pytest

from benchmarks.scale import agreement, dealing, logs, meshes, reads, startup, watchdog
from benchmarks.scale.__main__ import find_parts
from benchmarks.scale.rows import Curve, Row, format_table, group_rows

RANKS = [8, 64, 512]
# Units whose values depend on the machine.
MEASURED_UNITS = ("s", "MB")


def measure_counts(module: object, ranks: list[int]) -> dict[str, Curve]:
    """Return the curves of a part that are counts, by quantity."""
    curves = group_rows(module.measure(ranks))
    return {curve.rows[0].quantity: curve for curve in curves if curve.rows[0].unit not in MEASURED_UNITS}


def list_values(curve: Curve) -> list[float]:
    return [row.value for row in curve.rows]


def test_start_of_a_run() -> None:
    curves = measure_counts(startup, [8, 512])
    growing_curves = {name: curve.verdict for name, curve in curves.items() if curve.verdict != "constant or log N"}
    # About 200 bytes a host of eight ranks.
    assert (
        growing_curves.keys() == {"rank 0: received"} and "names of all hosts" in growing_curves["rank 0: received"]
    ), growing_curves
    assert list_values(curves["rank 0: received"])[1] < 300 * 512 / 8
    # Log2 of 8 and 512.
    assert list_values(curves["rank 0: connections for objects"]) == [3, 9]
    assert list_values(curves["last rank: connections for objects"]) == [1, 1]
    # Only the thread that saves checkpoints has a group besides that of all ranks.
    assert list_values(curves["rank 0: groups created"]) == [1, 1]
    assert list_values(curves["last rank: files or folders opened"]) == [0, 0]
    # Reader and statistics of rank 0.
    received_by_8, received_by_512 = list_values(curves["last rank: received"])
    assert received_by_8 > 10_000 and received_by_512 < received_by_8 + 300 * 512 / 8


def test_communicators() -> None:
    curves = measure_counts(meshes, [16, 512])
    communicators = {name: list_values(curve) for name, curve in curves.items() if name.endswith(": communicators")}
    assert all(first == last <= 12 for first, last in communicators.values()), communicators
    assert communicators["dp: communicators"] == [3, 3], "those of all ranks and of the saving thread"
    assert communicators["replicate x dp x domain x tensor: communicators"][0] > 6
    calls = {name: list_values(curve) for name, curve in curves.items() if "calls" in name}
    assert all(first == last <= 9 for first, last in calls.values()), calls
    groups_of_one_rank = {name: list_values(curve)[0] for name, curve in curves.items() if "groups of one rank" in name}
    # FSDP2 needs an axis of shards, also if there is one shard.
    assert {name.split(":")[0] for name, number in groups_of_one_rank.items() if number} == {"replicate"}


@pytest.mark.parametrize("module", [agreement, dealing, logs])
def test_counts_of_other_parts(module: object) -> None:
    curves = measure_counts(module, RANKS)
    assert {curve.verdict for curve in curves.values()} == {"constant or log N"}, curves


# Newer versions of Python warn of forks beside threads; the children here use none.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_reads_of_a_host() -> None:
    """Ten steps of three times on eight ranks: with a cache, the host opens each chunk once."""
    curves = {name: list_values(curve) for name, curve in measure_counts(reads, [8, 512]).items()}
    for label in ("a sample on each rank", "fields divided among 8 ranks"):
        assert curves[f"{label}, data.cache: none: opens of a host"] == [240, 240]
    assert all(opens <= 30 for opens in curves["fields divided among 8 ranks, data.cache: disk: opens of a host"])
    assert all(opens < 240 for opens in curves["a sample on each rank, data.cache: disk: opens of a host"])


def test_ranks_that_report() -> None:
    curves = measure_counts(logs, RANKS) | measure_counts(watchdog, RANKS)
    assert list_values(curves["log files without warnings"]) == [1, 1, 1]
    assert list_values(curves["ranks that may write STATUS when all fail"]) == [8, 8, 8]
    assert list_values(curves["ranks that log a stack"]) == [4, 4, 4]
    lines = list_values(curves["report of rank 0: lines"])
    assert lines[0] == lines[1] == lines[2]
    assert max(list_values(curves["entries in the store in a second, all ranks"])) <= 200


def test_verdicts() -> None:
    def verdict(function: object, unit: str = "", reason: str = "") -> str:
        return Curve([Row("quantity", unit, ranks, function(ranks), reason) for ranks in RANKS]).verdict

    assert verdict(lambda ranks: 7) == verdict(lambda ranks: ranks.bit_length() - 1) == "constant or log N"
    assert verdict(lambda ranks: ranks**0.5) == verdict(lambda ranks: ranks, "s") == "GROWS"
    assert verdict(lambda ranks: ranks / 1e6, "s") == "below 0.1 s"
    assert verdict(lambda ranks: ranks, reason="it is read once") == "it is read once"
    table = format_table("part", [Curve([Row("time", "s", ranks, 0.5) for ranks in RANKS])])
    assert table.splitlines()[0] == "| part | 8 | 64 | 512 | slope | verdict |"
    assert table.splitlines()[2] == "| time (s) | 0.5 | 0.5 | 0.5 | 0.00 | constant or log N |"


def test_parts_are_found() -> None:
    assert {"startup", "meshes", "parameters", "agreement", "watchdog", "dealing", "logs"} <= find_parts().keys()
