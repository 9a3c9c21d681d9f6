"""Plugin (``plugins: [tests.parallel.commands.count_reads]``) that records which rank reads which training sample.

Each read appends the initial time to the file ``rank_N`` in the folder of the environment variable READS_FOLDER.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from credit.data.samples.frames import FrameReader

_read_sample = FrameReader.read_sample


def _recording_read_sample(self: FrameReader, initial: int, *args: Any, as_forecast: bool = False) -> None:
    # Samples of validations are read as a forecast would read them, and are not of interest here.
    if not as_forecast:
        path = Path(os.environ["READS_FOLDER"]) / f"rank_{os.environ.get('RANK', '0')}"
        with path.open("a") as lines:
            lines.write(f"{initial}\n")
    _read_sample(self, initial, *args, as_forecast=as_forecast)


FrameReader.read_sample = _recording_read_sample
