"""Record of the inputs of a comparison in its folder, so that a second call continues the same comparison.

``settings.json`` contains the budget, the number of processes of each command, and the number of commands that run at
the same time. ``configs/NAME.yml`` contains the config of each run. Later calls may add configs and seeds. The
sections `inference` and `verification` may change, because forecasts and scores can be repeated cheaply. Other changes
are rejected, because they would make the training runs of different calls unequal.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from credit.compare.budget import Budget
from credit.compare.runs import BUDGET_KEYS, ComparedRun, flatten_config, format_value
from credit.config import Config, dump_config, load_config
from credit.errors import ConfigError
from credit.utils.atomic import atomic_write_text

# Keys that may differ between two calls, because they do not change a training run.
_CHANGEABLE_KEYS = re.compile(r"(save_loc|(inference|verification|pbs|slurm)\..*)")


def record_inputs(
    folder: Path, runs: Sequence[ComparedRun], budget: Budget | None, ranks: int, jobs: int = 1
) -> dict[str, Path]:
    """Write the inputs of a comparison into its folder, after comparing them with those of earlier calls.

    Args:
        folder: folder of the comparison.
        runs: the runs that are compared.
        budget: training budget of every run; None for finished runs.
        ranks: number of processes of each command.
        jobs: number of commands that share the host at the same time.

    Returns:
        Name of a run -> its config file in the folder. All commands read the config from this file.

    Raises:
        ConfigError: if an earlier call had a different budget, a different number of processes or commands, or a
            different config.
        CreditError: if a file cannot be written.
    """
    settings = {"equal": "none", "ranks": ranks, "jobs": jobs}
    if budget is not None:
        settings["equal"] = f"{budget.kind} {budget.text}"
    settings_path = folder / "settings.json"
    # Before the first training run, the budget may change, for example because the first budget was too small.
    has_trials = any(folder.glob("*/seed_*")) or any(folder.glob("*/finished_run"))
    if settings_path.exists() and (has_trials or (folder / "timing.json").exists()):
        earlier = json.loads(settings_path.read_text(encoding="utf-8"))
        for key, value in settings.items():
            is_binding = has_trials or key != "equal"
            if is_binding and earlier.get(key, value) != value:
                raise ConfigError(
                    f"{folder}: was made with {_describe_setting(key, earlier.get(key))}, but this call has "
                    f"{_describe_setting(key, value)}; such runs cannot be compared, so repeat the earlier setting or "
                    "choose another folder with -o"
                )
    config_paths = {run.name: folder / "configs" / f"{run.name}.yml" for run in runs}
    trains_runs = budget is not None
    for run in runs:
        _reject_or_restart_changed_run(config_paths[run.name], run, trains_runs, _has_begun(folder, run.name))
    (folder / "configs").mkdir(exist_ok=True)
    for run in runs:
        atomic_write_text(config_paths[run.name], dump_config(run.config))
    atomic_write_text(settings_path, json.dumps(settings, indent=1) + "\n")
    return config_paths


def _describe_setting(key: str, value: object) -> str:
    """Return a setting as an option of the command, such as ``--equal steps 800``, or as ``no --equal``."""
    return f"no --{key}" if value == "none" else f"--{key} {value}"


def _has_begun(folder: Path, name: str) -> bool:
    """Return True if a run has been timed, has taken an optimizer step or has forecasts.

    Args:
        folder: folder of the comparison.
        name: name of the run.
    """
    timing_path = folder / "timing.json"
    if timing_path.exists() and name in json.loads(timing_path.read_text(encoding="utf-8"))["costs"]:
        return True
    rows = [path for path in (folder / name).glob("seed_*/metrics.jsonl") if path.stat().st_size]
    return bool(rows) or any((folder / name).glob("finished_run/forecasts"))


def _reject_or_restart_changed_run(path: Path, run: ComparedRun, trains_runs: bool, has_begun: bool) -> None:
    """Raise a ConfigError if a run has begun with a different config in an earlier call.

    The config of a run that failed before its first step may be corrected. The folder of this run is then removed, so
    that the run starts again, because its first checkpoint belongs to the earlier config.

    Args:
        path: config file of the run in the folder of the comparison; the file need not exist.
        run: the run with its present config.
        trains_runs: True if the comparison trains the run; the keys that the budget sets are then ignored.
        has_begun: True if timings, checkpoints or forecasts of the run depend on the earlier config.
    """
    if not path.exists():
        return
    ignored_keys = BUDGET_KEYS if trains_runs else ()
    problems = describe_changes(load_config(path), run.config, ("seed", *ignored_keys))
    if problems and not has_begun:
        shutil.rmtree(path.parents[1] / run.name, ignore_errors=True)
    elif problems:
        raise ConfigError(
            f"{run.source}: differs from the config of the earlier call, {path}: {'; '.join(problems)}; undo the "
            "change, give the config another experiment, or choose another folder with -o"
        )


def describe_changes(earlier: Config, present: Config, ignored_keys: Collection[str] = ()) -> list[str]:
    """Return a message such as ``model.dim was 32 and is now 64`` for each changed key that affects a training run.

    Args:
        earlier: config of an earlier call.
        present: config of this call.
        ignored_keys: dotted keys that are ignored, in addition to the keys that do not affect a training run.
    """
    earlier_values = flatten_config(earlier)
    values = flatten_config(present)
    changes = []
    for key in dict.fromkeys([*earlier_values, *values]):
        if _CHANGEABLE_KEYS.fullmatch(key) or key in ignored_keys:
            continue
        earlier_text = format_value(earlier_values.get(key))
        text = format_value(values.get(key))
        if earlier_text != text:
            changes.append(f"{key} was {earlier_text} and is now {text}")
    return changes
