"""credit_check: everything at once, and silence where all is well."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from credit.cli import main
from credit.cli.check import check
from credit.config import Config, build_config
from credit.data.preprocess import preprocess
from tests.unit.data.files_on_the_fly import SPLITS, random_fields, write_file

H, W = 32, 64
CONFIG = """
save_loc: {save_loc}
data:
  sources: [{{path: "{path}"}}]
  variables:
    prognostic: {{vars_3D: [t], vars_2D: [t2m]}}
    dynamic_forcing: {{vars_2D: [sin_year, cos_year]}}
    static: {{vars_2D: [ground, sin_latitude]}}
  levels: [500, 850]
  splits: {splits}
  split_gap: 24h
  store: {store}
model:
  type: wxformer
  dim: [8, 16, 32, 64]
  depth: [1, 1, 1, 1]
  dim_head: 8
  global_window_size: [4, 2, 1, 1]
  local_window_size: 2
trainer: {{max_steps: 1}}
inference: {{lead_time: 6h, initial_times: {{every: 6h}}}}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A config whose data are all right."""
    fields = {"t": random_fields(40, 2, H, W), "t2m": random_fields(40, H, W), "ground": random_fields(H, W)}
    write_file(tmp_path / "a.nc", fields, [6 * n for n in range(40)], levels=[500, 850])
    settings = {"save_loc": tmp_path / "run", "path": tmp_path / "a.nc", "store": tmp_path / "store.zarr"}
    file = tmp_path / "config.yml"
    file.write_text(CONFIG.format(splits=SPLITS, **settings))
    return file


def load(config_file: Path, *overrides: str) -> Config:
    """Return the config with overrides."""
    from credit.config import load_config

    return load_config(config_file, overrides)


def test_all_is_well(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main._run("check", [str(config_file)], "credit_check") == 0
    out = capsys.readouterr().out
    assert "data.splits.train 2000-01-01T00:00..2000-01-04T23:59: 16 times, 15 samples; there is no gap" in out
    assert "is to be written (credit_preprocess), at most" in out
    assert "wxformer" in out and out.endswith("no problem found\n")
    # nothing is written
    assert sorted(path.name for path in config_file.parent.iterdir()) == ["a.nc", "config.yml"]
    config = load(config_file)
    preprocess(config.data)
    lines: list[str] = []
    assert check(config, lines.append) == []
    assert any("is complete" in line for line in lines)


def test_problems_of_every_kind_at_once(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [
        "data.levels=[500, 700]",
        "data.variables.prognostic.vars_2D=[t2n]",
        "data.splits.valid=['2000-01-04T12:00', '2000-01-06']",
        "model.padding=null",
        "model.local_window_size=5",
        f"save_loc={config_file}/run",
    ]
    assert main._run("check", [str(config_file), *overrides], "credit_check") == 2
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("PROBLEM: ")]
    for words in ("t has no level 700", '"t2n" is in no file', "data.split_gap", "window", "save_loc"):
        assert any(words in line for line in found), (words, found)


def test_problems_that_need_the_fields(config_file: Path) -> None:
    folder = config_file.parent
    hours = [6 * n for n in range(40) if n not in range(20, 24)]
    t = random_fields(36, 2, H, W)
    t[0, 0, 0, 0] = float("nan")
    fields = {"t": t, "t2m": random_fields(36, H, W), "ground": random_fields(H, W)}
    write_file(folder / "a.nc", fields, hours, levels=[500, 850])
    problems = check(load(config_file, "inference.lead_time=48h"))
    assert len(problems) == 3
    assert "level 500 at 2000-01-01T00:00: 1 of 2048 values are missing" in problems[0]
    assert "data.splits.valid 2000-01-06T00:00..2000-01-06T23:59: no data in this period" in problems[1]
    assert "inference.lead_time 48h" in problems[2]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_save_loc_without_permission(config_file: Path) -> None:
    closed = config_file.parent / "closed"
    closed.mkdir(mode=0o500)
    (problem,) = check(load(config_file, f"save_loc={closed}/run"))
    assert "cannot be written" in problem


def test_a_config_from_python(config_file: Path) -> None:
    import yaml

    assert check(build_config(yaml.safe_load(config_file.read_text()))) == []
