"""Tests of TensorBoard, Weights & Biases (offline) and MLflow (local): a restart continues the same record."""

from __future__ import annotations

import json
import struct
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from credit.config import build_config
from credit.train.loggers.background import close_loggers
from credit.train.loggers.base import LoggedPicture, LoggedRow
from credit.train.loggers.open_loggers import open_loggers
from tests.unit.config.test_load import with_key


def draw_picture() -> bytes:
    """Return a PNG file of 4 x 4 pixels."""
    buffer = BytesIO()
    Image.fromarray(np.full((4, 4, 3), 200, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def log_twice(folder: Path, name: str, first_status: str = "requeue") -> None:
    """Log steps 1 to 3, then restart after step 2 and log steps 3 and 4."""
    raw = with_key("save_loc", str(folder)) | {"experiment": "mine"}
    raw["data"]["store"] = "https://user:secret-password@host/store.zarr"
    raw["trainer"]["loggers"] = [name]
    # MLflow refuses names with such characters.
    raw["trainer"]["learning_rate_factors"] = {"blocks.*.norm": 0.5}
    folder.mkdir(exist_ok=True)
    config = build_config(raw)
    for first_step, steps, status in ((0, (1, 2, 3), first_status), (2, (3, 4), "done")):
        loggers = open_loggers(config, first_step)
        for step in steps:
            for logger in loggers:
                logger.log(LoggedRow(step, {"loss": 1.0 / step, "rmse/z500/24h": 2.0}))
        for logger in loggers:
            logger.log_image(LoggedPicture("early_map", draw_picture(), steps[-1]))
        close_loggers(loggers, status)


def test_no_logger_writes_files_by_default(tmp_path: Path) -> None:
    assert open_loggers(build_config(with_key("save_loc", str(tmp_path))), 0) == []
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_continues_after_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_twice(tmp_path / "run", "tensorboard")
    assert "WARNING" not in caplog.text
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    # Step 3 of the first start is no longer shown.
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("loss")] == [
        (step, pytest.approx(1.0 / step)) for step in (1, 2, 3, 4)
    ]
    assert events.Tags()["images"] == ["early_map"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_mlflow_continues_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracking = pytest.importorskip("mlflow.tracking", reason="mlflow is not part of the extra `test`: it needs 60 more")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log_twice(tmp_path / "run", "mlflow")
    assert "WARNING" not in caplog.text
    client = tracking.MlflowClient(f"sqlite:///{tmp_path}/run/mlflow.db")
    (record,) = client.search_runs([client.get_experiment_by_name("credit").experiment_id])
    assert record.info.status == "FINISHED" and record.info.run_name == "mine"
    assert record.data.params["trainer.loggers"] == "['mlflow']"
    assert record.data.params["trainer.learning_rate_factors.blocks._.norm"] == "0.5"
    assert "secret-password" not in json.dumps(record.data.params)
    history = client.get_metric_history(record.info.run_id, "loss")
    assert sorted((metric.step, metric.value) for metric in history) == [(step, 1.0 / step) for step in (1, 2, 3, 3, 4)]
    pictures = client.list_artifacts(record.info.run_id)
    assert [file.path for file in pictures] == ["step_00000003", "step_00000004"]
    # Nothing is written beside the run's folder.
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def read_wandb_rows(path: Path) -> list[dict[str, object]]:
    """Return the logged rows in a file of wandb, which is a log of LevelDB with messages of protobuf."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    rows = []
    message = b""
    # Behind 7 bytes that identify the file come records with a header of 7 bytes: checksum, length and kind.
    position = 7
    while position + 7 <= len(data):
        space_in_block = 32768 - position % 32768
        if space_in_block < 7:
            # A header never lies across the end of a block.
            position += space_in_block
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        message += data[position + 7 : position + 7 + length]
        position += 7 + length
        # Kinds 1 and 4 are a whole message and the end of a divided one.
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            message = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


@pytest.mark.slow
def test_wandb_offline_continues_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_twice(tmp_path / "run", "wandb")
    assert "WARNING" not in caplog.text
    starts = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    run_id = (tmp_path / "run" / "logger_id").read_text().strip()
    # Each start has its files; the id by which the server joins them is the same.
    assert len(starts) == 2 and all(start.name.endswith(run_id) for start in starts)
    steps = []
    for start in starts:
        (path,) = start.glob("*.wandb")
        assert b"secret-password" not in path.read_bytes()
        steps.append([int(row["step"]) for row in read_wandb_rows(path) if "loss" in row])
    assert steps == [[1, 2, 3], [3, 4]]


@pytest.mark.slow
def test_wandb_without_an_api_key_does_not_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    log_twice(tmp_path / "run", "wandb")
    assert caplog.text.count("trainer.loggers: wandb not used: CreditError: no API key; run `wandb login`") == 2
