"""Cost of a forecast beyond its network: writing and scoring, in seconds per step and in memory.

The 1 degree starter (80 channels in, 84 out: 5 variables on 16 levels and 4 at the surface) with random weights
forecasts from a random state. The case "bare network" runs the network and nothing else. Every other case makes the
same forecast with the package:

- "forecast alone" discards the forecast; it shows the cost of joining inputs, adding the change and decoding;
- the cases of files write it;
- the scored cases score it as `credit_verify --online` does: three baselines, five default regions, 16 winds.

Reading the truth takes no time here. Each case runs in a separate process, whose peak memory (resident set) is
reported. In this process, the case alternates with "bare network" and "forecast alone", because speeds of separate
processes differ too much. The ratios are medians over the rounds, of time and of processor time. On a shared
machine, processor time is
more reliable.

    python benchmarks/rollout.py [--threads 2] [--steps 40] [--rounds 3] [--members 1] [--amp] [--cases zarr scored]

--cases measures, besides the first two cases, only those whose names contain one of these words.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from options import add_counts, positive
from wxformer import build_ours

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.cli.common import set_environment_defaults
from credit.config import build_config
from credit.data.normalize import Normalizer
from credit.data.store.statistics import Statistics
from credit.forecast.io.async_writer import BackgroundWriter
from credit.forecast.io.forecast_writer import ForecastWriter
from credit.forecast.io.schema import OutputFields, OutputOptions
from credit.forecast.online import ForecastBatching, OnlineForecasts
from credit.forecast.rollout import ForecastInputs, build_starts, forecast_batch, iterate_in_inference_mode
from credit.forecast.stepper import Stepper
from credit.grid import LatLonGrid
from credit.models.inference import prepare_for_inference
from credit.utils.malloc import retain_freed_memory
from credit.verify.scorer import score_forecasts

# Minutes of a forecast step.
STEP = 360
BARE, ALONE, SCORED = "bare network", "forecast alone", "scored beside the baselines"
BOTH = "scored, and written as netCDF"
# Case -> options of the output files.
CASES: dict[str, dict[str, object]] = {
    BARE: {},
    ALONE: {},
    "netCDF": {},
    "netCDF, zlib 1, 12 bits": {"compression": 1, "keep_bits": 12},
    "zarr": {"format": "zarr"},
    "zarr, zstd 3, 12 bits": {"format": "zarr", "compression": 3, "keep_bits": 12},
    SCORED: {},
    BOTH: {},
}
LEVELS = [1000.0 - 60 * n for n in range(16)]
GROUPS = {
    "prognostic": {"vars_3D": list("uvtqz"), "vars_2D": []},
    "diagnostic": {"vars_3D": [], "vars_2D": ["a", "b", "c", "d"]},
}


class RandomFrames:
    """Frame reader that returns the same random initial state and forcing at once."""

    def __init__(self, channels: int, shape: tuple[int, int]) -> None:
        self._fields = np.random.default_rng(0).standard_normal((channels, *shape), dtype=np.float32)

    def prognostic(self, minutes: int) -> np.ndarray:
        return self._fields

    def forcing(self, minutes: int, initial: int | None = None) -> np.ndarray:
        return np.zeros((0, *self._fields.shape[1:]), dtype=np.float32)


class RandomReader:
    """Field reader that returns random truth and training data at once: every ten days of 2000, then every step."""

    def __init__(self, channels: ChannelMap, grid: LatLonGrid, steps: int) -> None:
        self.channels = channels
        self.grid = grid
        self.calendar = Calendar()
        self.masks = {}
        self._first = self.calendar.parse("2001-02-01")
        past = np.arange(self.calendar.parse("2000-01-01"), self.calendar.parse("2000-12-31"), 14400)
        self.times = np.concatenate([past, self._first + STEP * np.arange(steps + 1)])
        winds = {"u": "eastward_wind", "v": "northward_wind"}
        self.attributes = {c.variable: {"standard_name": winds.get(c.variable, "")} for c in channels.output}
        shape = (4, len(channels.time_varying_stored), *grid.shape)
        self._fields = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)

    def read(self, index: int) -> np.ndarray:
        # The initial time has different fields from all others, because a persistence forecast without any error would
        # be summed a second time, in float64.
        if self.times[index] == self._first:
            return self._fields[-1]
        return self._fields[index % (len(self._fields) - 1)]

    def static(self) -> np.ndarray:
        return np.zeros((0, *self.grid.shape), dtype=np.float32)

    def index_of(self, minutes: int) -> int | None:
        indices = np.flatnonzero(self.times == minutes)
        if len(indices) == 0:
            return None
        return int(indices[0])


def build_stepper_and_inputs(amp: bool) -> tuple[Stepper, RandomFrames, ChannelMap, LatLonGrid]:
    """Return the stepper of the starter's network, its initial states, its channels and its grid.

    Args:
        amp: True to compute in bfloat16.
    """
    # Every forecast command does this first.
    retain_freed_memory(torch.device("cpu"))
    channels = ChannelMap.build(GROUPS, LEVELS)
    grid, _ = LatLonGrid.from_coords(np.linspace(90, -90, 181), np.arange(360.0), origin="benchmark")
    torch.manual_seed(0)
    model = prepare_for_inference(build_ours().eval(), torch.bfloat16 if amp else None)
    zeros = np.zeros(len(channels.output))
    ones = np.ones(len(channels.output))
    names = tuple(channel.name for channel in channels.output)
    statistics_ = Statistics(names, zeros, ones, zeros, zeros, zeros, 0.1 * ones, zeros)
    normalizer = Normalizer(channels, statistics_, {}, {})
    num_prognostic = len(channels.group("prognostic"))
    static_fields = torch.zeros(0, *grid.shape)
    stepper = Stepper(model, channels, normalizer, static_fields, True, None, amp)
    return stepper, RandomFrames(num_prognostic, grid.shape), channels, grid


def measure(case: str, steps: int, rounds: int, members: int, amp: bool) -> dict[str, object]:
    """Measure one case in this process, in alternation with the cases that it is compared with.

    Returns:
        Case -> (rounds, 2) seconds and processor seconds per step, including the end of writing; peak memory in GB.
    """
    stepper, frames, channels, grid = build_stepper_and_inputs(amp)
    starts = build_starts([0], members)
    with torch.inference_mode():
        # State of all members (M, C, 1, H, W), and the network's input: there is no forcing.
        state = torch.from_numpy(frames.prognostic(0))[None, :, None].expand(members, -1, -1, -1, -1)
        forcing = torch.zeros(members, 0, 1, *grid.shape)
        x = torch.cat([state, forcing], dim=1)

        def run_once(name: str) -> np.ndarray:
            if name == BARE:
                return _time_network(stepper, x, steps, amp)
            if name == SCORED:
                return _time_scoring(stepper, frames, channels, grid, steps, members)
            outputs = forecast_batch(stepper, ForecastInputs(frames, STEP, 1), starts, steps)
            if name == ALONE:
                return _time_discarded_forecast(outputs, steps)
            with tempfile.TemporaryDirectory() as folder:
                leads = [STEP * number for number in range(1, steps + 1)]
                lead_indices = {lead: index for index, lead in enumerate(leads)}
                fields = OutputFields(channels, grid, Calendar(), {}, STEP)
                options = OutputOptions(**CASES[name])
                file_members = None if members == 1 else members
                writer = ForecastWriter(folder, fields, leads, [0], options, members=file_members)
                start = _read_clocks()
                with BackgroundWriter(writer, lead_indices, STEP, "benchmark", [0]) as background:
                    if name == BOTH:
                        return _time_scoring(stepper, frames, channels, grid, steps, members, background)
                    _write(outputs, starts, background)
                return (_read_clocks() - start) / steps

        # The case itself may be one of those that it is compared with.
        names = list(dict.fromkeys([BARE, ALONE, case]))
        # The first step warms up.
        stepper.step(state, forcing)
        times: dict[str, list[list[float]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in names:
                times[name].append(run_once(name).tolist())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"times": times, "peak": peak}


def _read_clocks() -> np.ndarray:
    """Return the current time and the processor time of this process in seconds, (2,)."""
    return np.array([time.perf_counter(), time.process_time()])


def _time_network(stepper: Stepper, x: torch.Tensor, steps: int, amp: bool) -> np.ndarray:
    """Run the network alone, and return its seconds and processor seconds per step, (2,)."""
    start = _read_clocks()
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            stepper.model(x)
    return (_read_clocks() - start) / steps


def _time_discarded_forecast(outputs: Iterator[torch.Tensor], steps: int) -> np.ndarray:
    """Make a forecast, discard it, and return its seconds and processor seconds per step, (2,)."""
    start = _read_clocks()
    for _ in outputs:
        pass
    return (_read_clocks() - start) / steps


def _time_scoring(stepper, frames, channels, grid, steps: int, members: int, background=None) -> np.ndarray:
    """Score a forecast, and return its seconds and processor seconds per step, (2,).

    The time does not include the fit of climatology and damping before the first step, and the tables at the end.
    """
    reader = RandomReader(channels, grid, steps)
    leads = [STEP * number for number in range(1, steps + 1)]
    # Time and processor time at the beginning of each step.
    step_starts = []

    def run(starts, num_steps):
        outputs = forecast_batch(stepper, ForecastInputs(frames, STEP, 1), starts, num_steps)
        # The files have the initial time 0.
        file_starts = [replace(start, initial_minutes=0, analysis_minutes=0) for start in starts]
        for step in range(1, num_steps + 1):
            step_starts.append(_read_clocks())
            output = next(outputs)
            if background is not None:
                background.put(file_starts, step, output)
            yield output

    fields = OutputFields(channels, grid, reader.calendar, {}, STEP)
    file_members = None if members == 1 else members
    batching = ForecastBatching(members, file_members)
    initial_times = [reader.calendar.parse("2001-02-01")]
    archive = OnlineForecasts(run, fields, initial_times, leads, batching, origin=Path("benchmark"), attributes={})
    splits = {"train": ["2000-01-01", "2000-12-31"], "valid": ["2002-02-01", "2002-02-28"]}
    config = {
        "experiment": "benchmark", "save_loc": "none", "model": {"type": "wxformer"}, "trainer": {"max_steps": 1},
        "data": {"sources": [{"path": "none"}], "levels": LEVELS, "variables": GROUPS,
                 "splits": splits | {"test": ["2001-02-01", "2001-12-31"]}},
    }  # fmt: skip
    score_forecasts(build_config(config), reader, archive)
    return (step_starts[-1] - step_starts[0]) / (len(step_starts) - 1)


def _write(outputs: Iterator[torch.Tensor], starts, background: BackgroundWriter) -> None:
    """Queue each step of a forecast for writing."""
    for step, output in enumerate(iterate_in_inference_mode(outputs), start=1):
        background.put(starts, step, output)


def main() -> None:
    """Print the table, or with --case measure one case and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_counts(parser, rounds=3, steps=40)
    parser.add_argument("--members", type=positive, default=1)
    parser.add_argument("--amp", action="store_true", help="bfloat16")
    parser.add_argument("--cases", nargs="+", default=[""], help="only those with one of these words in the name")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.case:
        print(json.dumps(measure(args.case, args.steps, args.rounds, args.members, args.amp)))
        return
    # The processes that are started below inherit this environment.
    set_environment_defaults()
    cases = [case for case in CASES if case not in (BARE, ALONE) and any(word in case for word in args.cases)]
    if not cases:
        parser.error(f"--cases {' '.join(args.cases)}: no case has that in its name; there are {', '.join(CASES)}")
    print(
        "| case | s a step | over the bare network | its processor time | over the forecast alone | its processor time "
        "| peak memory [GB] |\n|---|---|---|---|---|---|---|"
    )
    for case in [ALONE, *cases]:
        command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--case", case]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            sys.exit(f"{case}: {process.stderr[-2000:]}")
        result = json.loads(process.stdout)
        # (rounds, 2): elapsed and processor seconds of a step.
        case_times = np.array(result["times"][case])
        bare_times = np.array(result["times"][BARE])
        alone_times = np.array(result["times"][ALONE])
        if case == ALONE:
            print(f"| {BARE} | {median(bare_times[:, 0]):.3f} | | | | | |")
        # Ratios are taken within a round, because the machine may be faster in the next one.
        ratios_to_bare = np.median(case_times / bare_times, axis=0)
        ratios_to_alone = np.median(case_times / alone_times, axis=0)
        ratios = [*ratios_to_bare, *ratios_to_alone]
        cells = "".join(f"{ratio:.2f} | " for ratio in ratios)
        print(f"| {case} | {median(case_times[:, 0]):.3f} | {cells}{result['peak']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
