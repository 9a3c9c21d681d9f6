"""`read_metrics`: the log of a training as a table."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd

from credit.errors import DataError


def read_metrics(run: str | os.PathLike) -> pd.DataFrame:
    """Return the metrics of a training, also of one that is running.

    Args:
        run: folder of the run.

    Returns:
        Table with a row for each logged optimizer step, which is the index, and columns such as ``loss``, ``lr`` and,
        in the rows of validations, ``valid/loss``. Values that were not logged are NaN.

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
            # A run that is training may have written a part of its last line.
            continue
        # A validation has a separate row, with the step of the training row before it.
        columns = rows.setdefault(row["step"], {})
        for key, value in row.items():
            if isinstance(value, dict):
                columns.update({f"{key}/{name}": item for name, item in value.items()})
            elif key != "step":
                columns[key] = value
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("step").sort_index()
