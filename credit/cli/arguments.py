"""Arguments that most commands share."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``CONFIG [section.key=value ...]``."""
    parser.add_argument("config", metavar="CONFIG", help="the run's YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="replace single keys, e.g. trainer.max_steps=100"
    )
