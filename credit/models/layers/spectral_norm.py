"""Spectral normalisation of weights as a parametrization (Miyato et al. 2018, arXiv 1802.05957).

A layer computes with W / sigma, where sigma = u^T W v. The float32 buffers u and v approximate the leading singular
vectors of W by power iteration. A forward pass only reads u and v; `advance_power_iterations` updates them.

Call `advance_power_iterations` once per optimizer step, before the first forward pass, as the trainer of this package
does (docs/add_a_model.md). All micro-steps, rollout steps and recomputations of a step then use the same u and v. A
power iteration between a forward pass and its recomputation would silently produce wrong gradients.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.utils import parametrize

from credit.models.kernels.autocast import without_autocast
from credit.models.kernels.dispatch import is_cpu_path
from credit.models.layers.spectral_norm_batched import (
    normalize_batched,
    normalize_matrix,
    normalize_vectors,
    prepare_matrices,
)
from credit.parallel.blocks.marks import is_marked
from credit.parallel.dtensor import local_slices, num_shards, pad_local_part, pad_to_shape, to_local
from credit.parallel.reduce import sum_over_shards

# Number of power iterations for initial weights. With this number, the estimate of sigma is a few per cent too low.
INITIAL_ITERATIONS = 15


class SpectralNorm(nn.Module):
    """Parametrization that divides a weight by an estimate of its largest singular value.

    With tensor parallelism, each rank holds a part of the matrix, see `share`. Sigma is always the singular value of
    the complete matrix.

    Args:
        weight: the weight to normalise; only its shape and device are read.
        out_dim: dimension of the weight that corresponds to the outputs: 1 for transposed convolutions, otherwise 0.
    """

    def __init__(self, weight: Tensor, out_dim: int) -> None:
        super().__init__()
        self.out_dim = out_dim
        # Function that sums a tensor (and its gradient) over the tensor-parallel ranks; None for a weight on one rank.
        self.sum_over_parts: Callable[[Tensor], Tensor] | None = None
        rows = weight.shape[out_dim]
        columns = weight.numel() // rows
        # Placeholder unit vectors; `initialise` or a state dict replaces them.
        self.register_buffer("u", torch.full((rows,), rows**-0.5, device=weight.device))
        self.register_buffer("v", torch.full((columns,), columns**-0.5, device=weight.device))

    def matrix(self, weight: Tensor) -> Tensor:
        """Return `weight` (complete or a part) as a float32 matrix (outputs, product of all other dimensions)."""
        if self.out_dim:
            weight = weight.transpose(0, self.out_dim)
        return weight.flatten(1).float()

    def _reshape_to_weight(self, matrix: Tensor, weight: Tensor) -> Tensor:
        """Return a result of the method `matrix` in the shape and the dtype of `weight`."""
        if not self.out_dim:
            return matrix.view(weight.shape).to(weight.dtype)
        transposed_shape = weight.transpose(0, self.out_dim).shape
        return matrix.view(transposed_shape).transpose(0, self.out_dim).to(weight.dtype)

    def share(
        self, split_dim: int, all_reduce: Callable[[Tensor], Tensor], sum_gradient: Callable[[Tensor], Tensor]
    ) -> dict[str, int | None]:
        """Prepare the norm for a weight that tensor parallelism splits, so that each rank has a part of the matrix.

        Args:
            split_dim: dimension of the matrix that is split over the ranks: 0 for rows, 1 for columns.
            all_reduce: function that sums a tensor over the ranks, and its gradient as well.
            sum_gradient: function that returns its argument unchanged and sums its gradient over the ranks; not used.

        Returns:
            Name of the buffer, ``u`` or ``v`` -> dimension along which the buffer is split; None if it is not split.
        """
        self.sum_over_parts = all_reduce
        return {"u": 0 if split_dim == 0 else None, "v": 0 if split_dim == 1 else None}

    @staticmethod
    def merge_all_reduces(model: nn.Module) -> None:
        """Change `model` in place so that the split weights of each sharding unit share one all-reduce."""
        install_batched_normalization(model, by_unit=True)

    def initial_buffers(self, weight: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the buffers u and v of a complete initial `weight`, by power iterations from a random u."""
        matrix = self.matrix(weight)
        (u,) = normalize_vectors([torch.randn(matrix.shape[0], generator=generator, device="cpu")])
        for _ in range(INITIAL_ITERATIONS):
            (v,) = normalize_vectors([torch.mv(matrix.t(), u)])
            (u,) = normalize_vectors([torch.mv(matrix, v)])
        return {"u": u, "v": v}

    def forward(self, weight: Tensor) -> Tensor:
        """Return `weight` / sigma in the dtype of `weight`; sigma is computed in float32."""
        # A compiled graph normalises each weight separately, and the compiler fuses the operations.
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling:
            normalized_weight = _weights_by_norm.get().get(self)
            if normalized_weight is not None:
                return normalized_weight
        u, v = self.u, self.v
        if self.sum_over_parts is not None:
            weight, u, v = to_local(weight), to_local(u), to_local(v)
        with without_autocast(weight):
            if not is_compiling and self.sum_over_parts is None:
                matrix = normalize_matrix(self.matrix(weight), u, v)
                return self._reshape_to_weight(matrix, weight)
            sigma = torch.dot(u, torch.mv(self.matrix(weight), v))
            if self.sum_over_parts is not None:
                sigma = self.sum_over_parts(sigma)
            # Multiply by 1 / sigma, because the backward pass of a division reads the weight several times more.
            return (weight.float() * sigma.reciprocal()).to(weight.dtype)


# All parametrizations of a normalised weight. Adapters come first; spectral norm is the last parametrization.
Chain = parametrize.ParametrizationList
# Weights that the current forward pass has normalised in advance, see `install_batched_normalization`.
_weights_by_norm: ContextVar[Mapping[SpectralNorm, Tensor]] = ContextVar("normalized", default=MappingProxyType({}))


def apply_spectral_norm(model: nn.Module) -> nn.Module:
    """Normalise every Conv2d, ConvTranspose2d and Linear weight of `model` in place, and return the model.

    Call `advance_power_iterations` once per optimizer step. Layers with ``is_normalized = False`` are skipped.
    """
    classes: dict[type, type] = {}
    for module in list(model.modules()):
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)) and getattr(module, "is_normalized", True):
            plain_class = type(module)
            out_dim = 1 if isinstance(module, nn.ConvTranspose2d) else 0
            # `unsafe` skips a test of shape and dtype, which spectral norm never changes.
            parametrize.register_parametrization(module, "weight", SpectralNorm(module.weight, out_dim), unsafe=True)
            # torch creates a class for each module. A common class lets the compiler compile equal blocks only once.
            module.__class__ = classes.setdefault(plain_class, type(module))
    return model


def find_spectral_norms(module: nn.Module) -> dict[SpectralNorm, Chain]:
    """Return the spectral norms in `module` as keys, each with all parametrizations of its weight as the value."""
    # Walking through the modules with `named_modules` would take longer than all uses of the result in a training step.
    chains: dict[SpectralNorm, Chain] = {}
    stack: list[nn.Module | None] = [module]
    while stack:
        descendant = stack.pop()
        if isinstance(descendant, parametrize.ParametrizationList):
            for link in descendant:
                if isinstance(link, SpectralNorm):
                    assert link is descendant[-1], "spectral norm must be the last parametrization"
                    chains[link] = descendant
        elif descendant is not None:
            stack.extend(descendant._modules.values())
    return chains


def find_singular_vectors(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers u and v of all normalised weights by their names in the state dict, without copying them."""
    vectors = {}
    for name, module in model.named_modules():
        if isinstance(module, SpectralNorm):
            vectors |= {f"{name}.u": module.u, f"{name}.v": module.v}
    return vectors


def is_trainable(chain: Chain) -> bool:
    """Return True if the weight or an adapter of the weight is trained, so that u and v must be updated."""
    return chain.original.requires_grad or any(parameter.requires_grad for parameter in chain.parameters())


@torch.no_grad()
def advance_power_iterations(model: nn.Module, iterations: int = 1) -> None:
    """Collective: update u and v of every trainable weight in place by power iterations.

    Call this function once per optimizer step, before the first forward pass of the step. Call it with more iterations
    after weights have been replaced. An iteration updates v, then u. Sharded weights need two all-reduces, no gather.

    Args:
        model: the model; all ranks of its device meshes must make this call.
        iterations: number of power iterations.
    """
    unsharded: dict[SpectralNorm, Chain] = {}
    sharded: dict[SpectralNorm, Chain] = {}
    for norm, chain in find_spectral_norms(model).items():
        if is_trainable(chain):
            is_sharded = isinstance(chain.original, DTensor) and num_shards(chain.original) > 1
            chains = sharded if is_sharded else unsharded
            chains[norm] = chain
    if unsharded:
        _power_iterate_unsharded(unsharded, iterations)
    if sharded:
        _power_iterate_sharded(sharded, iterations)


def _power_iterate_unsharded(chains: Mapping[SpectralNorm, Chain], iterations: int) -> None:
    """Update u and v in place for the weights of `chains`; this rank has the complete matrix of each weight."""
    us = [norm.u for norm in chains]
    vs = [norm.v for norm in chains]
    with without_autocast(us[0]):
        inputs = [norm.matrix(_compute_adapted_weight(chain)).to(norm.u.device) for norm, chain in chains.items()]
        matrices = prepare_matrices(inputs)
        for _ in range(iterations):
            torch._foreach_copy_(vs, normalize_vectors(matrices.multiply(us, transposed=True)))
            torch._foreach_copy_(us, normalize_vectors(matrices.multiply(vs, transposed=False)))


@dataclass
class _MatrixShard:
    """Part of a matrix that this rank stores, given by its rows and columns."""

    norm: SpectralNorm
    chain: Chain
    rows: slice
    columns: slice

    @classmethod
    def build(cls, norm: SpectralNorm, chain: Chain) -> _MatrixShard:
        bounds = local_slices(chain.original)
        rows = bounds.pop(norm.out_dim)
        # The columns are several dimensions of the weight; only the first of these dimensions can be sharded.
        inner_size = chain.original.shape[2:].numel()
        columns = slice(bounds[0].start * inner_size, bounds[0].stop * inner_size)
        return cls(norm, chain, rows, columns)

    def list_adapter_tensors(self) -> list[Tensor]:
        """Return the sharded tensors that must be gathered before `add_adapters` can be called."""
        tensors: list[Tensor] = []
        for adapter in _list_adapters(self.chain):
            tensors += adapter.parameters()
        # Without tensor parallelism, every rank has the complete u.
        if tensors and isinstance(self.norm.u, DTensor):
            tensors.insert(0, self.norm.u)
        return tensors

    def add_adapters(
        self, product: Tensor, vector: Tensor, gathered: Mapping[Tensor, Tensor], transposed: bool
    ) -> Tensor:
        """Add the product of the adapters and `vector` to `product`, the product of the weight matrix and `vector`.

        `gathered` maps the tensors of `list_adapter_tensors` to whole tensors. `transposed` transposes all matrices.
        """
        adapters = _list_adapters(self.chain)
        if not adapters:
            return product
        addend = torch.zeros(self.chain.original.shape, device=vector.device)
        for adapter in adapters:
            parameters = {name: gathered[parameter] for name, parameter in adapter.named_parameters()}
            addend = functional_call(adapter, parameters, addend)
        matrix = self.norm.matrix(addend)
        if transposed:
            matrix = matrix.t()
        return product + torch.mv(matrix, vector)


def _power_iterate_sharded(chains: Mapping[SpectralNorm, Chain], iterations: int) -> None:
    """Collective: update u and v in place for the weights of `chains`, which are sharded over the ranks.

    Every rank multiplies its parts of the matrices. The sums of these products over the ranks are the complete u and v,
    and each rank stores its part of u and v. The first all-reduce also gathers the adapters, which are small.
    """
    shards = [_MatrixShard.build(norm, chain) for norm, chain in chains.items()]
    originals = [chain.original for chain in chains.values()]
    to_gather: list[Tensor] = []
    for shard in shards:
        to_gather += shard.list_adapter_tensors()
    us = [pad_local_part(norm.u) for norm in chains]
    gathered: dict[Tensor, Tensor] = {}
    with without_autocast(us[0]):
        stored = [norm.matrix(to_local(chain.original)).to(norm.u.device) for norm, chain in chains.items()]
        matrices = prepare_matrices(stored)
        for iteration in range(iterations):
            # v = W^T u, then u = W v; u and v are divided by their lengths.
            row_vectors = [u[shard.rows] for shard, u in zip(shards, us, strict=True)]
            summands = []
            for shard, product in zip(shards, matrices.multiply(row_vectors, transposed=True), strict=True):
                summands.append(pad_to_shape(product, [shard.columns], shard.norm.v.shape))
            if iteration == 0 and to_gather:
                embedded = [pad_local_part(tensor).to(us[0].device) for tensor in to_gather]
                sums = sum_over_shards(summands + embedded, originals + to_gather)
                gathered = dict(zip(to_gather, sums[len(shards) :], strict=True))
                us = [gathered.get(shard.norm.u, u) for shard, u in zip(shards, us, strict=True)]
            else:
                sums = sum_over_shards(summands, originals)
            vs = []
            for shard, product, u in zip(shards, sums[: len(shards)], us, strict=True):
                vs.append(shard.add_adapters(product, u, gathered, transposed=True))
            vs = normalize_vectors(vs)
            column_vectors = [v[shard.columns] for shard, v in zip(shards, vs, strict=True)]
            summands = []
            for shard, product in zip(shards, matrices.multiply(column_vectors, transposed=False), strict=True):
                summands.append(pad_to_shape(product, [shard.rows], shard.norm.u.shape))
            us = []
            for shard, product, v in zip(shards, sum_over_shards(summands, originals), vs, strict=True):
                us.append(shard.add_adapters(product, v, gathered, transposed=False))
            us = normalize_vectors(us)
    for norm, u, v in zip(chains, us, vs, strict=True):
        to_local(norm.u).copy_(u[local_slices(norm.u)[0]])
        to_local(norm.v).copy_(v[local_slices(norm.v)[0]])


def _list_adapters(chain: Chain) -> list[nn.Module]:
    """Return the adapters of a weight: all parametrizations before spectral norm."""
    return list(chain)[:-1]


def _compute_adapted_weight(chain: Chain) -> Tensor:
    """Return the input of spectral norm: the weight with its adapters, or the part on this rank."""
    # `to_local` and `_list_adapters` are inlined to avoid two function calls for each weight in every step.
    weight = chain.original.to_local() if isinstance(chain.original, DTensor) else chain.original
    for adapter in list(chain)[:-1]:
        weight = adapter(weight)
    return weight


def install_batched_normalization(module: nn.Module, by_unit: bool) -> None:
    """Change the forward of `module` in place so that it first normalises all weights inside it in a few operations.

    On a GPU, the same kernels normalise all weights of the same shape. Tensor-parallel weights share one all-reduce of
    their sigmas and one all-reduce of the gradient. All other weights are still normalised when they are read.

    Args:
        module: a module that is not compiled; a compiled graph normalises each weight separately.
        by_unit: True to normalise the weights of each sharding unit in the forward of the unit. This is necessary if
            weights are gathered, or activations are recomputed, unit by unit.
    """
    units = [module]
    if by_unit:
        units += [unit for unit in module.modules() if is_marked(unit) and unit is not module]
    for unit in units:
        # A unit inside this unit normalises its own weights.
        chains = find_spectral_norms(unit)
        for inner in units:
            if inner is not unit and inner in set(unit.modules()):
                for norm in find_spectral_norms(inner):
                    chains.pop(norm, None)
        if chains:
            unit.forward = functools.partial(_forward_with_prenormalized_weights, unit.forward, chains)


def _forward_with_prenormalized_weights(
    forward: Callable[..., Any], chains: Mapping[SpectralNorm, Chain], *args: Any, **kwargs: Any
) -> Any:
    """Normalise the weights of `chains`, then call `forward`, in which `SpectralNorm.forward` returns these weights."""
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    ready = _weights_by_norm.get()
    weights = {norm: _compute_adapted_weight(chain) for norm, chain in chains.items() if norm not in ready}
    token = _weights_by_norm.set({**ready, **_normalize_together(weights)})
    try:
        return forward(*args, **kwargs)
    finally:
        _weights_by_norm.reset(token)


def _normalize_together(weights: Mapping[SpectralNorm, Tensor]) -> dict[SpectralNorm, Tensor]:
    """Normalise and return the weights (or local parts) that can share kernels or all-reduces; omit the others."""
    split: dict[SpectralNorm, Tensor] = {}
    same_shape: defaultdict[tuple[Any, ...], dict[SpectralNorm, Tensor]] = defaultdict(dict)
    for norm, weight in weights.items():
        if norm.sum_over_parts is not None:
            split[norm] = weight
        elif not is_cpu_path(weight):
            same_shape[weight.shape, weight.dtype, norm.out_dim][norm] = weight
    normalized = _normalize_tensor_parallel(split) if split else {}
    for (_, _, out_dim), group in same_shape.items():
        if len(group) > 1:
            outputs_first = [weight.transpose(0, out_dim) for weight in group.values()]
            us = [norm.u for norm in group]
            vs = [norm.v for norm in group]
            with without_autocast(outputs_first[0]):
                results = normalize_batched(outputs_first, us, vs)
            normalized |= zip(group, [result.transpose(0, out_dim) for result in results], strict=True)
    return normalized


def _normalize_tensor_parallel(weights: Mapping[SpectralNorm, Tensor]) -> dict[SpectralNorm, Tensor]:
    """Collective: return the parts on this rank of the tensor-parallel `weights`, normalised with one all-reduce."""
    sum_over_parts = next(iter(weights)).sum_over_parts
    with without_autocast(next(iter(weights.values()))):
        products = []
        for norm, weight in weights.items():
            products.append(torch.dot(to_local(norm.u), torch.mv(norm.matrix(weight), to_local(norm.v))))
        sigmas = sum_over_parts(torch.stack(products)).unbind()
        normalized = {}
        for (norm, weight), sigma in zip(weights.items(), sigmas, strict=True):
            normalized[norm] = (weight.float() * sigma.reciprocal()).to(weight.dtype)
        return normalized
