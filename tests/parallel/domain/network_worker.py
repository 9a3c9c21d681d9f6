"""Worker of test_networks: compares divided networks with whole networks, also with a rule broken on purpose."""

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

# Broken rule -> network and numbers of its parts with which the comparison must find an error.
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
def break_rule(mutation: str) -> Iterator[None]:
    """Break one of the rules while the context is open."""
    patches: dict[str, tuple[Any, str, Any]] = {
        # Convolutions read no cells of other ranks.
        "halo": (rules, "build_exchange", _replace_remote_rows_by_zeros(rules.build_exchange)),
        # Rows beyond a pole come from the same meridian instead of the opposite one.
        "pole": (SpherePadding, "find_cells", _omit_roll_at_pole(SpherePadding.find_cells)),
        "vector sign": (SpherePadding, "find_vector_slices", lambda padding: []),
        # The sums of other ranks are left out.
        "group norm": (group_norm, "sum_over_ranks", lambda x, group: x),
        # Long attention works on the local rows and columns.
        "distant cells": (domain_rules.LongAttentionRule, "install", lambda rule, layer, group: None),
        # Shifted windows are those of the local columns.
        "shifted windows": (ShiftedWindowRule, "install", lambda rule, layer, group: None),
        # Attention to all cells sees only the local cells.
        "whole field": (GlobalAttentionRule, "install", lambda rule, layer, group: None),
        # Gradients of cells that went to other ranks do not come back.
        "gradient": (CellExchange, "move_gradient", _move_local_gradient),
    }
    owner, name, replacement = patches[mutation]
    with mock.patch.object(owner, name, replacement):
        yield


def _replace_remote_rows_by_zeros(build_exchange: Any) -> Any:
    """Return a `build_exchange` that replaces the rows of other ranks by zeros."""

    def build_local_exchange(group: Any, source: FieldDivision, needed: list[list[Cells]]) -> CellExchange:
        local_cells = []
        for rank, blocks in enumerate(needed):
            local_rows = source.owned(rank).rows
            local_blocks = []
            for block in blocks:
                rows = [row if row in local_rows else ZERO for row in block.rows]
                local_blocks.append(Cells(rows, block.columns))
            local_cells.append(local_blocks)
        return build_exchange(group, source, local_cells)

    return build_local_exchange


def _omit_roll_at_pole(find_cells: Any) -> Any:
    """Return a `find_cells` that finds cells beyond a pole on the same meridian."""

    def find_cells_on_same_meridian(self: SpherePadding, rows: range, columns: range, grid: tuple[int, int]) -> Any:
        west = self.lon[0]
        field_columns = [(column - west) % grid[1] for column in columns]
        return [(block_rows, field_columns) for block_rows, _ in find_cells(self, rows, columns, grid)]

    return find_cells_on_same_meridian


def _move_local_gradient(exchange: CellExchange, gradient: torch.Tensor) -> torch.Tensor:
    """Move the gradient without communication, so that only local gradients arrive."""
    with mock.patch.object(exchange, "_communicates", False):
        return MOVE_GRADIENT(exchange, gradient)


MOVE_GRADIENT = CellExchange.move_gradient


def catch_error_of_compiled_dropout() -> str:
    """Collective: compile a divided network with dropout and return the message of the error."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "domain"))
    network = networks.build_network(networks.CASES["noise"])
    try:
        parallelize(network, mesh, compile_blocks=lambda network: None)
    except ConfigError as error:
        return str(error)
    return "not refused"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    process_info = read_process_info()
    results: dict[str, Any] = {"cases": {}, "postprocesses": {}, "mutations": {}, "compiled": {}}
    with process_group(process_info, torch.device("cpu"), timeout_minutes=5):
        for num_parts in networks.PARTS[process_info.world]:
            for name in networks.CASES:
                results["cases"][f"{name} {num_parts}"] = networks.compare(name, num_parts)
            for poles in (False, True):
                errors = postprocesses.compare_wave_filter(num_parts, poles)
                results["postprocesses"][f"hyperdiffusion, poles {poles} {num_parts}"] = errors
            results["postprocesses"][f"dry mass {num_parts}"] = postprocesses.compare_dry_mass(num_parts)
        if process_info.world == 2:
            for mutation, (name, num_parts) in MUTATIONS.items():
                errors = networks.compare(name, num_parts, break_rule(mutation))
                results["mutations"][mutation] = errors
            for name in COMPILED:
                errors = networks.compare(name, (2, 1), backend="aot_eager")
                results["compiled"][name] = errors
            results["refusal"] = catch_error_of_compiled_dropout()
        dist.barrier()
    if process_info.is_main:
        (folder / f"{process_info.world}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
