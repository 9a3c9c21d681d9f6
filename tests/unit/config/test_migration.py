"""Errors about keys of miles-credit name the replacements that docs/migration.md lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from credit.config.docs_page import render_config_reference
from credit.config.migration import TABLES, describe_table, find_replacement
from tests.unit.config.test_load import collect_problems, with_key

# Keys with a placeholder for a name cannot be set by themselves.
KEYS = sorted({key for rows in TABLES.values() for row in rows for key in row.keys if "NAME" not in key})


@pytest.mark.parametrize("title", TABLES)
def test_the_page_has_the_tables(repository: Path, title: str) -> None:
    page = (repository / "docs" / "migration.md").read_text(encoding="utf-8")
    assert f"## {title}\n\n{describe_table(title)}\n" in page, "run: python -m credit.config.migration"


@pytest.mark.parametrize("key", KEYS)
def test_error_about_each_key_names_its_replacement(key: str) -> None:
    """Keys of both packages are skipped. The error about a key in an old section may name the section."""
    if f"| `{key}` |" in render_config_reference() or key in ("pbs", "trainer.parallelism"):
        return
    text = collect_problems(with_key(key, "x"))
    section_keys = [key[:end] for end in range(len(key) + 1) if key[end : end + 1] in (".", "")]
    assert any(f"- {section_key}: a key of miles-credit; here " in text for section_key in section_keys), text
    assert "did you mean" not in text
    assert text.endswith("converts a whole config of miles-credit")


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("data.lead_time_periods", "data.lead_time_periods: a key of miles-credit; here `data.timestep`"),
        ("model.padding_conf", "model.padding_conf: a key of miles-credit; here `model.padding`; null for none"),
        ("predict", "predict: a key of miles-credit; here `inference`"),
        ("validation_data", "validation_data: a key of miles-credit; here `data.splits.train`, `data.splits.valid`"),
        ("model.post_conf", "`model.postprocess`, a list; see docs/constraints.md"),
    ],
)
def test_error_names_replacement(key: str, says: str) -> None:
    assert says in collect_problems(with_key(key, 6))


def test_error_mentions_different_meaning() -> None:
    text = collect_problems(with_key("data.variables", ["u", "v"]))
    assert "must be a section" in text and "unlike miles-credit's data.variables; here `data.variables.prog" in text
    assert "generation 1 counts from 0" in collect_problems(with_key("data.forecast_len", 0))
    # If the meaning is the same in both packages, the error does not mention miles-credit.
    assert find_replacement("model.dim") is not None
    assert "miles-credit" not in collect_problems(with_key("model.dim", "wide"))
    assert "miles-credit" not in collect_problems(with_key("trainer.amp", "perhaps"))
