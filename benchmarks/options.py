"""What the benchmarks ask for alike; a value that measures nothing is refused before anything is measured."""

from __future__ import annotations

import argparse
from pathlib import Path

_NETWORK = "credit/models/wxformer/crossformer.py"


def add_counts(parser: argparse.ArgumentParser, *, rounds: int, steps: int) -> None:
    """Add --threads, --rounds and --steps, with these defaults."""
    import torch  # commands set its environment before they load it

    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=positive, default=rounds)
    parser.add_argument("--steps", type=positive, default=steps)


def add_reference(parser: argparse.ArgumentParser) -> None:
    """Add --reference."""
    parser.add_argument("--reference", type=_unpacked, help="folder with the unpacked wheel of miles-credit")


def positive(text: str) -> int:
    """Return a whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def _unpacked(text: str) -> Path:
    folder = Path(text)
    if not (folder / _NETWORK).is_file():
        raise argparse.ArgumentTypeError(
            f"{text} holds no {_NETWORK}; pip download --no-deps miles-credit, and unzip the wheel there"
        )
    return folder
