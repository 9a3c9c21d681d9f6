"""Keys of miles-credit are answered with what takes their place, as the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from credit.config.docs_page import render_config_reference
from credit.config.migration import TABLES, describe_table, find_replacement
from tests.unit.config.test_load import problems_of, with_key

# A key that a section or a name stands for cannot be set by itself.
KEYS = sorted({key for rows in TABLES.values() for row in rows for key in row.keys if "NAME" not in key})


@pytest.mark.parametrize("title", TABLES)
def test_the_page_has_the_tables(repository: Path, title: str) -> None:
    page = (repository / "docs" / "migration.md").read_text(encoding="utf-8")
    assert f"## {title}\n\n{describe_table(title)}\n" in page, "run: python -m credit.config.migration"


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_answered_with_the_table(key: str) -> None:
    """One that both packages have is none of its business, and what lies in an old section is told with that."""
    if f"| `{key}` |" in render_config_reference() or key in ("pbs", "trainer.parallelism"):
        return
    text = problems_of(with_key(key, "x"))
    above = [key[:end] for end in range(len(key) + 1) if key[end : end + 1] in (".", "")]
    assert any(f"- {old}: a key of miles-credit; here " in text for old in above), text
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
def test_what_is_said(key: str, says: str) -> None:
    assert says in problems_of(with_key(key, 6))


def test_a_key_with_another_meaning_says_so() -> None:
    text = problems_of(with_key("data.variables", ["u", "v"]))
    assert "must be a section" in text and "unlike miles-credit's data.variables; here `data.variables.prog" in text
    assert "generation 1 counts from 0" in problems_of(with_key("data.forecast_len", 0))
    # where both mean the same, miles-credit is not mentioned
    assert find_replacement("model.dim") is not None
    assert "miles-credit" not in problems_of(with_key("model.dim", "wide"))
    assert "miles-credit" not in problems_of(with_key("trainer.amp", "perhaps"))
