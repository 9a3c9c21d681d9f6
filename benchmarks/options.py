"""Options that several benchmarks have; a value that measures nothing is refused before anything is measured."""

from __future__ import annotations

import argparse
from pathlib import Path

_NETWORK = "credit/models/wxformer/crossformer.py"


def add_counts(parser: argparse.ArgumentParser, *, rounds: int, steps: int) -> None:
    """Add --threads, --rounds and --steps, with these defaults."""
    # Imported here, because benchmarks of the commands set the environment of torch before they import it.
    import torch

    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=positive, default=rounds)
    parser.add_argument("--steps", type=positive, default=steps)


def add_reference(parser: argparse.ArgumentParser) -> None:
    """Add --reference, the folder of the reference implementation."""
    parser.add_argument("--reference", type=_reference_folder, help="folder with the unpacked wheel of miles-credit")


def positive(text: str) -> int:
    """Return the number of an option's text.

    Raises:
        argparse.ArgumentTypeError: if it is not a whole number of 1 or more.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def _reference_folder(text: str) -> Path:
    """Return the folder of an option's text, which must have the reference network."""
    folder = Path(text)
    if not (folder / _NETWORK).is_file():
        raise argparse.ArgumentTypeError(
            f"{text} holds no {_NETWORK}; pip download --no-deps miles-credit, and unzip the wheel there"
        )
    return folder
