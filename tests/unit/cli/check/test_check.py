"""credit_check: everything at once, and silence where all is well."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors import safe_open

from credit.cli import main
from credit.cli.check import check_config
from credit.cli.check.report import CheckReport
from credit.config import load_config
from credit.data.sources.source_reader import open_sources
from credit.train.build.dry_run import dummy_assets, try_step
from tests.unit.cli.check.fault import Fault
from tests.unit.cli.check.faults import FAULTS, SEEDED, patch
from tests.unit.cli.world import hours, lose_a_chunk, others, plugin
from tests.unit.data.files_on_the_fly import random_fields, write_file

CONFIGS = sorted((Path(__file__).parents[4] / "config").glob("*.yml"))


def run_check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    """Return the exit status, the errors, and the rest of the output."""
    capsys.readouterr()
    code = main._run_command("check", ["config.yml", *arguments], "credit_check")
    said, *blocks = re.split(r"^(?=ERROR: |WARNING: )", capsys.readouterr().out, flags=re.MULTILINE)
    if blocks:
        # The last line is the count.
        blocks[-1], _, count = blocks[-1].rstrip("\n").rpartition("\n")
        assert re.fullmatch(r"\d+ errors?, \d+ warnings?", count)
    errors = [block.removeprefix("ERROR: ") for block in blocks if block.startswith("ERROR: ")]
    warnings = [block for block in blocks if block.startswith("WARNING: ")]
    return code, errors, said + "".join(warnings)


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
    patch(fault, monkeypatch)
    code, problems, _ = run_check(capsys, *fault.overrides, *fault.arguments)
    assert code == 2
    assert any(all(word in problem for word in fault.words) for problem in problems), problems
    assert len(problems) == fault.count, problems


def test_the_list_is_long_and_without_repetition() -> None:
    assert len(FAULTS) > 100
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("needs", ["", "store", "run"])
def test_no_alarm_without_a_fault(
    needs: str,
    tmp_path: Path,
    worlds: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(worlds(needs), tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code, problems, said = run_check(capsys, *(["data.store=store.zarr"] if needs == "store" else []))
    assert (code, problems) == (0, []), problems
    assert said.endswith("no problem found\n")
    assert "data.splits.train 2000-01-01T00:00..2000-01-04T23:59: 16 times, 15 samples; there is no gap" in said
    assert "training: 2 steps of 2 samples; an epoch has 7" in said
    assert ("store: store.zarr is complete" in said) == (needs == "store")
    assert ("the run begins with run/checkpoints/step_00000002, step 2" in said) == (needs == "run")
    assert ("nothing is left" in said) == (needs == "run")
    # nothing is written
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_no_alarm_over_forecasts_that_can_be_scored(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others()(world)
    code, problems, said = run_check(capsys, "verification.other_forecasts={ifs: others.zarr}")
    assert (code, problems) == (0, [])
    assert "other_forecasts: ifs: scored are what all forecasts have, initial times: 3, lead times: 1" in said
    arguments = "verification.other_forecasts={ifs: others.zarr}", "inference.initial_times=latest"
    code, problems, said = run_check(capsys, *arguments)
    assert (code, problems) == (0, []) and "initial times: not known, lead times: 1" in said
    others(rows=8, levels=(50000.0,))(world / "coarse")
    coarse = "verification.other_forecasts={ifs: others.zarr, coarse: coarse/others.zarr}"
    code, problems, said = run_check(capsys, coarse, "verification.grid={rows: 8, columns: 16, poles: false}")
    assert (code, problems) == (0, [])
    assert "other_forecasts.coarse: no scores of t850, which it does not have" in said
    assert "other_forecasts: ifs, coarse: scored are what all forecasts have, initial times: 3," in said


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_false_alarm_on_the_configs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    folders = {"SPEEDY": "speedy", "GFS_WIND": "gfs_wind10m"}
    there = path.stem == "quickstart"
    for name in re.findall(r"\$\{?(\w+)", path.read_text(encoding="utf-8")):
        there |= name in folders
        where = request.getfixturevalue("shared_data") / folders[name] if name in folders else tmp_path / name
        monkeypatch.setenv(name, str(where))
    places = [f"save_loc={tmp_path}/run", f"data.store={tmp_path}/store.zarr"]
    config = load_config(path, places if "store:" in path.read_text(encoding="utf-8") else places[:1])
    report = CheckReport()
    check_config(config, report)
    problems = report.messages
    # what is not here is what the sources are
    assert [problem for problem in problems if there or not re.match(r"data\.sources\.\d\.path: ", problem)] == []
    assert there or len(problems) == len(config.data.sources)


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
    code, problems, _ = run_check(capsys, *overrides)
    expected = ("t has no level 700", '"t2n" is in no file', "data.split_gap", "model.local_window_size",
                "rmse/z500/6h", "loss.weights", "/nowhere", "save_loc")  # fmt: skip
    assert code == 2
    for words in expected:
        assert sum(words in problem for problem in problems) == 1, (words, problems)
    assert len(problems) == len(expected)


def test_what_a_source_gives_and_a_file_that_gives_nothing(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_file(world / "data_other.nc", {"T2M": random_fields(20, 16, 32)}, hours(1))
    code, problems, said = run_check(capsys)
    assert (code, problems) == (0, [])
    line = (
        "data.sources.0 (data_*.nc): 3 files (1 of them give nothing); 2000-01-01T00:00..2000-01-10T18:00, 40 times; "
    )
    assert line + "t, t2m, sst, ground\n" in said
    warning = (
        "data_other.nc gives nothing: it has none of the variables that are read here (t, t2m, sst, ground), but T2M"
    )
    assert re.search(f"^WARNING: .*{re.escape(warning)}", said, flags=re.MULTILINE)


def test_a_store_with_a_lost_chunk_is_not_trained_on_until_it_is_mended(
    tmp_path: Path, worlds: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chunk is of the test period, which no training step reads."""
    shutil.copytree(worlds("store"), tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    lose_a_chunk(tmp_path, 30)
    arguments = ["config.yml", "data.store=store.zarr", "trainer.max_steps=1"]
    assert main._run_command("train", arguments, "credit train") == 2
    assert "1 of 32 times are lost or damaged, the first is 2000-01-08T12:00" in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert main._run_command("preprocess", arguments[:2], "credit preprocess") == 0
    assert main._run_command("train", arguments, "credit train") == 0
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


def test_sizes_are_those_of_the_checkpoint(worlds: Callable[[str], Path]) -> None:
    with chdir(worlds("run")):
        config = load_config("config.yml")
        reader = open_sources(config.data)
        tried = try_step(config, dummy_assets(config, reader.grid, reader.attributes, reader.masks))
        written = steps = 0
        for file in Path("run/checkpoints/step_00000002").glob("*/*.safetensors"):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    tensor = tensors.get_tensor(name)
                    written += tensor.numel() * tensor.element_size()
                    steps += 4 * name.endswith("/step")
    assert tried.checkpoint_bytes == written - steps > 10**5


def test_a_model_that_needs_values_is_no_problem(
    world: Path, plugins: None, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin("y = y if y.isfinite().all() else y * 0")(world)
    code, problems, said = run_check(capsys, *SEEDED, "trainer.amp=true")
    assert (code, problems) == (0, [])
    assert "could not be tried without values" in said


def test_ranks_that_fit(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["trainer.parallelism.tensor=2", "trainer.amp=true", "trainer.activation_checkpoint=true"]
    code, problems, said = run_check(capsys, *overrides, "--world-size", "4")
    assert (code, problems) == (0, []), problems
    assert "ranks: 4 = replicate 1 x shard 2 x tensor 2" in said
    assert "training: 2 steps of 4 samples" in said
    assert not dist.is_initialized()


def test_one_rank_of_many_checks(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "MASTER_ADDR": "a", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert run_check(capsys, "data.levels=[1]") == (0, [], "")


def test_a_number_of_ranks_that_is_none(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main._run_command("check", ["config.yml", "--world-size", "0"], "credit_check") == 2
    assert "--world-size: 0" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_save_loc_without_permission(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("closed").mkdir(mode=0o500)
    code, problems, _ = run_check(capsys, "save_loc=closed/run")
    assert code == 2 and "cannot be written" in problems[0]
