"""Worker of test_ensemble_axis: trains ensembles whose members are shared by ranks, and writes the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.collectives import CollectiveCounter
from credit.parallel.mesh import DeviceGrid, build_mesh, plan_degrees
from credit.parallel.process_info import process_group, read_process_info
from tests.parallel.training import cases


def count_exchanges(mesh: DeviceGrid) -> dict[str, Any]:
    """Return the number of collectives of an optimizer step and their bytes, by kind."""
    case = cases.CASES[cases.ENSEMBLE_CASES[0]]
    model, autocast = cases.build(case, mesh, "fsdp2")
    step, *_ = cases.build_step(case, model, autocast, mesh)
    source = cases.batches(case, mesh)
    step(source, 0, 1e-3)
    with CollectiveCounter() as counted:
        step(source, 1, 1e-3)
    return {"calls": counted.calls, "bytes": counted.bytes}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    launch = read_process_info()
    facts = {}
    with process_group(launch, torch.device("cpu"), timeout_minutes=5):
        for name, conf in cases.ENSEMBLE_MESHES[launch.world].items():
            mesh = build_mesh(plan_degrees(cases.parallelism(name), launch.world), launch.rank, "cpu")
            for number in cases.ENSEMBLE_CASE_NUMBERS[name]:
                results = cases.train(cases.CASES[number], mesh, conf["data"])
                if launch.is_main:
                    save_file(results, folder / f"{name}-{number}.safetensors")
            facts[name] = count_exchanges(mesh)
    if launch.is_main:
        (folder / f"facts-{launch.world}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
