"""Worker of test_fsdp2_api: runs the cases on four ranks and writes the error of each case, if any."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from credit.parallel.process_info import process_group, read_process_info
from tests.parallel.fsdp2_api import (  # noqa: F401 (the modules register their cases)
    clip_cases,
    compile_cases,
    entry_point_cases,
    sharding_cases,
    spectral_norm_cases,
    state_cases,
    tensor_plan_cases,
)
from tests.parallel.fsdp2_api.gradient_cases import CASES


def main(folder: Path, case_names: list[str]) -> None:
    torch.set_num_threads(1)
    errors_by_case: dict[str, str | None] = {}
    process_info = read_process_info()
    with process_group(process_info, torch.device("cpu"), timeout_minutes=2):
        for name in case_names or CASES:
            error = None
            try:
                CASES[name]()
            except Exception:
                error = f"rank {process_info.rank}: {traceback.format_exc()}"
            errors_by_rank: list[str | None] = [None] * process_info.world
            dist.all_gather_object(errors_by_rank, error)
            errors_by_case[name] = next(filter(None, errors_by_rank), None)
            if process_info.is_main:
                (folder / "verdicts.json").write_text(json.dumps(errors_by_case))
                print(name, errors_by_case[name] or "passed", flush=True)
        # With torch 2.13, the process is aborted if a gloo thread still frees the tensors of the last collective when
        # Python ends. A barrier has no tensors to free, and gives the thread time to free the earlier ones.
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
