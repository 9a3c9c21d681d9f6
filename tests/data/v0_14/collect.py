"""Write expected.json from the continued runs and the scores, and remove what no test reads."""

import csv
import json
import shutil
from pathlib import Path

KEYS = ("step", "epoch", "loss", "grad_norm", "lr", "valid")

expected = {"metrics": {}, "scores": []}
for run, first_step in (("run", 11), ("sharded", 11), ("tuned", 5), ("exported", 1)):
    rows = [json.loads(line) for line in Path("continued", run, "metrics.jsonl").read_text().splitlines()]
    expected["metrics"][run] = [
        {key: row[key] for key in KEYS if key in row}
        for row in rows
        if row["step"] >= first_step and ("loss" in row or "valid" in row)
    ]
with open("run/scores.csv", newline="") as table:
    for row in csv.DictReader(table):
        if row["region"] == "global" and row["season"] == "all" and row["metric"] in ("rmse", "acc"):
            names = ("forecast", "variable", "level", "lead_hours", "metric", "value")
            expected["scores"].append({name: row[name] for name in names})
# One row a line.
lines = json.dumps(expected).replace("}, {", "},\n{").replace('], "', '],\n"')
Path("expected.json").write_text(lines + "\n")

for run in ("run", "sharded", "tuned"):
    for name in ("figures", "logs", "report.html", "scores.csv", "scores.nc"):
        path = Path(run, name)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
