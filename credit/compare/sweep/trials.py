"""Trials of a sweep, and their record in the folder of the sweep, so that a second call continues the same sweep.

``sweep.json`` contains the overrides of each trial. ``configs/base.yml`` is the config without these overrides.
``configs/trial_0001.yml`` is the complete config of a trial, which ``credit train`` can also train directly.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from credit.compare.record import describe_changes
from credit.config import Config, build_config, dump_config, load_config
from credit.config.load import apply_overrides, read_config
from credit.config.renamed_keys import rename_override
from credit.errors import ConfigError, CreditError
from credit.train.monitor.run_files import read_status
from credit.utils.atomic import atomic_write_text

# File in the folder of a sweep; other commands recognise a sweep by this file.
RECORD = "sweep.json"


@dataclass(frozen=True)
class Trial:
    """One training run of a sweep.

    Attributes:
        name: name of the trial and of its run folder, such as ``trial_0001``.
        overrides: ``section.key=value`` for each key that the sweep changes.
    """

    name: str
    overrides: tuple[str, ...]

    @property
    def values(self) -> dict[str, str]:
        """Dotted key -> value (a YAML string) for each key that the sweep changes."""
        values = {}
        for override in self.overrides:
            key, _, value = override.partition("=")
            values[key] = value
        return values


class TrialRecord:
    """Record of the trials in the folder of a sweep; only `save` and `write_config` write files.

    The process must hold the lock of the folder.

    Args:
        folder: absolute path of the folder of the sweep.
        config_path: config file that all trials share.
        overrides: ``section.key=value``, applied to all trials.

    Raises:
        ConfigError: if the config is not valid, or a trial has begun with a different config.
        CreditError: if the record is damaged.
    """

    def __init__(self, folder: Path, config_path: str, overrides: Sequence[str]) -> None:
        self._folder = folder
        self._config_path = config_path
        # The config file is read only once, so that a warning about it is printed once and not for each trial.
        self._raw = read_config(config_path, overrides)
        self.trials = self._read()
        self.base = build_config(self._raw, config_path)
        base_path = folder / "configs" / "base.yml"
        if base_path.exists():
            self._reject_or_forget_changed_base(base_path)

    def save(self) -> None:
        """Write the record of the trials and the config that all trials share.

        Raises:
            CreditError: if a file cannot be written.
        """
        config_folder = self._folder / "configs"
        config_folder.mkdir(exist_ok=True)
        atomic_write_text(config_folder / "base.yml", dump_config(self.base))
        rows: list[dict[str, Any]] = [{"name": trial.name, "overrides": trial.overrides} for trial in self.trials]
        atomic_write_text(self._folder / RECORD, json.dumps({"trials": rows}, indent=1) + "\n")

    def _read(self) -> list[Trial]:
        """Return the trials that earlier calls recorded, in the order of their names."""
        path = self._folder / RECORD
        if not path.exists():
            return []
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))["trials"]
            return [Trial(row["name"], tuple(row["overrides"])) for row in rows]
        except (ValueError, KeyError, TypeError) as error:
            raise CreditError(f"{path}: is damaged ({error}); restore it, or choose another folder with -o") from error

    def _reject_or_forget_changed_base(self, base_path: Path) -> None:
        """Raise a ConfigError if the config was changed and a trial has begun.

        If the config was changed and no trial has begun, forget the earlier trials, because they may change as well.

        Args:
            base_path: file with the config of the earlier call.
        """
        changes = describe_changes(load_config(base_path), self.base)
        if not changes:
            return
        if any(read_status(self._folder / trial.name) for trial in self.trials):
            raise ConfigError(
                f"{self._config_path}: differs from the config of the earlier call, {base_path}: {'; '.join(changes)}; "
                "undo the change, or choose another folder with -o"
            )
        self.trials = []

    def add_trials(self, overrides_of_trials: Sequence[tuple[str, ...]]) -> list[Trial]:
        """Add trials unless the sweep already has a trial with the same overrides, and validate their configs.

        Args:
            overrides_of_trials: overrides of each trial.

        Returns:
            The trials with these overrides, including trials of earlier calls.

        Raises:
            ConfigError: if the config of a trial is not valid; the message names its overrides.
        """
        trials_by_overrides = {frozenset(trial.overrides): trial for trial in self.trials}
        trials = []
        for overrides in overrides_of_trials:
            trial = trials_by_overrides.get(frozenset(overrides))
            if trial is None:
                trial = Trial(f"trial_{len(trials_by_overrides) + 1:04d}", overrides)
                trials_by_overrides[frozenset(overrides)] = trial
            trials.append(trial)
        for trial in trials:
            try:
                self.build_trial_config(trial)
            except ConfigError as error:
                raise ConfigError(f"{trial.name} ({' '.join(trial.overrides)}): {error}") from error
        self.trials = list(trials_by_overrides.values())
        return trials

    def build_trial_config(self, trial: Trial) -> Config:
        """Return the complete config of a trial."""
        overrides = [
            *map(rename_override, trial.overrides),
            f"save_loc={json.dumps(str(self._folder / trial.name))}",
            f"experiment={json.dumps(f'{self.base.experiment}_{trial.name}')}",
        ]
        return build_config(apply_overrides(self._raw, overrides), self._config_path)

    def write_config(self, trial: Trial) -> Path:
        """Write the complete config of a trial to a file, and return the path of the file."""
        return atomic_write_text(
            self._folder / "configs" / f"{trial.name}.yml", dump_config(self.build_trial_config(trial))
        )
