"""Worker of test_fsdp2_api: runs the cases on four ranks and writes the error of each, if any."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from credit.parallel.process_info import process_group, read_process_info
from tests.parallel.fsdp2_api import (  # noqa: F401 (they add their cases)
    clip_cases,
    compile_cases,
    entry_point_cases,
    sharding_cases,
    spectral_norm_cases,
    state_cases,
    tensor_plan_cases,
)
from tests.parallel.fsdp2_api.gradient_cases import CASES


def main(folder: Path, chosen: list[str]) -> None:
    torch.set_num_threads(1)
    verdicts: dict[str, str | None] = {}
    launch = read_process_info()
    with process_group(launch, torch.device("cpu"), timeout_minutes=2):
        for name in chosen or CASES:
            problem = None
            try:
                CASES[name]()
            except Exception:
                problem = f"rank {launch.rank}: {traceback.format_exc()}"
            problems: list[str | None] = [None] * launch.world
            dist.all_gather_object(problems, problem)
            verdicts[name] = next(filter(None, problems), None)
            if launch.is_main:
                (folder / "verdicts.json").write_text(json.dumps(verdicts))
                print(name, verdicts[name] or "passed", flush=True)
        # A gloo thread that still frees the last collective's tensors when Python ends aborts the process (torch 2.13);
        # a barrier has none to free, and while the ranks wait in it the thread gets on.
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
