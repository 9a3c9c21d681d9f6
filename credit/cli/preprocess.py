"""``credit preprocess``: write the training store from source files and fit the statistics."""

from __future__ import annotations

import argparse

from credit.cli.common import add_config_arguments

HELP = """Write the training store data.store of CONFIG from data.sources, and fit the statistics of data.splits.train.

One chunk a time, channels in the model's order, float32, with checksums. preprocess.workers processes share the work,
or jobs of a cluster (preprocess.cluster); so do several of this command at once. Interrupted, the same command goes on
where it stopped. Of a complete store what is lost or damaged is written again, and the rest is left as it is. A store
of other channels, levels, sources or grid is refused: name another data.store. With preprocess.climatology the store
keeps the climatology of verification.climatology as well."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, overrides, ``--deep``, ``--redo-changed`` and ``--report``."""
    add_config_arguments(parser)
    parser.add_argument(
        "--deep",
        action="store_true",
        help="read every field of a complete store, and write again what does not agree with its checksums",
    )
    parser.add_argument(
        "--redo-changed",
        action="store_true",
        help="write the parts of the store again whose source files have changed since it was written",
    )
    parser.add_argument(
        "--report", action="store_true", help="also write STORE.report.html: a map and a histogram of each channel"
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Write the training store, and the climatology and report where asked for; return the exit status 0."""
    from credit.config import load_config
    from credit.data.store.preprocess import write_training_store
    from credit.parallel.process_info import require_one_process

    # Several processes share the work through files in the store, not as ranks of a launcher.
    require_one_process("preprocess")
    config = load_config(arguments.config, arguments.overrides)
    path = write_training_store(
        config.data, config.preprocess, deep=arguments.deep, redo_changed=arguments.redo_changed
    )
    if config.preprocess.climatology:
        from credit.data.climatology.stored import preprocess_climatology

        preprocess_climatology(config.data, config.preprocess, config.verification.climatology, deep=arguments.deep)
    print(f"complete: {path}")
    if arguments.report:
        from credit.verify.report.data_report import write_data_report

        print(f"report: {write_data_report(config.data)}")
    return 0
