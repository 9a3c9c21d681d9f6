"""Job scripts: each template is valid shell for each site, and its directives request the given resources."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from credit.cli.main import main
from credit.config.sections.execution import PbsConfig, SlurmConfig
from credit.errors import ConfigError
from credit.hpc import pbs, slurm
from credit.hpc.cluster import cluster_names, load_cluster
from credit.hpc.job import JOB_KINDS, Job, JobRequest, build_job
from credit.hpc.script import render_script

NAMES = ["", "run", "1st", "a b", "it's", "$(x)", "_x-", "e" * 99, "äöü", "x\n#PBS -q y"]


def make_job(
    cluster: str, kind: str = "train", folder: Path = Path("runs/x"), spread: bool = False, online: bool = False,
    trials: tuple[str, ...] = (), **settings: object,
) -> Job:  # fmt: skip
    site = load_cluster(cluster)
    section = PbsConfig if site.scheduler == "pbs" else SlurmConfig
    request = JobRequest(
        kind, experiment="my run", folder=folder, config=Path("my config.yml"), overrides=["seed=1", "pbs.queue=x"],
        spread=spread, online=online, trials=trials,
    )  # fmt: skip
    return build_job(request, site, section(**{"account": "P1", "walltime": "90min", **settings}))


def read_directives(text: str) -> list[str]:
    """Return the comment lines that the scheduler reads: those before the first command."""
    lines = text.splitlines()[1:]
    return lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]


@pytest.mark.parametrize("cluster", cluster_names())
@pytest.mark.parametrize("kind", JOB_KINDS)
def test_every_script_is_valid_shell(cluster: str, kind: str, shellcheck: str, tmp_path: Path) -> None:
    launchers = ("torchrun", "mpiexec" if load_cluster(cluster).scheduler == "pbs" else "srun")
    scripts = []
    for number, (nodes, launch) in enumerate((n, launch) for n in (1, 3) for launch in launchers):
        settings = {
            "nodes": nodes,
            "launch": launch,
            "chain": 4,
            "setup": ["ulimit -c 0"],
            "environment": {"A": "it's"},
        }
        scripts.append(tmp_path / f"{number}.sh")
        # Include verify jobs with and without --online, and with one and several ranks per forecast.
        spread, online = number % 2 == 0, kind == "verify" and number % 2 == 0
        scripts[-1].write_text(
            render_script(make_job(cluster, kind, tmp_path / "a run's folder", spread, online, **settings))
        )
    for path in scripts:
        subprocess.run(["bash", "-n", path], check=True)
    lint = subprocess.run([shellcheck, *scripts], capture_output=True, text=True)
    assert lint.returncode == 0, lint.stdout


@pytest.mark.parametrize("cluster", cluster_names())
def test_script_of_sweep_is_valid_shell(cluster: str, shellcheck: str, tmp_path: Path) -> None:
    scripts = []
    for num_trials in (1, 12):
        trials = tuple(f"trial_{number:04d}" for number in range(1, num_trials + 1))
        text = render_script(make_job(cluster, folder=tmp_path / "a sweep's folder", trials=trials, nodes=2, chain=3))
        is_slurm = load_cluster(cluster).scheduler == "slurm"
        directive = "#SBATCH --array=1-12" if is_slurm else "#PBS -J 1-12"
        assert (directive in read_directives(text)) == (num_trials == 12)
        # A single trial is no array, which PBS would refuse.
        assert ("-J 1-" in text or "--array" in text) == (num_trials == 12)
        # A chain of arrays is not supported.
        assert "requeue" not in text.replace("#SBATCH --requeue", "")
        assert 'train "$config"' in text
        scripts.append(tmp_path / f"{num_trials}.sh")
        scripts[-1].write_text(text)
    lint = subprocess.run([shellcheck, *scripts], capture_output=True, text=True)
    assert lint.returncode == 0, lint.stdout


def test_derecho_on_four_nodes() -> None:
    text = render_script(make_job("derecho", nodes=4, resources={"job_priority": "economy"}))
    assert read_directives(text) == [
        "#PBS -S /bin/bash", "#PBS -N my_run", "#PBS -j oe", "#PBS -r y", "#PBS -A P1", "#PBS -q main",
        "#PBS -l select=4:ncpus=64:mpiprocs=4:ngpus=4", "#PBS -l walltime=01:30:00", "#PBS -l job_priority=economy",
        "#PBS -k eod",
    ]  # fmt: skip
    first = next(line for line in text.splitlines()[1:] if not line.startswith("#"))
    assert first == "export CREDIT_JOB_END=$(($(date +%s) + 5400))"
    assert "exec mpiexec -n 4 --ppn 1 --cpu-bind none " in text
    assert "-m torch.distributed.run --signals-to-handle=SIGINT \\\n    --nnodes=4 --nproc-per-node=4 " in text
    command = f"-m credit.cli.main train '{Path.cwd()}/my config.yml' seed=1\n"
    assert command in text, "keys of the job itself are not the run's"
    text = render_script(make_job("derecho", nodes=4, launch="mpiexec"))
    assert "exec mpiexec -n 16 --ppn 4 --cpu-bind none " in text and "torch.distributed" not in text


def test_perlmutter_with_srun() -> None:
    text = render_script(make_job("perlmutter", nodes=2, chain=5, constraint="gpu&hbm80g"))
    assert read_directives(text) == [
        "#SBATCH --job-name=my_run", "#SBATCH --output=%x-%j.out", "#SBATCH --open-mode=append", "#SBATCH --requeue",
        "#SBATCH --account=P1", "#SBATCH --qos=regular", "#SBATCH --constraint=gpu&hbm80g", "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4", "#SBATCH --cpus-per-task=32", "#SBATCH --gpus-per-node=4",
        "#SBATCH --time=01:30:00", "#SBATCH --signal=B:USR2@300",
    ]  # fmt: skip
    assert "exec srun --ntasks 8 --ntasks-per-node 4 --gpu-bind none " in text
    assert '"${SLURM_RESTART_COUNT:-0}" -lt 4 ]' in text
    assert "scontrol" not in render_script(make_job("perlmutter", nodes=2)), "one job is no chain"


def test_jobs_without_gpus_request_none() -> None:
    text = render_script(make_job("derecho", "preprocess", nodes=4, chain=3))
    assert "#PBS -l select=1:ncpus=128:mpiprocs=1\n" in text and "torch.distributed" not in text
    assert text.rstrip().endswith(f"-m credit.cli.main preprocess '{Path.cwd()}/my config.yml' seed=1")
    for kind in ("preprocess", "verify"):
        assert "--gpus" not in render_script(make_job("slurm", kind)) and "--constraint=cpu" in render_script(
            make_job("perlmutter", kind)
        )


def test_verify_is_one_job_on_all_nodes() -> None:
    """Scoring of files uses CPU ranks. With --online, the ranks use GPUs, because they compute the forecasts."""
    text = render_script(make_job("derecho", "verify", nodes=3, chain=3))
    assert "#PBS -l select=3:ncpus=128:mpiprocs=16\n" in text and "#PBS -J" not in text
    assert "export OMP_NUM_THREADS=8\n" in text and "id=${PBS_JOBID-}\n" in text
    assert "--nnodes=3 --nproc-per-node=16 " in text and f"verify '{Path.cwd()}/my config.yml' seed=1\n" in text
    text = render_script(make_job("derecho", "verify", online=True, nodes=3))
    assert "#PBS -l select=3:ncpus=64:mpiprocs=4:ngpus=4\n" in text and "--nnodes=3 --nproc-per-node=4 " in text
    assert text.rstrip().endswith("seed=1 --online")
    text = render_script(make_job("perlmutter", "verify", nodes=2))
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=16\n#SBATCH --cpus-per-task=16\n" in text
    assert "exec srun --ntasks 32 --ntasks-per-node 16 " in text and "SRUN_CPUS_PER_TASK=" in text
    assert "torch.distributed" not in render_script(make_job("casper", "verify", ranks_per_node=1))


def test_a_rollout_is_an_array_of_whole_nodes() -> None:
    text = render_script(make_job("derecho", "rollout", nodes=3))
    assert "#PBS -J 1-3\n" in text and "#PBS -l select=1:ncpus=64:mpiprocs=4:ngpus=4\n" in text and "/12\n" in text
    text = render_script(make_job("slurm", "rollout", nodes=3))
    assert "#SBATCH --array=1-3\n" in text and "#SBATCH --nodes=1\n" in text and "%x-%A_%a.out" in text
    text = render_script(make_job("derecho", "rollout", spread=True, nodes=3))
    assert "#PBS -J" not in text and "#PBS -l select=3:" in text and "--part" not in text
    assert "--nnodes=3 --nproc-per-node=4 " in text
    text = render_script(make_job("perlmutter", "rollout", spread=True, nodes=3))
    assert "--array" not in text and "exec srun --ntasks 12 --ntasks-per-node 4 " in text
    # PBS does not accept an array of one job.
    assert "#PBS -J" not in render_script(make_job("derecho", "rollout"))


@pytest.mark.parametrize("name", NAMES)
def test_job_names_are_valid_for_schedulers(name: str) -> None:
    for scheduler, longest in ((pbs, 15), (slurm, 64)):
        job_name = scheduler.make_job_name(name)
        assert 0 < len(job_name) <= longest and job_name[0].isascii() and job_name[0].isalpha()
        assert all(c.isascii() and (c.isalnum() or c in "._-") for c in job_name)


def test_user_template_extends_packaged_template(tmp_path: Path) -> None:
    user_template = tmp_path / "mine.j2"
    user_template.write_text(
        '{% extends "slurm.sh.j2" %}\n{% block environment %}{{ super() }}echo {{ job.folder }}\n{% endblock %}'
    )
    text = render_script(make_job("slurm", folder=Path("a b"), template=str(user_template), environment={"A": "x y"}))
    assert f"export OMP_NUM_THREADS=8\nexport A='x y'\necho '{Path.cwd()}/a b'\n" in text
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    for invalid_template in ("{{ job.nothing }}", "{% if %}", '{% extends "none.j2" %}'):
        user_template.write_text(invalid_template)
        with pytest.raises(ConfigError, match=r"slurm\.template"):
            render_script(make_job("slurm", template=str(user_template)))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ('"a b" | word', "the filter `word` needs a single word .* not 'a b'"),
        ('"" | word', "the filter `word` needs a single word .* not ''"),
        (r'"a\nb" | line', r"the filter `line` needs a single line, not 'a\\nb'"),
    ],
)
def test_user_template_with_invalid_filter_value_is_refused(value: str, reason: str, tmp_path: Path) -> None:
    user_template = tmp_path / "mine.j2"
    user_template.write_text(f"{{{{ {value} }}}}")
    with pytest.raises(ConfigError, match=rf"slurm\.template: .*mine\.j2: {reason}"):
        render_script(make_job("slurm", template=str(user_template)))


def test_unknown_placeholder_in_start_command_is_refused(tmp_path: Path) -> None:
    text = Path(__file__).parents[3].joinpath("credit/hpc/clusters/pbs.yml").read_text()
    (tmp_path / "here.yml").write_text(text.replace("{ranks_per_node}", "{ppn}"))
    with pytest.raises(ConfigError, match=r"the only placeholders are \{ranks\} and \{ranks_per_node\}"):
        render_script(make_job(str(tmp_path / "here.yml"), nodes=2))


@pytest.mark.parametrize("plugins", [True, False])
def test_plugins_are_found_in_the_job(
    plugins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PBS does not pass the environment of the submission to a job, so the script exports PYTHONPATH."""
    (tmp_path / "my_plugin_of_a_job.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["init", "quickstart"]) == 0
    config = tmp_path / "config.yml"
    config.write_text(capsys.readouterr().out + ("plugins: [my_plugin_of_a_job]\n" if plugins else ""))
    assert main(["submit", str(config), "--cluster", "pbs", "--dry-run", "pbs.walltime=1h"]) == 0
    script = capsys.readouterr().out
    assert (f'[ -n "${{PYTHONPATH+set}}" ] || export PYTHONPATH={tmp_path}' in script) == plugins


def test_verify_job_has_options_and_environment_of_model_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "quickstart"]) == 0
    text = capsys.readouterr().out.replace("runs/quickstart", "$A_RUN")
    (tmp_path / "plugin_of_a_run.py").write_text("")
    for name, extra_lines in {"scores": "", "run": "plugins: [plugin_of_a_run]\n"}.items():
        (tmp_path / f"{name}.yml").write_text(text + extra_lines)
    arguments = ["--cluster", "slurm", "--job", "verify", "--online", "--model", str(tmp_path / "run.yml"), "--dry-run"]
    spread = ["inference.parallelism.tensor=2", "slurm.walltime=1h", "slurm.nodes=2", f"save_loc={tmp_path}"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("A_RUN", str(tmp_path / "a"))
        patched.setenv("PYTHONPATH", str(tmp_path))
        patched.syspath_prepend(tmp_path)
        assert main(["submit", str(tmp_path / "scores.yml"), *arguments, *spread]) == 0
    script = capsys.readouterr().out
    assert f"inference.parallelism.tensor=2 save_loc={tmp_path} --online --model {tmp_path}/run.yml\n" in script
    assert f"A_RUN={tmp_path}/a" in script and f"export PYTHONPATH={tmp_path}" in script


@pytest.mark.parametrize("cluster", cluster_names())
def test_script_with_min_nodes_restarts_training(cluster: str, shellcheck: str, tmp_path: Path) -> None:
    settings = {"nodes": 5, "min_nodes": 3, "launch": "torchrun", "chain": 2}
    folder = tmp_path / "a run's folder"
    text = render_script(make_job(cluster, folder=folder, **settings))
    script = tmp_path / "job.sh"
    script.write_text(text)
    lint = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert lint.returncode == 0, lint.stdout
    # One restart for each node that may fail, and three more.
    assert "--max-restarts=5\n    --nnodes=3:5 " in text and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text
    if load_cluster(cluster).scheduler == "slurm":
        assert "#SBATCH --no-kill" in read_directives(text)
        assert '--ntasks "$nodes" --ntasks-per-node 1' in text and "--kill-on-bad-exit=0" in text
    else:
        assert "#PBS -W tolerate_node_failures=all" in read_directives(text)
        assert '"$node" bash -s <<< "$commands" &' in text and "exec mpiexec" not in text
    # Without min_nodes, and for jobs other than training, the script has no restarts.
    for other in (make_job(cluster, folder=folder, nodes=5), make_job(cluster, "verify", folder, nodes=5, min_nodes=3)):
        assert "max-restarts" not in render_script(other) and "no-kill" not in render_script(other)


def test_impossible_min_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="slurm.min_nodes: 3: must not exceed the 2 nodes"):
        make_job("slurm", nodes=2, min_nodes=3)
    with pytest.raises(ConfigError, match="pbs.min_nodes: 1: mpiexec ends all ranks if a node fails; set pbs.launch"):
        make_job("pbs", nodes=2, min_nodes=1, launch="mpiexec")
