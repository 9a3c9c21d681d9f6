"""`credit doctor` writes a report that has all facts for a bug report, and no secrets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from credit.cli import main
from credit.cli.doctor import sections
from credit.config.redact import is_secret, redact
from tests.unit.cli.world import damage_checkpoints

LOG = """2026-01-01T00:00:00Z INFO credit: reading https://alice:Hunter2Hunter2@data.example.org/era5.zarr
2026-01-01T00:00:01Z INFO credit: GET https://bucket.example.org/x.nc?X-Amz-Credential=CRED-1234567&X-Amz-Signature=5166&a=1
2026-01-01T00:00:02Z INFO credit: {"Authorization": "Bearer bearer.token-0123456789"}
2026-01-01T00:00:03Z INFO credit: the key was env-secret-value, as one may see
2026-01-01T00:00:04Z INFO credit: wandb login --api-key abcdef0123456789
2026-01-01T00:00:05Z INFO credit: ghp_0123456789abcdefghij and AKIAABCDEFGHIJKLMNOP
2026-01-01T00:00:06Z ERROR root: step 7: the loss is not finite
Traceback (most recent call last):
  File "/u/alice/code/credit/train/step.py", line 1, in <module>
credit.errors.CreditError: password='in quotes, with spaces'
"""
ENVIRON = {
    "HOME": "/u/alice",
    "SLURM_JOB_ID": "4711",
    "SLURM_JWT": "slurm-jwt-value",
    "NCCL_SOCKET_IFNAME": "hsn0",
    "CREDIT_API_KEY": "env-secret-value",
    "PYTHONPATH": "/u/alice/plugins:/u/alicebob/plugins",
    "UNRELATED": "unrelated-value",
    "PWD": "/u/alice/work",
}
SECRETS = ("Hunter2Hunter2", "alice:", "CRED-1234567", "5166", "bearer.token-0123456789", "slurm-jwt-value",
           "env-secret-value", "abcdef0123456789", "ghp_0123456789abcdefghij", "AKIAABCDEFGHIJKLMNOP",
           "in quotes, with spaces", "config-secret", "second-secret", "/u/alice/", "unrelated-value")  # fmt: skip


@pytest.fixture
def run_folder(tmp_path: Path, worlds: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a run with secrets in its environment variables, config and logs."""
    shutil.copytree(worlds("run"), tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    raw = yaml.safe_load(Path("config.yml").read_text())
    raw["data"]["sources"][0]["path"] = "https://alice:Hunter2Hunter2@data.example.org/*.nc"
    raw["slurm"] = {"environment": {"WANDB_API_KEY": "config-secret", "NCCL_DEBUG": "INFO"},
                    "setup": ["export MY_TOKEN=second-secret"]}  # fmt: skip
    Path("config.yml").write_text(yaml.safe_dump(raw))
    Path("run/logs").mkdir(exist_ok=True)
    Path("run/logs/rank_00000.log").write_text("2026-01-01T00:00:05Z INFO root: step 7\n")
    Path("run/logs/rank_00001.log").write_text(LOG)
    return tmp_path


def run_doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the report."""
    capsys.readouterr()
    assert main._run_command("doctor", ["config.yml", "--output", "-", *arguments], "credit_doctor") == 0
    return capsys.readouterr().out


def test_report_has_all_sections(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main._run_command("doctor", ["config.yml"], "credit_doctor") == 0
    assert "run/doctor.txt" in capsys.readouterr().out
    text = Path("run/doctor.txt").read_text()
    for title in sections.SECTIONS:
        assert f"==== {title} ====" in text
    assert "not available" not in text
    expected = (
        "torch 2",
        "pydantic",
        "netCDF4",
        "safetensors",
        "MemTotal",
        "launcher='none'",
        "job_id='4711'",
        "mesh: 1 = replicate 1",
        "SLURM_JOB_ID=4711",
        "SLURM_JWT=***",
        "NCCL_SOCKET_IFNAME=hsn0",
        "type: wxformer",
        "NCCL_DEBUG: INFO",
        "WANDB_API_KEY: ***",
        "STATUS (changed",
        '"status": "done"',
        "2 in run/checkpoints",
        "latest -> step_00000002",
        "step_00000002: intact",
        '"samples_per_s"',
        "rmse/t500/6h",
        "rank_00001.log:\n2026-01-01T00:00:06Z ERROR root: step 7: the loss is not finite",
        "rank_00000.log, changed",
        "~/plugins:/u/alicebob/plugins",
        "https://***@data.example.org/*.nc",
    )
    for expected_text in expected:  # fmt: skip
        assert expected_text in text, expected_text


def test_report_has_no_secrets(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = json.loads(Path("run/STATUS").read_text())
    Path("run/STATUS").write_text(json.dumps({**status, "reason": "token=env-secret-value refused"}))
    text = run_doctor(capsys, "slurm.environment.WANDB_API_KEY=config-secret")
    assert [secret for secret in SECRETS if secret in text] == []
    assert "refused" in text and "the key was ***, as one may see" in text


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda raw: raw["trainer"].update(learning_rat=1, api_token="second-secret"), "trainer.learning_rat: unknown"),
        (lambda raw: raw.update(plugins=["no_such_plugin"]), "no_such_plugin"),
        (lambda raw: raw.pop("data"), "data: this key is missing"),
    ],
)
def test_a_broken_config_gets_a_report(
    break_it: Callable, words: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = yaml.safe_load(Path("config.yml").read_text())
    break_it(raw)
    Path("config.yml").write_text(yaml.safe_dump(raw))
    text = run_doctor(capsys)
    assert words in text and "contents of the file:" in text
    assert "step_00000002: intact" in text and "the loss is not finite" in text
    assert [secret for secret in SECRETS if secret in text] == []


@pytest.mark.parametrize("content", [None, "data: [1, password: second-secret", "- a list", "save_loc: 3\n"])
def test_a_config_that_cannot_be_read_gets_a_report(
    content: str | None, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("config.yml").unlink()
    if content is not None:
        Path("config.yml").write_text(content)
    text = run_doctor(capsys)
    assert "==== config ====\nconfig config.yml:" in text or "problems" in text
    assert "==== versions ====\npython 3" in text
    assert [secret for secret in SECRETS if secret in text] == []
    assert main._run_command("doctor", ["config.yml"], "credit_doctor") == 0
    assert Path("doctor.txt").exists()


def test_a_damaged_checkpoint_is_named(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage_checkpoints(-1)(run_folder)
    text = run_doctor(capsys)
    assert "step_00000002: model/rank_00000.safetensors does not match its checksum" in text
    assert "step_00000001: intact" in text


def test_doctor_only_reads(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times_before = {path: path.lstat().st_mtime_ns for path in run_folder.rglob("*")}
    run_doctor(capsys)
    assert {path: path.lstat().st_mtime_ns for path in run_folder.rglob("*")} == times_before


def test_run_without_folder_gets_report(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run_doctor(capsys, "save_loc=later")
    assert "save_loc: later does not exist" in text
    assert not Path("later").exists()


def test_failed_section_leaves_other_sections_intact(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    Path("run/metrics.jsonl").write_text('[1]\n{"step": 3}\n{"torn')
    text = run_doctor(capsys)
    assert "==== ranks ====\nRANK='x' is not a whole number" in text
    assert "step_00000002: intact" in text


def test_unwritable_output_is_refused(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main._run_command("doctor", ["config.yml", "--output", "config.yml/a.txt"], "credit_doctor") == 2
    assert "--output: config.yml/a.txt cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["doctor.txt", "-"])
def test_undecodable_names_are_escaped(
    to: str, run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an ASCII locale, Python represents undecodable bytes of file names by surrogates."""
    monkeypatch.setattr(sections, "render_report", lambda context: "runs/fr\udcc3\udcbch\n")
    assert main._run_command("doctor", ["config.yml", "--output", to], "credit_doctor") == 0
    output = capsys.readouterr().out
    text = output if to == "-" else Path(to).read_text()
    assert text.startswith("runs/fr\\udcc3\\udcbch")


@pytest.mark.parametrize("name", ["SLURM_JWT", "AWS_SECRET_ACCESS_KEY", "api_token", "DB_PASSWORD", "GIT_AUTH", "sig"])
def test_names_of_secrets_are_recognised(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["PWD", "SLURM_JOB_ID", "MASTER_ADDR", "monitor", "signal_seconds", "author", "keep"])
def test_other_names_are_not_secrets(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("s3://key:p@ss@host/a", "s3://***@host/a"),
        ("password: 'a b c' and more", "password: *** and more"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIB\nabc=\n-----END RSA PRIVATE KEY-----\nrest", "***\nrest"),
        ('{"client_secret": "xyz", "port": 1}', '{"client_secret": ***, "port": 1}'),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def_ghi", "***"),
        (
            "credit_doctor c.yml slurm.environment.A_KEY=x1 seed=1",
            "credit_doctor c.yml slurm.environment.A_KEY=*** seed=1",
        ),
        ("file:///u/alice/a /data/u/alice/b", "file://~/a /data/u/alice/b"),
        ("KeyError: 'z500'", "KeyError: 'z500'"),
        ("trainer.learning_rat: unknown key; did you mean", "trainer.learning_rat: unknown key; did you mean"),
        ("https://docs.example.org/a?page=2", "https://docs.example.org/a?page=2"),
    ],
)
def test_secrets_in_text_are_masked(text: str, masked: str) -> None:
    assert redact(text, {"HOME": "/u/alice"}) == masked


def test_home_folder_in_broken_config_is_expanded(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd()))
    document = yaml.safe_load(Path("config.yml").read_text())
    document["trainer"]["learning_rat"] = 1
    for save_loc, message in (("~/run", "step_00000002: intact"), ("~nobody_of_this_name/run", "does not exist")):
        document["save_loc"] = save_loc
        Path("config.yml").write_text(yaml.safe_dump(document))
        assert message in run_doctor(capsys)
