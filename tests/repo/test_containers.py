"""Container recipes: the lock file satisfies setup.cfg, and the recipes copy files that exist. No image is built."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Extras that the images contain.
EXTRAS = ("grib", "cloud", "units", "energy", "cluster", "tensorboard", "wandb")


@pytest.fixture
def folder(repository: Path) -> Path:
    return repository / "applications" / "containers"


def read_lock(folder: Path) -> dict[str, str]:
    """Return the version of each package in the lock file, by normalised name."""
    versions = {}
    for line in (folder / "requirements.lock").read_text().splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"([\w.-]+)==([\w.+]+)", line)
            assert match is not None, f"{line}: not a name and a version"
            versions[canonicalize_name(match[1])] = match[2]
    return versions


def list_requirements(setup_cfg: configparser.ConfigParser) -> list[Requirement]:
    """Return the requirements in setup.cfg of the package and of the extras in the images."""
    texts = [setup_cfg["options"]["install_requires"]]
    texts += [setup_cfg["options.extras_require"][extra] for extra in EXTRAS]
    return [Requirement(line) for line in "\n".join(texts).splitlines() if line and not line.startswith("#")]


def test_the_lock_file_satisfies_setup_cfg(repository: Path, folder: Path) -> None:
    setup_cfg = configparser.ConfigParser()
    setup_cfg.read(repository / "setup.cfg")
    versions = read_lock(folder)
    requirements = list_requirements(setup_cfg)
    assert len(requirements) > 25
    for requirement in requirements:
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is missing; docs/containers.md says how to renew the file"
        assert requirement.specifier.contains(version), f"{requirement}: the lock file has {version}"
    # The images are for GPUs, so torch must not be a build for CPUs only.
    assert "+" not in versions["torch"] and any(name.startswith("nvidia-nccl") for name in versions)


def test_the_command_in_the_lock_file_names_the_extras(folder: Path) -> None:
    assert tuple(re.findall(r"--extra (\w+)", (folder / "requirements.lock").read_text())) == EXTRAS


def docker_instructions(folder: Path) -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments, without comments and line breaks."""
    text = re.sub(r"^#.*\n", "", (folder / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    instructions = []
    for line in lines:
        if line.strip():
            name, _, arguments = line.partition(" ")
            instructions.append((name, " ".join(arguments.split())))
    return instructions


def test_both_recipes_have_the_same_content(repository: Path, folder: Path) -> None:
    instructions = docker_instructions(folder)
    assert {name for name, _ in instructions} == {"FROM", "RUN", "COPY", "ENV", "ENTRYPOINT", "CMD"}
    definition = (folder / "apptainer.def").read_text()
    (base,) = [arguments for name, arguments in instructions if name == "FROM"]
    assert f"From: {base}\n" in definition
    # Every copied path exists and is not excluded from the context of Docker.
    ignored = (folder / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [path for name, arguments in instructions if name == "COPY" for path in arguments.split()[:-1]]
    for path in copied:
        assert (repository / path).exists() and f"!{path}" in ignored
        assert re.search(rf"^    {re.escape(path)} /src/{Path(path).name}$", definition, re.MULTILINE)
    # Both run the same commands.
    for name, arguments in instructions:
        if name == "RUN":
            for command in arguments.split(" && "):
                assert command in definition, command


def test_interpreter_of_job_scripts_starts_container(folder: Path, tmp_path: Path) -> None:
    apptainer = tmp_path / "apptainer"
    apptainer.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    apptainer.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    script = folder / "python_in_container.sh"
    words = [str(script), "-m", "credit.cli.main", "train", "a b.yml"]
    failed = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert failed.returncode != 0 and "CREDIT_IMAGE" in failed.stderr
    environment |= {"CREDIT_IMAGE": "my image.sif", "CREDIT_BINDS": "/data,/scratch"}
    started = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert started.stdout.splitlines() == [
        "exec", "--nv", "--bind", "/data,/scratch", "my image.sif", "python", *words[1:],
    ]  # fmt: skip
