"""A checkpoint is whole or does not count, and weights of another model are refused."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from credit.errors import CheckpointError
from credit.train import checkpoint


def save(folder: Path, step: int) -> Path:
    tensors = {"model": {"weight": torch.full((3,), float(step))}, "assets": {}}
    path = checkpoint.save_checkpoint(folder, step, tensors, {"note": "x"})
    checkpoint.point(folder, "latest", path)
    return path


def test_round_trip(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    assert path.name == "step_00000007"
    assert checkpoint.load_meta(path)["note"] == "x"
    assert torch.equal(checkpoint.load_tensors(path, "model")["weight"], torch.full((3,), 7.0))
    assert (tmp_path / "latest").resolve() == path.resolve()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "no manifest"])
def test_damage_is_skipped_with_a_warning(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    file = bad / "model.safetensors"
    content = file.read_bytes()
    if damage == "truncate":
        file.write_bytes(content[:-4])
    elif damage == "flip":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "remove":
        file.unlink()
    else:
        (bad / "manifest.json").unlink()
    assert checkpoint.newest_checkpoint(tmp_path) == good
    assert "step_00000002" in caplog.text
    with pytest.raises(CheckpointError, match="step_00000002"):
        checkpoint.resolve_checkpoint(tmp_path, str(bad))


def test_a_full_disk_leaves_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save(tmp_path, 1)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device.*older checkpoints are untouched"):
        save(tmp_path, 2)
    assert checkpoint.newest_checkpoint(tmp_path) == good
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001"]


def test_pruning_keeps_latest_and_best(tmp_path: Path) -> None:
    for step in range(1, 6):
        path = save(tmp_path, step)
        if step == 2:
            checkpoint.point(tmp_path, "best", path)
    checkpoint.prune(tmp_path, keep_last=2)
    assert [path.name[-1] for path in checkpoint.list_checkpoints(tmp_path)] == ["2", "4", "5"]


def test_nothing_there(tmp_path: Path) -> None:
    assert checkpoint.newest_checkpoint(tmp_path / "none") is None
    for which in ("latest", "best", str(tmp_path / "step_00000009")):
        with pytest.raises(CheckpointError, match=r"train first|write best"):
            checkpoint.resolve_checkpoint(tmp_path, which)


def test_another_format(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.load_meta(path)


def test_weights_of_another_model(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    state = {"weight": torch.zeros(2, 4), "gain": torch.zeros(2)}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_state(model, state, tmp_path)
    text = str(caught.value)
    assert "1 missing (bias)" in text and "1 left over (gain)" in text and "weight (2, 4) instead of (2, 3)" in text
