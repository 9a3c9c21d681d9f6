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
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

EPS = 1e-12
SETTLE_ITERATIONS = 15  # leaves sigma of a random matrix a few per cent low


def sigma_of(matrix: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Return u^T `matrix` v, a float32 scalar; differentiable in `matrix` alone when u and v need no gradient."""
    return torch.dot(u, torch.mv(matrix, v))


def power_iteration(matrix: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new (u, v) of one power iteration on `matrix` (out, rest), starting from `u` (out,)."""
    v = F.normalize(torch.mv(matrix.t(), u), dim=0, eps=EPS)
    return F.normalize(torch.mv(matrix, v), dim=0, eps=EPS), v


class SpectralNorm(nn.Module):
    """Parametrization that divides a weight by an estimate of its largest singular value.

    Args:
        weight: the weight to be normalised; only its shape and device are read.
        out_dim: dimension of the weight that counts outputs (1 for transposed convolutions, else 0).
    """

    def __init__(self, weight: Tensor, out_dim: int) -> None:
        super().__init__()
        self.out_dim = out_dim
        self.armed = False
        self.per_step = False
        rows = weight.shape[out_dim]
        # Any unit vector will do here: `initialise` or a state dict sets the real ones.
        self.register_buffer("u", torch.full((rows,), rows**-0.5, device=weight.device))
        columns = weight.numel() // rows
        self.register_buffer("v", torch.full((columns,), columns**-0.5, device=weight.device))

    def matrix(self, weight: Tensor) -> Tensor:
        """Return `weight` as a float32 matrix (out, rest)."""
        return weight.transpose(0, self.out_dim).flatten(1).float()

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
        matrix = self.matrix(weight)
        for _ in range(iterations):
            u, v = power_iteration(matrix, self.u)
            self.u.copy_(u)
            self.v.copy_(v)

    def forward(self, weight: Tensor) -> Tensor:
        """Return `weight` / sigma in the dtype of `weight`; iterates first if armed, training and gradients are on."""
        # Autocast would compute the products in bfloat16, which loses the estimate. (The meta device has no autocast.)
        with contextlib.nullcontext() if weight.is_meta else torch.autocast(weight.device.type, enabled=False):
            if self.armed and self.training and torch.is_grad_enabled():
                self.settle_(weight.detach(), 1)
                self.armed = False
            # Clones, because backward needs the values of this forward while the buffers move on in place.
            sigma = sigma_of(self.matrix(weight), self.u.clone(), self.v.clone())
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


def parametrizations(model: nn.Module) -> Iterator[tuple[str, SpectralNorm, nn.Parameter]]:
    """Yield (name, parametrization, original weight) of every spectrally normalised weight, reading no `.weight`."""
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module, "weight") and isinstance(
            module.parametrizations.weight[0], SpectralNorm
        ):
            chain = module.parametrizations.weight
            yield f"{name}.parametrizations.weight.0", chain[0], chain.original


def arm(model: nn.Module) -> None:
    """Order one power iteration of every weight in the next training forward. Called once an optimizer step."""
    for _, norm, _ in parametrizations(model):
        norm.armed = True


def iterate_per_step(model: nn.Module) -> None:
    """Hand the timing of power iterations to the caller, who calls `arm` at the start of each optimizer step."""
    for _, norm, _ in parametrizations(model):
        norm.per_step = True


def arm_for_forward(model: nn.Module) -> None:
    """Arm the weights of a model that nobody times: one iteration per training forward. For a model's own forward."""
    if model.training and torch.is_grad_enabled():
        for _, norm, _ in parametrizations(model):
            norm.armed = not norm.per_step or norm.armed


def vectors(model: nn.Module) -> dict[str, Tensor]:
    """Return the live u and v buffers by their state-dict names. EMA stores these beside the averaged weights."""
    return {f"{name}.{key}": getattr(norm, key) for name, norm, _ in parametrizations(model) for key in ("u", "v")}


def settle_(model: nn.Module, iterations: int = SETTLE_ITERATIONS) -> None:
    """Run `iterations` power iterations for the present weights, in place, as after putting in averaged weights."""
    for _, norm, weight in parametrizations(model):
        norm.settle_(weight.detach(), iterations)
