"""Conversion treats every key of the table by its disposition, and refuses all other keys."""

from __future__ import annotations

import contextlib
import random
import re
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from credit.config.docs_page import render_config_reference
from credit.errors import ConfigError
from credit.interop.miles_credit import convert_tree
from credit.interop.miles_credit.conversion import require_valid_config
from credit.interop.miles_credit.docs_page import render_key_reference
from credit.interop.miles_credit.keys.row import Disposition, KeyRow
from credit.interop.miles_credit.keys.table import ROWS, find_row
from credit.interop.miles_credit.reading import iterate_leaves
from tests.unit.interop.examples import copy_example, with_value

# Key of the table -> a value that has an effect on the conversion, for keys that the examples do not have.
VALUES: dict[str, Any] = {
    "data.start_datetime": "1979-01-01",
    "data.backprop_on_timestep": [1],
    "data.valid_forecast_len": 2,
    "data.source.NAME.resolution": "240x121",
    "data.source.NAME.variables.diagnostic.vars_3D": ["w"],
    "data.source.NAME.variables.dynamic_forcing.vars_3D": ["w"],
    "data.source.NAME.variables.static.vars_3D": ["w"],
    "model.pad_lat": 8,
    "model.pad_lon": 8,
    "model.post_conf.tracer_fixer.tracer_thres_max": [1],
    "model.local_window_size": [4, 2, 1, 1],
    "trainer.parallelism.data": "ddp",
    "trainer.parallelism.tensor": 1,
    "trainer.parallelism.domain": 1,
    "trainer.mode": "none",
    "preblocks.per_step.NAME.type": "concat",
    "preblocks.NAME.type": "concat",
    "postblocks.per_step.NAME.type": "reconstruct",
    "postblocks.NAME.type": "reconstruct",
    "loss.training_loss": "mse",
    "loss.variable_weights.VARIABLE": 1.0,
}
# Key of the table -> values of other keys that it needs to have an effect.
CHANGES: dict[str, dict[str, Any]] = {
    "data.source.NAME.resolution": {"data.source.NAME.dataset_type": "weatherbench2_era5"},
    "model.pad_lat": {"model.padding_conf": None, "model.pad_lon": 8},
    "model.pad_lon": {"model.padding_conf": None, "model.pad_lat": 8},
    "loss.variable_weights.VARIABLE": {"loss.use_variable_weights": True},
    "trainer.backprop_on_timestep": {"data.forecast_len": 2},
    "trainer.scheduler.T_max": {"trainer.scheduler.scheduler_type": "cosine-annealing"},
    "trainer.scheduler.eta_min": {"trainer.scheduler.scheduler_type": "cosine-annealing"},
    "trainer.scheduler.max_lr": {"trainer.scheduler.scheduler_type": "cosine-annealing-restarts"},
    "trainer.scheduler.first_cycle_steps": {
        "trainer.scheduler.scheduler_type": "cosine-annealing-restarts",
        "trainer.batches_per_epoch": 0,
    },
    "predict.forecasts.days": {},
}
# Keys that describe a part of a schedule which this package does not have.
WITHOUT_EFFECT = {"trainer.scheduler.cycle_mult", "trainer.scheduler.gamma"}
CASES = [(row, int(generation)) for row in ROWS for generation in row.generations]


def build_key(row: KeyRow) -> str:
    """Return a key that matches a row, with the names of the examples."""
    key = row.path.replace("VARIABLE", "t2m")
    if row.path.startswith("data.source."):
        key = key.replace("NAME", "FILES", 1)
    elif row.path.startswith("preblocks"):
        key = key.replace("NAME", "log", 1)
    elif row.path.startswith("postblocks"):
        key = key.replace("NAME", "bounds", 1)
    elif row.path == "validation_data.source.*":
        key = "validation_data.source.FILES.levels"
    return key.replace(".*", ".anything")


def find_value(tree: dict[str, Any], key: str) -> Any:
    """Return the value of a dotted key, None if the config does not have it."""
    node: Any = tree
    for name in key.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node


def build_tree_for_row(row: KeyRow, generation: int) -> tuple[dict[str, Any], str]:
    """Return the example of a generation with the key of a row at a value that has an effect, and the key."""
    tree = copy_example(generation)
    key = build_key(row)
    if generation == 2 and row.path.startswith("loss.") and not row.path.startswith(("loss.args", "loss.type")):
        # Older files of generation 2 have the loss of generation 1.
        tree["loss"] = copy_example(1)["loss"]
    for other_key, value in CHANGES.get(row.path, {}).items():
        tree = with_value(tree, other_key.replace("NAME", "FILES"), value)
    value = VALUES.get(row.path)
    if value is None:
        value = find_value(tree, key)
    if row.disposition is Disposition.REFUSED:
        value = "x"
    elif value is None:
        value = 1
    return with_value(tree, key, value), key


@pytest.mark.parametrize(("row", "generation"), CASES, ids=lambda case: getattr(case, "path", case))
def test_each_key_has_its_disposition(row: KeyRow, generation: int) -> None:
    tree, key = build_tree_for_row(row, generation)
    entries = convert_tree(tree, "file.yml").report.entries
    expected = {row.disposition}
    if row.disposition is Disposition.MAPPED:
        # A mapped key may be reported with a text of its own, for this value.
        expected = {Disposition.MAPPED, Disposition.DERIVED}
    if row.path in WITHOUT_EFFECT:
        expected = {Disposition.IGNORED}
    assert entries[key].disposition in expected, entries[key]
    assert entries[key].text


@pytest.mark.parametrize(
    ("row", "generation"),
    [case for case in CASES if case[0].harmless_values],
    ids=lambda case: getattr(case, "path", case),
)
def test_harmless_values_are_ignored(row: KeyRow, generation: int) -> None:
    for value in row.harmless_values:
        tree, key = build_tree_for_row(row, generation)
        entry = convert_tree(with_value(tree, key, value), "file.yml").report.entries.get(key)
        if entry is not None:
            assert entry.disposition is not Disposition.REFUSED, (value, entry)


def test_examples_have_no_refused_keys() -> None:
    for generation in (1, 2):
        report = convert_tree(copy_example(generation), "file.yml").report
        assert report.keys_with(Disposition.REFUSED) == [], report.describe_refused()


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("section", ["data", "model", "trainer", "loss", "model.padding_conf", "trainer.scheduler"])
def test_a_random_unknown_key_is_refused(generation: int, section: str) -> None:
    generator = random.Random(f"{generation} {section}")
    for _ in range(5):
        key = f"{section}.{''.join(generator.choices(string.ascii_lowercase, k=12))}"
        report = convert_tree(with_value(copy_example(generation), key, 1), "file.yml").report
        assert report.keys_with(Disposition.REFUSED) == [key]


@pytest.mark.parametrize("generation", [1, 2])
def test_values_of_a_wrong_type_raise_no_other_error(generation: int) -> None:
    generator = random.Random(generation)
    keys = [key for key, _ in iterate_leaves(copy_example(generation))]
    for key in generator.sample(keys, 25):
        value = generator.choice([0, "x", [], [1, "x"], True, {"a": 1}, [None]])
        conversion = convert_tree(with_value(copy_example(generation), key, value), "file.yml")
        if not conversion.report.keys_with(Disposition.REFUSED):
            with contextlib.suppress(ConfigError):
                require_valid_config(conversion.yaml_text, "file.yml")


def test_the_nearest_key_is_proposed() -> None:
    report = convert_tree(with_value(copy_example(1), "trainer.learning_rat", 1), "file.yml").report
    assert "did you mean `trainer.learning_rate`?" in report.entries["trainer.learning_rat"].text
    # The proposed key has the same name, but is in another section.
    report = convert_tree(with_value(copy_example(2), "trainer.forecast_len", 1), "file.yml").report
    assert "did you mean `data.forecast_len`?" in report.entries["trainer.forecast_len"].text


def test_each_key_is_in_the_table_once() -> None:
    counts = Counter((row.path, generation) for row, generation in CASES)
    assert [key for key, number in counts.items() if number > 1] == []
    assert all(row.text for row in ROWS)


def test_exact_names_precede_wildcards() -> None:
    assert find_row("predict.forecasts.days", 1, ()).disposition is Disposition.DERIVED
    assert find_row("predict.forecasts.start_year", 1, ()).disposition is Disposition.IGNORED
    assert find_row("loss.U", 1, ("U",)) is not None
    assert find_row("loss.U", 1, ()) is None
    assert find_row("data_valid.start_datetime", 2, ()) is find_row("validation_data.start_datetime", 2, ())


def test_keys_in_texts_of_the_table_exist() -> None:
    existing = set(re.findall(r"^\| `([\w.]+)` \|", render_config_reference(), re.MULTILINE))
    existing |= {key.replace(".N.", ".").replace(".NAME.", ".") for key in existing}
    miles_credit_keys = set()
    for row in ROWS:
        miles_credit_keys.update(".".join(row.segments[:length]) for length in range(1, len(row.segments) + 1))
    for row in ROWS:
        for key in re.findall(r"`((?:data|model|loss|trainer|inference|pbs|slurm)\.[\w.]+)`", row.text):
            assert (
                key in existing or key in miles_credit_keys or any(name.startswith(f"{key}.") for name in existing)
            ), key


def test_the_page_is_current(repository: Path) -> None:
    page = (repository / "docs" / "migration_keys.md").read_text(encoding="utf-8")
    command = "python -m credit.interop.miles_credit.docs_page > docs/migration_keys.md"
    assert page == render_key_reference(), f"run: {command}"
