"""``credit check`` reports every fault, and reports no problem without faults."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from credit.cli import main
from credit.cli.check import check_config
from credit.cli.check.report import CheckReport
from credit.config import load_config
from credit.data.sources.source_reader import open_sources
from credit.forecast.objectives.ensemble import EnsembleRollout
from credit.train.build.dry_run import build_placeholder_assets, try_step
from tests.unit.cli.check.fault import Fault
from tests.unit.cli.check.faults import FAULTS, SEEDED, patch_environment
from tests.unit.cli.world import hours_of_file, remove_chunk, write_model_plugin, write_other_forecasts
from tests.unit.data.files_on_the_fly import random_fields, write_file

CONFIGS = sorted((Path(__file__).parents[4] / "config").glob("*.yml"))


def run_check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    """Return the exit status, the errors, and the rest of the output."""
    capsys.readouterr()
    status = main._run_command("check", ["config.yml", *arguments], "credit_check")
    # The notes come first, then the errors and warnings, each from its own level to the next.
    notes, *blocks = re.split(r"^(?=ERROR: |WARNING: )", capsys.readouterr().out, flags=re.MULTILINE)
    if blocks:
        # The last line has the number of errors and warnings.
        blocks[-1], _, count = blocks[-1].rstrip("\n").rpartition("\n")
        assert re.fullmatch(r"\d+ errors?, \d+ warnings?", count)
    errors = [block.removeprefix("ERROR: ") for block in blocks if block.startswith("ERROR: ")]
    warnings = [block for block in blocks if block.startswith("WARNING: ")]
    return status, errors, notes + "".join(warnings)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_each_fault_is_found(
    fault: Fault,
    tmp_path: Path,
    worlds: Callable[[str], Path],
    plugins: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(worlds(fault.needs), tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    fault.spoil(tmp_path)
    patch_environment(fault, monkeypatch)
    status, errors, _ = run_check(capsys, *fault.overrides, *fault.arguments)
    assert status == 2
    assert any(all(word in error for word in fault.words) for error in errors), errors
    assert len(errors) == fault.count, errors


def test_fault_names_are_unique() -> None:
    assert len(FAULTS) > 100
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("needs", ["", "store", "run"])
def test_no_problem_without_fault(
    needs: str,
    tmp_path: Path,
    worlds: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(worlds(needs), tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    times_before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    overrides = ["data.store=store.zarr"] if needs == "store" else []
    status, errors, output = run_check(capsys, *overrides)
    assert (status, errors) == (0, []), errors
    assert output.endswith("no problem found\n")
    assert "data.splits.train 2000-01-01T00:00..2000-01-04T23:59: 16 times, 15 samples; there is no gap" in output
    assert "training: 2 steps of 2 samples; an epoch has 7" in output
    assert ("store: store.zarr is complete" in output) == (needs == "store")
    assert ("the run begins with run/checkpoints/step_00000002, step 2" in output) == (needs == "run")
    assert ("no steps remain" in output) == (needs == "run")
    # The command does not change files.
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times_before


def test_no_problem_with_valid_other_forecasts(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_other_forecasts()(world)
    status, errors, output = run_check(capsys, "verification.other_forecasts={ifs: others.zarr}")
    assert (status, errors) == (0, [])
    assert "other_forecasts: ifs: scored are what all forecasts have, initial times: 3, lead times: 1" in output
    arguments = "verification.other_forecasts={ifs: others.zarr}", "inference.initial_times=latest"
    status, errors, output = run_check(capsys, *arguments)
    assert (status, errors) == (0, []) and "initial times: not known, lead times: 1" in output
    write_other_forecasts(rows=8, levels=(50000.0,))(world / "coarse")
    coarse = "verification.other_forecasts={ifs: others.zarr, coarse: coarse/others.zarr}"
    status, errors, output = run_check(capsys, coarse, "verification.grid={rows: 8, columns: 16, poles: false}")
    assert (status, errors) == (0, [])
    assert "other_forecasts.coarse: no scores of t850, which these forecasts do not contain" in output
    assert "other_forecasts: ifs, coarse: scored are what all forecasts have, initial times: 3," in output


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_problem_in_starter_configs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = path.read_text(encoding="utf-8")
    # Environment variables in paths refer to data sets, of which only some exist on this machine.
    shared_folders = {"SPEEDY": "speedy", "GFS_WIND": "gfs_wind10m"}
    has_data = path.stem == "quickstart"
    for name in re.findall(r"\$\{?(\w+)", text):
        folder = tmp_path / name
        if name in shared_folders:
            has_data = True
            folder = request.getfixturevalue("shared_data") / shared_folders[name]
        monkeypatch.setenv(name, str(folder))
    overrides = [f"save_loc={tmp_path}/run"]
    if "store:" in text:
        overrides.append(f"data.store={tmp_path}/store.zarr")
    if "resume:" in text:
        # The run whose weights this config fine-tunes does not exist on this machine.
        overrides.append("trainer.resume=auto")
    config = load_config(path, overrides)
    report = CheckReport()
    check_config(config, report)
    errors = report.messages
    if has_data:
        assert errors == []
    else:
        # The only errors are those of sources that do not exist or need a package of the extra cloud.
        assert [error for error in errors if not re.match(r"(data\.sources\.\d\.path|gs://\S+): ", error)] == []
        assert len(errors) == len(config.data.sources)


def test_problems_of_every_kind_at_once(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [
        "data.levels=[500, 700]",
        "data.variables.prognostic.vars_2D=[t2n]",
        "data.splits.valid=['2000-01-04T12:00', '2000-01-06']",
        "model.local_window_size=5",
        "trainer.monitor=rmse/z500/6h",
        "loss.weights={z: 1}",
        "trainer.walltime=1min",
        "trainer.resume=/nowhere",
        "save_loc=config.yml/run",
    ]
    status, errors, _ = run_check(capsys, *overrides)
    expected = ("t has no level 700", '"t2n" is in no file', "data.split_gap", "model.local_window_size",
                "rmse/z500/6h", "loss.weights", "/nowhere", "save_loc")  # fmt: skip
    assert status == 2
    for message in expected:
        assert sum(message in error for error in errors) == 1, (message, errors)
    assert len(errors) == len(expected)


def test_check_describes_sources_and_unused_files(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_file(world / "data_other.nc", {"T2M": random_fields(20, 16, 32)}, hours_of_file(1))
    status, errors, output = run_check(capsys)
    assert (status, errors) == (0, [])
    line = "data.sources.0 (data_*.nc): 3 files (1 of them not used); 2000-01-01T00:00..2000-01-10T18:00, 40 times; "
    assert line + "t, t2m, sst, ground\n" in output
    warning = "data_other.nc is not used: it has none of the requested variables (t, t2m, sst, ground), but T2M"
    assert re.search(f"^WARNING: .*{re.escape(warning)}", output, flags=re.MULTILINE)


def test_training_on_store_with_lost_chunk_is_refused_until_repaired(
    tmp_path: Path, worlds: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training is refused although the lost chunk is in the test period, which no training step reads."""
    shutil.copytree(worlds("store"), tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    remove_chunk(tmp_path, 30)
    arguments = ["config.yml", "data.store=store.zarr", "trainer.max_steps=1"]
    assert main._run_command("train", arguments, "credit train") == 2
    assert "1 of 32 times are lost or damaged, the first is 2000-01-08T12:00" in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert main._run_command("preprocess", arguments[:2], "credit preprocess") == 0
    assert main._run_command("train", arguments, "credit train") == 0
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


def test_estimated_checkpoint_size_is_exact(worlds: Callable[[str], Path]) -> None:
    with chdir(worlds("run")):
        config = load_config("config.yml")
        reader = open_sources(config.data)
        dry_run = try_step(config, build_placeholder_assets(config, reader.grid, reader.attributes, reader.masks))
        tensor_bytes = 0
        for file in Path("run/checkpoints/step_00000002").glob("*/*.safetensors"):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    tensor = tensors.get_tensor(name)
                    tensor_bytes += tensor.numel() * tensor.element_size()
    assert dry_run.checkpoint_bytes == tensor_bytes > 10**5


def test_recomputed_steps_with_checkpointed_blocks(world: Path) -> None:
    # Without `residual`, the last tensor that a recomputation needs is in the network, where torch stops recomputing.
    overrides = ["model.residual=false", "data.forecast_len=2", "trainer.recompute_steps=true"]
    config = load_config("config.yml", [*overrides, "trainer.activation_checkpoint=true"])
    reader = open_sources(config.data)
    assets = build_placeholder_assets(config, reader.grid, reader.attributes, reader.masks)
    assert try_step(config, assets).skip_reason == ""


def test_model_that_needs_values_is_skipped_without_error(
    world: Path, plugins: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model_plugin("y = y if y.isfinite().all() else y * 0")(world)
    status, errors, output = run_check(capsys, *SEEDED, "trainer.amp=true")
    assert (status, errors) == (0, [])
    assert "could not be tried without values" in output


def test_members_in_chunks(world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The dry run computes the members in the same way as training: in two chunks."""
    overrides = ["model.noise=global", "loss={kind: crps}", "trainer.members=3", "trainer.members_at_once=2"]
    chunks = []
    rollout = EnsembleRollout._rollout

    def record_chunk(objective: EnsembleRollout, chunk: object, *arguments: object, **options: object) -> object:
        chunks.append((len(chunk.members), torch.is_grad_enabled()))
        return rollout(objective, chunk, *arguments, **options)

    monkeypatch.setattr(EnsembleRollout, "_rollout", record_chunk)
    status, errors, output = run_check(capsys, *overrides)
    assert (status, errors) == (0, []) and "could not be tried" not in output
    # The calls are: all members, the first chunk without graph, the last chunk, and the first chunk again.
    assert chunks == [(3, True), (1, False), (2, True), (1, True)]


def test_cuda_graphs(world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["trainer.compile=reduce-overhead", "trainer.device=cpu", "trainer.grad_accum_every=2"]
    status, errors, output = run_check(capsys, *overrides)
    assert (status, errors) == (0, []), errors
    assert "has the same effect as true, without CUDA graphs" in output and "each of the 2 forward passes" in output
    status, errors, _ = run_check(capsys, "trainer.compile=reduce-overhead", "--world-size", "2")
    assert status == 2 and "works on one rank only, but the run has 2" in " ".join(errors)


def test_valid_number_of_ranks(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["trainer.parallelism.tensor=2", "trainer.amp=true", "trainer.activation_checkpoint=true"]
    status, errors, output = run_check(capsys, *overrides, "--world-size", "4")
    assert (status, errors) == (0, []), errors
    assert "ranks: 4 = replicate 1 x shard 2 x tensor 2" in output
    assert "training: 2 steps of 4 samples" in output
    assert not dist.is_initialized()


def test_other_ranks_print_nothing(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "MASTER_ADDR": "a", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert run_check(capsys, "data.levels=[1]") == (0, [], "")


def test_zero_ranks_are_refused(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main._run_command("check", ["config.yml", "--world-size", "0"], "credit_check") == 2
    assert "--world-size: 0" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_save_loc_without_permission(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("closed").mkdir(mode=0o500)
    status, errors, _ = run_check(capsys, "save_loc=closed/run")
    assert status == 2 and "cannot be written" in errors[0]


def test_spare_ranks_of_job_with_min_nodes(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four of five ranks divide the global batch equally. Each takes two micro-batches of train_batch_size 1."""
    slurm = "slurm={cluster: slurm, walltime: 1h, nodes: 5, min_nodes: 3, ranks_per_node: 1, gpus_per_node: 0}"
    batch = "trainer.global_batch_size=8", "trainer.train_batch_size=1"
    status, errors, output = run_check(capsys, slurm, *batch)
    assert (status, errors) == (0, []), errors
    assert "ranks: 4 = replicate 1 x shard 4" in output
    assert "of 8 samples (2 x 1 on each data-parallel rank); an epoch has 1" in output
    status, errors, _ = run_check(capsys, slurm.replace("min_nodes: 3, ", ""), *batch)
    assert status == 2 and "8 samples cannot be divided equally among 5 ranks" in " ".join(errors)
