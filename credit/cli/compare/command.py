"""``credit compare``: train, forecast and score several configs at equal cost, and write one HTML page."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from credit.cli.common import parse_path
from credit.cli.console.terminal import add_quiet_argument, format_table

if TYPE_CHECKING:
    from credit.compare.budget import Budget
    from credit.compare.workflow import CompareOutcome

HELP = """Train several configs at equal cost, forecast and score the same cases, and write one HTML page.

RUN is a config or the folder of a run. The key `experiment` is the name of the run; the names must be different. With
--equal, every config is trained with the same number of steps, the same time or the same number of floating-point
operations. Without --equal, the runs must be finished, and are compared without further training.

  --equal steps 800     optimizer steps
  --equal time 15min    time of the optimizer steps. Short alternating training runs first measure the speeds.
  --equal flops 2e15    operations of the network, forward and backward, over all processes

The command writes compare.html, compare.csv, compare.json, figures/, logs/, and a run folder NAME/seed_SEED for each
training run into FOLDER. Run the same command again to continue: finished parts are not repeated, and an interrupted
training run resumes. You may add configs and seeds later. A different budget or a changed config is an error.

If a part fails, the other parts continue. The page lists the missing parts.

example:
  credit compare a.yml b.yml -o runs/a_b --equal time 15min --seeds 1000,2000,3000
  credit compare runs/a runs/b -o runs/a_b --long-run 60d

If you stop the command (Ctrl-C or SIGTERM), the active training run saves a checkpoint first.

exit code: 0 done, 1 a part failed or is missing, 2 wrong config or arguments, 130 interrupted by Ctrl-C, 143 stopped by
SIGTERM"""

__all__ = ["HELP", "add_arguments", "run_command"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `credit compare`: runs, overrides, folder, budget and options of the comparison."""
    parser.add_argument(
        "runs", nargs="+", type=parse_path, metavar="RUN, section.key=value",
        help="YAML files or folders of at least two runs; replaced keys of all configs",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", required=True, type=parse_path, metavar="FOLDER", help="folder of the comparison"
    )
    parser.add_argument(
        "--equal", nargs=2, metavar=("KIND", "AMOUNT"),
        help="train all configs with equal steps, time or flops; without it, finished runs are compared",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", default="", metavar="SEEDS",
        help="train each config with each of these seeds, such as 1000,2000,3000; default: seed of the first config",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes of each training run (torchrun)")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N",
        help="training runs, forecasts and scorings at the same time; they share the cores and the GPUs evenly",
    )  # fmt: skip
    parser.add_argument(
        "--long-run", metavar="LENGTH", type=str,
        help="also make one long forecast of each run, such as 60d, and report when it becomes unstable",
    )  # fmt: skip
    parser.add_argument(
        "--timing-steps", type=int, default=30, metavar="N", help="steps of each short training run; default: 30"
    )
    parser.add_argument(
        "--timing-rounds", type=int, default=3, metavar="N", help="short training runs of each run; default: 3"
    )
    add_quiet_argument(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Compare the runs, write the page and print the results; return 1 if a part is missing, otherwise 0.

    Raises:
        ConfigError: if a config or an option is wrong, or the folder contains a different comparison.
        CreditError: if another process uses the folder, or a file cannot be written.
    """
    from credit.compare.budget import parse_budget
    from credit.compare.page import write_comparison_page
    from credit.compare.tables import build_document, write_csv, write_json
    from credit.compare.timing import TimingPlan
    from credit.compare.workflow import CompareRequest, compare_runs

    # The path of a run may contain an equals sign, so an existing path is never an override.
    sources = [text for text in arguments.runs if "=" not in text or os.path.exists(text)]
    overrides = [text for text in arguments.runs if text not in sources]
    budget = None if arguments.equal is None else parse_budget(*arguments.equal)
    folder = Path(arguments.output)
    _require_positive(arguments)
    request = CompareRequest(
        sources=sources,
        overrides=overrides,
        folder=folder,
        budget=budget,
        seeds=parse_seeds(arguments.seeds),
        long_run=arguments.long_run,
        timing=TimingPlan(arguments.timing_steps, arguments.timing_rounds, arguments.ranks),
        jobs=arguments.jobs,
    )
    outcome = compare_runs(request)
    document = build_document(outcome, budget)
    write_csv(outcome, folder / "compare.csv")
    write_json(document, folder / "compare.json")
    write_comparison_page(outcome, budget, document, folder)
    _print_results(outcome, budget, folder)
    return 1 if outcome.failures else 0


def parse_seeds(text: str) -> list[int]:
    """Return the seeds in the value of ``--seeds``; an empty list for an empty string.

    Raises:
        ConfigError: if a seed is not a whole number, is negative or is repeated.
    """
    from credit.errors import ConfigError

    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdigit() for word in words) or len(set(words)) < len(words):
        raise ConfigError(f"--seeds {text}: must be different whole numbers, for example 1000,2000,3000")
    return [int(word) for word in words]


def _require_positive(arguments: argparse.Namespace) -> None:
    """Raise a ConfigError if a numeric option is below its minimum."""
    from credit.errors import ConfigError

    # At least two timings of three steps are needed, because the first timing is ignored.
    for option, value, least in (
        ("--ranks", arguments.ranks, 1),
        ("--jobs", arguments.jobs, 1),
        ("--timing-steps", arguments.timing_steps, 6),
        ("--timing-rounds", arguments.timing_rounds, 1),
    ):
        if value < least:
            raise ConfigError(f"{option} {value}: must be at least {least}")


def _print_results(outcome: CompareOutcome, budget: Budget | None, folder: Path) -> None:
    """Print the table of results, the missing parts, and the paths of the written files."""
    scores = outcome.scores
    if scores is not None:
        rows = []
        for row in scores.result_rows():
            cells = []
            for name in scores.names:
                star = "*" if name == row.best else " "
                cells.append(f"{row.ratio[name].mean:.3f}{star}")
            rows.append([row.channel, f"{row.lead_hours:g} h", *cells])
        print("Global RMSE divided by the RMSE of persistence, mean over seeds; *: significantly the best run.")
        print(format_table(["channel", "lead", *scores.names], rows, right_aligned=["lead", *scores.names]))
    if budget is not None:
        print(budget.describe())
    for failure in outcome.failures:
        print(f"missing  {failure}")
    for name in ("compare.html", "compare.csv", "compare.json"):
        print(f"{name:12s} {folder / name}")
