"""Training step of the published package's network, as JSON: ``python published_step.py cuda|cpu bfloat16|tf32``.

The script runs in a separate process in which `credit` is the published package, so it does not import this package.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from networks import STARTER
from wxformer import build_reference, mean_square, random_sample


def main() -> None:
    """Print the time of a step, and the peak of memory on a GPU."""
    device, is_half = torch.device(sys.argv[1]), sys.argv[2] == "bfloat16"
    torch.set_float32_matmul_precision("high")
    model = build_reference().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    x, target = random_sample(STARTER, device)

    def take_step() -> float:
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=is_half):
            loss = mean_square(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # The value of the loss waits for the backward pass and the update, too.
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    num_steps = 20 if device.type == "cuda" else 2
    seconds = [take_step() for _ in range(num_steps)][num_steps // 4 :]
    peak_gb = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
    print(
        json.dumps(
            {"ms": statistics.median(seconds) * 1e3, "samples/s": 1 / statistics.median(seconds), "peak GB": peak_gb}
        )
    )


if __name__ == "__main__":
    main()
