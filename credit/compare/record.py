"""Record of the inputs of a comparison in its folder, so that a second call continues the same comparison.

``settings.json`` has the budget and the number of processes, and ``configs/NAME.yml`` the config of each run. Configs
and seeds may be added later. The sections `inference` and `verification` may change, because forecasts and scores can
be repeated cheaply. Other changes would make the trainings of different calls unequal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from credit.compare.budget import Budget
from credit.compare.runs import BUDGET_KEYS, ComparedRun, flatten_config, format_value
from credit.config import dump_config, load_config
from credit.errors import ConfigError
from credit.utils.atomic import atomic_write_text

# Keys that may differ between two calls.
_CHANGEABLE_KEYS = re.compile(r"(save_loc|seed|(inference|verification|pbs|slurm)\..*)")


def record_inputs(folder: Path, runs: Sequence[ComparedRun], budget: Budget | None, ranks: int) -> dict[str, Path]:
    """Write the inputs of a comparison into its folder, after comparing them with those of earlier calls.

    Args:
        folder: folder of the comparison.
        runs: the runs.
        budget: training that every run gets; None for finished runs.
        ranks: number of processes of each command.

    Returns:
        Name of a run -> its config file in the folder, from which all commands read.

    Raises:
        ConfigError: if an earlier call had another budget, number of processes or config.
        CreditError: if a file cannot be written.
    """
    settings = {"equal": "none", "ranks": ranks}
    if budget is not None:
        settings["equal"] = f"{budget.kind} {budget.text}"
    settings_path = folder / "settings.json"
    if settings_path.exists():
        earlier = json.loads(settings_path.read_text(encoding="utf-8"))
        for key, value in settings.items():
            if earlier.get(key) != value:
                raise ConfigError(
                    f"{folder}: was made with --{key} {earlier.get(key)}, but this call has --{key} {value}; runs with "
                    "different budgets cannot be compared, so repeat the earlier value or choose another folder with -o"
                )
    config_paths = {run.name: folder / "configs" / f"{run.name}.yml" for run in runs}
    is_trained = budget is not None
    for run in runs:
        _require_same_config(config_paths[run.name], run, is_trained)
    (folder / "configs").mkdir(exist_ok=True)
    for run in runs:
        atomic_write_text(config_paths[run.name], dump_config(run.config))
    atomic_write_text(settings_path, json.dumps(settings, indent=1) + "\n")
    return config_paths


def _require_same_config(path: Path, run: ComparedRun, is_trained: bool) -> None:
    """Raise a ConfigError if a run's config differs from the one of an earlier call.

    Args:
        path: config file of the run in the folder of the comparison; it need not exist.
        run: the run.
        is_trained: True if the comparison trains the run, so that the keys of the budget do not count.
    """
    if not path.exists():
        return
    earlier_values = flatten_config(load_config(path))
    values = flatten_config(run.config)
    problems = []
    for key in dict.fromkeys([*earlier_values, *values]):
        if _CHANGEABLE_KEYS.fullmatch(key) or (is_trained and key in BUDGET_KEYS):
            continue
        earlier = format_value(earlier_values.get(key))
        value = format_value(values.get(key))
        if earlier != value:
            problems.append(f"{key} was {earlier} and is now {value}")
    if problems:
        raise ConfigError(
            f"{run.source}: differs from the config of the earlier call, {path}: {'; '.join(problems)}; undo the "
            "change, give the config another experiment, or choose another folder with -o"
        )
