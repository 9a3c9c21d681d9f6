"""Command-line options of several benchmarks; invalid values raise an error before the measurements."""

from __future__ import annotations

import argparse
from pathlib import Path

_NETWORK = "credit/models/wxformer/crossformer.py"


def add_counts(parser: argparse.ArgumentParser, *, rounds: int, steps: int) -> None:
    """Add the options --threads, --rounds and --steps to a parser; `rounds` and `steps` are defaults."""
    # Imported here, because benchmarks of the commands set the environment of torch before they import it.
    import torch

    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=positive, default=rounds)
    parser.add_argument("--steps", type=positive, default=steps)


def add_reference(parser: argparse.ArgumentParser) -> None:
    """Add the option --reference, the folder of the reference implementation, to a parser."""
    parser.add_argument(
        "--reference", type=_parse_reference_folder, help="folder with the unpacked wheel of miles-credit"
    )


def positive(text: str) -> int:
    """Convert the string of an option to a positive whole number.

    Raises:
        argparse.ArgumentTypeError: if the string is not a whole number of at least 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def _parse_reference_folder(text: str) -> Path:
    """Convert the string of an option to the path of a folder, which must contain the reference network."""
    folder = Path(text)
    if not (folder / _NETWORK).is_file():
        raise argparse.ArgumentTypeError(
            f"{text} holds no {_NETWORK}; pip download --no-deps miles-credit, and unzip the wheel there"
        )
    return folder
