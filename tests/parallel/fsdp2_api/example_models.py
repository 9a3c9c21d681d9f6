"""Models in plain torch that are marked for sharding, as other programs have them, and helpers that compare them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from credit.parallel.blocks.marks import strip_wrapper_prefixes
from tests.parallel.training.cases import to_full_tensor

WIDTH, SAMPLES = 8, 8


class Block(nn.Module):
    """Residual block whose class is marked."""

    _fsdp2_shard = True

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.expand = nn.Linear(WIDTH, 3 * WIDTH, dtype=dtype)
        self.contract = nn.Linear(3 * WIDTH, WIDTH, dtype=dtype)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.norm(x.to(self.norm.weight.dtype))
        return x + self.contract(nn.functional.gelu(self.expand(y))).to(x.dtype)


class OwnMark(Block):
    """The same block, but each instance is marked and not the class."""

    _fsdp2_shard = False

    def __init__(self) -> None:
        super().__init__()
        self._fsdp2_shard = True


class Net(nn.Module):
    """Model with two marked blocks between layers of its own, of which one is never called, and with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), OwnMark()])
        self.unused = nn.Linear(WIDTH, 3)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.scale * self.head(x)


class EntryPointModel(nn.Module):
    """Model without forward. It has two entry points, and one takes the result of the other."""

    _fsdp2_forward_methods = ("encode", "generate")

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Block(), Block()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Latent:
        x = self.embed(x).sin()
        return Latent({"tokens": [self.encoder(x)]}, Note(len(x), x.square()))

    def generate(self, latent: Latent) -> Tensor:
        return 2 * self.head(self.decoder(latent.parts["tokens"][0]) + latent.note.weights)


@dataclass(frozen=True)
class Note:
    """Dataclass inside `Latent`."""

    count: int
    weights: Tensor
    missing: Tensor | None = None


@dataclass(frozen=True)
class Latent:
    """Dataclass with tensors at several depths, and with values that are not tensors."""

    parts: dict[str, list[Tensor]]
    note: Note


class Outer(nn.Module):
    """Marked block with marked blocks inside."""

    _fsdp2_shard = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = block(x)
        return self.last(x).sin()


class Nested(nn.Module):
    """Model with blocks inside a block, of which one is registered a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = Outer()
        self.again = self.outer.inner[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.outer(x))


class ReversedBlocks(nn.Module):
    """Model that calls its blocks in the reverse order of their registration."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class NestedInputModel(nn.Module):
    """Model that takes tensors in nested containers and records their dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.inner = DataclassBlock()
        self.seen: list[torch.dtype] = []

    def forward(self, latent: Latent, more: dict[str, list[Tensor]], *, count: Tensor) -> dict[str, Latent]:
        self.seen = [latent.parts["x"][0].dtype, latent.note.weights.dtype, more["y"][0].dtype, count.dtype]
        assert latent.note.missing is None and latent.note.count == 3
        out = self.inner(replace(latent, parts={"x": [self.block(latent.parts["x"][0])]}))
        return {"out": replace(out, note=replace(out.note, weights=more["y"][0] * out.parts["x"][0]))}


class DataclassBlock(nn.Module):
    """Marked block that takes and returns a dataclass."""

    _fsdp2_shard = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, latent: Latent) -> Latent:
        return replace(latent, parts={"x": [self.linear(latent.parts["x"][0]).sin()]})


class TwoDtypeBlock(Block):
    """Block whose norm has another dtype than its linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.to(self.norm.weight.dtype)).to(self.expand.weight.dtype)
        return x + self.contract(nn.functional.gelu(self.expand(y)))


class MixedDtypeModel(nn.Module):
    """Model with blocks of three dtypes, a block with two dtypes, and layers of two dtypes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(torch.float64), Block(torch.bfloat16), Block(), TwoDtypeBlock()])
        self.head = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).sin() + self.shift(x.to(self.shift.weight.dtype)).to(x.dtype).cos()


class Planned(nn.Module):
    """Model with a plan of tensor parallelism."""

    def __init__(self, plan: dict[str, str], hidden: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self._tp_plan = plan

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class Coder(nn.Module):
    """Marked block with two entry points instead of a forward. They return views."""

    _fsdp2_shard = True
    _fsdp2_forward_methods = ("encode", "decode")

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.calls = 0

    def encode(self, x: Tensor, *, scale: float) -> Latent:
        self.calls += 1
        y = nn.functional.gelu(self.down(x) * scale)
        return Latent({"tokens": [y.unflatten(-1, (3, WIDTH))]}, Note(len(x), x[..., :1]))

    def decode(self, latent: Latent) -> Tensor:
        self.calls += 1
        return (self.up(latent.parts["tokens"][0].flatten(-2)) + latent.note.weights).flatten(1).unflatten(1, (3, -1))


class Coders(nn.Module):
    """Model with two blocks `Coder`, which returns a view itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.coders = nn.ModuleList([Coder(), Coder()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for coder in self.coders:
            x = x + coder.decode(coder.encode(x, scale=2.0))
        return x.flatten(1).unflatten(1, (3, WIDTH))


def build_seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return a model whose weights depend only on the seed, so that they are equal on all ranks."""
    torch.manual_seed(seed)
    return build()


def samples(seed: int = 1) -> Tensor:
    """Return the whole batch (SAMPLES, 3, WIDTH)."""
    return torch.randn(SAMPLES, 3, WIDTH, generator=torch.Generator().manual_seed(seed))


def local_share(batch: Tensor) -> Tensor:
    """Return this rank's share of a batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else batch


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Collective, if the model is sharded: return the full gradients by name, without prefixes of wrappers."""
    return {
        strip_wrapper_prefixes(name): to_full_tensor(p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Collective, if the model is sharded: return the full weights by name, without prefixes of wrappers."""
    return {strip_wrapper_prefixes(name): to_full_tensor(p) for name, p in model.named_parameters()}


def reference_gradients(
    model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], seed: int = 1
) -> dict[str, Tensor]:
    """Return the gradients of a copy of `model` on the whole batch in one process."""
    reference_model = copy.deepcopy(model)
    loss(reference_model, samples(seed)).backward()
    return gradients(reference_model)


def mean_square_loss(model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean square of the output in float32."""
    return model(x).float().square().mean()


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Take one optimizer step on the ranks' shares of a batch."""
    mean_square_loss(model, local_share(samples(seed))).backward()
    optimizer.step()
    optimizer.zero_grad()


def describe_error(call: Callable[[], Any]) -> str:
    """Return the type and text of the error that `call` raises, or ``nothing``."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def require_close(tensors: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Require that the norm of each difference is small relative to the norm of its tensor and to the largest norm."""
    assert tensors.keys() == expected.keys(), f"{sorted(tensors.keys() ^ expected.keys())} are in one alone"
    largest = max(value.norm() for value in expected.values())
    for name, value in expected.items():
        error = (tensors[name].to(value.dtype) - value).norm()
        assert error <= tolerance * (value.norm() + 0.01 * largest), f"{name} is off by {error} of {value.norm()}"
