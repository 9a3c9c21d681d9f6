"""Tests of compilation: compiled blocks train like plain ones, and each is compiled once for each shape."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from credit.cli.plan import build_grid
from credit.errors import ConfigError
from credit.models.layers import spectral_norm
from credit.models.layers.cross_scale_embedding import CrossScaleEmbedding
from credit.models.layers.up_sampling import UpBlockPS
from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks
from credit.parallel.blocks.cuda_graphs import CUDA_GRAPHS
from credit.parallel.mesh import DeviceGrid
from credit.train.build import model as build_model
from credit.train.build.dry_run import build_placeholder_assets
from credit.train.build.model import compile_blocks
from tests.unit.hpc.measured import GRID, small_config
from tests.unit.models.small import build

# Warnings that torch causes itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def reset_compiler() -> Iterator[None]:
    """Start without compiled graphs, and restore torch's limit of compilations."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("device", "environment", "missing"),
    [
        ("cpu", {}, r"no C\+\+ compiler is found \((g\+\+|clang\+\+)\)"),
        ("cpu", {"CXX": "/nowhere/cc"}, r"no C\+\+ compiler is found \(/nowhere/cc\)"),
        ("cuda", {}, "no C compiler is found|the package triton is missing"),
    ],
)
def test_a_missing_compiler_is_refused(
    device: str, environment: dict[str, str], missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"trainer.compile is set, but .*({missing})"):
        build_model.require_compiler(torch.device(device))
    config = small_config("trainer.compile=true")
    assets = build_placeholder_assets(config, build_grid(GRID), {})
    with pytest.raises(ConfigError, match="set trainer.compile to false"):
        build_model.build_parallel_model(config, assets, DeviceGrid(), torch.device(device))


def test_an_available_compiler_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("CXX", str(compiler))
    build_model.require_compiler(torch.device("cpu"))
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    build_model.require_compiler(torch.device("cuda"))


def count_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def build_two_stages() -> nn.Module:
    """Return two encoder stages of different width and size, each with one marked block, for (B, 16, 8, 8)."""
    return prepare_model(nn.Sequential(*build(seed=3).stages[2:]))


def build_two_up_blocks() -> nn.Module:
    """Return two marked blocks with inputs of different size, for (B, 8, H, W)."""
    torch.manual_seed(0)
    return prepare_model(spectral_norm.apply_spectral_norm(nn.Sequential(UpBlockPS(8, 8, 4), UpBlockPS(8, 8, 4))))


def prepare_model(model: nn.Module) -> nn.Module:
    """Return the model in train mode, with singular vectors that are far from converged."""
    generator = torch.Generator().manual_seed(3)
    for vector in spectral_norm.find_singular_vectors(model).values():
        vector.copy_(F.normalize(torch.randn(vector.shape, generator=generator), dim=0))
    return model.train()


def draw_fields(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).contiguous(
        memory_format=torch.channels_last
    )


def assert_same_vectors(model: nn.Module, plain: nn.Module) -> None:
    """Require equal singular vectors; one power iteration more or less would change the first digit."""
    vectors = spectral_norm.find_singular_vectors(model).values()
    plain_vectors = spectral_norm.find_singular_vectors(plain).values()
    for vector, plain_vector in zip(vectors, plain_vectors, strict=True):
        torch.testing.assert_close(vector, plain_vector, rtol=0, atol=1e-4)


def train_three_steps(model: nn.Module) -> tuple[list[float], list[int]]:
    """Return the losses of three optimizer steps of two micro-steps, and the number of graphs after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    graph_counts = []
    for step in range(3):
        spectral_norm.advance_power_iterations(model)
        for micro in range(2):
            loss = (model(draw_fields(2, 16, 8, 8, seed=2 * step + micro)) - 1).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        graph_counts.append(count_graphs())
    return losses, graph_counts


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_compiled_losses_equal_plain_ones_with_one_graph_per_block(checkpointing: Any) -> None:
    plain, model = build_two_stages(), build_two_stages()
    if checkpointing:
        checkpoint_blocks(model, checkpointing)
    compile_blocks(model, backend="aot_eager")
    losses, graph_counts = train_three_steps(model)
    plain_losses, _ = train_three_steps(plain)
    assert graph_counts == [2, 2, 2]
    torch.testing.assert_close(losses, plain_losses, rtol=1e-5, atol=0)
    assert_same_vectors(model, plain)


def test_training_and_each_batch_size_of_evaluation_are_compiled_once() -> None:
    plain, model = build_two_up_blocks(), build_two_up_blocks()
    compile_blocks(model, backend="aot_eager")
    for _ in range(2):
        for train, batch in ((True, 2), (False, 2), (False, 1)):
            spectral_norm.advance_power_iterations(model.train(train))
            spectral_norm.advance_power_iterations(plain.train(train))
            with torch.set_grad_enabled(train), torch.autocast("cpu", torch.bfloat16):
                x_BCHW = draw_fields(batch, 8, 2, 3, seed=1)
                torch.testing.assert_close(model(x_BCHW), plain(x_BCHW), rtol=2**-6, atol=2**-6)
            assert_same_vectors(model, plain)
        assert count_graphs() == 3 * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # warning of torch dynamo
def test_an_embedding_is_one_graph() -> None:
    plain = CrossScaleEmbedding(4, 16, (4, 8, 16), 2)
    x = draw_fields(2, 4, 16, 24, seed=1)
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    parameters = list(plain.parameters())
    gradients = torch.autograd.grad(compiled(x).square().mean(), parameters)
    plain_gradients = torch.autograd.grad(plain(x).square().mean(), parameters)
    torch.testing.assert_close(gradients, plain_gradients)


@pytest.mark.slow
def test_equal_blocks_share_a_graph() -> None:
    model = prepare_model(nn.Sequential(*build(seed=3, depth=(1, 1, 3, 1)).stages[2].layers))
    compile_blocks(model, backend="aot_eager")
    model(draw_fields(2, 4, 4, 32, seed=0).contiguous().requires_grad_()).square().mean().backward()
    assert count_graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, CUDA_GRAPHS])
def test_inductor_compiles_blocks_of_several_shapes(mode: str | None) -> None:
    """With dynamic shapes, torch's default for the second block, inductor fails on these blocks (torch 2.13)."""
    plain, model = build_two_up_blocks(), build_two_up_blocks()
    compile_blocks(model, mode=mode)
    for network in (plain, model):
        network(draw_fields(2, 8, 2, 3, seed=1)).square().mean().backward()
    assert count_graphs() == 2
    for parameter, plain_parameter in zip(model.parameters(), plain.parameters(), strict=True):
        difference = (parameter.grad - plain_parameter.grad).norm()
        assert difference < 1e-4 * plain_parameter.grad.norm()
