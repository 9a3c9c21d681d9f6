"""Models as another program would bring them: torch alone, marked for sharding, and what is measured on them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from credit.parallel.activation import plain_name
from tests.parallel.cases import whole

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
        x = self.embed(x)
        return Latent({"tokens": [self.encoder(x)]}, Note(len(x), x.square()))

    def generate(self, latent: Latent) -> Tensor:
        return self.head(self.decoder(latent.parts["tokens"][0]) + latent.note.weights)


@dataclass(frozen=True)
class Note:
    """The inner one of two dataclasses."""

    count: int
    weights: Tensor
    missing: Tensor | None = None


@dataclass(frozen=True)
class Latent:
    """Tensors at several depths, beside what is none; one field is no argument of its constructor."""

    parts: dict[str, list[Tensor]]
    note: Note
    made: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        assert isinstance(self.parts, dict)


def built(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return a model with the same weights wherever it is built."""
    torch.manual_seed(seed)
    return kind()


def samples(seed: int = 1) -> Tensor:
    """Return the whole batch (SAMPLES, 3, WIDTH)."""
    return torch.randn(SAMPLES, 3, WIDTH, generator=torch.Generator().manual_seed(seed))


def mine(batch: Tensor) -> Tensor:
    """Return this rank's share of a batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else batch


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradients by plain name; collective where the model is sharded."""
    return {plain_name(name): whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole weights by plain name; collective where the model is sharded."""
    return {plain_name(name): whole(p) for name, p in model.named_parameters()}


def reference(model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], seed: int = 1) -> dict[str, Tensor]:
    """Return the gradients of a copy of `model` on the whole batch in one process."""
    alone = copy.deepcopy(model)
    loss(alone, samples(seed)).backward()
    return gradients(alone)


def require_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Compare tensor by tensor, each in units of its own norm and of the largest one."""
    assert got.keys() == expected.keys(), f"{sorted(got.keys() ^ expected.keys())} are in one alone"
    largest = max(value.norm() for value in expected.values())
    for name, value in expected.items():
        off = (got[name].to(value.dtype) - value).norm()
        assert off <= tolerance * (value.norm() + 0.01 * largest), f"{name} is off by {off} of {value.norm()}"
