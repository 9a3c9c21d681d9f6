"""Program that fits a stored climatology and kills its process at a given read. It is started by test_stored.

Arguments: the data section and the climatology section as JSON, the size of a block in bytes, and the number of the
read at which the process is killed.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from credit.config.sections.data import DataConfig, PreprocessConfig
from credit.config.sections.verification import ClimatologyConfig
from credit.data.climatology import blocks, stored
from credit.data.store.store_reader import StoreReader


def main() -> None:
    data, climatology, block_bytes, last_read = sys.argv[1:]
    blocks.BLOCK_BYTES = int(block_bytes)
    original_read_into = StoreReader.read_into
    num_reads = 0

    def read_until_killed(self: StoreReader, *arguments: Any) -> Any:
        nonlocal num_reads
        num_reads += 1
        if num_reads == int(last_read):
            os.kill(os.getpid(), signal.SIGKILL)
        return original_read_into(self, *arguments)

    StoreReader.read_into = read_until_killed
    stored.preprocess_climatology(
        DataConfig.model_validate_json(data),
        PreprocessConfig(climatology=True),
        ClimatologyConfig.model_validate_json(climatology),
        progress=False,
    )


if __name__ == "__main__":
    main()
