"""Log messages of a command that computes for a long time and prints one result."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def suppress_notices() -> Iterator[None]:
    """Suppress log messages below the level WARNING, except the messages of the planner."""
    logger = logging.getLogger("credit")
    planner_logger = logging.getLogger("credit.hpc.planner")
    previous_level = logger.level
    previous_planner_level = planner_logger.level
    logger.setLevel(logging.WARNING)
    # The messages of the planner show its progress.
    planner_logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(previous_level)
        planner_logger.setLevel(previous_planner_level)
