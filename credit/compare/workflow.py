"""Workflow of a comparison: measure, train, forecast, score, and collect the results of all runs and seeds.

A trial is a run with one of its seeds. The label of a trial is its seed, such as ``seed_1000``, or ``finished_run`` for
a finished run that the comparison does not train. The folder of a trial is ``FOLDER/NAME/LABEL``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from credit.compare.budget import Budget, StepCost, build_training_overrides
from credit.compare.costs import RunCosts, read_costs
from credit.compare.execution import ComparisonPart, Executor, divide_host_into_slots, exit_on_sigterm
from credit.compare.record import record_inputs
from credit.compare.results import ComparisonScores, load_tables
from credit.compare.runs import SCORES_FOLDER, ComparedRun, load_compared_runs
from credit.compare.stability import (
    LONG_RUN_FOLDER,
    StabilityCurve,
    build_long_run_overrides,
    measure_long_run,
    measure_truth_deviations,
    require_valid_long_run_length,
)
from credit.compare.timing import TimingPlan, measure_step_costs
from credit.errors import ConfigError, CreditError
from credit.train.monitor.run_files import read_status
from credit.utils.file_lock import file_lock
from credit.verify.table.summary import headline_channels

logger = logging.getLogger(__name__)

FINISHED_RUN = "finished_run"
# (name of the run, label of the seed)
TrialKey = tuple[str, str]


@dataclass(frozen=True)
class CompareRequest:
    """Arguments of ``credit compare``.

    Attributes:
        sources: paths of config files or run folders.
        overrides: ``section.key=value``, applied to every config.
        folder: folder of the comparison.
        budget: training budget of every run; None to compare finished runs without training.
        seeds: seeds with which each config is trained; empty to train all configs with the seed of the first config.
        long_run: length of a long forecast, a duration such as ``60d``; None without a long forecast.
        timing: plan of the measurement of step times; it also contains the number of processes of each command.
        jobs: number of training runs, forecasts or verifications that run at the same time. Step times are measured
            one run at a time.
    """

    sources: Sequence[str]
    overrides: Sequence[str]
    folder: Path
    budget: Budget | None
    seeds: Sequence[int]
    long_run: str | None
    timing: TimingPlan
    jobs: int = 1


@dataclass
class CompareOutcome:
    """Results of a comparison.

    Attributes:
        runs: the runs in the order of the command.
        steps: name of a run -> number of optimizer steps that the budget allows; empty for finished runs.
        step_costs: name of a run -> measured cost of a step; empty if nothing was measured.
        scores: scores of all runs and seeds; None if no forecasts were scored.
        costs: (name of the run, label of the seed) -> costs of the training run.
        curves: stability curves of the long forecasts.
        failures: a sentence for each part that failed or is missing.
    """

    runs: list[ComparedRun]
    steps: dict[str, int] = field(default_factory=dict)
    step_costs: dict[str, StepCost] = field(default_factory=dict)
    scores: ComparisonScores | None = None
    costs: dict[TrialKey, RunCosts] = field(default_factory=dict)
    curves: list[StabilityCurve] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def compare_runs(request: CompareRequest) -> CompareOutcome:
    """Do all parts of a comparison that are not done yet, and return its results.

    Raises:
        ConfigError: if the runs cannot be compared, or the folder contains a different comparison.
        CreditError: if another process works in the folder, or a file cannot be written.
    """
    if request.seeds and request.budget is None:
        raise ConfigError("--seeds: finished runs have the seeds they were trained with; add --equal steps 1000")
    runs = load_compared_runs(request.sources, request.overrides, trains_runs=request.budget is not None)
    if request.long_run is not None:
        require_valid_long_run_length(request.long_run, runs[0].config)
    request.folder.mkdir(parents=True, exist_ok=True)
    with exit_on_sigterm(), file_lock(request.folder / ".lock", wait=False) as is_locked:
        if not is_locked:
            raise CreditError(f"{request.folder}: another credit compare works in this folder; wait until it has ended")
        return _Workflow(request, runs).run()


class _Workflow:
    """Workflow of one comparison.

    Args:
        request: arguments of the command.
        runs: the runs; they must already have been checked to be comparable.
    """

    def __init__(self, request: CompareRequest, runs: list[ComparedRun]) -> None:
        self._request = request
        self._folder = request.folder.resolve()
        self._runs = {run.name: run for run in runs}
        self._config_paths = record_inputs(self._folder, runs, request.budget, request.timing.ranks, request.jobs)
        self._executor = Executor(self._folder, divide_host_into_slots(request.jobs, request.timing.ranks))
        self._outcome = CompareOutcome(runs)

    def run(self) -> CompareOutcome:
        """Do all parts in order and return the results; a trial that fails is left out of the later parts."""
        outcome = self._outcome
        self._count_steps()
        trials = self._train(self._list_trials())
        trials = self._make_forecasts(trials)
        for trial in trials:
            run_folder = self._runs[trial[0]].run_folder or self._trial_folder(trial)
            seconds = self._executor.seconds_of(f"forecast {describe_trial(trial)}")
            outcome.costs[trial] = read_costs(run_folder, self._trial_folder(trial) / "forecasts", seconds)
        scored = self._score(trials)
        if scored:
            outcome.scores = ComparisonScores(list(self._runs), load_tables(scored))
            if self._request.long_run is not None:
                try:
                    self._make_long_runs(trials)
                except CreditError as error:
                    # If the long forecasts fail, the page is still written with the scores.
                    outcome.failures.append(f"long forecasts failed: {error}")
        outcome.failures = [*outcome.failures, *self._executor.list_failures()]
        return outcome

    def _count_steps(self) -> None:
        """Measure the cost of a step if the budget needs this cost, and compute the number of steps of each run."""
        budget = self._request.budget
        if budget is None:
            return
        costs = self._outcome.step_costs
        if budget.needs_measurement:
            runs = self._outcome.runs
            plan = self._request.timing
            if budget.kind == "flops":
                # The count of operations does not vary.
                plan = TimingPlan(plan.steps, rounds=1, ranks=plan.ranks)
            costs |= measure_step_costs(runs, self._config_paths, plan, self._executor, self._folder)
        for name in self._runs:
            if budget.needs_measurement and name not in costs:
                # The executor reports the part that failed.
                continue
            self._outcome.steps[name] = budget.count_steps(name, costs.get(name))

    def _list_trials(self) -> list[TrialKey]:
        """Return all trials, ordered by seed: all runs with the first seed, then all runs with the next seed."""
        if self._request.budget is None:
            return [(name, FINISHED_RUN) for name in self._runs]
        seeds = self._request.seeds or [self._outcome.runs[0].config.seed]
        trials = []
        for seed in seeds:
            for name in self._outcome.steps:
                trials.append((name, f"seed_{seed}"))
        return trials

    def _trial_folder(self, trial: TrialKey) -> Path:
        """Return the folder of a trial."""
        return self._folder.joinpath(*trial)

    def _build_rollout_overrides(self, trial: TrialKey) -> list[str]:
        """Return the overrides that every ``credit rollout`` of a trial has."""
        name, label = trial
        overrides = [f"save_loc={self._trial_folder(trial)}"]
        run_folder = self._runs[name].run_folder
        if run_folder is None:
            return [*overrides, f"seed={label.removeprefix('seed_')}"]
        checkpoint = self._runs[name].config.inference.checkpoint
        if checkpoint in ("best", "latest"):
            # The target of the link is part of the inputs, so that a change of the weights is noticed.
            checkpoint = str((run_folder / "checkpoints" / checkpoint).resolve())
        return [*overrides, f"inference.checkpoint={checkpoint}"]

    def _run_parts(self, parts: Mapping[TrialKey, ComparisonPart]) -> list[TrialKey]:
        """Run the parts that are not done, and return the trials whose part is done afterwards."""
        results = self._executor.run_all(list(parts.values()))
        return [trial for trial, is_done in zip(parts, results, strict=True) if is_done]

    def _train(self, trials: Sequence[TrialKey]) -> list[TrialKey]:
        """Train the trials that are not trained yet, and return all trials whose training run is done."""
        if self._request.budget is None:
            return list(trials)
        parts = {}
        for trial in trials:
            name, label = trial
            folder = self._trial_folder(trial)
            seed = int(label.removeprefix("seed_"))
            overrides = build_training_overrides(self._runs[name].config, seed, self._outcome.steps[name], str(folder))
            parts[trial] = ComparisonPart(
                f"train {describe_trial(trial)}",
                "train",
                self._config_paths[name],
                tuple(overrides),
                folder / "summary.json",
                ranks=self._request.timing.ranks,
            )
        trained = []
        for trial in self._run_parts(parts):
            status = read_status(self._trial_folder(trial)).get("status")
            if status == "done":
                trained.append(trial)
            else:
                # On several ranks, a training run that stops at its time limit has the exit code 0.
                reason = f"STATUS is {status}; the same command continues the training run"
                self._executor.mark_failed(parts[trial], reason)
        return trained

    def _make_forecasts(self, trials: Sequence[TrialKey]) -> list[TrialKey]:
        """Make the forecasts of the trials unless they exist, and return the trials that have forecasts."""
        parts = {}
        for trial in trials:
            name, _ = trial
            parts[trial] = ComparisonPart(
                f"forecast {describe_trial(trial)}",
                "rollout",
                self._config_paths[name],
                (*self._build_rollout_overrides(trial), "inference.folder=forecasts"),
                self._trial_folder(trial) / "forecasts",
                depends_on=self._forecast_fingerprint(name),
                ranks=self._request.timing.ranks,
            )
        return self._run_parts(parts)

    def _forecast_fingerprint(self, name: str) -> tuple[str, ...]:
        """Return a fingerprint of the section `inference` of a run, as a tuple with one string."""
        return (fingerprint([self._runs[name].config.model_dump_json(include={"inference"})]),)

    def _score(self, trials: Sequence[TrialKey]) -> dict[TrialKey, Path]:
        """Score the forecasts of the trials unless the scores exist.

        Returns:
            Trial -> folder with its ``scores.nc``, for the trials that have scores. In the file, the run of the trial
            is ``model``, and the later runs with the same seed are the other forecasts.
        """
        trials_by_label: dict[str, list[TrialKey]] = {}
        for trial in trials:
            trials_by_label.setdefault(trial[1], []).append(trial)
        parts = {label: self._build_score_part(label, members) for label, members in trials_by_label.items()}
        results = self._executor.run_all(list(parts.values()))
        folders = {}
        for (label, members), is_done in zip(trials_by_label.items(), results, strict=True):
            if not is_done:
                continue
            folder = parts[label].result.parent
            folders[members[0]] = folder
            for trial in members[1:]:
                folders[trial] = folder / "pairs" / trial[0]
        return folders

    def _build_score_part(self, label: str, trials: Sequence[TrialKey]) -> ComparisonPart:
        """Return the part that scores the forecasts of all runs with the same seed, and compares each pair of them.

        The part is a single verification, so the forecasts of each run are read only once. All forecasts are scored
        with the data and the section `verification` of the first run, so truth, climatology and grid are the same.

        Args:
            label: label of the seed, such as ``seed_1000``.
            trials: trials with this label that have forecasts, in the order of the runs.
        """
        first, *others = trials
        paths = {name: str(self._trial_folder((name, label)) / "forecasts") for name, _ in others}
        runs = self._outcome.runs
        depends_on = [runs[0].config.model_dump_json(include={"verification"})]
        for trial in trials:
            depends_on += [*self._build_rollout_overrides(trial), *self._forecast_fingerprint(trial[0])]
        folder = self._folder / SCORES_FOLDER / label
        return ComparisonPart(
            f"score {label.replace('_', ' ')}",
            "verify",
            self._config_paths[runs[0].name],
            (
                f"save_loc={folder}",
                f"experiment={first[0]}",
                f"inference.folder={self._trial_folder(first) / 'forecasts'}",
                "verification.animate=[]",
                "verification.draw_figures=false",
                f"verification.other_forecasts={json.dumps(paths)}",
                "verification.all_pairs=true",
            ),
            folder / "scores.nc",
            depends_on=(fingerprint(depends_on),),
        )

    def _make_long_runs(self, trials: Sequence[TrialKey]) -> None:
        """Make one long forecast for each trial, and measure its variability.

        Args:
            trials: all trials with forecasts.
        """
        length = str(self._request.long_run)
        scores = self._outcome.scores
        assert scores is not None
        truth = measure_truth_deviations(self._outcome.runs[0].config, headline_channels(scores.first_table))
        parts = {}
        for trial in trials:
            name, _ = trial
            folder = self._trial_folder(trial)
            overrides = build_long_run_overrides(self._runs[name].config, folder / "forecasts", length)
            parts[trial] = ComparisonPart(
                f"long forecast {describe_trial(trial)}",
                "rollout",
                self._config_paths[name],
                (*self._build_rollout_overrides(trial), *overrides),
                folder / LONG_RUN_FOLDER,
                depends_on=self._forecast_fingerprint(name),
            )
        for trial in self._run_parts(parts):
            name, label = trial
            self._outcome.curves += measure_long_run(name, label, parts[trial].result, truth)


def describe_trial(trial: TrialKey) -> str:
    """Return the name of a trial for messages, such as ``a, seed 1000``."""
    return f"{trial[0]}, {trial[1].replace('_', ' ')}"


def fingerprint(texts: Iterable[str]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 checksum of several strings."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
