"""Command-line arguments that all commands share, and default environment variables of the libraries."""

from __future__ import annotations

import argparse
import os

from credit.utils.paths import expand_home


def parse_path(text: str) -> str:
    """Return a path of the command line with ``~`` replaced with the home folder.

    Shells do not expand ``~`` inside quotes and after ``--option=``.

    Raises:
        argparse.ArgumentTypeError: if the home folder of the user is not known.
    """
    try:
        return expand_home(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the positional arguments ``CONFIG [section.key=value ...]``, stored as `config` and `overrides`."""
    parser.add_argument("config", metavar="CONFIG", type=parse_path, help="YAML file that describes the run")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="replace a key of CONFIG, for example trainer.max_steps=100; repeat for several keys",
    )


def set_environment_defaults() -> None:
    """Set environment variables that make runs on a CPU faster, unless the user has already set them.

    Call this function before numpy and torch are imported. The variables request:

    - Huge pages for tensors of 2 MB and more. Many Linux distributions use huge pages only on request (``madvise``).
      Without huge pages, the kernel clears and looks up 512 times as many small pages. This takes a few percent of the
      time of a training step or a forecast on a CPU (benchmarks/lab_notes.md).
    - One thread for numpy's matrix products, which are small in this package. More threads would busy-wait on the cores
      on which torch computes. This takes 8 % of the processor time of a scored forecast on two cores.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
