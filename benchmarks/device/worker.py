"""Process that measures parts one after another, and records each row as soon as it has been measured.

    python -m benchmarks.device.worker FOLDER OPTIONS

OPTIONS is JSON with the names of the parts, the device, and the other options that `benchmarks.device` passes on.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.device.accelerator import Accelerator, CpuAccelerator, CudaAccelerator
from benchmarks.device.cases import Run
from benchmarks.device.context import Context
from benchmarks.device.parts import PARTS
from benchmarks.device.report import append_record
from credit.cli.common import set_environment_defaults

# Exit status after an error of CUDA, for which the rest needs a new process.
FATAL_STATUS = 3


def measure_part(name: str, context: Context) -> bool:
    """Measure a part and record its rows; return False after an error after which the process cannot use the GPU."""
    folder = context.folder
    start = time.monotonic()
    append_record(folder, {"event": "begin", "part": name})
    error_text = ""
    is_usable = True
    try:
        module = importlib.import_module(f"benchmarks.device.parts.{name}")
        for row in module.run(context):
            seconds = time.monotonic() - start
            append_record(folder, {"event": "row", "part": name, "seconds": seconds, "row": row})
    except Exception:
        # The last lines name the place; the whole text of a compiler's error has hundreds.
        error_text = traceback.format_exc()[-2000:]
        is_usable = context.accelerator.is_usable()
    record = {"event": "end", "part": name, "seconds": time.monotonic() - start, "error": error_text}
    append_record(folder, record)
    return is_usable


def measure_parts(accelerator: Accelerator, options: dict[str, Any], folder: Path) -> int:
    """Measure the parts of `options`; return the exit status of the process."""
    shares = {part.name: part.share for part in PARTS}
    reference = options["reference"] and Path(options["reference"])
    run = options["run"] and Run(*options["run"][:3], tuple(options["run"][3]))
    for name in options["parts"]:
        deadline = time.monotonic() + shares[name] * options["minutes"] * 60
        context = Context(accelerator, options["fast"], deadline, folder, reference, options["words"], run)
        if not measure_part(name, context):
            return FATAL_STATUS
        accelerator.release()
    return 0


def main() -> int:
    """Measure the parts that the command line names."""
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    set_environment_defaults()
    if options["device"] == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU on this machine; --device cpu --fast tries the script")
    accelerator = CudaAccelerator() if options["device"] == "cuda" else CpuAccelerator()
    return measure_parts(accelerator, options, folder)


if __name__ == "__main__":
    sys.exit(main())
