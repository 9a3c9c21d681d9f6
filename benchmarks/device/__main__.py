"""All measurements on one GPU, in at most nine minutes: equality to the CPU, time, memory, kernels and CUDA graphs.

    python -m benchmarks.device --out FOLDER [--minutes 9] [--parts equality steps ...] [--cases WORD ...]
        [--device cuda|cpu] [--fast] [--reference FOLDER] [--run CONFIG ROWSxCOLUMNS [key=value ...]]

Start it in the repository. --list prints the parts with their shares of the time and the questions that they answer.
The most important parts run first, in any order of --parts. FOLDER gets ``results.json``, ``results.md`` with
a table for each part, and the log of the worker process. Both files are rewritten after each case.

A worker process measures. An error is recorded, and the next case or part follows. After a CUDA error, or if a part
takes much longer than its share of the time, the worker is ended, and a new worker begins with the next part. At the
time limit, the worker is also ended; the files contain the results up to this time.

On a machine without a GPU, ``--device cpu --fast`` tests the script with small networks. These times are not valid
for a GPU, and parts that need a GPU report this. --cases measures only the cases whose names contain one of the words.
--run names a run that the parts steps, kernels, graphs, compiled, forecasts and memory measure instead of the runs of
this repository; no data are opened. --reference is the folder of the unpacked wheel of the published package.

Exit status: 0 if all parts were measured and no check failed, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.device.parts import PARTS
from benchmarks.device.report import RECORDS, Results, read_records

REPOSITORY = Path(__file__).parents[2]
# A part is ended after this factor times its share of the time, and these seconds for the start of the worker.
_LIMIT_FACTOR = 1.5
_START_SECONDS = 30.0
# Time before the end of --minutes at which the worker is ended, to write the results.
_RESERVE_SECONDS = 3.0
_POLL_SECONDS = 0.2


class Supervisor:
    """Process that starts workers, reads their records and ends them at their limits.

    Args:
        options: options of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._end = time.monotonic() + options.minutes * 60 - _RESERVE_SECONDS
        self._offset = 0
        self.results = Results(
            {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "minutes": options.minutes,
                "device": options.device,
                "fast": options.fast,
            }
        )

    def run(self, part_names: list[str]) -> None:
        """Measure the parts; if a worker had to be ended, start a new worker for the remaining parts."""
        remaining = list(part_names)
        while remaining and time.monotonic() < self._end:
            self._run_worker(remaining)
            # A worker that ended before its first part would end so again and again.
            if remaining[0] not in self.results.parts:
                break
            remaining = [name for name in part_names if name not in self.results.parts]
        for name in remaining:
            self.results.add({"event": "begin", "part": name})
            self.results.parts[name].status = "not reached"
        self.results.write(self._options.out)

    def _run_worker(self, part_names: list[str]) -> None:
        """Start a worker for some parts, and wait until it ends or must be ended."""
        options = {
            "parts": part_names,
            "device": self._options.device,
            "fast": self._options.fast,
            "minutes": self._options.minutes,
            "words": self._options.cases,
            "run": self._options.run,
            "reference": self._options.reference and str(self._options.reference.resolve()),
        }
        command = [sys.executable, "-m", "benchmarks.device.worker", str(self._options.out), json.dumps(options)]
        environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}
        cache_folder = tempfile.TemporaryDirectory()
        # Compilation is timed without a cache, and a worker that is ended leaves no damaged cache to other runs.
        environment["TORCHINDUCTOR_CACHE_DIR"] = cache_folder.name
        with (self._options.out / "worker.log").open("ab") as log:
            # A session of its own, so that the processes of torch's compiler end with it.
            worker = subprocess.Popen(
                command, env=environment, cwd=REPOSITORY, stdout=log, stderr=log, start_new_session=True
            )
        limit = time.monotonic() + self._limit_seconds(part_names[0])
        current = part_names[0]
        try:
            while worker.poll() is None:
                time.sleep(_POLL_SECONDS)
                started = self._read_records()
                if started and started != current:
                    current = started
                    limit = time.monotonic() + self._limit_seconds(current)
                if time.monotonic() > min(limit, self._end):
                    break
        finally:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            cache_folder.cleanup()
        self._read_records()
        if worker.returncode and part_names[0] not in self.results.parts:
            lines = (self._options.out / "worker.log").read_text(errors="replace").splitlines()
            self.results.header["error"] = " / ".join(lines[-3:])
        for result in self.results.parts.values():
            if result.status == "running":
                result.status = "stopped"
                result.error = f"the worker was ended, or ended with status {worker.returncode}; see worker.log"
        self.results.write(self._options.out)

    def _limit_seconds(self, name: str) -> float:
        """Return the time limit of a part in seconds; after this time, its worker is ended."""
        share = next(part.share for part in PARTS if part.name == name)
        return _START_SECONDS + _LIMIT_FACTOR * share * self._options.minutes * 60

    def _read_records(self) -> str | None:
        """Add new records of the worker to the results; return the name of the part in the last record."""
        records, self._offset = read_records(self._options.out, self._offset)
        for record in records:
            self.results.add(record)
        if not records:
            return None
        self.results.write(self._options.out)
        return records[-1]["part"]


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the results; required")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of all parts together; default 9")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART")
    parser.add_argument("--cases", nargs="+", default=[], metavar="WORD")
    parser.add_argument(
        "--run", nargs="+", metavar=("CONFIG", "GRID"), help="a run to measure: config, grid, overrides"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--fast", action="store_true", help="small networks and few repetitions")
    parser.add_argument("--reference", type=Path, metavar="FOLDER")
    parser.add_argument("--list", action="store_true", help="print the parts and end")
    options = parser.parse_args()
    if options.list:
        for part in PARTS:
            print(f"{part.name:12}{part.share:5.0%}  {part.question}")
        parser.exit()
    if options.out is None:
        parser.error("--out FOLDER is required")
    if options.minutes <= 0:
        parser.error(f"--minutes: {options.minutes:g} must be more than 0")
    if (options.out / RECORDS).exists():
        parser.error(f"--out: {options.out} has results already; name another folder")
    if options.run is not None:
        if len(options.run) < 2 or not Path(options.run[0]).is_file():
            parser.error("--run: give a config file, the grid as ROWSxCOLUMNS, and overrides if you like")
        config, grid, *overrides = options.run
        options.run = [Path(config).stem, str(Path(config).resolve()), grid, overrides]
    if options.reference is not None and not (options.reference / "credit/models/wxformer/crossformer.py").is_file():
        parser.error(f"--reference: {options.reference} is not the unpacked wheel of miles-credit")
    return options


def main() -> int:
    """Measure, and print the page with the results."""
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()
    # Without --reference its part has nothing to measure.
    names = [part.name for part in PARTS if part.name in options.parts]
    if options.reference is None and "reference" in names:
        names.remove("reference")
    supervisor = Supervisor(options)
    supervisor.run(names)
    print(supervisor.results.format())
    return 1 if supervisor.results.list_problems() else 0


if __name__ == "__main__":
    sys.exit(main())
