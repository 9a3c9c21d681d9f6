"""``credit realtime``: make a forecast from the newest operational analysis."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from credit.cli.common import add_config_arguments
from credit.cli.console.terminal import add_quiet_argument

if TYPE_CHECKING:
    from credit.config import Config
    from credit.realtime.workflow import Outcome

HELP = """Make a forecast from the newest operational analysis of GFS or IFS, and score earlier forecasts against it.

The section `realtime` of CONFIG sets the address and the format of the analyses. The command fetches and checks the
records that the model needs, and compares the fields with the training data. Then it makes the same forecasts as
credit rollout, and scores the earlier forecasts that are valid at the time of the new analysis.

A missing field is never filled in. The call fails or uses an earlier cycle (realtime.on_incomplete). A second call for
the same cycle does nothing. If another call is active, the command waits for its end.

save_loc/realtime contains STATUS (cycle and state of the last call), cycles.jsonl (finished cycles), scores.jsonl
(scores) and the analyses.

example:
  credit realtime config.yml
  credit realtime config.yml --until 05:30

exit code: 0 the forecast of the newest expected cycle exists, 3 no usable cycle, 4 the forecast of an earlier cycle
exists, 2 wrong config, 130 interrupted, 1 any other error"""

__all__ = ["HELP", "add_arguments", "run_command"]

EARLIER_CYCLE = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `credit realtime`: CONFIG, overrides, deadline and cycle."""
    add_config_arguments(parser)
    parser.add_argument(
        "--until", metavar="TIME",
        help="wait for a late cycle until this time (UTC, such as 05:30), or for this long (such as 90min); the cycle "
        "is the newest one that is expected by then",
    )  # fmt: skip
    parser.add_argument(
        "--cycle", metavar="TIME", help="use only this cycle, such as 2026-11-27T00:00; default: the newest cycle"
    )
    add_quiet_argument(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Make the forecast and return the exit status that the help text lists.

    Raises:
        ConfigError: if the config or an option is wrong, or several ranks were started.
        CycleError: if there is no usable cycle.
        CreditError: if the forecast cannot be made.
    """
    from credit.config import load_config
    from credit.errors import ConfigError
    from credit.parallel.process_info import read_process_info
    from credit.realtime.clock import Clock
    from credit.realtime.cycles import parse_cycle
    from credit.realtime.fetch.records import require_realtime_section
    from credit.realtime.workflow import RealtimeWorkflow

    config = load_config(arguments.config, arguments.overrides)
    realtime = require_realtime_section(config)
    num_ranks = read_process_info().world
    if num_ranks > 1:
        raise ConfigError(f"credit realtime uses one process, but {num_ranks} were started; use srun --ntasks=1")
    if config.inference.parallelism.needs_process_group:
        raise ConfigError("inference.parallelism: credit realtime uses one process; leave its keys at their defaults")
    clock = Clock()
    if arguments.until is not None:
        clock.set_deadline(arguments.until)
    cycle = None
    if arguments.cycle is not None:
        cycle = parse_cycle(arguments.cycle, realtime)
    outcome = RealtimeWorkflow(config, _make_forecasts, clock).run(cycle)
    _print_outcome(outcome)
    return 0 if outcome.cycle == outcome.expected_cycle else EARLIER_CYCLE


def _make_forecasts(config: Config) -> None:
    """Make the forecasts of a config on this process; complete forecasts are kept."""
    from credit.cli.rollout.command import make_forecasts
    from credit.parallel.mesh import DeviceGrid
    from credit.parallel.process_info import read_process_info

    make_forecasts(config, None, read_process_info(), DeviceGrid())


def _print_outcome(outcome: Outcome) -> None:
    """Print the cycle of the forecast and, if the expected cycle was not usable, the reason."""
    from credit.calendar import Calendar

    cycle = Calendar().format(outcome.cycle)
    state = "made" if outcome.is_new else "already existed"
    if outcome.reason:
        expected_cycle = Calendar().format(outcome.expected_cycle)
        print(f"cycle {expected_cycle} is not usable: {outcome.reason}")
        print(f"forecast of the earlier cycle {cycle} {state}")
    else:
        print(f"forecast of cycle {cycle} {state}")
