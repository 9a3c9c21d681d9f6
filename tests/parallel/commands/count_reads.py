"""Plugin (``plugins: [tests.parallel.commands.count_reads]``) that records which rank reads which training sample.

Each read appends the initial time to the file ``rank_N`` in the folder of the environment variable READS_FOLDER.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from credit.data.samples.frames import FrameReader

_original_read_sample = FrameReader.read_sample


def _record_and_read_sample(self: FrameReader, initial: int, *args: Any, as_forecast: bool = False) -> None:
    # Validations read their samples as forecasts do. Record only training samples.
    if not as_forecast:
        path = Path(os.environ["READS_FOLDER"]) / f"rank_{os.environ.get('RANK', '0')}"
        with path.open("a") as reads_file:
            reads_file.write(f"{initial}\n")
    _original_read_sample(self, initial, *args, as_forecast=as_forecast)


FrameReader.read_sample = _record_and_read_sample
