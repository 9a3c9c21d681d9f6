"""Worker of test_lora: trains adapters on several meshes of four ranks and writes the results."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from credit.models import lora
from credit.models.initialise import build_generator, initial_values
from credit.models.wxformer import WXFormer
from credit.parallel.blocks.marks import strip_wrapper_prefixes
from credit.parallel.dtensor import local_shard
from credit.parallel.mesh import DeviceGrid, build_mesh, plan_degrees
from credit.parallel.parallelize import parallelize
from credit.parallel.process_info import process_group, read_process_info
from credit.parallel.reduce import mean_over_ranks
from credit.parallel.state.materialise import allocate_, fill_, require_filled, take_local_part
from tests.parallel.training import cases

MESHES = ("4x1", "2x2")
CASES = (
    cases.Case(True, True, 1, 2, steps=2),
    cases.Case(False, False, 2, 1, "pixel_shuffle", steps=2),
    cases.Case(True, "selective", 1, 1, steps=2),
    cases.Case(False, False, 1, 1, steps=2, optimizer="muon"),
)
TARGETS = ["*.to_qkv", "*.to_out", "*.expand", "*.contract", "*.position_bias.layers.0", "decoder.*"]


def build(case: cases.Case, mesh: DeviceGrid, data: str) -> nn.Module:
    """Return the network of a case with adapters, with values and distributed over its ranks."""
    with torch.device("meta"):
        plain, model = (WXFormer.from_kwargs(**cases.settings(case)) for _ in range(2))
    lora.apply_lora(model, TARGETS, rank=3, alpha=6.0)
    parallelize(
        model, mesh.device_mesh, shard=mesh.device_mesh is not None and data != "none", checkpoint=case.checkpoint
    )
    allocate_(model, torch.device("cpu"))
    base = lora.base_state_dict(model, set())
    for name, value in initial_values(plain, seed=7):
        local_shard(base[name]).copy_(take_local_part(value, base[name]))
    fill_(model, map(randomise_b, lora.initial_adapters(model, seed=7)))
    require_filled(model)
    return model.train()


def randomise_b(name_and_value: tuple[str, Tensor]) -> tuple[str, Tensor]:
    """Return name and value of a factor of an adapter. b becomes random, since a has no gradient while b is zero."""
    name, value = name_and_value
    if name.endswith(".b"):
        value = 0.05 * torch.randn(value.shape, generator=build_generator(7, name))
    return name, value


def train(case: cases.Case, mesh: DeviceGrid, data: str) -> dict[str, Tensor]:
    """Collective: train the adapters and return losses, norms, first gradients and saved tensors, as full tensors."""
    model = build(case, mesh, data)
    frozen_values = {name: local_shard(p).clone() for name, p in model.named_parameters() if not p.requires_grad}
    step, optimizer, average = cases.build_step(case, model, False, mesh)
    gradients: dict[str, Tensor] = {}

    def record_first_gradients(*_: object) -> None:
        if not gradients:
            gradients_by_name = {
                strip_wrapper_prefixes(name): p.grad for name, p in model.named_parameters() if p.grad is not None
            }
            gradients.update(
                {f"gradient/{name}": cases.to_full_tensor(gradient) for name, gradient in gradients_by_name.items()}
            )

    optimizer.register_step_pre_hook(record_first_gradients)
    batch_iterator, losses, norms = cases.batches(case, mesh), [], []
    for number in range(case.steps):
        result = step(batch_iterator, number, 3e-3)
        losses.append(mean_over_ranks(result.loss))
        norms.append(result.grad_norm)
    with average.applied():
        pass
    for name, p in model.named_parameters():
        assert p.requires_grad or torch.equal(local_shard(p), frozen_values[name]), f"{name} is frozen and has changed"
    saved_tensors = {
        f"saved/{name}": cases.to_full_tensor(tensor) for name, tensor in lora.checkpoint_state_dict(model).items()
    }
    require_equal_peers(model)
    return {"loss": torch.stack(losses), "norm": torch.stack(norms), **gradients, **saved_tensors}


def require_equal_peers(model: nn.Module) -> None:
    """Require that adapters that are not split are equal, bit for bit, on tensor-parallel ranks."""
    for name, p in model.named_parameters():
        if isinstance(p, DTensor) and "tp" in p.device_mesh.mesh_dim_names:
            axis = p.device_mesh.mesh_dim_names.index("tp")
            if p.placements[axis].is_replicate():
                adapter = local_shard(p).contiguous()
                peers = [torch.empty_like(adapter) for _ in range(p.device_mesh.size(axis))]
                dist.all_gather(peers, adapter, group=p.device_mesh.get_group(axis))
                assert all(torch.equal(peer, adapter) for peer in peers), (
                    f"{name} differs between tensor-parallel ranks"
                )


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    process_info = read_process_info()
    with process_group(process_info, torch.device("cpu"), timeout_minutes=2):
        for name in MESHES:
            mesh = build_mesh(plan_degrees(cases.parallelism(name), process_info.world), process_info.rank, "cpu")
            for number, case in enumerate(CASES):
                results = train(case, mesh, cases.MESHES[name]["data"])
                if process_info.is_main:
                    save_file(results, folder / f"{name}-{number}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
