"""Worker of test_checkpoint.py: four ranks save checkpoints in the folder of the test, and load them."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from credit.errors import CheckpointError
from credit.parallel.dtensor import local_shard
from credit.train.checkpoint import checkpoint, retention
from credit.train.checkpoint.async_writer import AsyncCheckpointer
from credit.train.checkpoint.external_weights import adapt_assets_to_weights, load_weights_file
from credit.train.checkpoint.resume import choose_checkpoint, find_weights_file
from credit.train.checkpoint.sharded.reader import read_into

RANKS = 4


class UnevenModel(nn.Module):
    """Model with buffers, and weights whose rows four ranks cannot divide evenly.

    Some weights have fewer rows than there are ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.column = nn.Linear(6, 10)
        self.row = nn.Linear(10, 7)
        self.norm = nn.LayerNorm(7)
        self.narrow = nn.Parameter(torch.zeros(3, 5, 2, dtype=torch.bfloat16))
        self.tiny = nn.Parameter(torch.zeros(1, 3))
        self.register_buffer("vector", torch.zeros(5))
        self.register_buffer("count", torch.tensor(0))


def draw_values(model: nn.Module) -> dict[str, Tensor]:
    """Return full values for every tensor of the model, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    full_values = {}
    for name, tensor in sorted(model.state_dict().items()):
        random_values = torch.randn(tensor.shape, generator=generator)
        full_values[name] = (random_values * 100).to(tensor.dtype)
    return full_values


def build_unsharded() -> nn.Module:
    return UnevenModel()


def build_fsdp4() -> nn.Module:
    return fully_shard(UnevenModel(), mesh=init_device_mesh("cpu", (4,)))


def build_hybrid() -> nn.Module:
    return fully_shard(UnevenModel(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def build_grid() -> nn.Module:
    """Return a model on 2 x 2 ranks with two kinds of mesh.

    The split layers are on the mesh (dp, tp). The other parameters are sharded over a flat mesh of all ranks.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(UnevenModel(), mesh["tp"], {"column": ColwiseParallel(), "row": RowwiseParallel()})
    for layer in (model.column, model.row):
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=init_device_mesh("cpu", (4,)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": build_unsharded,
    "fsdp4": build_fsdp4,
    "hybrid": build_hybrid,
    "grid": build_grid,
}


# Number of ranks that save as if they were on one host, by model.
RANKS_PER_HOST = {"plain": 4, "fsdp4": 2, "hybrid": 4, "grid": 2}


# Files of a checkpoint, by model. Only the first of two replicas writes. If tensor parallelism splits columns, a host
# needs a file for each part.
FILES = {
    "plain": ["index.json", "rank_00000.safetensors"],
    "fsdp4": ["index.json", "rank_00000.safetensors", "rank_00002.safetensors"],
    "hybrid": ["index.json", "rank_00000.safetensors"],
    "grid": [
        "index.json",
        "rank_00000.safetensors",
        "rank_00000_1.safetensors",
        "rank_00002.safetensors",
        "rank_00002_1.safetensors",
    ],
}


def build_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the model itself, and new tensors that stand for the state of an optimizer."""
    model_state = model.state_dict()
    moments = {f"{name}/exp_avg": torch.zeros_like(value) for name, value in model_state.items() if value.ndim}
    return {**model_state, **moments, "steps": torch.tensor(0.0)}


def build_expected_state(full_values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the full values that the tensors of `build_state` are given."""
    moments = {f"{name}/exp_avg": -value for name, value in full_values.items() if value.ndim}
    return {**full_values, **moments, "steps": torch.tensor(17.0)}


def gather_full_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Collective: return the full tensors as torch gathers them."""
    return {name: v.full_tensor() if isinstance(v, DTensor) else v.clone() for name, v in state.items()}


def require_equal(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    gathered_state = gather_full_tensors(state)
    assert gathered_state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(gathered_state[name], value), name
        assert gathered_state[name].dtype == value.dtype, name


def fill_state(model: nn.Module, state: dict[str, Tensor], expected: dict[str, Tensor], folder: Path) -> None:
    """Set the tensors of the model by `copy_complete_tensors`, and the others by arithmetic on DTensors."""
    checkpoint.copy_complete_tensors(model, {name: expected[name] for name in model.state_dict()}, folder)
    with torch.no_grad():
        for name in state:
            if name.endswith("/exp_avg"):
                state[name].copy_(-state[name.removesuffix("/exp_avg")])
        state["steps"].fill_(17.0)


def require_stored_once(path: Path, expected: dict[str, Tensor]) -> None:
    """Require that every element is in the file of exactly one rank."""
    counts = dict.fromkeys(expected, 0)
    for file in (path / "all").glob("*.safetensors"):
        with safe_open(file, "pt") as content:
            for name in content.keys():  # noqa: SIM118
                counts[name] += content.get_tensor(name).numel()
    assert counts == {name: value.numel() for name, value in expected.items()}


def check_save(folder: Path, kind: str, expected: dict[str, Tensor]) -> None:
    """Save on a mesh and check the files.

    During the save, the tensors are overwritten and the ranks run other collectives. `check_load` checks the values.
    """
    os.environ["LOCAL_RANK"] = str(dist.get_rank() % RANKS_PER_HOST[kind])
    model = MODELS[kind]()
    state = build_state(model)
    fill_state(model, state, expected, folder)
    require_equal(state, expected)
    with AsyncCheckpointer(folder / kind) as checkpointer:
        path = checkpointer.save(1, {"all": state}, {"mask": torch.ones(2)}, {"kind": kind}, links=("latest", "best"))
        for value in state.values():
            local_shard(value).zero_()
        for _ in range(50):
            dist.all_reduce(torch.ones(1000))
        checkpointer.wait()
        assert checkpointer.committed_step == 1
    assert checkpoint.resolve_checkpoint(folder / kind, "best", "key") == path
    require_stored_once(path, expected)
    assert sorted(file.name for file in (path / "all").iterdir()) == FILES[kind]


def read_as_only_replica(folder: Path, index: Any, state: dict[str, Tensor]) -> None:
    """Read as usual, but require that only the first replica reads, so that no value is read twice."""
    for tensor in state.values():
        if isinstance(tensor, DTensor):
            replicate_axes = [
                axis for axis, name in enumerate(tensor.device_mesh.mesh_dim_names or ()) if name == "replicate"
            ]
            assert all(tensor.device_mesh.get_local_rank(axis) == 0 for axis in replicate_axes)
        else:
            assert dist.get_rank() == 0
    read_into(folder, index, state)


def check_load(folder: Path, kind: str, expected: dict[str, Tensor]) -> None:
    """Load on a mesh the checkpoints of every mesh, and that of one process without a process group."""
    checkpoint.read_into = read_as_only_replica
    for source in (*MODELS, "single"):
        model = MODELS[kind]()
        state = build_state(model)
        path = checkpoint.resolve_checkpoint(folder / source, "latest", "key")
        checkpoint.load_into(path, "all", state)
        require_equal(state, expected)
        torch_state = build_state(MODELS[kind]())
        dcp.load(torch_state, storage_reader=HuggingFaceStorageReader(str(path / "all")))
        require_equal(torch_state, expected)
    # All ranks report tensors that the checkpoint lacks, or has in addition.
    steps = state.pop("steps")
    for wrong_state, fragment in (
        (dict(state), "1 unexpected (steps)"),
        ({**state, "x": state["tiny"]}, "1 missing (x)"),
    ):
        # The first state is wrong on rank 2 only.
        if fragment.startswith("1 unexpected") and dist.get_rank() != 2:
            wrong_state["steps"] = steps
        assert fragment in catch_error(lambda wrong_state=wrong_state: checkpoint.load_into(path, "all", wrong_state))


def catch_error(action: Callable[[], object]) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    raise AssertionError("no CheckpointError")


def check_full_disk(folder: Path, expected: dict[str, Tensor]) -> None:
    """Check that a full disk of one rank fails the save of all ranks, and that the next save succeeds.

    The older checkpoint stays valid.
    """
    os.environ["LOCAL_RANK"] = str(dist.get_rank() % 2)
    model = build_fsdp4()
    state = build_state(model)
    fill_state(model, state, expected, folder)
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    retention_policy = retention.Retention(last=1)
    with AsyncCheckpointer(folder / "fsdp4") as checkpointer:
        if dist.get_rank() == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard_limit))
        checkpointer.save(2, {"all": state}, {}, {})
        assert "File too large" in catch_error(checkpointer.wait)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))
        assert checkpoint.find_newest_checkpoint(folder / "fsdp4").name == "step_00000001"
        dist.barrier()
        assert sorted(path.name for path in (folder / "fsdp4").iterdir()) == ["best", "latest", "step_00000001"]
        dist.barrier()
        checkpointer.save(3, {"all": state}, {}, {}, keep=retention_policy, synchronous=True)
        assert [path.name for path in checkpoint.list_checkpoints(folder / "fsdp4")] == [
            "step_00000001",
            "step_00000003",
        ]
        checkpointer.move_link("best", 3)
        assert checkpoint.resolve_checkpoint(folder / "fsdp4", "best", "key").name == "step_00000003"


def check_damage(folder: Path) -> None:
    """Check that all ranks report damage, which one rank finds in its share, and choose the same older checkpoint."""
    for name in ("index.json", *(f"rank_{number:05d}.safetensors" for number in (0, 2))):
        damaged_file = folder / "fsdp4" / "step_00000003" / "all" / name
        content = damaged_file.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            damaged_file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        dist.barrier()
        assert damaged_file.name in checkpoint.verify_checkpoint(damaged_file.parents[1])
        assert checkpoint.find_newest_checkpoint(folder / "fsdp4").name == "step_00000001"
        assert damaged_file.name in catch_error(lambda: checkpoint.resolve_checkpoint(folder / "fsdp4", "best", "key"))
        dist.barrier()
        if dist.get_rank() == 0:
            damaged_file.write_bytes(content)
        dist.barrier()


def check_weights_file(folder: Path) -> None:
    """Check that each rank reads its part of a weights file.

    If only rank 0 has the file, all ranks make the same decision and raise the same error.
    """
    full_values = draw_values(build_unsharded())
    if dist.get_rank() == 0:
        save_file(full_values, folder / "all.safetensors")
        torch.save(full_values, folder / "all.pt")
    dist.barrier()
    for kind, build in MODELS.items():
        model = build()
        load_weights_file(model, folder / ("all.pt" if kind == "hybrid" else "all.safetensors"), seed=0)
        require_equal(model.state_dict(), full_values)
    has_file, model = dist.get_rank() == 0, build_fsdp4()
    path = folder / ("weights.safetensors" if has_file else "absent.pt")
    if has_file:
        save_file(draw_values(build_unsharded()), path)
    config = SimpleNamespace(trainer=SimpleNamespace(resume=str(path)))
    assert choose_checkpoint(config, folder / "new") is None
    assert find_weights_file(config, None) == path
    assert "absent.pt: cannot be read" in catch_error(lambda: load_weights_file(model, path, seed=0))
    if has_file:
        path.write_bytes(b"nothing")
    assert "cannot be read as safetensors" in catch_error(lambda: adapt_assets_to_weights(None, None, None, path))


def refuse_call(*_: Any) -> None:
    raise AssertionError("a thousand ranks would do this, each for all of them")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    DefaultSavePlanner.create_global_plan = refuse_call
    if dist.get_rank():
        checkpoint.read_index = refuse_call
    expected = build_expected_state(draw_values(build_unsharded()))
    for kind in MODELS:
        check_save(folder, kind, expected)
    for kind in MODELS:
        check_load(folder, kind, expected)
    check_full_disk(folder, expected)
    check_damage(folder)
    check_weights_file(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
