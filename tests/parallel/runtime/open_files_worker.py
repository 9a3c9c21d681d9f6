"""Worker of test_open_files: makes process groups under a low limit of open files."""

from __future__ import annotations

import os
import resource

import torch
import torch.distributed as dist

from credit.parallel.process_info import process_group, read_process_info

GROUPS = 8


def main() -> None:
    launch = read_process_info()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 16, hard))
    with process_group(launch, torch.device("cpu"), timeout_minutes=1):
        for _ in range(GROUPS):
            total = torch.ones(1)
            dist.all_reduce(total, group=dist.new_group(backend="gloo"))
            assert total.item() == launch.world
        print(f"rank {launch.rank} is through", flush=True)


if __name__ == "__main__":
    main()
