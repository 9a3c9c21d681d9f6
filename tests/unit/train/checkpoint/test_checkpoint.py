"""Tests of checkpoints: incomplete ones are ignored, and weights of another model are refused."""

from __future__ import annotations

import json
import random
import re
import resource
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from credit.errors import CheckpointError, ConfigError
from credit.train.checkpoint import checkpoint, retention
from credit.train.checkpoint.async_writer import AsyncCheckpointer
from credit.train.checkpoint.sharded import writer


def build_tensors(step: float) -> dict[str, dict[str, Tensor]]:
    """Return tensors of all kinds that a run has, with different values at each step."""
    model_tensors = {
        "matrix": torch.full((40, 5), step),
        "scalar": torch.tensor(step, dtype=torch.float64),
        "bfloat16": torch.full((7,), step, dtype=torch.bfloat16),
        "count": torch.tensor(int(step)),
        "flag": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
        "strided": torch.arange(24.0).reshape(4, 6).t() + step,
        "channels_last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last) * step,
    }
    return {"model": model_tensors, "optimizer": {"matrix/exp_avg": torch.full((40, 5), -step)}, "forecast": {}}


ASSETS = {"mask": torch.tensor([[True, False]]), "turned": torch.arange(6.0).reshape(2, 3).t()}


def save_steps(folder: Path, *steps: int, **options: object) -> Path:
    """Save these steps one after the other and return the last."""
    with AsyncCheckpointer(folder) as checkpointer:
        for step in steps:
            path = checkpointer.save(step, build_tensors(step), ASSETS, {"note": "x"}, **options)
    return path


def are_equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return tensors.keys() == expected.keys() and all(
        torch.equal(tensors[name], value) and tensors[name].dtype == value.dtype for name, value in expected.items()
    )


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Make every write beyond `size` bytes fail, as on a full disk; the limit applies to this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_round_trip(tmp_path: Path) -> None:
    path = save_steps(tmp_path, 7)
    assert path.name == "step_00000007"
    assert checkpoint.verify_checkpoint(path) is None
    meta = checkpoint.load_meta(path)
    assert meta["note"] == "x" and meta["step"] == 7
    for stem, expected in build_tensors(7).items():
        assert are_equal(checkpoint.load_tensors(path, stem), expected)
        assert checkpoint.read_stored_shapes(path, stem) == {name: value.shape for name, value in expected.items()}
        state = {name: torch.full_like(value, 9) for name, value in expected.items()}
        checkpoint.load_into(path, stem, state)
        assert are_equal(state, expected)
    assert are_equal(checkpoint.load_tensors(path, "assets"), ASSETS)
    assert (tmp_path / "latest").resolve() == path.resolve()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_00000007"]
    probe = tmp_path / "probe"
    probe.touch()
    assert {file.stat().st_mode for file in path.rglob("*") if file.is_file()} == {probe.stat().st_mode}


def test_saved_tensors_have_the_values_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training changes its tensors as soon as `save` returns, long before they are written."""
    may_write, write_ranges = threading.Event(), writer.write_ranges

    def write_ranges_late(*args: object) -> int:
        assert may_write.wait(60)
        return write_ranges(*args)

    monkeypatch.setattr(writer, "write_ranges", write_ranges_late)
    state, meta = build_tensors(1), {"position": 1}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        path = checkpointer.save(1, state, ASSETS, meta)
        for tensors_by_name in state.values():
            for value in tensors_by_name.values():
                value.zero_()
        meta["position"] = 2
        assert not path.exists() and checkpointer.committed_step is None
        may_write.set()
        checkpointer.wait()
        assert checkpointer.committed_step == 1 and checkpointer.longest_save_seconds > 0
    assert are_equal(checkpoint.load_tensors(path, "model"), build_tensors(1)["model"])
    assert are_equal(checkpoint.load_tensors(path, "optimizer"), build_tensors(1)["optimizer"])
    assert checkpoint.load_meta(path)["position"] == 1


def test_consecutive_saves_may_have_other_tensors(tmp_path: Path) -> None:
    """The host memory of one save is used again by the next, which may have other tensors."""
    with AsyncCheckpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, build_tensors(step), ASSETS, {})
        checkpointer.save(3, {"model": {"matrix": torch.ones(3, 3), "new": torch.ones(2)}}, {}, {})
    for step in (1, 2):
        assert are_equal(
            checkpoint.load_tensors(tmp_path / f"step_0000000{step}", "model"), build_tensors(step)["model"]
        )
    assert are_equal(
        checkpoint.load_tensors(tmp_path / "step_00000003", "model"),
        {"matrix": torch.ones(3, 3), "new": torch.ones(2)},
    )


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def flip(file: Path, position: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def add(file: Path) -> None:
    file.with_name("rank_00009.safetensors").write_bytes(file.read_bytes())


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink, add])
@pytest.mark.parametrize("name", ["model/rank_00000.safetensors", "assets.safetensors", "meta.json", "manifest.json"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, damage: Callable[[Path], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    damaged_path = save_steps(tmp_path, 1, 2)
    damage(damaged_path / name)
    assert checkpoint.find_newest_checkpoint(tmp_path) == tmp_path / "step_00000001"
    assert "step_00000002" in caplog.text
    with pytest.raises(CheckpointError, match="step_00000002"):
        checkpoint.resolve_checkpoint(tmp_path, str(damaged_path), "key")


def test_every_damaged_file_is_detected(tmp_path: Path) -> None:
    path = save_steps(tmp_path, 1)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    generator = random.Random(0)
    for _ in range(300):
        file = generator.choice(files)
        content = file.read_bytes()
        flip(file, generator.randrange(len(content)))
        assert checkpoint.verify_checkpoint(path) is not None, file
        file.write_bytes(content[: generator.randrange(len(content))])
        assert checkpoint.verify_checkpoint(path) is not None, file
        file.write_bytes(content)
    assert checkpoint.verify_checkpoint(path) is None


@pytest.mark.parametrize(("failing_part", "limit"), [("weights", 900), ("meta", 5000)])
def test_a_full_disk_keeps_older_checkpoints_and_the_run(
    tmp_path: Path, failing_part: str, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    complete_path = save_steps(tmp_path, 1)
    meta = {"note": "x" * (10 * limit if failing_part == "meta" else 1)}
    message = "step_00000002.*File too large.*older checkpoints are untouched"
    with AsyncCheckpointer(tmp_path) as checkpointer:
        with limit_file_size(limit):
            checkpointer.save(2, build_tensors(2), ASSETS, meta)
            checkpointer.move_link("best", 2)
            assert re.search(message, caplog.text) and "tries again at its next checkpoint" in caplog.text
            assert not (tmp_path / "best").is_symlink()
            with pytest.raises(CheckpointError, match=message):
                checkpointer.save(2, build_tensors(2), ASSETS, meta, synchronous=True)
        assert checkpoint.find_newest_checkpoint(tmp_path) == complete_path
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001"]
        assert checkpointer.committed_step is None
        checkpointer.wait()  # an error is reported only once
        checkpointer.save(3, build_tensors(3), ASSETS, meta)
    assert checkpoint.find_newest_checkpoint(tmp_path) == tmp_path / "step_00000003"


def test_the_last_save_is_completed_at_the_end_of_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError, match="why"), AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, build_tensors(1), ASSETS, {})
        raise KeyError("why")
    assert checkpoint.find_newest_checkpoint(tmp_path) == tmp_path / "step_00000001"
    with limit_file_size(900):
        with pytest.raises(CheckpointError, match="step_00000002"), AsyncCheckpointer(tmp_path) as checkpointer:
            checkpointer.save(2, build_tensors(2), ASSETS, {})
        with pytest.raises(KeyError, match="why"), AsyncCheckpointer(tmp_path) as checkpointer:
            checkpointer.save(2, build_tensors(2), ASSETS, {})
            raise KeyError("why")
    assert "step_00000002: cannot be saved" in caplog.text


def test_files_left_by_a_killed_process_are_removed(tmp_path: Path) -> None:
    partial_folder = tmp_path / ".step_00000005.part" / "model"
    partial_folder.mkdir(parents=True)
    (partial_folder / "rank_00000.safetensors").write_text("half")
    assert checkpoint.find_newest_checkpoint(tmp_path) is None
    save_steps(tmp_path, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000006"]


def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    path = save_steps(tmp_path, 4)
    (path / "model" / "rank_00000.safetensors").write_text("damaged")
    save_steps(tmp_path, 4)
    assert checkpoint.find_newest_checkpoint(tmp_path) == path


def test_files_that_cannot_be_removed_do_not_prevent_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS keeps files that another process has open, so their folder stays for a while."""
    path = save_steps(tmp_path, 4)

    def keep_files(path: Path, ignore_errors: bool = False) -> None:
        if path.exists() and not ignore_errors:
            raise OSError("Directory not empty")

    with monkeypatch.context() as context:
        context.setattr(retention.shutil, "rmtree", keep_files)
        with AsyncCheckpointer(tmp_path) as checkpointer:
            checkpointer.save(4, build_tensors(40), ASSETS, {})
        assert checkpoint.find_newest_checkpoint(tmp_path) == path
        assert are_equal(checkpoint.load_tensors(path, "model"), build_tensors(40)["model"])
        retention.remove_checkpoints_after(tmp_path, 3)
        assert checkpoint.list_checkpoints(tmp_path) == []
    save_steps(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000005"]


def test_links_follow_saves_and_linked_checkpoints_are_kept(tmp_path: Path) -> None:
    keep = retention.Retention(last=2)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        for step in range(1, 6):
            links = ("latest", "best") if step == 2 else ("latest",)
            checkpointer.save(step, build_tensors(step), ASSETS, {}, links, keep)
        checkpointer.wait()
        assert [path.name[-1] for path in checkpoint.list_checkpoints(tmp_path)] == ["2", "4", "5"]
        assert checkpoint.resolve_checkpoint(tmp_path, "best", "key") == (tmp_path / "step_00000002").resolve()
        checkpointer.save(6, build_tensors(6), ASSETS, {}, keep=keep)
        checkpointer.move_link("best", 6)  # the link moves after the save in progress
        assert checkpoint.resolve_checkpoint(tmp_path, "best", "key") == (tmp_path / "step_00000006").resolve()


def test_retention_keeps_the_selected_steps(tmp_path: Path) -> None:
    save_steps(tmp_path, *range(90, 111, 2))
    keep = retention.Retention(last=1, every=50, steps=(92, 104))
    assert len(retention.prune_checkpoints(tmp_path, keep, dry_run=True)) == 7
    assert len(checkpoint.list_checkpoints(tmp_path)) == 11
    retention.prune_checkpoints(tmp_path, keep)
    assert [checkpoint.parse_step(path) for path in checkpoint.list_checkpoints(tmp_path)] == [92, 100, 104, 110]


def test_a_removal_that_is_killed_leaves_no_damaged_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 2, 4)

    def remove_a_file_and_stop(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            (path / "meta.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(retention.shutil, "rmtree", remove_a_file_and_stop)
        with pytest.raises(KeyboardInterrupt):
            retention.prune_checkpoints(tmp_path, retention.Retention(last=1))
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step_00000004"]
    save_steps(tmp_path, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000004", "step_00000006"]


def test_checkpoints_after_a_step_are_removed(tmp_path: Path) -> None:
    save_steps(tmp_path, 99_999_999, 100_000_000, 100_000_005)
    assert checkpoint.find_newest_checkpoint(tmp_path, at_most=100_000_004).name == "step_100000000"
    retention.remove_checkpoints_after(tmp_path, 100_000_000)
    assert [checkpoint.parse_step(path) for path in checkpoint.list_checkpoints(tmp_path)] == [99_999_999, 100_000_000]
    assert not (tmp_path / "latest").is_symlink(), "it pointed to what is gone"


def test_missing_checkpoints_are_errors(tmp_path: Path) -> None:
    assert checkpoint.find_newest_checkpoint(tmp_path / "none") is None
    for which in ("latest", "best"):
        with pytest.raises(CheckpointError, match="train first"):
            checkpoint.resolve_checkpoint(tmp_path, which, "trainer.resume")
    with pytest.raises(ConfigError, match=r"^trainer.resume: .*/step_00000009: no such .* step_XXXXXXXX folder$"):
        checkpoint.resolve_checkpoint(tmp_path, str(tmp_path / "step_00000009"), "trainer.resume")
    with pytest.raises(ConfigError, match=r'^inference.checkpoint: bset: no such .*; did you mean "best"\?$'):
        checkpoint.resolve_checkpoint(tmp_path, "bset", "inference.checkpoint")


def test_format_1_is_read_and_future_formats_are_refused(tmp_path: Path) -> None:
    """Format 1 has one file for each set of tensors."""
    path = tmp_path / "step_00000003"
    path.mkdir()
    expected = {name: value.contiguous() for name, value in build_tensors(3)["model"].items()}
    save_file(expected, path / "model.safetensors")
    (path / "meta.json").write_text(json.dumps({"format": 1, "step": 3}))
    manifest = {
        file.name: {"size": file.stat().st_size, "crc32": zlib.crc32(file.read_bytes())} for file in path.iterdir()
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.resolve_checkpoint(tmp_path, "latest", "key") == path.resolve()
    assert checkpoint.load_meta(path)["step"] == 3
    assert are_equal(checkpoint.load_tensors(path, "model"), expected)
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    checkpoint.load_into(path, "model", state)
    assert are_equal(state, expected)
    (path / "meta.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.load_meta(path)


def test_fingerprint_tells_weights_apart(tmp_path: Path) -> None:
    fingerprints = {
        checkpoint.read_weights_checksum(save_steps(tmp_path / str(n), step), "model")
        for n, step in enumerate((1, 1, 2))
    }
    assert len(fingerprints) == 2 and all(len(value) == 8 for value in fingerprints)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    state = {"weight": torch.zeros(2, 4), "gain": torch.zeros(2)}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        path = checkpointer.save(1, {"model": state}, {}, {})
    for load in (
        lambda: checkpoint.copy_complete_tensors(model, state, tmp_path),
        lambda: checkpoint.load_into(path, "model", model.state_dict()),
    ):
        with pytest.raises(CheckpointError) as caught:
            load()
        text = str(caught.value)
        assert "1 missing (bias)" in text and "1 unexpected (gain)" in text
        assert "weight (2, 4) instead of (2, 3)" in text and str(tmp_path) in text


def test_a_model_is_loaded_in_place(tmp_path: Path) -> None:
    source_model, model = nn.Linear(3, 2), nn.Linear(3, 2)
    parameters = list(model.parameters())
    checkpoint.copy_complete_tensors(model, source_model.state_dict(), tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(parameters, source_model.parameters(), strict=True))
    assert all(p.requires_grad and p.is_leaf for p in parameters)
