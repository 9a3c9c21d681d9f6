"""Processor time and memory of each ensemble loss: its value, and its gradient with respect to the members.

    python benchmarks/losses.py [--threads 1] [--rounds 5] [--members 2]

The script prints a row for each loss on the grids of the quickstart and the 1 degree starter, with their channels and
batch sizes. Memory is the peak of the tensors of value and gradient, without the members and the constants of the loss.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from importlib.resources import files

import numpy as np
import torch
from live_memory import LiveMemory
from options import add_counts, positive

from credit.config.load import build_config, read_yaml
from credit.config.registry import LOSSES
from credit.grid import LatLonGrid
from credit.losses.base import Loss
from credit.losses.build import build_loss

LOSS_SECTIONS = {
    "crps": {"kind": "crps"},
    "spectral_crps": {"kind": "spectral_crps"},
    "multiscale_crps, 2 scales": {"kind": "multiscale_crps", "scales": ["800km", "0km"]},
    "multiscale_crps, 4 scales": {"kind": "multiscale_crps", "scales": ["1600km", "800km", "400km", "0km"]},
    "amse": {"kind": "amse"},
}
# template of a config -> grid
CASES = {
    "quickstart": LatLonGrid.equiangular(32, 64, poles=False),
    "wxformer_1deg": LatLonGrid.equiangular(181, 360, poles=True),
}


def measure(loss: Loss, members_BMCHW: torch.Tensor, truth_BCHW: torch.Tensor, rounds: int) -> tuple[float, float]:
    """Return the median processor time of value and gradient in ms, and the peak of their memory in MB."""

    def evaluate() -> None:
        torch.autograd.grad(loss(members_BMCHW, truth_BCHW), members_BMCHW)

    # The first evaluation does not count.
    evaluate()
    times = []
    for _ in range(rounds):
        start = time.process_time()
        evaluate()
        times.append(time.process_time() - start)
    existing_tensors = [members_BMCHW, truth_BCHW, *loss.buffers()]
    with LiveMemory(existing_tensors) as memory:
        evaluate()
    return 1000 * statistics.median(times), memory.peak / 1e6


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_counts(parser, rounds=5, steps=1)
    parser.add_argument("--members", type=positive, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} threads, {args.members} members, median of {args.rounds}")
    # The template names its folders by these variables; nothing is read from them.
    os.environ.update(SCRATCH=".", ERA5_1DEG=".")
    generator = torch.Generator().manual_seed(0)
    for template, grid in CASES.items():
        config = build_config(read_yaml(str(files("credit.config.templates") / f"{template}.yml")))
        channels = config.data.channel_map()
        batch = config.trainer.train_batch_size
        num_channels = len(channels.output)
        members_BMCHW = torch.randn(batch, args.members, num_channels, *grid.shape, generator=generator)
        members_BMCHW.requires_grad_()
        truth_BCHW = torch.randn(batch, num_channels, *grid.shape, generator=generator)
        megabytes = members_BMCHW.nbytes / 1e6
        print(f"\n{template}: batch {batch}, {num_channels} channels, {grid.shape} cells, members {megabytes:.1f} MB")
        crps_milliseconds = None
        for name, conf in LOSS_SECTIONS.items():
            section = LOSSES.find_section(conf["kind"]).model_validate(conf)
            tendency_scale_C = np.ones(len(channels.group("prognostic")))
            loss = build_loss(section, channels, grid, tendency_scale_C, {})
            milliseconds, peak = measure(loss, members_BMCHW, truth_BCHW, args.rounds)
            # The first section is that of the CRPS.
            if crps_milliseconds is None:
                crps_milliseconds = milliseconds
            constants = sum(buffer.nbytes for buffer in loss.buffers()) / 1e6
            print(
                f"{name:28} {milliseconds:9.1f} ms ({milliseconds / crps_milliseconds:5.1f} x crps)  "
                f"{peak:8.1f} MB  constants {constants:7.1f} MB"
            )


if __name__ == "__main__":
    main()
