"""Arguments that most commands share."""

from __future__ import annotations

import argparse

from credit.utils.paths import expand_home


def path_argument(text: str) -> str:
    """Return a path of the command line; the shell leaves ``~`` as it is in quotes and behind ``--option=``."""
    try:
        return expand_home(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``CONFIG [section.key=value ...]``."""
    parser.add_argument("config", metavar="CONFIG", type=path_argument, help="the run's YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="replace single keys, e.g. trainer.max_steps=100"
    )
