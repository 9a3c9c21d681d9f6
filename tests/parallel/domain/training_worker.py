"""Worker of test_training: trains on divided fields and writes the results."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from credit.losses import member_loss as member_loss_module
from credit.parallel.process_info import process_group, read_process_info
from tests.parallel.domain import training_cases


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # Compute losses in parts even though the fields of these tests are small.
    member_loss_module.MIN_PART_VALUES = 1
    process_info = read_process_info()
    with process_group(process_info, torch.device("cpu"), timeout_minutes=5):
        for mesh, case_names in training_cases.CASES_OF_MESH.items():
            for case_name in case_names:
                results = training_cases.train_on_mesh(case_name, mesh, process_info.rank)
                if process_info.is_main:
                    save_file(
                        {key: value.contiguous() for key, value in results.items()},
                        folder / f"{mesh}-{case_name}.safetensors",
                    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
