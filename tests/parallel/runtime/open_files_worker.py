"""Worker of test_open_files: creates process groups after the limit of open files was set to a low number."""

from __future__ import annotations

import os
import resource

import torch
import torch.distributed as dist

from credit.parallel.process_info import process_group, read_process_info

NUM_GROUPS = 8


def main() -> None:
    process_info = read_process_info()
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 16, hard_limit))
    with process_group(process_info, torch.device("cpu"), timeout_minutes=1):
        for _ in range(NUM_GROUPS):
            total = torch.ones(1)
            dist.all_reduce(total, group=dist.new_group(backend="gloo"))
            assert total.item() == process_info.world
        print(f"rank {process_info.rank} is through", flush=True)


if __name__ == "__main__":
    main()
