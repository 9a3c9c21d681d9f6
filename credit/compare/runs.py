"""Runs that are compared: their configs, their folders, and the requirements of a fair comparison."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from credit.config import Config, load_config
from credit.config.sections.verification import is_reserved_name
from credit.errors import ConfigError
from credit.train.monitor.run_files import read_status

# Folder of the scores of all runs.
SCORES_FOLDER = "scores"
# Names of folders of a comparison, which no run may have.
RESERVED_FOLDERS = ("configs", "logs", "timing", "figures", SCORES_FOLDER)
# Keys that must agree, because forecasts are scored on the same cases, channels and lead times.
_MATCHING_KEYS = (
    "data.timestep",
    "data.level_units",
    "data.grid",
    "data.regrid",
    "data.splits.test",
    "inference.initial_times",
    "inference.lead_time",
    "inference.lead_times",
    "inference.output_every",
    "inference.pressure_levels",
)
# Keys that differ by nature or have no influence on the comparison; they are not listed as differences.
_UNLISTED_KEYS = re.compile(r"(experiment|save_loc|seed|pbs\..*|slurm\..*|verification\..*|inference\.folder)")
# Keys that `credit compare` sets itself when it trains.
BUDGET_KEYS = (
    "trainer.max_steps",
    "trainer.num_epoch",
    "trainer.validate_every",
    "trainer.checkpoint_every",
    "trainer.patience",
)


@dataclass(frozen=True)
class ComparedRun:
    """A config that takes part in a comparison.

    Attributes:
        name: the `experiment` of the config, with other characters than letters, digits, underscore, dot and hyphen
            replaced by underscores.
        source: path that the user gave.
        config: the validated config.
        run_folder: folder of a finished run; None if the comparison trains the config.
    """

    name: str
    source: str
    config: Config
    run_folder: Path | None = None


def load_compared_runs(sources: Sequence[str], overrides: Sequence[str], is_trained: bool) -> list[ComparedRun]:
    """Load the configs of a comparison and check that they can be compared.

    Args:
        sources: paths of config files or run folders.
        overrides: ``section.key=value``, applied to every config.
        is_trained: True if the comparison trains the configs; False if they are finished runs.

    Raises:
        ConfigError: if a config is not valid, a run is not finished, or the runs cannot be compared.
    """
    if len(sources) < 2:
        raise ConfigError("a comparison needs at least two configs or run folders; append another one")
    runs = []
    for source in sources:
        path = Path(source)
        config_path = path / "config.yml" if path.is_dir() else path
        config = load_config(config_path, overrides)
        name = re.sub(r"[^\w.-]", "_", config.experiment)
        run_folder = None
        if not is_trained:
            run_folder = path if path.is_dir() else Path(config.save_loc)
            _require_finished(run_folder, source)
        runs.append(ComparedRun(name, source, config, run_folder))
    _require_distinct_names(runs)
    for run in runs[1:]:
        require_comparable(runs[0], run)
    return runs


def _require_finished(folder: Path, source: str) -> None:
    """Raise a ConfigError if the run in a folder is not done."""
    status = read_status(folder).get("status", "missing")
    if status != "done":
        raise ConfigError(
            f"{source}: STATUS of {folder} is {status}, but a run must be done to be compared as it is; finish it with "
            "credit train, or let this command train the configs: --equal steps 1000"
        )


def _require_distinct_names(runs: Sequence[ComparedRun]) -> None:
    """Raise a ConfigError if two runs have the same name, or a run has a name that the comparison uses."""
    sources: dict[str, str] = {}
    for run in runs:
        if run.name in sources:
            raise ConfigError(
                f"experiment: {run.name} names both {sources[run.name]} and {run.source}; results are listed by "
                "experiment, so give each config another one"
            )
        if is_reserved_name(run.name) or run.name in RESERVED_FOLDERS or run.name.startswith("."):
            raise ConfigError(
                f"experiment: {run.name} in {run.source} is a name that the comparison uses itself; choose another "
                f"one, for example {run.name.strip('.')}_run"
            )
        sources[run.name] = run.source


def require_comparable(first: ComparedRun, other: ComparedRun) -> None:
    """Raise a ConfigError if two runs cannot be scored on the same cases, channels and lead times.

    Args:
        first: run whose data are the truth for all runs.
        other: another run.
    """
    first_channels = [channel.name for channel in first.config.data.channel_map().output]
    other_channels = [channel.name for channel in other.config.data.channel_map().output]
    missing = sorted(set(first_channels) ^ set(other_channels))
    if missing:
        raise ConfigError(
            f"data.variables: {first.name} and {other.name} must forecast the same channels, but only one of them has "
            f"{', '.join(missing)}; give both the same prognostic and diagnostic variables and levels"
        )
    first_values = flatten_config(first.config)
    other_values = flatten_config(other.config)
    problems = []
    for key in sorted(set(first_values) | set(other_values)):
        matches = any(key == name or key.startswith(f"{name}.") for name in _MATCHING_KEYS)
        if matches and first_values.get(key) != other_values.get(key):
            problems.append(
                f"{key} is {format_value(first_values.get(key))} in {first.name} and "
                f"{format_value(other_values.get(key))} in {other.name}"
            )
    if problems:
        raise ConfigError(
            f"{'; '.join(problems)}: forecasts are compared on the same grid, cases and lead times; set the key in "
            "both configs, or append section.key=value, which replaces it in all"
        )


def flatten_config(config: Config | Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted key -> value of a config; lists are values."""
    document = config if isinstance(config, Mapping) else config.model_dump(mode="json")
    return dict(_iterate_leaves(document, ""))


def _iterate_leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a section and the sections in it; an empty section is a value."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _iterate_leaves(value, f"{key}.")
        else:
            yield key, value


def list_differences(runs: Sequence[ComparedRun], is_trained: bool) -> list[tuple[str, list[str]]]:
    """Return the config keys in which runs differ, with the value of each run as text.

    Args:
        runs: the runs.
        is_trained: True if the comparison trains them, so that the keys of the budget are not theirs.
    """
    values = [flatten_config(run.config) for run in runs]
    keys = dict.fromkeys(key for flat in values for key in flat)
    differences = []
    for key in keys:
        if _UNLISTED_KEYS.fullmatch(key) or (is_trained and key in BUDGET_KEYS):
            continue
        texts = [format_value(flat[key]) if key in flat else "" for flat in values]
        if len(set(texts)) > 1:
            differences.append((key, texts))
    return differences


def format_value(value: Any) -> str:
    """Return a value of a config as one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
