"""``credit convert --output``: the files that it writes, and ``credit check`` of the converted config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from credit.cli import main
from credit.cli.check.command import check_config
from credit.cli.check.report import CheckReport
from credit.config import load_config
from credit.utils import installation
from tests.unit.cli.world import write_world
from tests.unit.interop.examples import copy_example, remove_keys, with_value


def run_convert(*arguments: str) -> int:
    """Run ``credit convert`` and return its exit status."""
    return main._run_command("convert", list(arguments), "credit_convert")


def write_config(tree: dict[str, Any]) -> None:
    """Write ``theirs.yml`` into the current folder."""
    Path("theirs.yml").write_text(yaml.safe_dump(tree))


@pytest.fixture(autouse=True)
def _work_in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def build_tree_for_files() -> dict[str, Any]:
    """Return a config of generation 2 for the files of `write_world`, whose 40 times begin in 2000."""
    tree = copy_example(2)
    variables = {
        "prognostic": {"vars_3D": ["t"], "vars_2D": ["t2m"], "path": "data_*.nc"},
        "dynamic_forcing": {"vars_2D": ["toa_incident_solar_radiation", "sst"], "path": "data_*.nc"},
        "static": {"vars_2D": ["ground"], "path": "data_*.nc"},
    }
    tree = with_value(tree, "data.source.FILES.variables", variables)
    tree = with_value(tree, "data.start_datetime", "2000-01-01")
    tree = with_value(tree, "data.end_datetime", "2000-01-10")
    tree = with_value(remove_keys(tree, "validation_data"), "data.forecast_len", 1)
    tree = with_value(tree, "trainer.backprop_on_timestep", [1])
    tree = with_value(tree, "trainer.parallelism.domain", 1)
    tree = with_value(tree, "inference.batch_forecast.forecast_length", "6h")
    return with_value(tree, "model.output_only_channels", 0) | {"preblocks": {}, "postblocks": {}}


def test_the_converted_config_passes_the_check() -> None:
    write_world(Path.cwd())
    tree = remove_keys(build_tree_for_files(), "model.post_conf")
    write_config(tree)
    assert run_convert("theirs.yml", "-o", "converted.yml") == 0
    report = CheckReport()
    config = load_config("converted.yml", ["trainer.device=cpu", "verification.climatology.harmonics=0"])
    check_config(config, report)
    assert report.messages == []
    assert any("model: wxformer" in note for note in report.notes)


def test_written_config_and_report(capsys: pytest.CaptureFixture[str]) -> None:
    write_config(with_value(copy_example(1), "trainer.scheduler.scheduler_type", "lambda"))
    assert run_convert("theirs.yml", "--output", "converted.yml") == 0
    output = capsys.readouterr().out
    assert "data.level_units: `hPa`" in output
    # Approximate values come last.
    approximate_lines = output.splitlines()[-5:-3]
    assert "trainer.scheduler.scheduler_type: approximate" in approximate_lines[0]
    assert "trainer.grad_max_norm: approximate" in approximate_lines[1]
    assert output.count("approximate") == 2
    assert output.splitlines()[-2:] == ["converted.yml", "converted.report.md"]
    text = Path("converted.yml").read_text()
    assert text.startswith("# Converted from theirs.yml") and "# miles-credit counts from 0" in text
    assert load_config("converted.yml").data.forecast_len == 2
    report = Path("converted.report.md").read_text()
    # Each key of the file is in the report once.
    for key in ("data.forecast_len", "pbs.walltime", "model.post_conf.global_mass_fixer.midpoint", "data.skip_periods"):
        assert report.count(f"| `{key}` |") == 1
    assert "| `model.padding_conf.pad_lat` | `8` |" in report and "## Refused" not in report


def test_nothing_is_written_if_a_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write_config(with_value(copy_example(1), "model.type", "unet"))
    assert run_convert("theirs.yml", "-o", "converted.yml") == 2
    assert "model.type: `unet`" in capsys.readouterr().err
    assert [path.name for path in Path.cwd().iterdir()] == ["theirs.yml"]


def test_existing_file_is_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    write_config(copy_example(1))
    Path("converted.report.md").write_text("mine")
    assert run_convert("theirs.yml", "-o", "converted.yml") == 2
    assert "converted.report.md: already exists" in capsys.readouterr().err
    assert not Path("converted.yml").exists()


def test_error_without_output_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    write_config(copy_example(1))
    assert run_convert("theirs.yml", "--weights", "model.pt") == 2
    assert "`credit convert theirs.yml -o my_run.yml`" in capsys.readouterr().err
    Path("other.yml").write_text("data: {}")
    assert run_convert("other.yml") == 2
    assert "-o my_run.yml` converts it" not in capsys.readouterr().err


def test_invalid_files_of_an_import_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write_config(copy_example(1))
    assert run_convert("theirs.yml", "-o", "converted.yml", "--weights", "model.pt", "--std", "std.nc") == 2
    message = capsys.readouterr().err
    assert "--mean: mean.nc, which the config names, does not exist" in message and "--std" not in message
    assert run_convert("theirs.yml", "-o", "converted.yml", "seed=1") == 2
    assert "no overrides" in capsys.readouterr().err
    write_config(copy_example(2))
    for name in ("mean.nc", "std.nc", "data_*.nc"):
        Path(name).touch()
    assert run_convert("theirs.yml", "-o", "converted.yml", "--weights", "model.pt") == 2
    assert "adds a mask channel" in capsys.readouterr().err
    assert not Path("converted.yml").exists()


def test_check_warns_of_an_installed_miles_credit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = tmp_path / "miles_credit-2026.2.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: miles-credit\nVersion: 2026.2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    (conflict,) = installation.describe_conflicts([str(tmp_path)])
    assert "miles-credit 2026.2.0" in conflict and "docs/migration.md describes how to use two environments" in conflict
    Path("config.yml").write_text("{}")
    main._run_command("check", ["config.yml"], "credit_check")
    assert "WARNING: miles-credit 2026.2.0" in capsys.readouterr().out
