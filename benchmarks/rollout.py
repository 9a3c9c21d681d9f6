"""What a forecast costs beyond its network: writing, in seconds a step and in memory.

The 1 degree starter (80 channels in, 84 out: 5 variables on 16 levels and 4 at the surface) with random weights
forecasts from a random state. Bare is the network and nothing else; every other case makes the same forecast by the
package's own road, with another way of writing. Cases alternate, each in a process of its own, so that peak memory
(resident set) is its own; the ratios are medians over the rounds.

    python benchmarks/rollout.py [--threads 2] [--steps 40] [--rounds 3] [--members 1] [--amp]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from wxformer import build_ours

from credit.channels import ChannelMap
from credit.data.normalize import Normalizer
from credit.data.statistics import Statistics
from credit.forecast.background import BackgroundWriter
from credit.forecast.run import forecast, inferred, starts_of
from credit.forecast.step import Stepper
from credit.forecast.writer import ForecastWriter
from credit.grid import LatLonGrid
from credit.times import Clock

STEP = 360
CASES: dict[str, dict[str, object] | None] = {
    "bare network": None,
    "netCDF": {},
    "netCDF, zlib 1, 12 bits": {"compression": 1, "keep_bits": 12},
    "zarr": {"format": "zarr"},
    "zarr, zstd 3, 12 bits": {"format": "zarr", "compression": 3, "keep_bits": 12},
}
LEVELS = [1000.0 - 60 * n for n in range(16)]
GROUPS = {
    "prognostic": {"vars_3D": list("uvtqz"), "vars_2D": []},
    "diagnostic": {"vars_3D": [], "vars_2D": ["a", "b", "c", "d"]},
}


class RandomFrames:
    """Initial states that cost nothing to read."""

    def __init__(self, channels: int, shape: tuple[int, int]) -> None:
        self._fields = np.random.default_rng(0).standard_normal((channels, *shape), dtype=np.float32)

    def prognostic(self, minutes: int) -> np.ndarray:
        return self._fields

    def forcing(self, minutes: int, initial: int | None = None) -> np.ndarray:
        return np.zeros((0, *self._fields.shape[1:]), dtype=np.float32)


def build(amp: bool) -> tuple[Stepper, RandomFrames, ChannelMap, LatLonGrid]:
    """Return everything that forecasts."""
    channels = ChannelMap.build(GROUPS, LEVELS)
    grid, _ = LatLonGrid.from_coords(np.linspace(90, -90, 181), np.arange(360.0), origin="benchmark")
    torch.manual_seed(0)
    model = build_ours().eval()
    count = len(channels.output)
    zeros, ones = np.zeros(count), np.ones(count)
    names = tuple(channel.name for channel in channels.output)
    statistics_ = Statistics(names, zeros, ones, zeros, zeros, zeros, 0.1 * ones, zeros)
    normalizer = Normalizer(channels, statistics_, {}, {})
    prognostic = len(channels.group("prognostic"))
    stepper = Stepper(
        model, channels, normalizer, torch.zeros(0, *grid.shape), True, torch.full((count,), -torch.inf),
        torch.ones(prognostic, *grid.shape, dtype=torch.bool), amp,
    )  # fmt: skip
    return stepper, RandomFrames(prognostic, grid.shape), channels, grid


def measure(case: str, steps: int, members: int, amp: bool) -> dict[str, float]:
    """Run one case in this process; return seconds a step, end of writing included, and peak memory in GB."""
    stepper, frames, channels, grid = build(amp)
    options, starts = CASES[case], starts_of([0], members)
    with torch.inference_mode():  # warm
        state = torch.from_numpy(frames.prognostic(0))[None, :, None].expand(members, -1, -1, -1, -1)
        forcing = torch.zeros(members, 0, 1, *grid.shape)
        stepper.step(state, forcing)
        if options is None:
            x = torch.cat([state, torch.zeros(members, 0, 1, *grid.shape)], dim=1)
            began = time.perf_counter()
            for _ in range(steps):
                with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                    stepper.model(x)
            taken = time.perf_counter() - began
        else:
            taken = _write(stepper, frames, channels, grid, starts, steps, options)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"time": taken / steps, "peak": peak}


def _write(stepper, frames, channels, grid, starts, steps: int, options: dict[str, object]) -> float:
    leads = [STEP * number for number in range(1, steps + 1)]
    with tempfile.TemporaryDirectory() as folder:
        writer = ForecastWriter(
            folder, channels, grid, Clock(), {}, STEP, lead_minutes=leads, initial_minutes=[0],
            members=len(starts) if len(starts) > 1 else None, **options,
        )  # fmt: skip
        began = time.perf_counter()
        numbers = {lead: number for number, lead in enumerate(leads)}
        with BackgroundWriter(writer, numbers, STEP, "benchmark", [0]) as background:
            outputs = forecast(stepper, frames, starts, steps, STEP, 1, reading=background.reading)
            for step, output in enumerate(inferred(outputs), start=1):
                background.put(starts, step, output)
        return time.perf_counter() - began


def main() -> None:
    """Print the table, or with --case measure one case and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--members", type=int, default=1)
    parser.add_argument("--amp", action="store_true", help="bfloat16")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    if asked.case:
        print(json.dumps(measure(asked.case, asked.steps, asked.members, asked.amp)))
        return
    found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(asked.rounds):
        for case in CASES:
            command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--case", case]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[case].append(json.loads(done.stdout))
    print("| case | s a step | over the bare network | peak memory [GB] |\n|---|---|---|---|")
    bare = [own["time"] for own in found["bare network"]]
    for case, rounds in found.items():
        ratio = statistics.median(own["time"] / one for own, one in zip(rounds, bare, strict=True))
        seconds = statistics.median(own["time"] for own in rounds)
        print(f"| {case} | {seconds:.3f} | {ratio:.2f} | {statistics.median(own['peak'] for own in rounds):.2f} |")


if __name__ == "__main__":
    main()
