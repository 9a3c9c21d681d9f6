"""Parts of the measurements, one module for each part; the most important parts come first.

A module has a function `run`, which takes a `Context` and yields a row of the part's table after each case.
"""

from __future__ import annotations

from dataclasses import dataclass

# Row of a part's table: title of a column -> value.
Row = dict[str, str | float | int | bool | None]


@dataclass(frozen=True)
class Part:
    """One part of the measurements.

    Attributes:
        name: name of the module in this folder.
        share: fraction of the whole time, from 0 to 1, after which the part begins no further case.
        question: question that the table of the part answers.
    """

    name: str
    share: float
    question: str


# `python -m benchmarks.device --list` prints this list.
PARTS = (
    Part("machine", 0.03, "Which device is it, and which rates does it reach?"),
    Part("equality", 0.16, "Does the device compute what the CPU computes?"),
    Part("steps", 0.17, "How long is a training step, how much memory does it take, and what limits it?"),
    Part("kernels", 0.12, "Is the formulation that the dispatch chooses right, and the faster one?"),
    Part("graphs", 0.06, "How long is a step that is replayed as one CUDA graph, without the host?"),
    Part("compiled", 0.16, "What do `trainer.compile: true` and `reduce-overhead` bring, after how long a start?"),
    Part("forecasts", 0.06, "How long is a forecast step?"),
    Part("loader", 0.05, "How fast do samples reach the device?"),
    Part("checkpoint", 0.04, "How long does training wait for a checkpoint?"),
    Part("memory", 0.06, "Is the memory of a training step that of `credit plan`?"),
    Part("suite", 0.08, "Do the tests in `tests/gpu` pass?"),
    Part("reference", 0.01, "How long is a step of the published package's network? Only with `--reference`."),
)
