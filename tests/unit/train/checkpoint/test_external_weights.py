"""Tests of weights of other programs: their place in a file, plain names, and the refusal of other objects."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from credit.errors import CheckpointError
from credit.train.checkpoint.external_weights import read_state_file

STATE = {"layers.0.weight": torch.ones(2, 3), "layers.module.bias": torch.zeros(2), "scale": torch.tensor(2.0)}


@pytest.mark.parametrize("nested", [(), ("model_state_dict",), ("model",), ("state_dict",), ("model", "state_dict")])
@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.module.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: "_fsdp_wrapped_module." + name.replace("0.", "0._fsdp_wrapped_module.", 1),
        lambda name: "module." + name.replace("0.", "0._fsdp_wrapped_module._checkpoint_wrapped_module.", 1),
    ],
)
def test_torch_files_are_read_with_plain_names(tmp_path: Path, nested: tuple[str, ...], rename) -> None:
    content: dict = {rename(name): value for name, value in STATE.items()}
    for key in reversed(nested):
        content = {key: content, "epoch": 3, "optimizer_state_dict": {"state": {}}}
    torch.save(content, tmp_path / "file.pt")
    state = read_state_file(tmp_path / "file.pt")
    assert state.keys() == STATE.keys()
    assert all(torch.equal(state[name], value) for name, value in STATE.items())


def test_names_of_torch_wrappers_are_removed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    model[0] = checkpoint_wrapper(torch.compile(model[0], backend="eager"))
    torch.save(torch.compile(model, backend="eager").state_dict(), tmp_path / "file.pt")
    state = read_state_file(tmp_path / "file.pt")
    assert state.keys() == plain.keys() and all(torch.equal(state[name], value) for name, value in plain.items())


def test_safetensors_files_are_read_with_plain_names(tmp_path: Path) -> None:
    save_file({f"module.{name}": value for name, value in STATE.items()}, tmp_path / "file.safetensors")
    assert read_state_file(tmp_path / "file.safetensors").keys() == STATE.keys()


class MaliciousObject:
    """Object whose unpickling runs code."""

    def __reduce__(self):
        return print, ("executed",)


def test_files_without_a_state_dict_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    file = tmp_path / "file.pt"
    objects_message, no_state_dict_message = (
        "contains Python objects in addition to tensors .*state_dict",
        "does not contain a state dict",
    )
    for content, says in (
        ({"model": MaliciousObject()}, objects_message),
        ({"weights": STATE}, no_state_dict_message),
        ({"epoch": 3}, no_state_dict_message),
        ({}, no_state_dict_message),
        ([torch.ones(2)], no_state_dict_message),
        ({"a.b": torch.ones(2), "a._orig_mod.b": torch.ones(2)}, "two tensors have the same name"),
    ):
        torch.save(content, file)
        with pytest.raises(CheckpointError, match=says):
            read_state_file(file)
    file.write_bytes(pickle.dumps(MaliciousObject(), protocol=2))
    with pytest.raises(CheckpointError, match=objects_message):
        read_state_file(file)
    for missing_name in ("absent.pt", "absent.safetensors"):
        with pytest.raises(CheckpointError, match="No such file"):
            read_state_file(tmp_path / missing_name)
    assert "executed" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello\n",
        b"\x80\x02hello world",
        bytes(range(256)) * 8,
        pickle.dumps({"a": [1]}),
        b"data: {}\n# a config\n",
    ],
    ids=["empty", "text", "pickle's beginning", "bytes", "plain pickle", "yaml"],
)
def test_files_of_other_formats_are_refused(tmp_path: Path, content: bytes) -> None:
    """The message must never recommend unpickling without protection, as errors of torch's unpickler do."""
    (tmp_path / "junk.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a file of torch.save, or is damaged") as caught:
        read_state_file(tmp_path / "junk.pt")
    assert "weights_only" not in str(caught.value) and "\n" not in str(caught.value)
    (tmp_path / "junk.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a safetensors file, or is damaged"):
        read_state_file(tmp_path / "junk.safetensors")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_file_of_torch_is_refused(tmp_path: Path, zipped: bool) -> None:
    file = tmp_path / "file.pt"
    torch.save({"w": torch.zeros(100, 100)}, file, _use_new_zipfile_serialization=zipped)
    file.write_bytes(file.read_bytes()[:20_000])
    with pytest.raises(CheckpointError, match="or is damaged; copy it again"):
        read_state_file(file)


@pytest.mark.parametrize("name", ["file.safetensors", "file.pt"])
def test_a_file_is_mapped_and_not_read(tmp_path: Path, name: str) -> None:
    """With a mapped file, a rank reads only the parts that it needs."""
    path = tmp_path / name
    state = {"weight": torch.arange(5000.0)}
    if path.suffix == ".pt":
        torch.save(state, path)
    else:
        save_file(state, path)
    weight = read_state_file(path)["weight"]
    mappings = Path("/proc/self/maps").read_text().splitlines()
    address = weight.untyped_storage().data_ptr()
    mapped_files = []
    for mapping in mappings:
        begin, end = (int(number, 16) for number in mapping.split()[0].split("-"))
        if begin <= address < end:
            mapped_files.append(mapping.split()[-1])
    assert mapped_files == [str(path)]
    assert torch.equal(weight, state["weight"])
