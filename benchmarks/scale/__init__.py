"""Model of a run on up to thousands of ranks: the cost of one rank, measured in one process.

    python -m benchmarks.scale [PART ...] [--ranks 8 64 512 4096 16384]

The process is the first or the last of N ranks in torch's fake process group. `simulation` answers its object
collectives in place of the other ranks. The process runs the code of a real run. The counts of messages, bytes,
communicators and files are therefore the same as in a real run. Times are the times of this rank's work on this
machine, without the network.

Each module of this package with a function ``measure(ranks)`` is a part. It returns rows (see `rows.Row`), which the
main program prints as one line per quantity: its values over N, their slope in a log-log plot, and a verdict.
"""
