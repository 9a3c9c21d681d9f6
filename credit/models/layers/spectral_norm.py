"""Spectral normalisation of weights as a parametrization (Miyato et al. 2018, arXiv 1802.05957).

The weight in use is W / sigma, sigma = u^T W v, where u and v are float32 buffers that follow the leading singular
vectors of W by power iteration. A forward pass only reads u and v; `advance_power_iterations` alone moves them.

Call it once per optimizer step, before the step's first forward. The package's trainer does; so does whoever trains by
hand:

    model = apply_spectral_norm(model)
    for batch in batches:
        advance_power_iterations(model)
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

All micro-steps, rollout steps and recomputations of an optimizer step then compute with the same u and v. An iteration
between a forward and its recomputation would give wrong gradients without any error.

Each weight is normalised when it is read. `normalize_together` does it for many weights in one pass, where that saves
kernels (GPUs) or collectives (tensor parallelism).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.utils import parametrize

from credit.models.kernels.autocast import without_autocast
from credit.models.kernels.dispatch import use_cpu_kernels
from credit.models.layers.spectral_norm_batched import EPS, StackedMatrices, normalize_batched, unit_vectors_batched
from credit.parallel.blocks.marks import is_marked
from credit.parallel.dtensor import local, local_bounds, num_shards
from credit.parallel.reduce import sum_over_shards

# Leaves sigma of a random matrix a few per cent low.
INITIAL_ITERATIONS = 15


class SpectralNorm(nn.Module):
    """Parametrization that divides a weight by an estimate of its largest singular value.

    The weight may be the part of a matrix that tensor parallelism gives to a rank, see `share`; sigma is that of the
    whole matrix.

    Args:
        weight: the weight to be normalised; only its shape and device are read.
        out_dim: dimension of the weight that counts outputs (1 for transposed convolutions, else 0).
    """

    def __init__(self, weight: Tensor, out_dim: int) -> None:
        super().__init__()
        self.out_dim = out_dim
        # sums a tensor over the tensor-parallel parts of the weight, forward and backward; None for a whole weight
        self.sum_over_parts: Callable[[Tensor], Tensor] | None = None
        rows = weight.shape[out_dim]
        columns = weight.numel() // rows
        # Any unit vectors will do here: `initialise` or a state dict sets the real ones.
        self.register_buffer("u", torch.full((rows,), rows**-0.5, device=weight.device))
        self.register_buffer("v", torch.full((columns,), columns**-0.5, device=weight.device))

    def matrix(self, weight: Tensor) -> Tensor:
        """Return `weight`, or any part of it, as a float32 matrix (out, rest)."""
        if self.out_dim:
            weight = weight.transpose(0, self.out_dim)
        return weight.flatten(1).float()

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
        self.sum_over_parts = total
        return {"u": 0 if split == 0 else None, "v": 0 if split == 1 else None}

    @staticmethod
    def share_sums(model: nn.Module) -> None:
        """Add up over the parts of split weights once for all weights of a sharding unit, in place."""
        normalize_together(model, by_unit=True)

    def initial_buffers(self, weight: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return u and v for a whole initial `weight`, iterated from a random u that is drawn from `generator`."""
        matrix = self.matrix(weight)
        (u,) = _unit_vectors([torch.randn(matrix.shape[0], generator=generator, device="cpu")])
        for _ in range(INITIAL_ITERATIONS):
            (v,) = _unit_vectors([torch.mv(matrix.t(), u)])
            (u,) = _unit_vectors([torch.mv(matrix, v)])
        return {"u": u, "v": v}

    def forward(self, weight: Tensor) -> Tensor:
        """Return `weight` / sigma in the dtype of `weight`; sigma is computed in float32."""
        # A compiled graph normalises each of its weights itself; the compiler fuses that.
        if not torch.compiler.is_compiling():
            normalized_weight = _normalized_together.get().get(self)
            if normalized_weight is not None:
                return normalized_weight
        u, v = self.u, self.v
        if self.sum_over_parts is not None:
            weight, u, v = local(weight), local(u), local(v)
        with without_autocast(weight):
            sigma = torch.dot(u, torch.mv(self.matrix(weight), v))
            if self.sum_over_parts is not None:
                sigma = self.sum_over_parts(sigma)
            # A product with 1 / sigma: the backward of a division makes several more passes over the weight.
            return (weight.float() * sigma.reciprocal()).to(weight.dtype)


# A normalised weight's parametrizations, of which spectral norm is the last.
Chain = parametrize.ParametrizationList
# The weights that the forward under way has normalised together.
_normalized_together: ContextVar[Mapping[SpectralNorm, Tensor]] = ContextVar(
    "normalized_together", default=MappingProxyType({})
)


def apply_spectral_norm(model: nn.Module) -> nn.Module:
    """Normalise every Conv2d, ConvTranspose2d and Linear weight of `model` in place, and return the model.

    Who trains it calls `advance_power_iterations` once per optimizer step.
    """
    classes: dict[type, type] = {}
    for module in list(model.modules()):
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
            plain = type(module)
            out_dim = 1 if isinstance(module, nn.ConvTranspose2d) else 0
            # unsafe skips a trial evaluation, which is wasted work here: shape and dtype are kept by construction.
            parametrize.register_parametrization(module, "weight", SpectralNorm(module.weight, out_dim), unsafe=True)
            # torch makes a class for each module; blocks that are equal otherwise would be compiled each for its own
            module.__class__ = classes.setdefault(plain, type(module))
    return model


def normalized_weights(module: nn.Module) -> dict[SpectralNorm, Chain]:
    """Return the spectral norm of every normalised weight in `module`, with all parametrizations of that weight.

    Without names, which take longer to build than everything else that a training step does with the result.
    """
    chains: dict[SpectralNorm, Chain] = {}
    stack: list[nn.Module | None] = [module]
    while stack:
        descendant = stack.pop()
        if isinstance(descendant, parametrize.ParametrizationList):
            last = descendant[-1]
            if isinstance(last, SpectralNorm):
                chains[last] = descendant
        elif descendant is not None:
            stack.extend(descendant._modules.values())
    return chains


def singular_vectors(model: nn.Module) -> dict[str, Tensor]:
    """Return the live u and v buffers by their names in a state dict."""
    return {
        f"{name}.{key}": module._buffers[key]
        for name, module in model.named_modules()
        if isinstance(module, SpectralNorm)
        for key in ("u", "v")
    }


def is_trainable(chain: Chain) -> bool:
    """Return whether the weight can change. Vectors of others stay as they are, so a frozen layer's function does."""
    return chain.original.requires_grad or any(parameter.requires_grad for parameter in chain.parameters())


@torch.no_grad()
def advance_power_iterations(model: nn.Module, iterations: int = 1) -> None:
    """Collective: move u and v of every weight that trains by power iterations, v first, in place.

    To be called once per optimizer step, before its first forward, and with more iterations after weights have been
    replaced. The present weights are used as they are stored, whole or sharded; where they are sharded or split over
    ranks, an iteration takes two all-reduces for each mesh.

    Args:
        model: all ranks of its meshes call this.
        iterations: number of power iterations.
    """
    whole: dict[SpectralNorm, Chain] = {}
    sharded: dict[SpectralNorm, Chain] = {}
    for norm, chain in normalized_weights(model).items():
        if is_trainable(chain):
            is_sharded = isinstance(chain.original, DTensor) and num_shards(chain.original) > 1
            chains = sharded if is_sharded else whole
            chains[norm] = chain
    if whole:
        _advance_whole(whole, iterations)
    if sharded:
        _advance_sharded(sharded, iterations)


def _advance_whole(chains: Mapping[SpectralNorm, Chain], iterations: int) -> None:
    us = [norm.u for norm in chains]
    vs = [norm.v for norm in chains]
    with without_autocast(us[0]):
        matrices = _hold([norm.matrix(_before_norm(chain)).to(norm.u.device) for norm, chain in chains.items()])
        for _ in range(iterations):
            torch._foreach_copy_(vs, _unit_vectors(matrices.products(us, transposed=True)))
            torch._foreach_copy_(us, _unit_vectors(matrices.products(vs, transposed=False)))


def _advance_sharded(chains: Mapping[SpectralNorm, Chain], iterations: int) -> None:
    """Collective: iterate with the rows and columns of each matrix that this rank stores.

    Every rank multiplies its parts, and the products are added up to whole vectors over all ranks. Of those a rank
    keeps what tensor parallelism gives it.
    """
    originals = [chain.original for chain in chains.values()]
    shards, rows, columns = [], [], []
    for norm, original in zip(chains, originals, strict=True):
        shards.append(norm.matrix(original.to_local()).to(norm.u.device))
        bounds = local_bounds(original)
        rows.append(bounds.pop(norm.out_dim))
        # Of the dimensions that make up the columns only the first is ever cut.
        inner_size = original.shape[2:].numel()
        columns.append(slice(bounds[0].start * inner_size, bounds[0].stop * inner_size))
    # Adapters are added to the original weight. They are small, and every rank takes them whole.
    adapters = [parameter for chain in chains.values() for link in list(chain)[:-1] for parameter in link.parameters()]
    us = [_embed(local(norm.u), local_bounds(norm.u), norm.u.shape) for norm in chains]
    vs = [_embed(local(norm.v), local_bounds(norm.v), norm.v.shape) for norm in chains]
    with without_autocast(us[0]):
        matrices = _hold(shards)
        for _ in range(iterations):
            products = matrices.products([u[r] for u, r in zip(us, rows, strict=True)], transposed=True)
            summands = [_embed(p, [c], v.shape) for p, c, v in zip(products, columns, vs, strict=True)]
            summands += [_embed(local(a).to(us[0].device), local_bounds(a), a.shape) for a in adapters]
            vs = sum_over_shards(summands, originals + adapters)
            whole_adapters = dict(zip(adapters, vs[len(originals) :], strict=True))
            del vs[len(originals) :]
            for (norm, chain), u, v in zip(chains.items(), us, vs, strict=True):
                if len(chain) > 1:
                    v += torch.mv(norm.matrix(_adapter_sum(chain, whole_adapters)).t(), u)
            vs = _unit_vectors(vs)
            products = matrices.products([v[c] for v, c in zip(vs, columns, strict=True)], transposed=False)
            us = sum_over_shards(
                [_embed(p, [r], u.shape) for p, r, u in zip(products, rows, us, strict=True)], originals
            )
            for (norm, chain), u, v in zip(chains.items(), us, vs, strict=True):
                if len(chain) > 1:
                    u += torch.mv(norm.matrix(_adapter_sum(chain, whole_adapters)), v)
            us = _unit_vectors(us)
    for norm, u, v in zip(chains, us, vs, strict=True):
        local(norm.u).copy_(u[local_bounds(norm.u)[0]])
        local(norm.v).copy_(v[local_bounds(norm.v)[0]])


class _PlainMatrices:
    """Matrices that are multiplied one after another: on a CPU nothing is gained by copying them into one tensor."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self._matrices = matrices

    def products(self, vectors: Sequence[Tensor], transposed: bool) -> list[Tensor]:
        """Return the product of each matrix, or of its transpose, with its vector."""
        matrices = [matrix.t() for matrix in self._matrices] if transposed else self._matrices
        return [torch.mv(matrix, vector) for matrix, vector in zip(matrices, vectors, strict=True)]


def _hold(matrices: Sequence[Tensor]) -> StackedMatrices | _PlainMatrices:
    """Return the matrices in the form whose products are fastest on their device."""
    return _PlainMatrices(matrices) if use_cpu_kernels(matrices[0]) else StackedMatrices(matrices)


def _unit_vectors(vectors: Sequence[Tensor]) -> list[Tensor]:
    """Return each vector scaled to length 1."""
    if not use_cpu_kernels(vectors[0]):
        return unit_vectors_batched(vectors)
    lengths = torch._foreach_norm(vectors)
    torch._foreach_clamp_min_(lengths, EPS)
    return torch._foreach_div(vectors, lengths)


def _embed(part: Tensor, bounds: Sequence[slice], shape: torch.Size) -> Tensor:
    """Return a tensor of `shape` with `part` at `bounds` and zeros elsewhere."""
    if part.shape == shape:
        return part
    whole = part.new_zeros(shape)
    whole[tuple(bounds)] = part
    return whole


def _adapter_sum(chain: Chain, whole_adapters: Mapping[nn.Parameter, Tensor]) -> Tensor:
    """Return what the adapters of a weight, with these whole parameters, add to it."""
    update = next(iter(whole_adapters.values())).new_zeros(chain.original.shape)
    for link in list(chain)[:-1]:
        parameters = {name: whole_adapters[parameter] for name, parameter in link.named_parameters()}
        update = functional_call(link, parameters, update)
    return update


def _before_norm(chain: Chain) -> Tensor:
    """Return what spectral norm, the last of a weight's parametrizations, is given."""
    *adapters, norm = chain
    assert isinstance(norm, SpectralNorm), "nothing may come after spectral norm"
    weight = local(chain.original)
    for adapter in adapters:
        weight = adapter(weight)
    return weight


def normalize_together(module: nn.Module, by_unit: bool) -> None:
    """Let the forward of `module` normalise the weights inside it in one pass at its start; in place.

    On a GPU weights of one shape share their kernels. Split weights share the sum of their sigmas over the ranks, and
    its gradient. Other weights are normalised when they are read, as without this.

    Args:
        module: not to be compiled, as a graph computes each of its weights itself.
        by_unit: let each sharding unit inside take its own weights in its own forward. Sharded weights are whole, and
            checkpointed blocks are recomputed, unit by unit.
    """
    units = [module]
    if by_unit:
        units += [unit for unit in module.modules() if is_marked(unit) and unit is not module]
    for unit in units:
        chains = normalized_weights(unit)
        for inner in units:
            if inner is not unit and inner in set(unit.modules()):
                for norm in normalized_weights(inner):
                    chains.pop(norm, None)
        if chains:
            unit.forward = functools.partial(_forward_together, unit.forward, chains)


def _forward_together(
    forward: Callable[..., Any], chains: Mapping[SpectralNorm, Chain], *args: Any, **kwargs: Any
) -> Any:
    """Call `forward` while the weights of `chains` are those that are normalised here."""
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    ready = _normalized_together.get()
    weights = [(norm, _before_norm(chain)) for norm, chain in chains.items() if norm not in ready]
    token = _normalized_together.set({**ready, **_normalize_groups(weights)})
    try:
        return forward(*args, **kwargs)
    finally:
        _normalized_together.reset(token)


def _normalize_groups(weights: Iterable[tuple[SpectralNorm, Tensor]]) -> dict[SpectralNorm, Tensor]:
    """Return the normalised weights, or this rank's parts of them, of which several are computed together."""
    split: dict[SpectralNorm, Tensor] = {}
    same_shape: defaultdict[tuple[Any, ...], dict[SpectralNorm, Tensor]] = defaultdict(dict)
    for norm, weight in weights:
        if norm.sum_over_parts is not None:
            split[norm] = weight
        elif not use_cpu_kernels(weight):
            same_shape[weight.shape, weight.dtype, norm.out_dim][norm] = weight
    normalized: dict[SpectralNorm, Tensor] = {}
    if split:
        normalized |= _normalize_split(split)
    for (_, _, out_dim), group in same_shape.items():
        if len(group) > 1:
            outputs_first = [weight.transpose(0, out_dim) for weight in group.values()]
            with without_autocast(outputs_first[0]):
                results = normalize_batched(outputs_first, [norm.u for norm in group], [norm.v for norm in group])
            normalized |= zip(group, [result.transpose(0, out_dim) for result in results], strict=True)
    return normalized


def _normalize_split(weights: Mapping[SpectralNorm, Tensor]) -> dict[SpectralNorm, Tensor]:
    """Collective: return this rank's parts of split weights divided by their sigmas, by one sum over the ranks."""
    sum_over_parts = next(iter(weights)).sum_over_parts
    with without_autocast(next(iter(weights.values()))):
        products = [torch.dot(local(n.u), torch.mv(n.matrix(part), local(n.v))) for n, part in weights.items()]
        sigmas = sum_over_parts(torch.stack(products)).unbind()
        return {
            norm: (part.float() * sigma.reciprocal()).to(part.dtype)
            for (norm, part), sigma in zip(weights.items(), sigmas, strict=True)
        }
