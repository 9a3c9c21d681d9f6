"""Runs every case on every mesh of four ranks and writes what came out; started by test_equality."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from credit.parallel.launch import process_group, read_launch
from credit.parallel.mesh import build_mesh, plan_degrees
from tests.parallel import cases


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    launch = read_launch()
    with process_group(launch, torch.device("cpu"), timeout_minutes=2):
        for name, conf in cases.MESHES.items():
            mesh = build_mesh(plan_degrees(cases.parallelism(name), launch.world), launch.rank, "cpu")
            for number in cases.WHICH[name]:
                case, began = cases.CASES[number], time.perf_counter()
                made = cases.train(case, mesh, conf["data"])
                if launch.is_main:
                    save_file(made, folder / f"{name}-{number}.safetensors")
                    print(f"{name} {number} {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
