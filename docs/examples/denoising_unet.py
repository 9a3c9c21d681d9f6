"""Train a small denoising U-Net with FSDP2 and tensor parallelism, without the trainer of `credit`.

    python denoising_unet.py FOLDER                                            # one process
    torchrun --nproc-per-node=4 denoising_unet.py FOLDER --tensor-ranks 2      # 2 x 2 ranks

Both print the same losses. Halfway through, the training state is saved to FOLDER with torch's distributed checkpoint;
a second model loads it and finishes the training with the same losses again.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from credit.parallel.parallelize import parallelize
from credit.parallel.process_info import process_group, read_process_info
from credit.parallel.reduce import clip_grad_norm_

# Shape suffixes: B batch, C channels, H rows, W columns, N tokens, E embedding.
ROWS, COLUMNS, FIELDS = 16, 32, 2
BATCH, STEPS = 8, 6


class ResidualBlock(nn.Module):
    """Two convolutions, shifted by the embedding of the noise level."""

    # Marks the block as a unit: sharded, gathered and recomputed as a whole.
    _fsdp2_shard = True

    def __init__(self, in_channels: int, out_channels: int, embedding: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, in_channels)
        self.first = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.shift = nn.Linear(embedding, out_channels)
        self.second = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.residual = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x_BCHW: Tensor, embedding_BE: Tensor) -> Tensor:
        hidden_BCHW = self.first(F.silu(self.norm(x_BCHW)))
        hidden_BCHW = hidden_BCHW + self.shift(embedding_BE)[:, :, None, None]
        return self.residual(x_BCHW) + self.second(F.silu(hidden_BCHW))


class Attention(nn.Module):
    """Self-attention over the tokens of a sample."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        # Tensor parallelism reads this number and gives each rank whole heads.
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BNC: Tensor) -> Tensor:
        # On a tensor-parallel rank the three layers return the channels of its own heads only, so the number of
        # heads is left to `unflatten`, and the width of a head is computed from the whole layer.
        head_width = self.query.in_features // self.heads
        query = self.query(x_BNC).unflatten(-1, (-1, head_width)).transpose(1, 2)
        key = self.key(x_BNC).unflatten(-1, (-1, head_width)).transpose(1, 2)
        value = self.value(x_BNC).unflatten(-1, (-1, head_width)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, key, value)
        return self.out(attended.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, whose linear layers are split over the tensor-parallel ranks."""

    _fsdp2_shard = True
    _tp_plan = {
        "attention.query": "colwise",
        "attention.key": "colwise",
        "attention.value": "colwise",
        "attention.out": "rowwise",
        "expand": "colwise",
        "contract": "rowwise",
    }

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        tokens_BNC = x_BCHW.flatten(2).transpose(1, 2)
        tokens_BNC = tokens_BNC + self.attention(self.attention_norm(tokens_BNC))
        tokens_BNC = tokens_BNC + self.contract(F.gelu(self.expand(self.mlp_norm(tokens_BNC))))
        return tokens_BNC.transpose(1, 2).unflatten(2, x_BCHW.shape[2:])


class DenoisingUNet(nn.Module):
    """Predict the noise in fields (B, C, H, W) from its level sigma (B)."""

    def __init__(self, width: int = 16, levels: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding_width = 2 * width
        self.embed = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.SiLU(), nn.Linear(2 * width, 2 * width))
        self.stem = nn.Conv2d(FIELDS, width, 3, padding=1)
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        for level in range(levels):
            narrow, wide = width * 2**level, width * 2 ** (level + 1)
            self.down.append(ResidualBlock(narrow, wide, self.embedding_width))
            # The skip connection doubles the channels that the decoder's block of this level reads.
            self.up.insert(0, ResidualBlock(2 * wide, narrow, self.embedding_width))
        self.middle = TransformerBlock(width * 2**levels, heads)
        self.head = nn.Conv2d(width, FIELDS, 3, padding=1)

    def forward(self, x_BCHW: Tensor, sigma_B: Tensor) -> Tensor:
        embedding_BE = self.embed(sinusoids(sigma_B, self.embedding_width))
        x_BCHW = self.stem(x_BCHW)
        skips = []
        for block in self.down:
            x_BCHW = block(x_BCHW, embedding_BE)
            skips.append(x_BCHW)
            x_BCHW = F.avg_pool2d(x_BCHW, 2)
        x_BCHW = self.middle(x_BCHW)
        for block in self.up:
            x_BCHW = F.interpolate(x_BCHW, scale_factor=2)
            x_BCHW = block(torch.cat([x_BCHW, skips.pop()], dim=1), embedding_BE)
        return self.head(x_BCHW)


def sinusoids(sigma_B: Tensor, width: int) -> Tensor:
    """Return sines and cosines (B, width) of the logarithm of the noise level."""
    frequencies = torch.exp(torch.linspace(0, math.log(100), width // 2))
    angles = sigma_B.log()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def draw_batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return clean fields, noise and noise levels of the whole batch; they depend on the step alone."""
    generator = torch.Generator().manual_seed(step)
    coarse = torch.randn(BATCH, FIELDS, ROWS // 4, COLUMNS // 4, generator=generator)
    fields_BCHW = F.interpolate(coarse, scale_factor=4, mode="bilinear")
    noise_BCHW = torch.randn(fields_BCHW.shape, generator=generator)
    sigma_B = torch.exp(torch.randn(BATCH, generator=generator))
    return fields_BCHW, noise_BCHW, sigma_B


def build(mesh: DeviceMesh | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model on the ranks of `mesh` and its optimizer."""
    torch.manual_seed(0)
    model = DenoisingUNet()
    parallelize(model, mesh, checkpoint=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, mesh: DeviceMesh | None) -> list[float]:
    """Take one optimizer step on this rank's share of the batch; return loss of the whole batch and gradient norm."""
    fields_BCHW, noise_BCHW, sigma_B = draw_batch(step)
    if mesh is not None:
        # Tensor-parallel peers work on the same samples, so the share is that of the data-parallel rank.
        data_rank, data_ranks = mesh["dp"].get_local_rank(), mesh["dp"].size()
        fields_BCHW = fields_BCHW.chunk(data_ranks)[data_rank]
        noise_BCHW = noise_BCHW.chunk(data_ranks)[data_rank]
        sigma_B = sigma_B.chunk(data_ranks)[data_rank]
    noisy_BCHW = fields_BCHW + sigma_B[:, None, None, None] * noise_BCHW
    scale_B = (1 + sigma_B.square()).rsqrt()
    loss = F.mse_loss(model(noisy_BCHW * scale_B[:, None, None, None], sigma_B), noise_BCHW)
    loss.backward()
    grad_norm = clip_grad_norm_(model.parameters(), max_norm=1.0, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
    mean_loss = loss.detach()
    if mesh is not None:
        dist.all_reduce(mean_loss)
        mean_loss /= mesh.size()
    return [mean_loss.item(), grad_norm.item()]


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write weights and optimizer state; every rank writes its own part."""
    weights, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"weights": weights, "optimizer": optimizer_state}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read what `save` has written, on the same mesh or on another one."""
    weights, optimizer_state = get_state_dict(model, optimizer)
    state = {"weights": weights, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["weights"], optim_state_dict=state["optimizer"])


def run(mesh: DeviceMesh | None, folder: Path, resume_only: bool) -> dict[str, list[list[float]]]:
    """Return [loss, gradient norm] of every step of the whole training, and of its second half after loading."""
    result = {}
    if not resume_only:
        model, optimizer = build(mesh)
        first_half = [train_step(model, optimizer, step, mesh) for step in range(STEPS // 2)]
        save(model, optimizer, folder)
        second_half = [train_step(model, optimizer, step, mesh) for step in range(STEPS // 2, STEPS)]
        result["trained"] = first_half + second_half
    model, optimizer = build(mesh)
    load(model, optimizer, folder)
    result["resumed"] = [train_step(model, optimizer, step, mesh) for step in range(STEPS // 2, STEPS)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the checkpoint")
    parser.add_argument("--tensor-ranks", type=int, default=1, help="ranks that share one sample")
    parser.add_argument("--resume-only", action="store_true", help="load a checkpoint that another mesh has written")
    options = parser.parse_args()
    process = read_process_info()
    # Without a launcher there is one process, which needs neither a process group nor a mesh.
    with process_group(process, torch.device("cpu"), timeout_minutes=10):
        mesh = None
        if process.world > 1:
            shape = (process.world // options.tensor_ranks, options.tensor_ranks)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        result = run(mesh, options.folder, options.resume_only)
    if process.is_main:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
