"""Commands on the starter configs of public archives, with small stores of the same layout behind a local server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from credit.data.store.store_reader import read_description
from tests.unit.data.archives_on_the_fly import ArchiveServer, write_arco_era5, write_weatherbench2

NETWORK = (
    "model={type: wxformer, dim: [8, 16, 32, 64], depth: [1, 1, 1, 1], dim_head: 8, global_window_size: [4, 4, 2, 1], "
    "local_window_size: 4, padding: {mode: earth, lat: auto, lon: auto, pole: exact}}"
)
SHORT = (
    "trainer.max_steps=2", "trainer.num_epoch=null", "trainer.validate_every=2", "trainer.checkpoint_every=2",
    "trainer.amp=false", "trainer.activation_checkpoint=false", "trainer.valid_samples=1", "trainer.train_batch_size=1",
    "trainer.valid_batch_size=1", "data.valid_forecast_len=1", "data.num_workers=0", "inference.lead_time=6h",
    "verification.climatology={method: harmonic, harmonics: 0}",
)  # fmt: skip
# The archives begin at 2000-01-01.
PERIODS = (
    'data.splits={train: ["2000-01-01", "2000-01-04T18"], valid: ["2000-01-05", "2000-01-06"], '
    'test: ["2000-01-07T06", "2000-01-08"]}',
    "data.split_gap=6h",
)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ArchiveServer]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    # The delay makes a command last long enough to be killed before it ends.
    with ArchiveServer(tmp_path, delay=0.01) as archive_server:
        yield archive_server


def write_config(command: object, name: str, url: str) -> None:
    """Write the config that `credit init` prints, with the address of the local store in place of the archive's."""
    text = command("init", name).stdout
    text, num_replaced = re.subn(r"(?m)^( +- path:) gs://\S+\n +storage_options: .*$", rf"\1 {url}", text)
    assert num_replaced == 1
    Path("config.yml").write_text(text)


def kill_during_preprocess(folder: Path, num_parts: int) -> None:
    """Start `credit preprocess` in a process of its own, and kill it when `folder` has `num_parts` entries."""
    arguments = [sys.executable, "-m", "credit.cli.main", "preprocess", "config.yml", *PERIODS]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while not folder.is_dir() or len(list(folder.iterdir())) < num_parts:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_arco_era5_killed_and_resumed(server: ArchiveServer, tmp_path: Path, command) -> None:
    write_arco_era5(tmp_path / "arco", 24 * 8)
    write_config(command, "arco_era5", f"{server.url}/arco")
    options = (*PERIODS, NETWORK, *SHORT)
    checked = command("check", "config.yml", *options)
    assert checked.returncode == 0, checked.stdout
    assert "t (named temperature in the files)" in checked.stdout
    estimate = command("preprocess", "config.yml", *PERIODS, "--estimate").stdout
    # 32 times, four a day, of ten variables.
    assert "to fetch: 320 chunks" in estimate
    store = tmp_path / "credit" / "arco_era5" / "store.zarr"
    assert not store.exists()
    server.requests.clear()
    # All 32 times of this small store form one part, so the killed command has not completed any part.
    kill_during_preprocess(store / "fields" / "c", 10)
    server.requests.clear()
    assert command("preprocess", "config.yml", *PERIODS).returncode == 0
    assert set(server.count_chunks().values()) == {1}
    # Reading the same times from the local folder gives the same store.
    text = Path("config.yml").read_text().replace(f"{server.url}/arco", str(tmp_path / "arco"))
    Path("local.yml").write_text(text)
    assert command("preprocess", "local.yml", *PERIODS, "data.store=local.zarr").returncode == 0
    assert read_description(store)["content"] == read_description(Path("local.zarr"))["content"]
    assert command("train", "config.yml", *options).returncode == 0
    assert (tmp_path / "credit" / "arco_era5" / "checkpoints" / "latest").exists()


def test_weatherbench2(server: ArchiveServer, tmp_path: Path, command) -> None:
    write_weatherbench2(tmp_path / "wb2", 40, times_per_chunk=10)
    write_config(command, "weatherbench2_5p6deg", f"{server.url}/wb2")
    options = (*PERIODS, NETWORK, *SHORT)
    checked = command("check", "config.yml", *options)
    assert checked.returncode == 0, checked.stdout
    server.requests.clear()
    assert command("preprocess", "config.yml", *PERIODS).returncode == 0
    # Times 0 to 31 lie in the first four chunks of each of ten variables.
    assert len(server.count_chunks()) == 40
    assert set(server.count_chunks().values()) == {1}
    assert command("train", "config.yml", *options).returncode == 0
