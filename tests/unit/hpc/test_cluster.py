"""Cluster files: their contents, settings that a config may change, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from credit.cli.main import main
from credit.config import load_config
from credit.config.sections.execution import PbsConfig, SlurmConfig
from credit.errors import ConfigError
from credit.hpc.cluster import cluster_names, load_cluster, resolve_settings

REPOSITORY = Path(__file__).parents[3]
CLUSTER_FOLDER = REPOSITORY / "credit" / "hpc" / "clusters"


def test_each_cluster_file_is_linked_in_config_folder() -> None:
    links = sorted((REPOSITORY / "config" / "clusters").iterdir())
    assert [link.stem for link in links] == cluster_names() == ["casper", "derecho", "pbs", "perlmutter", "slurm"]
    assert all(link.is_symlink() and link.resolve() == CLUSTER_FOLDER / link.name for link in links)


@pytest.mark.parametrize("name", ["casper", "derecho", "pbs", "perlmutter", "slurm"])
def test_each_cluster_file_has_sources_and_valid_defaults(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster == load_cluster(str(CLUSTER_FOLDER / f"{name}.yml"))
    assert "Sources: " in (CLUSTER_FOLDER / f"{name}.yml").read_text().split("title:")[0]
    section = type(cluster.defaults)(account="x", walltime="30min")
    for uses_gpus in (True, False):
        settings = resolve_settings(cluster, section, uses_gpus)
        assert (settings.gpus_per_node > 0) == uses_gpus and settings.walltime == "30min"


def test_templates_name_no_site() -> None:
    for path in (REPOSITORY / "credit" / "hpc" / "templates").iterdir():
        text = path.read_text().lower()
        assert not any(
            word in text for word in ("nccl", "hsn", "derecho", "casper", "perlmutter", "ncar", "module purge")
        )


def test_config_has_precedence_and_mappings_are_merged() -> None:
    derecho = load_cluster("derecho")
    section = PbsConfig(account="P1", gpus_per_node=2, modules=["mine"], environment={"NCCL_DEBUG": "INFO"})
    settings = resolve_settings(derecho, section, uses_gpus=True)
    assert (settings.gpus_per_node, settings.modules, settings.queue, settings.cpus_per_node) == (
        2,
        ["mine"],
        "main",
        64,
    )
    assert settings.environment["NCCL_DEBUG"] == "INFO" and settings.environment["NCCL_SOCKET_IFNAME"] == "hsn"
    # A job without GPUs does not request the settings of GPU nodes.
    settings = resolve_settings(load_cluster("casper"), PbsConfig(account="P1"), uses_gpus=False)
    assert settings.chunk is None and settings.gpus_per_node == 0


@pytest.mark.parametrize(
    ("name", "section", "message"),
    [
        ("derecho", PbsConfig(), "pbs.account: this key is missing, but Derecho requires it"),
        ("slurm", SlurmConfig(), "slurm.walltime: this key is missing"),
        ("derecho", PbsConfig(account="x", walltime="13h"), "pbs.walltime: 13h: main of Derecho allows at most 12h"),
        ("derecho", PbsConfig(account="x", queue="develop"), "12h: develop of Derecho allows at most 6h"),
        ("perlmutter", SlurmConfig(qos="debug"), "slurm.walltime: 12h: debug of Perlmutter allows at most 30min"),
    ],
)
def test_settings_that_the_site_forbids_are_refused(name: str, section: PbsConfig | SlurmConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_settings(load_cluster(name), section, uses_gpus=True)


def test_unknown_queue_is_left_to_the_scheduler() -> None:
    settings = resolve_settings(
        load_cluster("derecho"), PbsConfig(account="x", queue="R123", walltime="99h"), uses_gpus=True
    )
    assert settings.queue == "R123"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduler": "lsf"}, "scheduler: 'lsf': must be pbs or slurm"),
        ({"tittle": "x"}, 'tittle: unknown key; did you mean "title"'),
        ({"defaults": {"ques": "main"}}, 'defaults.ques: unknown key; did you mean "queue"'),
        ({"defaults": {"queue": "a b"}}, "defaults.queue: 'a b'"),
        ({"defaults": {"directives": ["x\ny"]}}, "defaults.directives"),
        ({"defaults": {"launch": "srun"}}, "defaults.launch: 'srun'"),
        ({"queues": {"q": {"max_walltime": "soon"}}}, "queues.q.max_walltime"),
        ({"start": None}, "start"),
    ],
)
def test_invalid_cluster_file_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    document = yaml.safe_load((CLUSTER_FOLDER / "pbs.yml").read_text()) | changes
    (tmp_path / "here.yml").write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(tmp_path / "here.yml"))
    assert message in str(caught.value) and "here.yml" in str(caught.value)


@pytest.fixture
def quickstart(tmp_path: Path, capsys: pytest.CaptureFixture) -> str:
    """Path of the quickstart config."""
    main(["init", "quickstart"])
    (tmp_path / "q.yml").write_text(capsys.readouterr().out)
    return str(tmp_path / "q.yml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "derech"], 'cluster "derech": no such site; did you mean "derecho"'),
        (["--cluster", "nowhere/here.yml"], "nowhere/here.yml: cannot be read"),
        ([], "name the cluster with --cluster"),
        (["pbs.cluster=pbs", "slurm.cluster=slurm"], "name the cluster with --cluster"),
        (["pbs.cluster=perlmutter"], "pbs.cluster: perlmutter: Perlmutter uses slurm; set slurm.cluster instead"),
        (["--cluster", "pbs", "pbs.acount=x"], 'pbs.acount: unknown key; did you mean "account"'),
        (["--cluster", "pbs", "pbs.account='a b'"], "pbs.account: 'a b'"),
        (["--cluster", "pbs", 'pbs.queue="a\\n#PBS -q b"'], "pbs.queue"),
        (["--cluster", "pbs", "--job", "trian"], 'not a kind of job; did you mean "train"'),
        (["--cluster", "pbs", "--job", "rollout", "--chain", "2"], "only training can be a chain"),
        (["--cluster", "pbs", "--job", "preprocess", "--nodes", "2"], "preprocess is one process"),
        (["--cluster", "pbs", "--job", "rollout", "--online"], "--online: rollout scores nothing"),
        (["--cluster", "pbs", "--job", "verify", "--model", "run.yml"], "--model requires --online"),
        (["--cluster", "pbs", "--job", "rollout", "--after", "train"], "submit when save_loc/STATUS says done"),
        (["--cluster", "pbs", "--job", "verify", "--after", "rolout"], 'did you mean "rollout"'),
        (["--cluster", "pbs", "--job", "verify", "--after", "rollout", "pbs.walltime=1h"], "omit the option"),
        (["--cluster", "pbs", "--nodes", "0"], "nodes: 0"),
        (["--cluster", "pbs", "pbs.walltime=1h", "trainer.parallelism.tensor=2"], "tensor 2 on 1 ranks"),
        (["--cluster", "pbs", "pbs.walltime=1h", "pbs.template=none.j2"], "pbs.template: none.j2: cannot be read"),
    ],
)
def test_invalid_arguments_are_refused(
    quickstart: str, capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    assert main(["submit", quickstart, "--dry-run", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_dry_run_writes_nothing(quickstart: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["--cluster", "perlmutter", "--dry-run", "--nodes", "2", f"save_loc={tmp_path}/run"]
    assert main(["submit", quickstart, *arguments]) == 0
    output = capsys.readouterr().out
    assert output.startswith("#!/bin/bash\n#SBATCH ") and f"# sbatch --parsable {tmp_path}/run/jobs/train.sh" in output
    assert [path.name for path in tmp_path.iterdir()] == ["q.yml"]


def test_scheduler_sections_are_saved_with_the_config(quickstart: str, tmp_path: Path) -> None:
    from credit.config import dump_config

    config = load_config(quickstart, ["pbs.cluster=derecho", "slurm.environment={A: 'b c'}"])
    (tmp_path / "again.yml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yml") == config
