"""Package metadata are correct, and no file has paths of a machine."""

from __future__ import annotations

import configparser
import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

import credit
from credit.cli.main import COMMANDS
from credit.utils.installation import DISTRIBUTION


@pytest.fixture(scope="module")
def setup_cfg(repository: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(repository / "setup.cfg", encoding="utf-8")
    return parser


def test_install_commands_name_this_distribution(setup_cfg: configparser.ConfigParser, files: list[Path]) -> None:
    assert setup_cfg["metadata"]["name"] == DISTRIBUTION
    # This command would install a package of another project. Joined, so that this file does not match itself.
    wrong_command = re.compile(r"pip install.*[ '\"]" + r"credit(?:\[|['\"`\s]|$)", re.MULTILINE)
    files_with_match = {
        path.name
        for path in files
        if path.suffix in (".py", ".md", ".yml", ".cfg", ".toml", ".j2", "") and path.name != "CHANGELOG.md"
        if wrong_command.search(path.read_text(encoding="utf-8"))
    }
    assert files_with_match == set()


def test_messages_name_extras_that_exist(setup_cfg: configparser.ConfigParser, repository: Path) -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (repository / "credit").rglob("*.py"))
    extras = set(re.findall(r"""install_command\(["'](\w+)["']\)""", code))
    # Loggers name their extra in an attribute of their class.
    extras |= set(re.findall(r'^    extra = "(\w+)"$', code, re.MULTILINE))
    assert extras >= {"wandb", "mlflow", "grib", "cloud", "units", "energy", "tensorboard", "cluster"}
    assert extras <= set(setup_cfg["options.extras_require"])


def test_torch_requirement_has_bounds(setup_cfg: configparser.ConfigParser) -> None:
    required = setup_cfg["options"]["install_requires"].split()
    assert [line for line in required if line.startswith("torch")] == ["torch>=2.11,<2.14"]


def test_every_import_is_required(setup_cfg: configparser.ConfigParser, repository: Path) -> None:
    required = {re.split(r"[<>=]", line)[0].lower() for line in setup_cfg["options"]["install_requires"].split()}
    distribution_names = {"yaml": "pyyaml", "PIL": "pillow", "netCDF4": "netcdf4", "pydantic_core": "pydantic"}
    distribution_names["google_crc32c"] = "google-crc32c"
    for path in (repository / "credit").rglob("*.py"):
        for name in re.findall(r"^(?:import|from) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            module = import_module(name)
            if name != "credit" and "site-packages" in (getattr(module, "__file__", None) or ""):
                assert distribution_names.get(name, name) in required, (
                    f"{path} imports {name}, which setup.cfg does not require"
                )


def test_each_command_has_its_scripts(setup_cfg: configparser.ConfigParser, repository: Path) -> None:
    scripts = dict(
        line.replace(" ", "").split("=")
        for line in setup_cfg["options.entry_points"]["console_scripts"].strip().splitlines()
    )
    assert scripts.pop("credit") == "credit.cli.main:main"
    assert scripts == {f"credit_{name}": f"credit.cli.main:{name}" for name in COMMANDS}
    scripts_without_logic = {path.stem for path in (repository / "applications").glob("*.py")}
    assert scripts_without_logic == set(COMMANDS) - {"init"}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name: str) -> None:
    module = import_module(f"credit.cli.{name}")
    assert len(module.HELP) > 60
    assert callable(module.run_command) and callable(module.add_arguments)


def test_the_changelog_has_this_version(repository: Path) -> None:
    titles = re.findall(r"^## (\S+)", (repository / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert titles[0] == credit.__version__


def test_the_citation_names_this_version(repository: Path) -> None:
    assert f"\nversion: {credit.__version__}\n" in (repository / "CITATION.cff").read_text(encoding="utf-8")


def test_the_license_is_apache_2(repository: Path, setup_cfg: configparser.ConfigParser) -> None:
    text = (repository / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and len(text) > 11_000
    assert setup_cfg["metadata"]["license"] == "Apache-2.0"


def test_no_file_has_absolute_paths(repository: Path, files: list[Path]) -> None:
    # Joined here, so that this file does not match itself.
    roots = "|".join(("work", "root", "home", "Users", "glade", "lustre", "scratch", "mnt", "tmp", "opt"))
    pattern = re.compile(rf"(?<![\w.$}}*)\]-])/(?:{roots})/\w")
    paths_in_text = []
    for path in files:
        data = b"" if path.suffix in (".nc", ".npz", ".png", ".xz", ".zip") or path.is_symlink() else path.read_bytes()
        for number, line in enumerate(data.decode("utf-8").splitlines(), start=1):
            if pattern.search(line):
                paths_in_text.append(f"{path.relative_to(repository)}:{number}: {line.strip()[:100]}")
    assert paths_in_text == []


def test_shared_data_folder_is_named_in_one_file(repository: Path, files: list[Path]) -> None:
    this_file = Path(__file__).resolve()
    files_with_match = [
        str(path.relative_to(repository))
        for path in files
        if path.suffix in (".py", ".md", ".yml", ".cfg", ".toml") and path.resolve() != this_file
        if re.search(r"""\.\./shared|["']shared["']""", path.read_text(encoding="utf-8"))
    ]
    assert files_with_match == ["tests/conftest.py"]


def test_root_folder_has_only_known_files(repository: Path, files: list[Path]) -> None:
    in_root = {path.name for path in files if path.parent == repository}
    expected = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "CITATION.cff", "SECURITY.md"}
    expected |= {"setup.cfg", "pyproject.toml", "ruff.toml", ".gitignore"}
    assert in_root == expected


def test_no_tracked_file_is_ignored(repository: Path) -> None:
    """Copies of the working tree that follow .gitignore would lack such a file."""
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    ignored = subprocess.run(command, cwd=repository, capture_output=True, check=True, text=True).stdout
    assert ignored.split() == []
