"""Job scripts: every template for every site is sound shell, and says to the scheduler what was asked for."""

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


def job(
    cluster: str, kind: str = "train", folder: Path = Path("runs/x"), spread: bool = False, online: bool = False,
    trials: tuple[str, ...] = (), **asked: object,
) -> Job:  # fmt: skip
    site = load_cluster(cluster)
    section = PbsConfig if site.scheduler == "pbs" else SlurmConfig
    request = JobRequest(
        kind, experiment="my run", folder=folder, config=Path("my config.yml"), overrides=["seed=1", "pbs.queue=x"],
        spread=spread, online=online, trials=trials,
    )  # fmt: skip
    return build_job(request, site, section(**{"account": "P1", "walltime": "90min", **asked}))


def directives(text: str) -> list[str]:
    """Return what the scheduler reads: nothing after the first command."""
    lines = text.splitlines()[1:]
    return lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]


@pytest.mark.parametrize("cluster", cluster_names())
@pytest.mark.parametrize("kind", JOB_KINDS)
def test_every_script_is_sound(cluster: str, kind: str, shellcheck: str, tmp_path: Path) -> None:
    launchers = ("torchrun", "mpiexec" if load_cluster(cluster).scheduler == "pbs" else "srun")
    scripts = []
    for number, (nodes, launch) in enumerate((n, launch) for n in (1, 3) for launch in launchers):
        asked = {"nodes": nodes, "launch": launch, "chain": 4, "setup": ["ulimit -c 0"], "environment": {"A": "it's"}}
        scripts.append(tmp_path / f"{number}.sh")
        # of verify: from files and online, spread or not
        spread, online = number % 2 == 0, kind == "verify" and number % 2 == 0
        scripts[-1].write_text(render_script(job(cluster, kind, tmp_path / "a run's folder", spread, online, **asked)))
    for path in scripts:
        subprocess.run(["bash", "-n", path], check=True)
    checked = subprocess.run([shellcheck, *scripts], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("cluster", cluster_names())
def test_the_script_of_a_sweep_is_sound(cluster: str, shellcheck: str, tmp_path: Path) -> None:
    scripts = []
    for num_trials in (1, 12):
        trials = tuple(f"trial_{number:04d}" for number in range(1, num_trials + 1))
        text = render_script(job(cluster, folder=tmp_path / "a sweep's folder", trials=trials, nodes=2, chain=3))
        is_slurm = load_cluster(cluster).scheduler == "slurm"
        directive = "#SBATCH --array=1-12" if is_slurm else "#PBS -J 1-12"
        assert (directive in directives(text)) == (num_trials == 12)
        # A single trial is no array, which PBS would refuse.
        assert ("-J 1-" in text or "--array" in text) == (num_trials == 12)
        # A chain of arrays is not supported.
        assert "requeue" not in text.replace("#SBATCH --requeue", "")
        assert 'train "$config"' in text
        scripts.append(tmp_path / f"{num_trials}.sh")
        scripts[-1].write_text(text)
    checked = subprocess.run([shellcheck, *scripts], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_derecho_on_four_nodes() -> None:
    text = render_script(job("derecho", nodes=4, resources={"job_priority": "economy"}))
    assert directives(text) == [
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
    text = render_script(job("derecho", nodes=4, launch="mpiexec"))
    assert "exec mpiexec -n 16 --ppn 4 --cpu-bind none " in text and "torch.distributed" not in text


def test_perlmutter_with_srun() -> None:
    text = render_script(job("perlmutter", nodes=2, chain=5, constraint="gpu&hbm80g"))
    assert directives(text) == [
        "#SBATCH --job-name=my_run", "#SBATCH --output=%x-%j.out", "#SBATCH --open-mode=append", "#SBATCH --requeue",
        "#SBATCH --account=P1", "#SBATCH --qos=regular", "#SBATCH --constraint=gpu&hbm80g", "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4", "#SBATCH --cpus-per-task=32", "#SBATCH --gpus-per-node=4",
        "#SBATCH --time=01:30:00", "#SBATCH --signal=B:USR2@300",
    ]  # fmt: skip
    assert "exec srun --ntasks 8 --ntasks-per-node 4 --gpu-bind none " in text
    assert '"${SLURM_RESTART_COUNT:-0}" -lt 4 ]' in text
    assert "scontrol" not in render_script(job("perlmutter", nodes=2)), "one job is no chain"


def test_what_needs_no_gpu_asks_for_none() -> None:
    text = render_script(job("derecho", "preprocess", nodes=4, chain=3))
    assert "#PBS -l select=1:ncpus=128:mpiprocs=1\n" in text and "torch.distributed" not in text
    assert text.rstrip().endswith(f"-m credit.cli.main preprocess '{Path.cwd()}/my config.yml' seed=1")
    for kind in ("preprocess", "verify"):
        assert "--gpus" not in render_script(job("slurm", kind)) and "--constraint=cpu" in render_script(
            job("perlmutter", kind)
        )


def test_scoring_is_one_job_of_all_nodes() -> None:
    """Ranks without GPUs from files; with them where the forecasts are made meanwhile."""
    text = render_script(job("derecho", "verify", nodes=3, chain=3))
    assert "#PBS -l select=3:ncpus=128:mpiprocs=16\n" in text and "#PBS -J" not in text
    assert "export OMP_NUM_THREADS=8\n" in text and "id=${PBS_JOBID-}\n" in text
    assert "--nnodes=3 --nproc-per-node=16 " in text and f"verify '{Path.cwd()}/my config.yml' seed=1\n" in text
    text = render_script(job("derecho", "verify", online=True, nodes=3))
    assert "#PBS -l select=3:ncpus=64:mpiprocs=4:ngpus=4\n" in text and "--nnodes=3 --nproc-per-node=4 " in text
    assert text.rstrip().endswith("seed=1 --online")
    text = render_script(job("perlmutter", "verify", nodes=2))
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=16\n#SBATCH --cpus-per-task=16\n" in text
    assert "exec srun --ntasks 32 --ntasks-per-node 16 " in text and "SRUN_CPUS_PER_TASK=" in text
    assert "torch.distributed" not in render_script(job("casper", "verify", ranks_per_node=1))


def test_a_rollout_is_an_array_of_whole_nodes() -> None:
    text = render_script(job("derecho", "rollout", nodes=3))
    assert "#PBS -J 1-3\n" in text and "#PBS -l select=1:ncpus=64:mpiprocs=4:ngpus=4\n" in text and "/12\n" in text
    text = render_script(job("slurm", "rollout", nodes=3))
    assert "#SBATCH --array=1-3\n" in text and "#SBATCH --nodes=1\n" in text and "%x-%A_%a.out" in text
    text = render_script(job("derecho", "rollout", spread=True, nodes=3))
    assert "#PBS -J" not in text and "#PBS -l select=3:" in text and "--part" not in text
    assert "--nnodes=3 --nproc-per-node=4 " in text
    text = render_script(job("perlmutter", "rollout", spread=True, nodes=3))
    assert "--array" not in text and "exec srun --ntasks 12 --ntasks-per-node 4 " in text
    # PBS has no array of one
    assert "#PBS -J" not in render_script(job("derecho", "rollout"))


@pytest.mark.parametrize("name", NAMES)
def test_names_that_schedulers_take(name: str) -> None:
    for scheduler, longest in ((pbs, 15), (slurm, 64)):
        job_name = scheduler.make_job_name(name)
        assert 0 < len(job_name) <= longest and job_name[0].isascii() and job_name[0].isalpha()
        assert all(c.isascii() and (c.isalnum() or c in "._-") for c in job_name)


def test_a_template_of_one_s_own(tmp_path: Path) -> None:
    user_template = tmp_path / "mine.j2"
    user_template.write_text(
        '{% extends "slurm.sh.j2" %}\n{% block environment %}{{ super() }}echo {{ job.folder }}\n{% endblock %}'
    )
    text = render_script(job("slurm", folder=Path("a b"), template=str(user_template), environment={"A": "x y"}))
    assert f"export OMP_NUM_THREADS=8\nexport A='x y'\necho '{Path.cwd()}/a b'\n" in text
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    for wrong in ("{{ job.nothing }}", "{% if %}", '{% extends "none.j2" %}'):
        user_template.write_text(wrong)
        with pytest.raises(ConfigError, match=r"slurm\.template"):
            render_script(job("slurm", template=str(user_template)))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ('"a b" | word', "the filter `word` needs a single word .* not 'a b'"),
        ('"" | word', "the filter `word` needs a single word .* not ''"),
        (r'"a\nb" | line', r"the filter `line` needs a single line, not 'a\\nb'"),
    ],
)
def test_a_template_of_one_s_own_with_a_wrong_filter(value: str, reason: str, tmp_path: Path) -> None:
    user_template = tmp_path / "mine.j2"
    user_template.write_text(f"{{{{ {value} }}}}")
    with pytest.raises(ConfigError, match=rf"slurm\.template: .*mine\.j2: {reason}"):
        render_script(job("slurm", template=str(user_template)))


def test_a_start_that_cannot_be_filled_in(tmp_path: Path) -> None:
    text = Path(__file__).parents[3].joinpath("credit/hpc/clusters/pbs.yml").read_text()
    (tmp_path / "here.yml").write_text(text.replace("{ranks_per_node}", "{ppn}"))
    with pytest.raises(ConfigError, match=r"the only placeholders are \{ranks\} and \{ranks_per_node\}"):
        render_script(job(str(tmp_path / "here.yml"), nodes=2))


@pytest.mark.parametrize("plugins", [True, False])
def test_plugins_are_found_in_the_job(
    plugins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PBS starts a job without the environment of its submission."""
    (tmp_path / "my_plugin_of_a_job.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["init", "quickstart"]) == 0
    config = tmp_path / "config.yml"
    config.write_text(capsys.readouterr().out + ("plugins: [my_plugin_of_a_job]\n" if plugins else ""))
    assert main(["submit", str(config), "--cluster", "pbs", "--dry-run", "pbs.walltime=1h"]) == 0
    script = capsys.readouterr().out
    assert (f'[ -n "${{PYTHONPATH+set}}" ] || export PYTHONPATH={tmp_path}' in script) == plugins


def test_a_job_of_scores_names_the_run_that_forecasts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "quickstart"]) == 0
    text = capsys.readouterr().out.replace("runs/quickstart", "$A_RUN")
    (tmp_path / "plugin_of_a_run.py").write_text("")
    for name, more in {"scores": "", "run": "plugins: [plugin_of_a_run]\n"}.items():
        (tmp_path / f"{name}.yml").write_text(text + more)
    asked = ["--cluster", "slurm", "--job", "verify", "--online", "--model", str(tmp_path / "run.yml"), "--dry-run"]
    spread = ["inference.parallelism.tensor=2", "slurm.walltime=1h", "slurm.nodes=2", f"save_loc={tmp_path}"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("A_RUN", str(tmp_path / "a"))
        patched.setenv("PYTHONPATH", str(tmp_path))
        patched.syspath_prepend(tmp_path)
        assert main(["submit", str(tmp_path / "scores.yml"), *asked, *spread]) == 0
    script = capsys.readouterr().out
    assert f"inference.parallelism.tensor=2 save_loc={tmp_path} --online --model {tmp_path}/run.yml\n" in script
    assert f"A_RUN={tmp_path}/a" in script and f"export PYTHONPATH={tmp_path}" in script


@pytest.mark.parametrize("cluster", cluster_names())
def test_a_job_that_goes_on_without_nodes(cluster: str, shellcheck: str, tmp_path: Path) -> None:
    asked = {"nodes": 5, "min_nodes": 3, "launch": "torchrun", "chain": 2}
    folder = tmp_path / "a run's folder"
    text = render_script(job(cluster, folder=folder, **asked))
    script = tmp_path / "job.sh"
    script.write_text(text)
    checked = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    # One restart for each node that may fail, and three more.
    assert "--max-restarts=5\n    --nnodes=3:5 " in text and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text
    if load_cluster(cluster).scheduler == "slurm":
        assert "#SBATCH --no-kill" in directives(text)
        assert '--ntasks "$nodes" --ntasks-per-node 1' in text and "--kill-on-bad-exit=0" in text
    else:
        assert "#PBS -W tolerate_node_failures=all" in directives(text)
        assert '"$node" bash -s <<< "$commands" &' in text and "exec mpiexec" not in text
    # Without min_nodes, and for other jobs, a script is as before.
    for other in (job(cluster, folder=folder, nodes=5), job(cluster, "verify", folder, nodes=5, min_nodes=3)):
        assert "max-restarts" not in render_script(other) and "no-kill" not in render_script(other)


def test_impossible_numbers_of_nodes() -> None:
    with pytest.raises(ConfigError, match="slurm.min_nodes: 3: must not exceed the 2 nodes"):
        job("slurm", nodes=2, min_nodes=3)
    with pytest.raises(ConfigError, match="pbs.min_nodes: 1: mpiexec ends all ranks if a node fails; set pbs.launch"):
        job("pbs", nodes=2, min_nodes=1, launch="mpiexec")
