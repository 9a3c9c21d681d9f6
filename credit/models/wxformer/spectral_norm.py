"""Spectral normalisation of weights as a parametrization (Miyato et al. 2018, arXiv 1802.05957).

The weight in use is W / sigma, sigma = u^T W v, where u and v are float32 buffers that follow W's leading singular
vectors by power iteration. They must be the same in every forward and recomputation of one optimizer step,
otherwise activation checkpointing and multi-step rollouts give wrong gradients without any error. So an iteration
needs an explicit order:

- `SpectralNorm.armed` is a plain flag; the next training forward with gradients iterates once and disarms.
- A bare model orders one iteration per training forward (`arm_for_forward`, called by the model's own forward).
  Recomputation under activation checkpointing calls blocks, not the model, so it never iterates.
- A trainer takes over with `iterate_per_step(model)` and then calls `arm(model)` at the start of each optimizer step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from credit.parallel.reduce import local

EPS = 1e-12
SETTLE_ITERATIONS = 15  # leaves sigma of a random matrix a few per cent low


def without_autocast(weight: Tensor) -> contextlib.AbstractContextManager:
    """Return the context for products with `weight`: in bfloat16, as by autocast, they would lose the estimate."""
    # the meta device has no autocast
    return contextlib.nullcontext() if weight.is_meta else torch.autocast(weight.device.type, enabled=False)


def power_iteration(matrix: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new (u, v) of one power iteration on `matrix` (out, rest), starting from `u` (out,)."""
    v = F.normalize(torch.mv(matrix.t(), u), dim=0, eps=EPS)
    return F.normalize(torch.mv(matrix, v), dim=0, eps=EPS), v


def itself(part: Tensor) -> Tensor:
    """Return the sum over the parts of a weight that is whole."""
    return part


class SpectralNorm(nn.Module):
    """Parametrization that divides a weight by an estimate of its largest singular value.

    A weight may be a part of a matrix that is split over ranks by rows (outputs) or columns, see `share`; u and v are
    split with it, and sigma is that of the whole matrix.

    Args:
        weight: the weight to be normalised; only its shape and device are read.
        out_dim: dimension of the weight that counts outputs (1 for transposed convolutions, else 0).
    """

    def __init__(self, weight: Tensor, out_dim: int) -> None:
        super().__init__()
        self.out_dim = out_dim
        self.armed = False
        self.per_step = False
        self._total: Callable[[Tensor], Tensor] = itself
        self._split: int | None = None
        rows = weight.shape[out_dim]
        # Any unit vector will do here: `initialise` or a state dict sets the real ones.
        self.register_buffer("u", torch.full((rows,), rows**-0.5, device=weight.device))
        columns = weight.numel() // rows
        self.register_buffer("v", torch.full((columns,), columns**-0.5, device=weight.device))

    def matrix(self, weight: Tensor) -> Tensor:
        """Return `weight` as a float32 matrix (out, rest)."""
        return weight.transpose(0, self.out_dim).flatten(1).float()

    def share(
        self, split: int, total: Callable[[Tensor], Tensor], common: Callable[[Tensor], Tensor]
    ) -> dict[str, int | None]:
        """Take the weight from now on as one part of a matrix.

        Args:
            split: 0 if the matrix is split by rows, 1 by columns.
            total: adds up a tensor over the parts, in the backward pass as well.
            common: hands on a tensor that all parts have whole, and adds up its gradient.

        Returns:
            The dimension along which each buffer is split with the matrix, None for the one that stays whole.
        """
        self._split, self._total = split, total
        return {"u": 0 if split == 0 else None, "v": 0 if split == 1 else None}

    def initial_buffers(self, weight: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return settled u and v for a whole initial `weight`, starting from a random u drawn from `generator`."""
        matrix = self.matrix(weight)
        u = F.normalize(torch.randn(matrix.shape[0], generator=generator, device="cpu"), dim=0, eps=EPS)
        for _ in range(SETTLE_ITERATIONS):
            u, v = power_iteration(matrix, u)
        return {"u": u, "v": v}

    @torch.no_grad()
    def settle_(self, weight: Tensor, iterations: int) -> None:
        """Run `iterations` power iterations of u and v for `weight`, in place."""
        matrix, u, v = self.matrix(local(weight)), local(self.u), local(self.v)
        for _ in range(iterations):
            if self._split is None:
                new_u, new_v = power_iteration(matrix, u)
            else:
                new_v = self._unit(torch.mv(matrix.t(), u), along=1)
                new_u = self._unit(torch.mv(matrix, new_v), along=0)
            u.copy_(new_u)
            v.copy_(new_v)

    def _unit(self, product: Tensor, along: int) -> Tensor:
        """Return a product with the matrix, scaled to length 1; `along` says whether it runs along rows or columns."""
        if self._split == along:
            return product / self._total(product.square().sum()).sqrt().clamp(min=EPS)
        return F.normalize(self._total(product), dim=0, eps=EPS)

    def iterate_if_armed(self, weight: Tensor) -> None:
        """Take the ordered power iteration for `weight` if training and gradients are on."""
        # The flag comes last: so a compiled forward depends on it in training alone, and there it is always down.
        if self.training and torch.is_grad_enabled() and self.armed:
            with without_autocast(weight):
                self.settle_(weight.detach(), 1)
            self.armed = False

    def forward(self, weight: Tensor) -> Tensor:
        """Return `weight` / sigma in the dtype of `weight`; iterates first if armed, training and gradients are on."""
        self.iterate_if_armed(weight)
        weight = local(weight)
        with without_autocast(weight):
            # Clones, because backward needs the values of this forward while the buffers move on in place.
            u, v = local(self.u).clone(), local(self.v).clone()
            sigma = self._total(torch.dot(u, torch.mv(self.matrix(weight), v)))
            # A product with 1 / sigma: the backward of a division makes several more passes over the weight.
            return (weight.float() * sigma.reciprocal()).to(weight.dtype)


def apply_spectral_norm(model: nn.Module) -> nn.Module:
    """Normalise every Conv2d, ConvTranspose2d and Linear weight of `model` in place, and return the model."""
    for module in list(model.modules()):
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
            out_dim = 1 if isinstance(module, nn.ConvTranspose2d) else 0
            # unsafe skips a trial evaluation, which is wasted work here: shape and dtype are kept by construction.
            parametrize.register_parametrization(module, "weight", SpectralNorm(module.weight, out_dim), unsafe=True)
    return model


def parametrizations(model: nn.Module) -> Iterator[tuple[str, SpectralNorm, parametrize.ParametrizationList]]:
    """Yield (name, parametrization, all parametrizations of the weight) of every spectrally normalised weight."""
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module, "weight"):
            chain = module.parametrizations.weight
            for i, link in enumerate(chain):
                if isinstance(link, SpectralNorm):
                    yield f"{name}.parametrizations.weight.{i}", link, chain


def unnormalised(chain: parametrize.ParametrizationList) -> Tensor:
    """Return what spectral norm, the last of a weight's parametrizations, is given."""
    *before, last = chain
    assert isinstance(last, SpectralNorm), "nothing may come after spectral norm"
    weight = chain.original
    for link in before:
        weight = link(weight)
    return weight


def trains(chain: parametrize.ParametrizationList) -> bool:
    """Whether the weight can change: only then do its vectors move, so that a frozen layer's function stays."""
    return any(parameter.requires_grad for parameter in chain.parameters())


def arm(model: nn.Module) -> None:
    """Order one power iteration of every weight that trains, in the next forward. Called once an optimizer step."""
    for _, norm, chain in parametrizations(model):
        norm.armed = trains(chain)


def iterate_per_step(model: nn.Module) -> None:
    """Hand the timing of power iterations to the caller, who calls `arm` at the start of each optimizer step."""
    for _, norm, _ in parametrizations(model):
        norm.per_step = True


def arm_for_forward(model: nn.Module) -> None:
    """Arm the weights of a model that nobody times: one iteration per training forward. For a model's own forward."""
    if model.training and torch.is_grad_enabled():
        for _, norm, chain in parametrizations(model):
            norm.armed = trains(chain) if not norm.per_step else norm.armed


def iterate_before_forward(module: nn.Module, args: tuple) -> None:
    """Take the ordered power iterations of all weights in `module`; a forward pre-hook, for compiled forwards."""
    for _, norm, chain in parametrizations(module):
        if norm.armed:
            norm.iterate_if_armed(unnormalised(chain))


def vectors(model: nn.Module) -> dict[str, Tensor]:
    """Return the live u and v buffers by their state-dict names. EMA stores these beside the averaged weights."""
    return {f"{name}.{key}": getattr(norm, key) for name, norm, _ in parametrizations(model) for key in ("u", "v")}


@torch.no_grad()
def settle_(modules: Iterable[nn.Module], iterations: int = SETTLE_ITERATIONS) -> None:
    """Run `iterations` power iterations for the present weights of `modules` themselves, not of what is inside them.

    In place, as after putting in averaged weights; of a sharded model, while the weights are whole. Weights that do
    not train keep their vectors.
    """
    for module in modules:
        for _, norm, chain in parametrizations(module) if parametrize.is_parametrized(module, "weight") else ():
            if trains(chain):
                norm.settle_(unnormalised(chain), iterations)
