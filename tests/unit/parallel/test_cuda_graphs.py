"""CUDA graphs of compiled blocks: refused settings, notes about their cost, and marks of iterations."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from credit.cli.plan import build_grid
from credit.data.samples.batch import Batch
from credit.errors import ConfigError
from credit.hpc.planner.gpus import find_gpu
from credit.hpc.planner.report import list_assumptions
from credit.models.initialise import initial_values
from credit.parallel.blocks.cuda_graphs import CUDA_GRAPHS, describe_cuda_graphs, require_one_rank_for_cuda_graphs
from credit.parallel.mesh import DeviceGrid
from credit.parallel.state.materialise import fill_
from credit.train.build import model as build_model
from credit.train.build.dry_run import build_placeholder_assets
from credit.train.build.stepper import build_stepper, compute_cell_weights
from credit.train.build.training import build_run_objective, build_training_step
from credit.train.build.validation import build_metrics
from credit.train.optim import build_optimizer
from credit.train.validate import shard_cases, validate
from tests.unit.hpc.measured import small_config

GRAPHS = f"trainer.compile={CUDA_GRAPHS}"
CPU = torch.device("cpu")
ENSEMBLE = ["model.noise=global", "loss={kind: crps}", "trainer.members=3", "trainer.members_at_once=2"]


@pytest.mark.parametrize(
    ("overrides", "has_gpu", "expected"),
    [
        ([], True, []),
        ([], False, ["on a CPU"]),
        (["trainer.grad_accum_every=3"], True, ["each of the 3 forward passes"]),
        (["data.forecast_len=2"], True, ["each of the 2 forward passes", "recomputed rollout steps"]),
        (["data.forecast_len=2", "trainer.recompute_steps=false"], True, ["each of the 2 forward passes"]),
        # There are two batches of members, and three forward passes: the first batch without gradients, the last batch,
        # and the first batch again with gradients.
        (ENSEMBLE, True, ["each of the 3 forward passes"]),
        (
            ["data.forecast_len=2", "trainer.forecast_len_from={0: 1, 0.5: 2}", "trainer.recompute_steps=false"],
            True,
            ["each of the 2 forward passes", "recorded again"],
        ),
    ],
)
def test_notes_say_where_graphs_cost_more_or_do_not_apply(
    overrides: list[str], has_gpu: bool, expected: list[str]
) -> None:
    config = small_config(GRAPHS, *overrides)
    notes = describe_cuda_graphs(config.trainer, config.data.forecast_len, has_gpu)
    assert len(notes) == len(expected)
    for note, text in zip(notes, expected, strict=True):
        assert text in note


@pytest.mark.parametrize("value", ["false", "true"])
def test_other_values_have_no_graphs(value: str) -> None:
    config = small_config(f"trainer.compile={value}", "trainer.grad_accum_every=3")
    assert describe_cuda_graphs(config.trainer, 2, has_gpu=False) == []
    require_one_rank_for_cuda_graphs(config.trainer, 8)


def test_several_ranks_are_refused() -> None:
    config = small_config(GRAPHS)
    require_one_rank_for_cuda_graphs(config.trainer, 1)
    with pytest.raises(ConfigError, match="works on one rank only, but the run has 2"):
        require_one_rank_for_cuda_graphs(config.trainer, 2)


def test_the_plan_says_what_it_leaves_out() -> None:
    trainer = small_config(GRAPHS, "trainer.grad_accum_every=3").trainer
    run = SimpleNamespace(trainer=trainer, rollout={0.0: 1}, samples=10, max_samples_per_step=None)
    text = " ".join(list_assumptions(run, find_gpu("h100")))
    assert "works on one rank only" in text and "the plan does not include their memory" in text
    assert "each of the 3 forward passes" in text


@pytest.mark.parametrize("axis", ["tensor", "replicate", "domain", "ensemble"])
def test_a_config_that_needs_several_ranks_is_refused(axis: str) -> None:
    with pytest.raises(ConfigError, match="trainer.*compile: reduce-overhead records the kernels of one GPU"):
        small_config(GRAPHS, *ENSEMBLE, "trainer.members=4", f"trainer.parallelism.{axis}=2")


@pytest.mark.parametrize(("setting", "num_marks"), [(GRAPHS, [1, 2, 3]), ("trainer.compile=true", [0, 0, 0])])
def test_an_iteration_is_an_optimizer_step_or_a_batch_of_the_validation(
    setting: str, num_marks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    marks = []
    monkeypatch.setattr(build_model, "compile_blocks", lambda model, mode: modes.append(mode))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    config = small_config(setting, "trainer.grad_accum_every=2", "data.forecast_len=2", "data.valid_forecast_len=2")
    assets = build_placeholder_assets(config, build_grid("16x32"), {})
    model, autocast = build_model.build_parallel_model(config, assets, DeviceGrid(), CPU)
    assert modes == [CUDA_GRAPHS if num_marks[0] else None]
    fill_(model, initial_values(model, config.seed))
    stepper = build_stepper(config, assets, model.train(), CPU, autocast)
    objective = build_run_objective(config, assets, stepper, CPU)
    step = build_training_step(config, objective, build_optimizer(model, config.trainer), None, lambda _: 2, 0)
    groups = {name: len(assets.channels.group(name)) for name in ("prognostic", "dynamic_forcing")}
    batch = Batch(
        torch.zeros(1, groups["prognostic"], 1, 16, 32),
        torch.zeros(1, groups["dynamic_forcing"], 2, 16, 32),
        torch.zeros(1, len(assets.channels.output), 2, 16, 32),
        (0,),
    )
    share = shard_cases(3, 1, 0, 1)
    metrics = build_metrics(config, assets, compute_cell_weights(assets, CPU))
    calls = [
        partial(step, iter([batch] * 2), 0, 1e-3),
        # The search for a non-finite value repeats each micro-step as a separate iteration.
        partial(step.describe_first_nonfinite, iter([batch] * 2), 0),
        partial(validate, objective, iter([batch] * 3), share, metrics, 2, lambda: False),
    ]
    for call, expected in zip(calls, num_marks, strict=True):
        marks.clear()
        call()
        assert len(marks) == expected
