"""Tests of reading tables with coefficients of hybrid levels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from credit.data.sources.levels.hybrid_coefficients import load_coefficients
from credit.errors import DataError


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "a number in every row; the file is empty"),
        (b"\n\n", "a number in every row; the file is empty"),
        (b"n,hyai,b\n0,0,0\n1,0,1\n", "a number in every row; its columns are n, hyai, b"),
        (b"a,b\n0,0\n2000\n0,1\n", r"a number in every row \("),
        ("a,b\n0,0\n0,1\n".encode("utf-16"), r"a number in every row \("),
    ],
)
def test_invalid_table_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "half.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"data.coefficients: .*half.csv must have columns a .Pa. and b, with {says}"):
        load_coefficients(path, "data.coefficients")


def test_table_of_a_spreadsheet_is_read(tmp_path: Path) -> None:
    """Spreadsheet programs write a byte order mark at the start."""
    path = tmp_path / "half.csv"
    path.write_text("a [Pa],b\n0,0\n2000,0.1\n0,1\n", encoding="utf-8-sig")
    np.testing.assert_array_equal(load_coefficients(path, "data.coefficients").a, [1000.0, 1000.0])
