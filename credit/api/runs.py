"""Function `read_metrics`, which reads the metrics of a training run as a table."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd

from credit.errors import DataError


def read_metrics(run: str | os.PathLike) -> pd.DataFrame:
    """Return the metrics of a training run, which may still be running.

    Args:
        run: folder of the run.

    Returns:
        Table with one row per logged optimizer step, and the number of the step as index. The columns are ``loss``,
        ``lr`` and others; the columns of validations begin with ``valid/``. Values that were not logged are NaN.

    Raises:
        DataError: if the folder has no ``metrics.jsonl``.
    """
    path = Path(run) / "metrics.jsonl"
    if not path.exists():
        raise DataError(f"{path} does not exist; give the folder of a run (save_loc) that has begun to train")
    rows: dict[int, dict[str, object]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            # The last line may be incomplete, because the run may still be writing it.
            continue
        # A validation has a separate row with the same step as the preceding row of training; the rows are merged.
        columns = rows.setdefault(row["step"], {})
        for key, value in row.items():
            if isinstance(value, dict):
                columns.update({f"{key}/{name}": item for name, item in value.items()})
            elif key != "step":
                columns[key] = value
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("step").sort_index()
