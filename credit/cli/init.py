"""``credit_init``: a starter config on standard output."""

from __future__ import annotations

import argparse
import sys
from importlib import resources

from credit.errors import ConfigError, did_you_mean

HELP = """Write a starter config to standard output: credit_init quickstart > config.yml. Without NAME, list them."""


def templates() -> dict[str, str]:
    """Return name -> text of the templates in the package."""
    folder = resources.files("credit.config") / "templates"
    return {
        item.name.removesuffix(".yml"): item.read_text(encoding="utf-8")
        for item in folder.iterdir()
        if item.name.endswith(".yml")
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add NAME."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a template's name")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    found = templates()
    if arguments.name is None:
        for name, text in sorted(found.items()):
            print(f"{name:24s} {text.splitlines()[0].lstrip('# ')}")
        return 0
    if arguments.name not in found:
        raise ConfigError(f'"{arguments.name}" is no template{did_you_mean(arguments.name, found)}')
    sys.stdout.write(found[arguments.name])
    return 0
