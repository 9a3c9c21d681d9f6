"""``credit_preprocess``: from source files to the training store."""

from __future__ import annotations

import argparse

from credit.cli.arguments import add_config_arguments as add_arguments

HELP = """Write the training store data.store of CONFIG from data.sources, and fit the statistics of data.splits.train.

One chunk a time, channels in the model's order, float32, with checksums. preprocess.workers processes share the work,
or jobs of a cluster (preprocess.cluster); so do several of this command at once. Interrupted, the same command goes on
where it stopped; a complete store is left as it is. A store of other channels, levels, sources or grid is refused:
delete it first."""

__all__ = ["HELP", "add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from credit.config import load_config
    from credit.data.preprocess import preprocess
    from credit.parallel.launch import require_one_process

    require_one_process("preprocess")
    config = load_config(arguments.config, arguments.overrides)
    path = preprocess(config.data, config.preprocess)
    print(f"complete: {path}")
    return 0
