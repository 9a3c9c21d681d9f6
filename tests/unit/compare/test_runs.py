"""Tests of the requirements of a comparison, and of the record with which a second call must agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from credit.compare.budget import parse_budget
from credit.compare.record import record_inputs
from credit.compare.runs import list_differences, load_compared_runs, require_comparable
from credit.errors import ConfigError
from tests.unit.compare.configs import QUICKSTART, make_run


def write_config(folder: Path, name: str) -> str:
    """Write the quickstart with another experiment and return the path."""
    document = yaml.safe_load(QUICKSTART.read_text())
    document["experiment"] = name
    document["save_loc"] = str(folder / "runs" / name)
    path = folder / f"{name}.yml"
    path.write_text(yaml.safe_dump(document))
    return str(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.levels=[850,500]", "only one of them has z250"),
        ("data.timestep=12h", "data.timestep is 6h in a and 12h in b"),
        ('data.splits.test=["2001-04-01","2001-05-01"]', "data.splits.test is"),
        ("inference.lead_time=48h", "inference.lead_time is 120h in a and 48h in b"),
        ("inference.initial_times.every=12h", "inference.initial_times.every is 24h in a and 12h in b"),
    ],
)
def test_runs_on_different_cases_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_comparable(make_run("a"), make_run("b", override))


def test_other_differences_are_allowed_and_listed() -> None:
    runs = [
        make_run("a"),
        make_run("b", "seed=5", "trainer.max_steps=9", 'data.splits.train=["2000-02-01","2000-12-31"]'),
    ]
    require_comparable(*runs)
    train = ["['2000-01-01', '2000-12-31']", "['2000-02-01', '2000-12-31']"]
    assert list_differences(runs, trains_runs=True) == [("data.splits.train", train)]
    assert list_differences(runs, trains_runs=False) == [
        ("data.splits.train", train),
        ("trainer.max_steps", ["800", "9"]),
    ]


def test_names_of_runs_are_distinct_and_not_reserved(tmp_path: Path) -> None:
    first = write_config(tmp_path, "a")
    for sources, message in (
        ([first], "at least two"),
        ([first, first], "a names both"),
        ([first, write_config(tmp_path, "persistence")], "is a name that the comparison uses"),
        ([first, write_config(tmp_path, "logs")], "for example logs_run"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_compared_runs(sources, [], trains_runs=True)
    runs = load_compared_runs([first, write_config(tmp_path, "b c")], ["inference.lead_time=24h"], trains_runs=True)
    assert [run.name for run in runs] == ["a", "b_c"]
    assert {run.config.inference.lead_time for run in runs} == {"24h"}


def test_networks_that_cannot_be_built_are_refused_before_the_first_training(tmp_path: Path) -> None:
    sources = [write_config(tmp_path, "a"), write_config(tmp_path, "b")]
    path = Path(sources[1])
    document = yaml.safe_load(path.read_text())
    document["model"] = {"type": "unet", "dim": [32, 48]}
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match=r"b\.yml: model.depth: "):
        load_compared_runs(sources, [], trains_runs=True)


def test_a_run_that_is_not_trained_must_be_done(tmp_path: Path) -> None:
    sources = [write_config(tmp_path, "a"), write_config(tmp_path, "b")]
    with pytest.raises(ConfigError, match="STATUS of .*runs/a is missing"):
        load_compared_runs(sources, [], trains_runs=False)
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "STATUS").write_text(json.dumps({"status": "done"}))
    runs = load_compared_runs(sources, [], trains_runs=False)
    assert [run.run_folder for run in runs] == [tmp_path / "runs" / "a", tmp_path / "runs" / "b"]


def test_a_second_call_must_have_the_same_budget_and_configs(tmp_path: Path) -> None:
    budget = parse_budget("steps", "60")
    paths = record_inputs(tmp_path, [make_run("a")], budget, ranks=1)
    assert paths == {"a": tmp_path / "configs" / "a.yml"}
    # Before its first step, a run may be corrected. Its folder is then removed.
    (tmp_path / "a" / "seed_1" / "checkpoints").mkdir(parents=True)
    record_inputs(tmp_path, [make_run("a", "trainer.learning_rate=0.1")], budget, ranks=1)
    assert not (tmp_path / "a").exists()
    record_inputs(tmp_path, [make_run("a")], budget, ranks=1)
    # A new run, scores of more regions and another length in the config are no contradiction.
    record_inputs(tmp_path, [make_run("a", "verification.regions=[global]", "trainer.max_steps=7")], budget, ranks=1)
    record_inputs(tmp_path, [make_run("a", "inference.lead_time=24h"), make_run("b")], budget, ranks=1)
    # A budget that was too small for a single training may be replaced; measured times are those of one rank.
    (tmp_path / "timing.json").write_text('{"costs": {"b": {}}}')
    record_inputs(tmp_path, [make_run("a")], parse_budget("steps", "5"), ranks=1)
    with pytest.raises(ConfigError, match=r"--ranks 1, but this call has --ranks 2"):
        record_inputs(tmp_path, [make_run("a")], budget, ranks=2)
    record_inputs(tmp_path, [make_run("a")], budget, ranks=1)
    (tmp_path / "a" / "seed_1").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"--equal steps 60, but this call has --equal steps 61"):
        record_inputs(tmp_path, [make_run("a")], parse_budget("steps", "61"), ranks=1)
    with pytest.raises(ConfigError, match=r"--ranks 1, but this call has --ranks 2"):
        record_inputs(tmp_path, [make_run("a")], budget, ranks=2)
    with pytest.raises(ConfigError, match=r"trainer.learning_rate was 0.002 and is now 0.1"):
        record_inputs(tmp_path, [make_run("a"), make_run("b", "trainer.learning_rate=0.1")], budget, ranks=1)
    assert "learning_rate: 0.002" in (tmp_path / "configs" / "b.yml").read_text()
