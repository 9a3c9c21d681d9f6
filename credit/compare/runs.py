"""Runs that are compared: their configs, their folders, and the requirements of a fair comparison."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from credit.config import Config, load_config
from credit.config.sections.verification import is_reserved_name
from credit.data.reader import open_reader
from credit.errors import ConfigError
from credit.train.build.model import build_network
from credit.train.monitor.run_files import read_status

# Subfolder of a comparison with the scores of all runs.
SCORES_FOLDER = "scores"
# Names of subfolders of a comparison; a run must not have one of these names.
RESERVED_FOLDERS = ("configs", "logs", "timing", "figures", SCORES_FOLDER)
# Config keys that must have the same value in all runs, because forecasts are scored on the same cases and channels.
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
# Config keys that always differ or do not affect the comparison; they are not listed as differences.
_UNLISTED_KEYS = re.compile(r"(experiment|save_loc|seed|pbs\..*|slurm\..*|verification\..*|inference\.folder)")
# Config keys of a training run that `credit compare` sets.
BUDGET_KEYS = (
    "trainer.max_steps",
    "trainer.num_epoch",
    "trainer.validate_every",
    "trainer.checkpoint_every",
    "trainer.patience",
)


@dataclass(frozen=True)
class ComparedRun:
    """One config of a comparison, or one finished run.

    Attributes:
        name: the `experiment` of the config. Every character except letters, digits, underscore, dot and hyphen is
            replaced with an underscore.
        source: path of the config file or run folder, as the user wrote it.
        config: the validated config.
        run_folder: folder of a finished run; None if the comparison trains the config.
    """

    name: str
    source: str
    config: Config
    run_folder: Path | None = None


def load_compared_runs(sources: Sequence[str], overrides: Sequence[str], trains_runs: bool) -> list[ComparedRun]:
    """Load the configs of a comparison and check that they can be compared.

    Args:
        sources: paths of config files or run folders.
        overrides: ``section.key=value``, applied to every config.
        trains_runs: True if the comparison trains the configs; False if they are finished runs.

    Raises:
        ConfigError: if a config is not valid, a run is not finished, or the runs cannot be compared.
    """
    if len(sources) < 2:
        raise ConfigError("a comparison needs at least two configs or run folders; append a second one")
    runs = []
    for source in sources:
        path = Path(source)
        config_path = path / "config.yml" if path.is_dir() else path
        config = load_config(config_path, overrides)
        name = re.sub(r"[^\w.-]", "_", config.experiment)
        run_folder = None
        if not trains_runs:
            run_folder = path if path.is_dir() else Path(config.save_loc)
            _require_finished(run_folder, source)
        runs.append(ComparedRun(name, source, config, run_folder))
    _require_distinct_names(runs)
    for run in runs[1:]:
        require_comparable(runs[0], run)
    if trains_runs:
        _require_valid_networks(runs)
    return runs


def _require_valid_networks(runs: Sequence[ComparedRun]) -> None:
    """Build the network of each run without memory for its weights, so that errors are found before the first training.

    Raises:
        ConfigError: if the section ``model`` of a config does not fit the channels or the grid of the data.
        DataError: if the data cannot be opened.
    """
    # All runs have the same grid.
    reader = open_reader(runs[0].config.data)
    for run in runs:
        try:
            with torch.device("meta"):
                build_network(run.config, run.config.data.channel_map(), reader.grid, reader.attributes)
        except ConfigError as error:
            raise ConfigError(f"{run.source}: {error}") from error


def _require_finished(folder: Path, source: str) -> None:
    """Raise a ConfigError if the training run in a folder is not finished."""
    status = read_status(folder).get("status", "missing")
    if status != "done":
        raise ConfigError(
            f"{source}: STATUS of {folder} is {status}, but a run must be done to be compared without training; finish "
            "it with credit train, or let this command train the configs: --equal steps 1000"
        )


def _require_distinct_names(runs: Sequence[ComparedRun]) -> None:
    """Raise a ConfigError if two runs have the same name, or a run has a name that the comparison uses."""
    sources: dict[str, str] = {}
    for run in runs:
        if run.name in sources:
            raise ConfigError(
                f"experiment: {run.name} names both {sources[run.name]} and {run.source}; results are listed by "
                "experiment, so give each config a different one"
            )
        if is_reserved_name(run.name) or run.name in RESERVED_FOLDERS or run.name.startswith("."):
            raise ConfigError(
                f"experiment: {run.name} in {run.source} is a name that the comparison uses for other files; choose "
                f"a different one, for example {run.name.strip('.')}_run"
            )
        sources[run.name] = run.source


def require_comparable(first: ComparedRun, other: ComparedRun) -> None:
    """Raise a ConfigError if two runs cannot be scored on the same cases, channels and lead times.

    Args:
        first: first run of the comparison; its data are the truth for all runs.
        other: a later run.
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
            f"{'; '.join(problems)}: forecasts are compared on the same grid, cases and lead times; set the same value "
            "in both configs, or append section.key=value, which sets the key in all configs"
        )


def flatten_config(config: Config | Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted key -> value for all keys of a config; a list is one value."""
    document = config if isinstance(config, Mapping) else config.model_dump(mode="json")
    return dict(_iterate_leaves(document, ""))


def _iterate_leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for all keys of a section and of its subsections; an empty subsection is a value."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _iterate_leaves(value, f"{key}.")
        else:
            yield key, value


def list_differences(runs: Sequence[ComparedRun], trains_runs: bool) -> list[tuple[str, list[str]]]:
    """Return (dotted key, value of each run as a string) for each config key that differs between the runs.

    Args:
        runs: the runs that are compared.
        trains_runs: True if the comparison trains the runs; the keys that the budget sets are then ignored.
    """
    values = [flatten_config(run.config) for run in runs]
    keys = dict.fromkeys(key for flat in values for key in flat)
    differences = []
    for key in keys:
        if _UNLISTED_KEYS.fullmatch(key) or (trains_runs and key in BUDGET_KEYS):
            continue
        texts = [format_value(flat[key]) if key in flat else "" for flat in values]
        if len(set(texts)) > 1:
            differences.append((key, texts))
    return differences


def format_value(value: Any) -> str:
    """Return a config value as one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
