"""Commands that install an extra, and conflicts with other installed distributions."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from credit.cli import main
from credit.utils import installation
from credit.utils.installation import describe_conflicts, describe_installation, install_command

COMMANDS = {"entry_points.txt": "[console_scripts]\ncredit = credit.cli.main:main\n"}
TOP_LEVEL = {"top_level.txt": "credit\n"}


def write_distribution(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Write the metadata of an installed distribution."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for file, text in files.items():
        (metadata / file).write_text(text)


def test_own_installation_is_no_conflict(tmp_path: Path) -> None:
    editable = {"direct_url.json": json.dumps({"url": "file:///srv/my%20credit", "dir_info": {"editable": True}})}
    write_distribution(tmp_path, "credit-weather", "0.15.0", COMMANDS | TOP_LEVEL | editable)
    write_distribution(tmp_path, "numpy", "2.4", {"top_level.txt": "numpy\n"})
    assert describe_conflicts([str(tmp_path)]) == []
    assert "credit-weather 0.15.0 (editable, /srv/my credit)" in describe_installation([str(tmp_path)])


def test_other_project_of_the_same_name_is_a_conflict(tmp_path: Path) -> None:
    # The package index has a distribution `credit` that contains only metadata.
    write_distribution(tmp_path, "credit-weather", "0.15.0", COMMANDS | TOP_LEVEL)
    write_distribution(tmp_path, "credit", "0.0.1", {"top_level.txt": "\n"})
    (conflict,) = describe_conflicts([str(tmp_path)])
    assert conflict.startswith(f"credit 0.0.1 ({tmp_path}) is a package of a different project")
    assert "pip uninstall credit`" in conflict
    assert "0.0.1" not in describe_installation([str(tmp_path)])


@pytest.mark.parametrize(
    "files", [TOP_LEVEL, {"RECORD": "credit/__init__.py,,\ncredit/cli.py,,\n"}], ids=["top_level", "record"]
)
def test_other_project_with_the_same_import_name_is_a_conflict(tmp_path: Path, files: dict[str, str]) -> None:
    # Create the files, because files that RECORD lists but that do not exist do not count.
    (tmp_path / "credit").mkdir()
    for name in ("__init__.py", "cli.py"):
        (tmp_path / "credit" / name).touch()
    write_distribution(tmp_path, "miles-credit", "2026.2.0", files)
    (conflict,) = describe_conflicts([str(tmp_path)])
    assert "miles-credit 2026.2.0" in conflict and "also installs a package `credit`" in conflict
    assert "no distribution named credit-weather is installed" in describe_installation([str(tmp_path)])


def test_similar_import_name_is_no_conflict(tmp_path: Path) -> None:
    (tmp_path / "microcredit").mkdir()
    (tmp_path / "microcredit" / "loans.py").touch()
    write_distribution(tmp_path, "microcredit", "1.0", {"RECORD": "microcredit/loans.py,,\n"})
    assert describe_conflicts([str(tmp_path)]) == []


def test_former_name_of_this_package_is_recognised(tmp_path: Path) -> None:
    write_distribution(tmp_path, "credit-weather", "0.15.0", COMMANDS | TOP_LEVEL)
    write_distribution(tmp_path, "credit", "0.14.0", COMMANDS | TOP_LEVEL)
    (conflict,) = describe_conflicts([str(tmp_path)])
    assert "credit 0.14.0" in conflict and "this package under its former name" in conflict
    # Removing the former distribution also removes the commands, so the message asks for a new installation.
    assert re.search(r"pip uninstall credit`.*pip install -e \S", conflict)


def test_build_files_in_checkout_are_no_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "credit").mkdir()
    for name in ("setup.cfg", "pyproject.toml"):
        (tmp_path / name).touch()
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "credit" / "utils" / "installation.py"))
    leftover = tmp_path / "credit.egg-info"
    leftover.mkdir()
    (leftover / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: credit\nVersion: 0.14.0\n")
    assert describe_conflicts([str(tmp_path)]) == []


def test_install_command_of_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    monkeypatch.setattr(installation.shutil, "which", lambda name: str(Path(sys.executable).parent / name))
    assert install_command("grib").strip("'").startswith("pip install -e ")
    assert f"{repository}[grib]" in install_command("grib")
    # An installed wheel has no setup.cfg next to the package.
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "credit" / "utils" / "installation.py"))
    assert install_command("grib") == "pip install 'credit-weather[grib]'"
    # The pip on PATH belongs to another environment.
    monkeypatch.setattr(installation.shutil, "which", lambda name: "/elsewhere/bin/pip")
    assert install_command("grib") == f"{sys.executable} -m pip install 'credit-weather[grib]'"


def test_doctor_reports_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_distribution(tmp_path, "credit", "0.0.1", {})
    monkeypatch.syspath_prepend(tmp_path)
    assert main.main(["doctor", str(tmp_path / "missing.yml"), "--output", "-"]) == 0
    output = capsys.readouterr()
    assert "CONFLICT: credit 0.0.1" in output.out
    assert "credit 0.0.1" in output.err and "a package of a different project" in output.err
