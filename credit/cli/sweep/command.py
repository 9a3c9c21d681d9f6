"""Arguments, job submission and output of ``credit sweep``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from credit.cli.common import add_config_arguments, parse_path
from credit.cli.console.terminal import add_quiet_argument, colorize, format_table, print_json

if TYPE_CHECKING:
    from credit.compare.sweep.results import TrialResult
    from credit.compare.sweep.seeds import SeedAverage
    from credit.compare.sweep.workflow import Sweep
    from credit.hpc.job import Job

HELP = """Train CONFIG with several values of some keys, and list the trials sorted by their best validation.

  --grid KEY=V1,V2 ...     all combinations of these values
  --random N --range ...   N random trials: KEY=log:LOW,HIGH, KEY=uniform:LOW,HIGH or KEY=choice:V1,V2

Values are read as YAML, for example model.dim=[32,64,128,256],[64,128,256,512]. The table is sorted by the best value
of trainer.monitor; smaller is better. To train with several seeds, make the seed a key of the grid: seed=1000,2000. A
second table then shows means and standard deviations over the seeds.

The command writes a run folder for each trial (trial_0001 and so on), configs/, logs/, sweep.json, sweep.csv and, with
several seeds, seeds.csv into FOLDER. Run the same command again to continue: finished trials are not repeated, and an
interrupted trial resumes. You may add values to the grid later, or raise N; the first trials of a random search stay
the same. If a trial fails, the other trials continue.

With --submit, an array of PBS or Slurm jobs trains the trials, one job for each trial. After the jobs have ended, run
the same command again to print the table and to submit unfinished trials.

example:
  credit sweep config.yml -o runs/sweep --grid trainer.learning_rate=1e-4,3e-4,1e-3 seed=1000,2000 --jobs 2
  credit sweep config.yml -o runs/random --random 20 --range trainer.learning_rate=log:1e-4,1e-2
  credit sweep config.yml -o runs/sweep --grid trainer.weight_decay=0,0.01 --submit --cluster derecho pbs.account=ABC1

If you stop the command (Ctrl-C or SIGTERM), the active training runs save a checkpoint first.

exit code: 0 done or submitted, 1 a trial failed or is not finished, 2 wrong config or arguments, 130 interrupted by
Ctrl-C, 143 stopped by SIGTERM"""

_STATE_COLORS = {"running": "green", "failed": "red", "lost": "red", "requeue": "yellow"}
# Text in the cell of an unknown value.
_UNKNOWN = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `credit sweep`: CONFIG, overrides, keys of the search, folder, and options of execution and
    output.
    """
    add_config_arguments(parser)
    parser.add_argument("-o", "--output", required=True, type=parse_path, metavar="FOLDER", help="folder of the sweep")
    parser.add_argument(
        "--grid", nargs="+", default=[], action="extend", metavar="KEY=V1,V2", help="train all combinations of values"
    )
    parser.add_argument("--random", type=int, metavar="N", help="train N trials with random values")
    parser.add_argument(
        "--range", nargs="+", default=[], action="extend", metavar="KEY=KIND:V1,V2", dest="ranges",
        help="with --random: range of a key; KIND is log, uniform or choice",
    )  # fmt: skip
    parser.add_argument(
        "--search-seed", type=int, default=0, metavar="SEED", help="with --random: seed of the search; default: 0"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N",
        help="training runs at the same time on this host; they share the processor cores and the GPUs evenly",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes of each training run (torchrun)")
    parser.add_argument("--submit", action="store_true", help="submit an array of jobs instead of training here")
    parser.add_argument(
        "--cluster", metavar="NAME", type=parse_path,
        help="with --submit: name of the cluster, such as derecho, or path of a cluster file",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true", help="with --submit: only print the job script; without: only list the trials"
    )
    parser.add_argument("--json", action="store_true", help="print the results as one JSON document")
    add_quiet_argument(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Train or submit the unfinished trials, print the results, and return the exit status that the help text lists.

    Raises:
        ConfigError: if a config or an option is wrong, or the folder contains a different sweep.
        CreditError: if another process uses the folder, a file cannot be written, or the scheduler fails.
    """
    from credit.compare.sweep.workflow import SweepRequest, open_sweep

    _require_consistent(arguments)
    request = SweepRequest(arguments.config, arguments.overrides, Path(arguments.output), _choose_trials(arguments))
    with open_sweep(request) as sweep:
        if arguments.submit:
            # The scheduler runs the jobs after the end of this command.
            return _submit_trials(sweep, arguments)
        if arguments.dry_run:
            _print_results(sweep, arguments.json)
            return 0
        failures = sweep.train(arguments.jobs, arguments.ranks)
        tables = sweep.write_tables()
        _print_results(sweep, arguments.json)
        # The JSON document of --json contains the reasons for failures.
        if not arguments.json:
            for failure in failures:
                print(failure)
            _print_paths(tables)
        return 1 if sweep.list_pending() else 0


def _require_consistent(arguments: argparse.Namespace) -> None:
    """Raise a ConfigError if options contradict each other or are out of range."""
    from credit.errors import ConfigError

    if (arguments.random is None) == (not arguments.grid):
        raise ConfigError("give either --grid with the values of keys, or --random with a number of trials")
    if (arguments.random is None) != (not arguments.ranges):
        raise ConfigError(
            "--random and --range must be used together: --random 20 --range trainer.learning_rate=log:1e-4,1e-2"
        )
    for option, value, least in (
        ("--random", arguments.random, 1),
        ("--search-seed", arguments.search_seed, 0),
        ("--jobs", arguments.jobs, 1),
        ("--ranks", arguments.ranks, 1),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{option} {value}: must be at least {least}")
    if arguments.submit and (arguments.jobs > 1 or arguments.ranks > 1):
        raise ConfigError(
            "--jobs and --ranks: only for processes on this host; with --submit, set nodes and ranks_per_node in the "
            "section pbs or slurm"
        )
    if arguments.cluster is not None and not arguments.submit:
        raise ConfigError("--cluster: needs --submit")
    if arguments.json and arguments.submit:
        raise ConfigError("--json and --submit: cannot be combined; --json --dry-run prints the results so far")


def _choose_trials(arguments: argparse.Namespace) -> list[tuple[str, ...]]:
    """Return the overrides of each trial of the grid or the random search."""
    from credit.compare.sweep.search import list_grid_combinations, parse_ranges, sample_trials

    if arguments.random is None:
        return list_grid_combinations(arguments.grid)
    return sample_trials(parse_ranges(arguments.ranges), arguments.random, arguments.search_seed)


def _submit_trials(sweep: Sweep, arguments: argparse.Namespace) -> int:
    """Submit an array of jobs for the unfinished trials, unless an array is active; return the exit status 0."""
    from credit.hpc.submit import find_active_jobs, render_preview, submit_job

    pending = [trial.name for trial in sweep.list_pending()]
    job = _build_job(sweep, pending, arguments)
    if arguments.dry_run:
        print(render_preview(job), end="")
        return 0
    _print_results(sweep, as_json=False)
    for result in sweep.read_results():
        if result.state == "failed":
            print(f"{result.trial.name} failed: {result.reason}")
    _print_paths(sweep.write_tables())
    active_ids = find_active_jobs(job)
    if active_ids:
        print(f"queued or running: {' '.join(active_ids)}; run the same command again when the jobs have ended")
    elif pending:
        sweep.write_configs()
        job_ids = submit_job(job)
        print(f"submitted  {' '.join(job_ids)} (trials: {len(pending)})")
        print(f"script     {job.script}")
        print(f"logs       {job.folder / 'logs'}")
    return 0


def _build_job(sweep: Sweep, trials: Sequence[str], arguments: argparse.Namespace) -> Job:
    """Return an array of jobs that trains trials on the cluster that the options or the config name.

    Args:
        sweep: the sweep.
        trials: names of the trials.
        arguments: options of the command.

    Raises:
        ConfigError: if no cluster is named, or the job is not possible on the cluster or with the config's parallelism.
    """
    import os

    from credit.cli.submit import find_cluster_section
    from credit.hpc.job import JobRequest, build_job
    from credit.parallel.mesh import plan_degrees

    cluster, section = find_cluster_section(sweep.base, arguments)
    # In the configs of the trials, environment variables are already replaced. Only PYTHONPATH is needed, for plugins.
    variables = {}
    if sweep.base.plugins and "PYTHONPATH" in os.environ:
        variables["PYTHONPATH"] = os.environ["PYTHONPATH"]
    request = JobRequest(
        kind="train",
        experiment=sweep.base.experiment,
        folder=sweep.folder,
        config=Path(arguments.config),
        variables=variables,
        trials=tuple(trials),
    )
    job = build_job(request, cluster, section)
    # Raise errors here that would otherwise occur when the jobs start.
    plan_degrees(sweep.base.trainer.parallelism, job.ranks)
    return job


def _print_results(sweep: Sweep, as_json: bool) -> None:
    """Print the results of all trials in the folder."""
    from credit.compare.sweep.results import list_changed_keys
    from credit.compare.sweep.seeds import average_over_seeds, remove_seed

    results = sweep.read_results()
    monitor = sweep.base.trainer.monitor
    if as_json:
        print_json([result.to_dict(monitor) for result in results])
        return
    keys = list_changed_keys(results)
    rows = [_build_row(result, keys) for result in results]
    header = ["trial", *keys, monitor, "at step", "step", "state"]
    print(format_table(header, rows, right_aligned=[monitor, "at step", "step"]))
    averages = average_over_seeds(results)
    if averages:
        _print_averages(averages, remove_seed(keys), monitor)


def _print_averages(averages: Sequence[SeedAverage], keys: Sequence[str], monitor: str) -> None:
    """Print means and standard deviations over the seeds.

    Args:
        averages: the averages, in the order of the rows.
        keys: keys that the trials change, without the seed.
        monitor: name of the monitored metric.
    """
    rows = []
    for average in averages:
        rows.append(
            [
                *(average.values.get(key, "") for key in keys),
                _format_value(average.mean),
                _format_value(average.deviation),
                f"{average.num_done} of {average.num_trials}",
            ]
        )
    columns = [f"mean {monitor}", "std", "seeds"]
    print()
    print(format_table([*keys, *columns], rows, right_aligned=columns))


def _format_value(value: float | None) -> str:
    """Return a value of the monitored metric as text."""
    return _UNKNOWN if value is None else f"{value:.4g}"


def _print_paths(tables: Sequence[Path]) -> None:
    """Print name and path of each table that was written."""
    for path in tables:
        print(f"{path.name}  {path}")


def _build_row(result: TrialResult, keys: Sequence[str]) -> list[str]:
    """Return the cells of the table row of a trial.

    Args:
        result: result of the trial.
        keys: keys that the trials change, in the order of the columns.
    """
    state = result.state
    if state in _STATE_COLORS:
        state = colorize(state, _STATE_COLORS[state])
    return [
        result.trial.name,
        *(result.trial.values.get(key, "") for key in keys),
        _format_value(result.best),
        _UNKNOWN if result.best_step is None else str(result.best_step),
        _UNKNOWN if result.step is None else str(result.step),
        state,
    ]
