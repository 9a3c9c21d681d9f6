"""``credit preprocess``: write the training store from source files and fit the statistics."""

from __future__ import annotations

import argparse

from credit.cli.common import add_config_arguments

HELP = """Write the training store data.store from data.sources, and compute the statistics of the training period.

The store is a zarr store in float32 with checksums. Each chunk contains all channels of one time, in channel order.

You may start the command several times at once, or use processes (preprocess.workers) or cluster jobs
(preprocess.cluster). If the command is interrupted, start it again; it continues. In a complete store, it rewrites only
lost or damaged parts. If channels, levels, sources or grid of the store differ from the config, the command ends
with an error; choose a different path for data.store.

Chunks of remote zarr stores (data.sources.N.path: gs://, s3://, https://) are fetched several at a time
(preprocess.fetches), and failed requests are repeated. --estimate prints the size and the duration of the download.

With preprocess.climatology, the command also stores the climatology of verification.climatology.

example:
  credit preprocess config.yml --estimate
  credit preprocess config.yml preprocess.workers=8 --report"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `credit preprocess`: CONFIG, overrides, ``--estimate``, ``--deep``, ``--redo-changed`` and
    ``--report``.
    """
    add_config_arguments(parser)
    parser.add_argument(
        "--estimate",
        action="store_true",
        help="print the amount of data to fetch from remote stores and to write, and the required time; write nothing",
    )
    parser.add_argument(
        "--deep",
        action="store_true",
        help="read every field of a complete store, and rewrite fields with wrong checksums",
    )
    parser.add_argument(
        "--redo-changed",
        action="store_true",
        help="rewrite the parts of the store whose source files have changed",
    )
    parser.add_argument(
        "--report", action="store_true", help="also write STORE.report.html, with a map and a histogram of each channel"
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Write the training store, and the climatology and the report if they are requested; return the exit status 0.

    With ``--estimate``, only the estimate is printed.

    Raises:
        ConfigError: if the config is not valid, or the command runs under a launcher with several ranks.
        DataError: if source files have errors, or the existing store belongs to a different config.
    """
    from credit.config import load_config
    from credit.data.store.preprocess import describe_work, write_training_store
    from credit.parallel.process_info import require_one_process

    # Several processes share the work through files in the store, so the command must not run under a launcher.
    require_one_process("preprocess")
    config = load_config(arguments.config, arguments.overrides)
    if arguments.estimate:
        print(describe_work(config.data, config.preprocess))
        return 0
    path = write_training_store(
        config.data, config.preprocess, deep=arguments.deep, redo_changed=arguments.redo_changed
    )
    if config.preprocess.climatology:
        from credit.data.climatology.stored import preprocess_climatology

        preprocess_climatology(config.data, config.preprocess, config.verification.climatology, deep=arguments.deep)
    print(f"complete: {path}")
    if arguments.report:
        from credit.verify.report.store_report import write_data_report

        print(f"report: {write_data_report(config.data)}")
    return 0
