"""Worker of test_equality: runs the cases on every mesh of four ranks and writes the results."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule

from benchmarks.collectives import CollectiveCounter
from credit.parallel.mesh import DeviceGrid, build_mesh, plan_degrees
from credit.parallel.process_info import process_group, read_process_info
from tests.parallel.training import cases


def count_collectives(mesh: DeviceGrid, rollout: int, accumulation: int) -> dict[str, Any]:
    """Return the collectives of the second optimizer step and the bytes of their results, with sizes of the model."""
    case = cases.Case(rollout=rollout, accumulation=accumulation)
    model, autocast = cases.build(case, mesh, "fsdp2")
    step, *_ = cases.build_step(case, model, autocast, mesh)
    batch_iterator = cases.batches(case, mesh)
    step(batch_iterator, 0, 1e-3)
    with CollectiveCounter() as counter:
        step(batch_iterator, 1, 1e-3)
    return {
        "units": sum(isinstance(module, FSDPModule) for module in model.modules()),
        "layers": sum(hasattr(module, "_tp_plan") for module in model.modules()),
        "parameter_bytes": sum(4 * p.numel() for p in model.parameters()),
        "calls": counter.calls,
        "bytes": counter.bytes,
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    process_info = read_process_info()
    facts: dict[str, Any] = {}
    with process_group(process_info, torch.device("cpu"), timeout_minutes=2):
        for name, mesh_config in cases.MESHES.items():
            mesh = build_mesh(plan_degrees(cases.parallelism(name), process_info.world), process_info.rank, "cpu")
            for number in cases.CASE_NUMBERS[name]:
                case, start_seconds = cases.CASES[number], time.perf_counter()
                results = cases.train(case, mesh, mesh_config["data"])
                if process_info.is_main:
                    save_file(results, folder / f"{name}-{number}.safetensors")
                    print(f"{name} {number} {time.perf_counter() - start_seconds:.1f} s", flush=True)
            if name in ("4x1", "2x2"):
                facts[name] = [count_collectives(mesh, 1, 1), count_collectives(mesh, 2, 2)]
    if process_info.is_main:
        (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
