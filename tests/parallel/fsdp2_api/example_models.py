"""Models of other programs, in plain torch and marked for sharding, and helpers that compare them."""

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
    """A residual block that is marked as a class."""

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
    """The same, marked as an instance."""

    _fsdp2_shard = False

    def __init__(self) -> None:
        super().__init__()
        self._fsdp2_shard = True


class Net(nn.Module):
    """Two marked blocks between layers of the model itself, one of which is never called, and a buffer."""

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


class Entries(nn.Module):
    """No forward; two entries, of which one returns what the other takes."""

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
    """The inner one of two dataclasses."""

    count: int
    weights: Tensor
    missing: Tensor | None = None


@dataclass(frozen=True)
class Latent:
    """Tensors at several depths, beside what is none."""

    parts: dict[str, list[Tensor]]
    note: Note


class Outer(nn.Module):
    """A marked block with marked blocks inside."""

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
    """Blocks in a block, one of which has a second place in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = Outer()
        self.again = self.outer.inner[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.outer(x))


class Reversed(nn.Module):
    """Blocks that are called in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Inputs(nn.Module):
    """Takes tensors inside everything and tells their dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.inner = Taker()
        self.seen: list[torch.dtype] = []

    def forward(self, latent: Latent, more: dict[str, list[Tensor]], *, count: Tensor) -> dict[str, Latent]:
        self.seen = [latent.parts["x"][0].dtype, latent.note.weights.dtype, more["y"][0].dtype, count.dtype]
        assert latent.note.missing is None and latent.note.count == 3
        out = self.inner(replace(latent, parts={"x": [self.block(latent.parts["x"][0])]}))
        return {"out": replace(out, note=replace(out.note, weights=more["y"][0] * out.parts["x"][0]))}


class Taker(nn.Module):
    """A marked block from dataclass to dataclass."""

    _fsdp2_shard = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, latent: Latent) -> Latent:
        return replace(latent, parts={"x": [self.linear(latent.parts["x"][0]).sin()]})


class TwoTypes(Block):
    """A block whose norm is of another dtype than its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.to(self.norm.weight.dtype)).to(self.expand.weight.dtype)
        return x + self.contract(nn.functional.gelu(self.expand(y)))


class Mixed(nn.Module):
    """Blocks of three dtypes, one of two, and layers of two dtypes in the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(torch.float64), Block(torch.bfloat16), Block(), TwoTypes()])
        self.head = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).sin() + self.shift(x.to(self.shift.weight.dtype)).to(x.dtype).cos()


class Planned(nn.Module):
    """A model with a plan of tensor parallelism."""

    def __init__(self, plan: dict[str, str], hidden: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self._tp_plan = plan

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class Coder(nn.Module):
    """A marked block whose entry points are not its forward; what they return is a view."""

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
    """Two such blocks in a model that returns a view itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.coders = nn.ModuleList([Coder(), Coder()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for coder in self.coders:
            x = x + coder.decode(coder.encode(x, scale=2.0))
        return x.flatten(1).unflatten(1, (3, WIDTH))


def build_seeded(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return a model with the same weights wherever it is built."""
    torch.manual_seed(seed)
    return kind()


def samples(seed: int = 1) -> Tensor:
    """Return the whole batch (SAMPLES, 3, WIDTH)."""
    return torch.randn(SAMPLES, 3, WIDTH, generator=torch.Generator().manual_seed(seed))


def local_share(batch: Tensor) -> Tensor:
    """Return this rank's share of a batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else batch


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradients by plain name; collective where the model is sharded."""
    return {
        strip_wrapper_prefixes(name): to_full_tensor(p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole weights by plain name; collective where the model is sharded."""
    return {strip_wrapper_prefixes(name): to_full_tensor(p) for name, p in model.named_parameters()}


def reference_gradients(
    model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], seed: int = 1
) -> dict[str, Tensor]:
    """Return the gradients of a copy of `model` on the whole batch in one process."""
    alone = copy.deepcopy(model)
    loss(alone, samples(seed)).backward()
    return gradients(alone)


def mean_square_loss(model: nn.Module, x: Tensor) -> Tensor:
    """Return the usual loss."""
    return model(x).float().square().mean()


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Take one optimizer step on the ranks' shares of a batch."""
    mean_square_loss(model, local_share(samples(seed))).backward()
    optimizer.step()
    optimizer.zero_grad()


def describe_error(call: Callable[[], Any]) -> str:
    """Return the type and text of what `call` raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def require_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Compare tensor by tensor, each in units of its own norm and of the largest one."""
    assert got.keys() == expected.keys(), f"{sorted(got.keys() ^ expected.keys())} are in one alone"
    largest = max(value.norm() for value in expected.values())
    for name, value in expected.items():
        off = (got[name].to(value.dtype) - value).norm()
        assert off <= tolerance * (value.norm() + 0.01 * largest), f"{name} is off by {off} of {value.norm()}"
