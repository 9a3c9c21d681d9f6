"""Main program of the scale model: prints a table for each part."""

from __future__ import annotations

import argparse
import importlib
import logging
import pkgutil
from types import ModuleType

import torch

from benchmarks import scale
from benchmarks.scale.rows import format_table, group_rows
from credit.utils.progress import set_quiet

DEFAULT_RANKS = [8, 64, 512, 4096, 16384]


def find_parts() -> dict[str, ModuleType]:
    """Return name -> module of each part: the modules of this package with a function `measure`."""
    parts = {}
    for module_info in pkgutil.iter_modules(scale.__path__):
        if module_info.name != "__main__":
            module = importlib.import_module(f"{scale.__name__}.{module_info.name}")
            if hasattr(module, "measure"):
                parts[module_info.name] = module
    return parts


def main() -> None:
    """Measure the parts of the command line."""
    parts = find_parts()
    parser = argparse.ArgumentParser(
        prog=f"python -m {scale.__name__}",
        description=scale.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(parts)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {names}; all by default")
    parser.add_argument("--ranks", type=int, nargs="+", default=DEFAULT_RANKS, metavar="N", help="numbers of ranks")
    args = parser.parse_args()
    unknown_parts = sorted(set(args.parts) - parts.keys())
    if unknown_parts:
        parser.error(f"{unknown_parts[0]} is no part; choose some of {names}")
    if min(args.ranks) < 8:
        parser.error(f"--ranks: {min(args.ranks)} is too few; a host has 8")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    set_quiet(True)
    for name in args.parts or parts:
        rows = parts[name].measure(sorted(args.ranks))
        print(format_table(name, group_rows(rows)), flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
