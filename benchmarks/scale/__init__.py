"""Model of a run on up to thousands of ranks: the cost of one rank, found in one process.

    python -m benchmarks.scale [PART ...] [--ranks 8 64 512 4096 16384]

The process is one rank of N, the first or the last, in torch's fake process group; `simulation` answers its object
collectives in place of the other ranks. What runs is the code of a real run. So counts (messages, bytes, communicators,
files) are those of a real run, and times are those of the rank's own work on this machine, without the network.

Each module of this package with a function ``measure(ranks)`` is a part. It returns rows (see `rows.Row`), which the
main program prints as one line per quantity: its values over N, their slope in a log-log plot, and a verdict.
"""
