"""Documentation names only dotted names, config keys, commands and files that exist, and its examples run."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from credit.cli.main import COMMANDS, main
from credit.cli.reference import render_cli_reference
from credit.config.docs_page import render_config_reference
from credit.config.renamed_keys import find_old_key
from tests.registries import isolate

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(REPOSITORY / "docs").glob("*.md"),
        *(REPOSITORY / "benchmarks").glob("*.md"),
        *(REPOSITORY / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "config/README.md")),
    ]
)
SECTIONS = "experiment|save_loc|seed|plugins|data|model|loss|trainer|inference|verification|realtime|pbs|slurm"
# Keys that the pages name as absent.
ABSENT_KEYS = {"trainer.fsdp2_mp_policy"}


def page_name(page: Path) -> str:
    """Return the path of a page, used as the id of a test."""
    return str(page.relative_to(REPOSITORY))


def resolve(name: str) -> object:
    """Return the object of a dotted name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            # The missing module must be a part of the name, not a module that it imports.
            if not ".".join(parts).startswith(error.name or "?"):
                raise
            continue
        for part in parts[length:]:
            value = getattr(value, part)
        return value
    raise AttributeError(name)


# CHANGELOG.md names what earlier versions had.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=page_name)
def test_dotted_names_import(page: Path) -> None:
    for name in set(re.findall(r"(?<![\w/.])credit(?:\.[A-Za-z_]\w*)+", page.read_text(encoding="utf-8"))):
        resolve(name)


def test_wrong_dotted_names_are_errors() -> None:
    with pytest.raises(AttributeError):
        resolve("credit.grid.LatLongGrid")
    with pytest.raises(AttributeError):
        resolve("credit.gird.LatLonGrid")


def build_key_pattern() -> re.Pattern:
    """Return a pattern that matches every key in docs/config.md; N represents a number, NAME a name."""
    keys = re.findall(r"^\| `([\w.]+)` \|", render_config_reference(), re.MULTILINE)
    assert len(keys) > 100
    key_patterns = (key.replace(".NAME.", r"\.\w+\.").replace(".N.", r"\.(?:\d+|N)\.") for key in keys)
    return re.compile("|".join([*key_patterns, SECTIONS]))


# docs/migration_keys.md names keys of another package; tests/unit/interop checks those of this package.
_PAGES_WITH_OUR_KEYS = [page for page in PAGES if page.name not in ("config.md", "migration_keys.md")]


@pytest.mark.parametrize("page", _PAGES_WITH_OUR_KEYS, ids=page_name)
def test_config_keys_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.name == "migration.md":
        # Only the last column of tables names keys of this package.
        lines = (line.rsplit("|", 2)[1] if line.startswith("|") else line for line in text.splitlines())
        text = "\n".join(line for line in lines if "`train_years" not in line)
    key_pattern = build_key_pattern()
    named_keys = re.findall(rf"`((?:{SECTIONS})(?:\.\w+)+)(?:[=:][^`]*)?`", text)
    wrong_keys = [key for key in named_keys if not key_pattern.fullmatch(key) and key not in ABSENT_KEYS]
    if page.name == "CHANGELOG.md":
        # Entries of earlier versions have the names of those versions.
        wrong_keys = [key for key in wrong_keys if find_old_key(key) is None]
    assert wrong_keys == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.name == "migration.md":
        text = text.split("## Commands")[0]
    command_names = set(re.findall(r"(?:^ {4}(?:srun )?|`)credit[ _]([a-z]+)", text, re.MULTILINE))
    assert command_names <= set(COMMANDS), page


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_link_targets_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_files_exist(page: Path, files: list[Path]) -> None:
    text = page.read_text(encoding="utf-8")
    if page.name == "migration.md":
        text = text.replace("`config/gen_1/example/`, `config/gen_2/examples/`", "")
    folders = "applications|benchmarks|config|credit|docs|tests"
    for name in re.findall(rf"(?<![\w/.])((?:{folders})/[\w./*]+)", text):
        if "_build" not in name and "NAME" not in name:
            assert list(REPOSITORY.glob(name.rstrip("./"))), f"{page.name} names {name}"


def test_the_architecture_lists_every_package(repository: Path, files: list[Path]) -> None:
    page = repository / "docs" / "architecture.md"
    section = page.read_text(encoding="utf-8").split("## Packages")[1].split("\n## ")[0]
    listed_packages = re.findall(r"^\| `(credit/\w+/)` \| \w", section, re.MULTILINE)
    relative = [path.relative_to(repository) for path in files]
    packages = {f"credit/{path.parts[1]}/" for path in relative if path.parts[0] == "credit" and len(path.parts) > 2}
    assert len(packages) > 8
    assert sorted(listed_packages) == sorted(packages)


def test_readme_is_short(repository: Path) -> None:
    assert len((repository / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_command_pages_are_current(repository: Path) -> None:
    docs = repository / "docs"
    pages = {}
    for path in [docs / "cli.md", *(docs / "commands").glob("*.md")]:
        pages[path.relative_to(docs).as_posix()] = path.read_text(encoding="utf-8")
    assert pages == render_cli_reference(), "run: python -m credit.cli.reference docs"


def test_notebooks_are_stored_without_outputs(repository: Path) -> None:
    """The build of the documentation creates the outputs."""
    paths = list((repository / "docs" / "notebooks").glob("*.ipynb"))
    assert len(paths) >= 6
    for path in paths:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            assert not cell.get("outputs"), f"{path.name}: clear all outputs before you save it"
            assert cell.get("execution_count") is None, f"{path.name}: clear all outputs before you save it"


def test_messages_of_troubleshooting_exist() -> None:
    """Readers search the page for messages, so every message in it must still be printed by the code."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "credit").rglob("*.py"))
    # The code splits messages into adjacent literals on several lines, which are joined here.
    code = re.sub(r"[\"']\s*\n\s*f?[\"']", "", code)
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    assert len(messages) > 20
    missing = []
    for message in messages:
        # Three dots represent a value.
        parts = [part.strip() for part in message.split("...")]
        if not all(part in code for part in parts):
            missing.append(message)
    # The first message is printed by the Makefile. The others are a metric and an option.
    assert set(missing) <= {"Python 3.11 or newer", "data_wait_frac", "--after rollout"}


def test_every_key_is_read() -> None:
    """Every documented key must be read by code outside the schema."""
    schema = (REPOSITORY / "credit" / "config" / "sections", REPOSITORY / "credit" / "config" / "schema.py")
    readers = [path for path in (REPOSITORY / "credit").rglob("*.py") if not path.is_relative_to(schema[0])]
    readers = [path for path in readers if path != schema[1] and path.name != "section.py"]
    readers += (REPOSITORY / "credit").rglob("*.j2")
    code = "\n".join(path.read_text(encoding="utf-8") for path in readers)
    # These sections are passed on whole, or read by a computed name: the model, groups of variables, splits.
    by_name = ("model.", "plugins", "data.variables.", "data.splits.")
    page = (REPOSITORY / "docs" / "config.md").read_text(encoding="utf-8")
    for key in re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE):
        if not key.startswith(by_name):
            assert re.search(rf"\.{key.rsplit('.', 1)[-1]}\b", code), f"nothing reads {key}"


@pytest.fixture
def isolated_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)


def read_code_blocks(page_name: str) -> dict[str, str]:
    """Return the Python and the YAML block of a page."""
    page = (REPOSITORY / "docs" / page_name).read_text(encoding="utf-8")
    return dict(re.findall(r"```(python|yaml)\n(.*?)```", page, re.DOTALL))


def write_short_run(folder: Path, capsys: pytest.CaptureFixture, changes: dict) -> None:
    """Write ``config.yml`` for two steps of the quickstart, with some sections replaced."""
    main(["init", "quickstart"])
    config = yaml.safe_load(capsys.readouterr().out) | changes
    config["data"]["splits"]["train"] = ["2000-01-01", "2000-01-10"]
    config["trainer"] = {"max_steps": 2, "train_batch_size": 2, "valid_samples": 2}
    (folder / "config.yml").write_text(yaml.safe_dump(config))


def read_training_steps(run_folder: Path) -> list[int]:
    """Return the steps of the training rows of a run."""
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "loss" in row]


def test_model_of_add_a_model_page_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolated_registries: None, capsys: pytest.CaptureFixture
) -> None:
    blocks = read_code_blocks("add_a_model.md")
    (tmp_path / "my_models.py").write_text(blocks["python"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    write_short_run(tmp_path, capsys, yaml.safe_load(blocks["yaml"]))
    try:
        assert main(["train", "config.yml", "save_loc=run"]) == 0
        assert main(["train", "config.yml", "save_loc=run", "model.widht=8"]) == 2
    finally:
        sys.modules.pop("my_models", None)
    assert read_training_steps(tmp_path / "run") == [1, 2]
    assert 'did you mean "width"' in capsys.readouterr().err


def test_loss_of_extend_page_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolated_registries: None, capsys: pytest.CaptureFixture
) -> None:
    blocks = read_code_blocks("extend.md")
    (tmp_path / "my_losses.py").write_text(blocks["python"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    write_short_run(tmp_path, capsys, yaml.safe_load(blocks["yaml"]))
    try:
        assert main(["train", "config.yml", "save_loc=run"]) == 0
    finally:
        sys.modules.pop("my_losses", None)
    assert read_training_steps(tmp_path / "run") == [1, 2]
