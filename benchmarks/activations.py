"""Memory of a training step of one sample, by the number of tensor-parallel ranks and by checkpointing.

The step runs on the meta device, in float32, with rank 0's part of the split layers. As on a GPU, attention stores no
probabilities. `kept` is the memory that the forward pass stores for the backward pass. `peak` includes the gradients of
this rank's weights. The weights themselves are not counted. The column `weights` is the memory of the weights divided
by sigma (spectral norm). The column `fields` is the memory of input, padding and output.

    python benchmarks/activations.py [--network published]
"""

from __future__ import annotations

import argparse
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from live_memory import LiveMemory
from networks import PUBLISHED, STARTER
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from credit.models.layers.cross_scale_embedding import CrossScaleEmbedding
from credit.models.layers.spectral_norm import SpectralNorm
from credit.models.layers.transformer_layer import TransformerLayer
from credit.models.wxformer import WXFormer
from credit.models.wxformer.model import Decoder
from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks
from credit.parallel.dtensor import local_shard
from credit.parallel.tensor.tensor_parallel import apply_tensor_parallel

PARTS = {TransformerLayer: "layers", CrossScaleEmbedding: "embeddings", Decoder: "decoder", SpectralNorm: "weights"}


def compute_gpu_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, dropout_p: float) -> Tensor:
    """Return attention (batch, heads, tokens, dim), computed with the memory-efficient kernel of GPUs."""
    bias = attn_mask.expand(*q.shape[:2], *attn_mask.shape)
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p)[0]


def count_memory_by_part(model: nn.Module, live: LiveMemory) -> None:
    """Register hooks that record the memory of each module under the name of its part of the network (`PARTS`)."""
    # Parts around the present one, since the modules of a part may lie inside those of another.
    enclosing_parts: list[str] = []

    def enter(part: str, *_: object) -> None:
        enclosing_parts.append(live.part)
        live.part = part

    def leave(*_: object) -> None:
        live.part = enclosing_parts.pop()

    for module in model.modules():
        part = PARTS.get(type(module))
        if part is not None:
            # Prepended, so that the other hooks of the module count for its part.
            module.register_forward_pre_hook(functools.partial(enter, part), prepend=True)
            module.register_forward_hook(leave, always_call=True)


def measure(settings: dict, ranks: int, checkpoint: bool | str) -> tuple[dict[str, int], int]:
    """Return part -> bytes that a forward pass stores for the backward pass, and the peak of the step in bytes.

    Args:
        settings: arguments of the network's constructor.
        ranks: number of tensor-parallel ranks.
        checkpoint: value of ``trainer.activation_checkpoint``.
    """
    with torch.device("meta"):
        model = WXFormer.from_kwargs(**settings)
        fields = torch.empty(1, *model.spec.in_shape)
    if ranks > 1:
        apply_tensor_parallel(model, init_device_mesh("cpu", (ranks,)))
    if checkpoint:
        checkpoint_blocks(model, checkpoint)
    model_tensors = (*model.parameters(), *model.buffers())
    live = LiveMemory(existing_tensors=map(local_shard, model_tensors))
    count_memory_by_part(model, live)
    live.part = "fields"
    with live:
        result = model.train()(fields)
        saved_bytes = dict(live.now)
        live.part = "backward"
        result.square().mean().backward()
    return saved_bytes, live.peak


def main() -> None:
    """Print a row for each number of ranks and kind of checkpointing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="published", choices=("published", "starter"))
    networks = {"published": PUBLISHED, "starter": STARTER}
    settings = networks[parser.parse_args().network]
    F.scaled_dot_product_attention = compute_gpu_attention
    # The other ranks do not exist, so nothing is summed.
    dist.all_reduce = lambda *_, **__: None
    parts = [*PARTS.values(), "fields"]
    print(f"| tensor | checkpointing | {' | '.join(parts)} | kept [MB] | peak [MB] |")
    print("|" + "---|" * (len(parts) + 4))
    for ranks in (1, 2, 4):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        for checkpoint in (False, "selective", True):
            saved_bytes, peak = measure(settings, ranks, checkpoint)
            by_part = " | ".join(f"{saved_bytes.get(part, 0) / 1e6:.0f}" for part in parts)
            total_saved = sum(saved_bytes.values())
            print(
                f"| {ranks} | {checkpoint} | {by_part} | {total_saved / 1e6:.0f} | {peak / 1e6:.0f} |",
                flush=True,
            )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
