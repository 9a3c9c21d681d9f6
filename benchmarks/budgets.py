"""Cost of budgets: a step of the 1 degree starter with and without model.postprocess, in forecasts and in training.

    python benchmarks/budgets.py [--device cuda] [--threads 1] [--steps 5] [--network]

Without --network, a network that adds a constant replaces the real network, so the difference shows the budgets alone.
Times are medians after a warm-up. Memory is the peak of the tensors of a training step (on a GPU).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace
from importlib.resources import files

import torch
from torch import nn

from credit.config.load import build_config, read_yaml
from credit.data.store.statistics import Statistics
from credit.grid import LatLonGrid
from credit.train.build.dry_run import build_placeholder_assets
from credit.train.build.model import build_network
from credit.train.build.stepper import build_stepper

# Accumulated fluxes of energy: two at the top of the atmosphere, four at the surface.
FLUXES = ["tsr", "ttr", "ssr", "str", "sshf", "slhf"]
AIR = {"surface_pressure": "sp"}
# Value of `model.postprocess`; the cases take its first items.
POST = [
    {"kind": "clamp", "variable": "q", "maximum": 0.05},
    {"kind": "dry_mass", **AIR},
    {"kind": "water", **AIR, "precipitation": "tp", "evaporation": "e", "evaporation_positive": "down"},
    {
        "kind": "energy", **AIR, "surface_geopotential": "geopotential_at_surface",
        "top_down": FLUXES[:2], "surface_down": FLUXES[2:],
    },
]  # fmt: skip
UNITS = {"t": "K", "u": "m s-1", "v": "m s-1", "q": "kg kg-1", "sp": "Pa", "tp": "m", "e": "m"}
UNITS |= {"geopotential_at_surface": "m2 s-2", **dict.fromkeys(FLUXES, "J m-2")}


class Constant(nn.Module):
    """Network that adds one trainable number to each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.change = nn.Parameter(torch.full((1, channels, 1, 1, 1), 0.1))

    def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        return self.change.expand(len(x_BCTHW), -1, 1, *x_BCTHW.shape[-2:])


def plausible_statistics(statistics_: Statistics) -> Statistics:
    """Return statistics with plausible means, so that zeros in normalised units are a plausible atmosphere."""
    mean = statistics_.mean.copy()
    for number, name in enumerate(statistics_.names):
        # Temperature on a level has a name such as t500.
        is_temperature = name[0] == "t" and name[1:].isdigit()
        if name == "sp":
            mean[number] = 1e5
        elif is_temperature:
            mean[number] = 250.0
        else:
            mean[number] = 0.001
    return replace(statistics_, mean=mean)


def measure(post: list | None, device: torch.device, network: bool, train: bool, steps: int) -> tuple[float, float]:
    """Return milliseconds per step and, on a GPU, the peak memory of a step in MB.

    Args:
        post: value of ``model.postprocess``, None for none.
        device: device of the step.
        network: True for the starter's network, False for a network that adds a constant.
        train: True for a training step, False for a forecast step.
        steps: number of measured steps.
    """
    # The starter config, with the fluxes that the budgets need. Its folders are named by these variables; nothing is
    # read from them.
    os.environ.update(SCRATCH=".", ERA5_1DEG=".")
    raw = read_yaml(str(files("credit.config.templates") / "wxformer_1deg.yml"))
    raw["data"]["variables"]["diagnostic"]["vars_2D"] += ["e", *FLUXES]
    raw["data"]["variable_options"] |= {name: {"temporal": "accumulate"} for name in ("e", *FLUXES)}
    raw["model"]["postprocess"] = post
    config = build_config(raw)
    channels = config.data.channel_map()
    grid = LatLonGrid.equiangular(181, 360, poles=True)
    attributes = {name: {"units": units} for name, units in UNITS.items()}
    assets = build_placeholder_assets(config, grid, attributes)
    assets = replace(assets, statistics=plausible_statistics(assets.statistics))
    if network:
        model = build_network(config, channels, grid, attributes)
    else:
        model = Constant(len(channels.output))
    model = model.to(device).train(train)
    stepper = build_stepper(config, assets, model, device, amp=False)
    state = torch.zeros(1, len(channels.group("prognostic")), 1, *grid.shape, device=device)
    forcing = torch.zeros(1, len(channels.group("dynamic_forcing")), 1, *grid.shape, device=device)
    times = []
    peak = 0
    on_gpu = device.type == "cuda"
    # The first step warms up.
    for _ in range(steps + 1):
        bytes_before = 0
        if on_gpu:
            bytes_before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.set_grad_enabled(train):
            output = stepper.step(state, forcing)
            if train:
                (output**2).mean().backward()
        if on_gpu:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - bytes_before
        times.append(time.perf_counter() - start)
        del output
    return 1000 * statistics.median(times[1:]), peak / 1e6


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--network", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.device}, {args.threads} threads, median of {args.steps}")
    cases = {"none": None, "clamp": POST[:1], "+ dry_mass": POST[:2], "+ water": POST[:3], "+ energy": POST}
    for train in (False, True):
        kind = "training" if train else "forecast"
        for name, post in cases.items():
            milliseconds, peak = measure(post, torch.device(args.device), args.network, train, args.steps)
            print(f"{kind} {name:11} {milliseconds:9.1f} ms {peak:8.0f} MB")


if __name__ == "__main__":
    main()
