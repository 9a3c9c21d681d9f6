"""Worker of test_networks: compares divided networks with whole ones, also with a rule broken on purpose."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from credit.errors import ConfigError
from credit.models.layers import domain_rules
from credit.models.layers.padding import SpherePadding
from credit.models.swin.domain import ShiftedWindowRule
from credit.models.unet.attention import GlobalAttentionRule
from credit.parallel.domain import group_norm, rules
from credit.parallel.domain.division import FieldDivision
from credit.parallel.domain.exchange import ZERO, CellExchange, Cells
from credit.parallel.parallelize import parallelize
from credit.parallel.process_info import process_group, read_process_info
from tests.parallel.domain import networks, postprocesses

# Broken rule -> the network and its parts with which it must be noticed.
MUTATIONS = {
    "halo": ("pixel shuffle", (2, 1)),
    "pole": ("pixel shuffle", (2, 1)),
    "vector sign": ("pixel shuffle", (2, 1)),
    "group norm": ("pixel shuffle", (2, 1)),
    "distant cells": ("pixel shuffle", (2, 1)),
    "gradient": ("pixel shuffle", (2, 1)),
    "shifted windows": ("swin", (1, 2)),
    "whole field": ("unet", (2, 1)),
}
# Networks whose blocks are compiled as well.
COMPILED = ("pixel shuffle", "interpolated")


@contextmanager
def broken(mutation: str) -> Iterator[None]:
    """Break one of the rules while the context is open."""
    patches: dict[str, tuple[Any, str, Any]] = {
        # Convolutions read no cells of other ranks.
        "halo": (rules, "build_exchange", _without_other_cells(rules.build_exchange)),
        # Rows beyond a pole come from the same meridian instead of the opposite one.
        "pole": (SpherePadding, "find_cells", _without_roll(SpherePadding.find_cells)),
        "vector sign": (SpherePadding, "find_vector_slices", lambda padding: []),
        # The sums of other ranks are left out.
        "group norm": (group_norm, "sum_over_ranks", lambda x, group: x),
        # Long attention works on the local rows and columns.
        "distant cells": (domain_rules.LongAttentionRule, "install", lambda rule, layer, group: None),
        # Shifted windows are those of the local columns.
        "shifted windows": (ShiftedWindowRule, "install", lambda rule, layer, group: None),
        # Attention to all cells sees the local cells.
        "whole field": (GlobalAttentionRule, "install", lambda rule, layer, group: None),
        # Gradients of cells that went to other ranks do not come back.
        "gradient": (CellExchange, "move_gradient", _only_own_gradient),
    }
    owner, name, replacement = patches[mutation]
    with mock.patch.object(owner, name, replacement):
        yield


def _without_other_cells(build_exchange: Any) -> Any:
    def replaced(group: Any, source: FieldDivision, needed: list[list[Cells]]) -> CellExchange:
        local = []
        for rank, blocks in enumerate(needed):
            rows_here = source.owned(rank).rows
            local_blocks = []
            for block in blocks:
                rows = [row if row in rows_here else ZERO for row in block.rows]
                local_blocks.append(Cells(rows, block.columns))
            local.append(local_blocks)
        return build_exchange(group, source, local)

    return replaced


def _without_roll(find_cells: Any) -> Any:
    def replaced(self: SpherePadding, rows: range, columns: range, grid: tuple[int, int]) -> Any:
        west = self.lon[0]
        columns_here = [(column - west) % grid[1] for column in columns]
        return [(block_rows, columns_here) for block_rows, _ in find_cells(self, rows, columns, grid)]

    return replaced


def _only_own_gradient(exchange: CellExchange, gradient: torch.Tensor) -> torch.Tensor:
    with mock.patch.object(exchange, "_communicates", False):
        return MOVE_GRADIENT(exchange, gradient)


MOVE_GRADIENT = CellExchange.move_gradient


def refuse_compiled_dropout() -> str:
    """Collective: return the message with which the compilation of a divided network with dropout is refused."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "domain"))
    network = networks.build_network(networks.CASES["noise"])
    try:
        parallelize(network, mesh, compile_blocks=lambda network: None)
    except ConfigError as error:
        return str(error)
    return "not refused"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    launch = read_process_info()
    results: dict[str, Any] = {"cases": {}, "postprocesses": {}, "mutations": {}, "compiled": {}}
    with process_group(launch, torch.device("cpu"), timeout_minutes=5):
        for num_parts in networks.PARTS[launch.world]:
            for name, case in networks.CASES.items():
                results["cases"][f"{name} {num_parts}"] = networks.compare(case, num_parts)
            for poles in (False, True):
                errors = postprocesses.compare_wave_filter(num_parts, poles)
                results["postprocesses"][f"hyperdiffusion, poles {poles} {num_parts}"] = errors
            results["postprocesses"][f"dry mass {num_parts}"] = postprocesses.compare_dry_mass(num_parts)
        if launch.world == 2:
            for mutation, (name, num_parts) in MUTATIONS.items():
                errors = networks.compare(networks.CASES[name], num_parts, broken(mutation))
                results["mutations"][mutation] = errors
            for name in COMPILED:
                errors = networks.compare(networks.CASES[name], (2, 1), backend="aot_eager")
                results["compiled"][name] = errors
            results["refusal"] = refuse_compiled_dropout()
        dist.barrier()
    if launch.is_main:
        (folder / f"{launch.world}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
