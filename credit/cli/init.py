"""``credit init``: write a starter config to standard output."""

from __future__ import annotations

import argparse
import sys
from importlib import resources

from credit.errors import ConfigError, did_you_mean

HELP = """Write a starter config to standard output. Without NAME, list the configs.

example:
  credit init quickstart > config.yml"""


def load_starter_configs() -> dict[str, str]:
    """Return name -> YAML text of each starter config; the files are credit/config/templates/NAME.yml."""
    folder = resources.files("credit.config") / "templates"
    texts = {}
    for file in folder.iterdir():
        if file.name.endswith(".yml"):
            texts[file.name.removesuffix(".yml")] = file.read_text(encoding="utf-8")
    return texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the optional NAME of a starter config."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of a starter config")


def run_command(arguments: argparse.Namespace) -> int:
    """Write the named starter config to standard output, or list all; return the exit status 0.

    Raises:
        ConfigError: if there is no starter config of this name.
    """
    texts = load_starter_configs()
    if arguments.name is None:
        for name, text in sorted(texts.items()):
            # The first line of each config is a comment that states the purpose of the config.
            first_comment = text.splitlines()[0].lstrip("# ")
            print(f"{name:24s} {first_comment}")
        return 0
    if arguments.name not in texts:
        raise ConfigError(f'"{arguments.name}" is not a starter config{did_you_mean(arguments.name, texts)}')
    sys.stdout.write(texts[arguments.name])
    return 0
