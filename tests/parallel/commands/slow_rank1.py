"""Plugin that makes the forward pass of rank 1 half a second longer, as a slow processor would do."""

from __future__ import annotations

import os
import time

from credit.forecast.objectives.base import EncodedBatch, Objective

original_encode = Objective.encode


def encode_slowly(*args: object) -> EncodedBatch:
    """Wait, then encode the batch."""
    time.sleep(0.5)
    return original_encode(*args)


if os.environ["RANK"] == "1":
    Objective.encode = encode_slowly
