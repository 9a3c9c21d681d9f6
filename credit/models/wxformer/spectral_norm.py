"""Spectral normalisation of weights as a parametrization (Miyato et al. 2018, arXiv 1802.05957).

The weight in use is W / sigma, sigma = u^T W v, where u and v are float32 buffers that follow W's leading singular
vectors by power iteration. They must be the same in every forward and recomputation of one optimizer step,
otherwise activation checkpointing and multi-step rollouts give wrong gradients without any error. So an iteration
needs an explicit order:

- `SpectralNorm.armed` is a plain flag; the next training forward with gradients iterates once and disarms.
- A bare model orders one iteration per training forward (`arm_for_forward`, called by the model's own forward).
  Recomputation under activation checkpointing calls blocks, not the model, so it never iterates.
- A trainer takes over with `iterate_per_step(model)` and orders one at the start of each optimizer step, as `arm` does.

What can be done for several weights together is done before the forward of a module that has them
(`prepare_before_forward`). Where weights are split over ranks, sigma and the products of an iteration are sums over the
ranks: one for all sigmas, one for their gradients, two for all iterations. On a GPU weights of one shape share their
kernels (`alike`). A weight that is read at another time is normalised by itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from credit.models.device_paths import use_cpu_kernels
from credit.models.wxformer.spectral_norm_batched import EPS, normalize_, normalize_batched, power_iteration_batched_
from credit.parallel.blocks.marks import is_marked
from credit.parallel.dtensor import local

SETTLE_ITERATIONS = 15  # leaves sigma of a random matrix a few per cent low


def without_autocast(weight: Tensor) -> contextlib.AbstractContextManager:
    """Return the context for products with `weight`: in bfloat16, as by autocast, they would lose the estimate."""
    device = weight.device.type
    # the meta device has no autocast
    on = not weight.is_meta and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else contextlib.nullcontext()


def power_iteration_(matrix: Tensor, u: Tensor, v: Tensor) -> None:
    """Take one power iteration on `matrix` (out, rest) from `u` (out,), in `u` and `v` (rest,)."""
    normalize_(torch.mv(matrix.t(), u, out=v))
    normalize_(torch.mv(matrix, v, out=u))


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
        self.split: int | None = None
        self.total: Callable[[Tensor], Tensor] | None = None
        # the normalised weight for the forward that is under way, where it was prepared
        self.prepared: Tensor | None = None
        rows = weight.shape[out_dim]
        # Any unit vector will do here: `initialise` or a state dict sets the real ones.
        self.register_buffer("u", torch.full((rows,), rows**-0.5, device=weight.device))
        columns = weight.numel() // rows
        self.register_buffer("v", torch.full((columns,), columns**-0.5, device=weight.device))

    def matrix(self, weight: Tensor) -> Tensor:
        """Return `weight`, or this rank's part of it, as a float32 matrix (out, rest)."""
        return self.outputs_first(local(weight)).flatten(1).float()

    def outputs_first(self, weight: Tensor) -> Tensor:
        """Return a view of `weight` whose first dimension counts outputs; of such a view, return the weight."""
        return weight.transpose(0, self.out_dim) if self.out_dim else weight

    def held(self, name: str) -> Tensor:
        """Return `u` or `v`, or this rank's part of it, with the values of now until the backward pass.

        Where nobody times the iterations, the next forward moves them in place, perhaps before the backward of this.
        """
        vector = local(getattr(self, name))
        return vector if self.per_step else vector.clone()

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
        self.split, self.total = split, total
        return {"u": 0 if split == 0 else None, "v": 0 if split == 1 else None}

    def is_ordered(self) -> bool:
        """Whether the forward under way is to iterate."""
        # The flag comes last: so a compiled forward depends on it in training alone, and there it is always down.
        return self.training and torch.is_grad_enabled() and self.armed

    @staticmethod
    def share_sums(block: nn.Module) -> None:
        """Add up for all split weights of `block` together from now on, for those of a sharding unit inside apart."""
        prepare_units_before_forward(block)

    def initial_buffers(self, weight: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return settled u and v for a whole initial `weight`, starting from a random u drawn from `generator`."""
        matrix = self.matrix(weight)
        u = normalize_(torch.randn(matrix.shape[0], generator=generator, device="cpu"))
        v = matrix.new_empty(matrix.shape[1])
        for _ in range(SETTLE_ITERATIONS):
            power_iteration_(matrix, u, v)
        return {"u": u, "v": v}

    def forward(self, weight: Tensor) -> Tensor:
        """Return `weight` / sigma in the dtype of `weight`; iterates first if armed, training and gradients are on."""
        if self.prepared is not None:
            return self.prepared
        if self.is_ordered():
            take_ordered_iteration([(self, weight)])
        (normalised_weight,) = normalised([(self, weight)])
        return normalised_weight


# Parametrizations, each with the weight that it is given: a single whole one, several whole ones of one shape, or any
# number that are split over ranks.
Weights = Sequence[tuple[SpectralNorm, Tensor]]
Chains = Sequence[tuple[SpectralNorm, parametrize.ParametrizationList]]


def together(weights: Iterable[tuple[SpectralNorm, Tensor]]) -> Iterator[Weights]:
    """Yield the whole weights, on a CPU one by one, on a GPU those of one shape together, then all that are split."""
    split, alike = [], defaultdict(list)
    for norm, weight in weights:
        if norm.split is not None:
            split.append((norm, weight))
        elif use_cpu_kernels(weight):
            yield [(norm, weight)]
        else:
            alike[weight.shape, weight.dtype, norm.out_dim].append((norm, weight))
    yield from alike.values()
    if split:
        yield split


def normalised(weights: Weights) -> Sequence[Tensor]:
    """Return each weight, or this rank's part of it, divided by its sigma, in its dtype.

    Over ranks, by one sum forward and one backward.
    """
    norms, parts = [norm for norm, _ in weights], [local(weight) for _, weight in weights]
    total = norms[0].total
    with without_autocast(parts[0]):
        if total is None and len(weights) > 1:
            views = [norm.outputs_first(part) for norm, part in zip(norms, parts, strict=True)]
            found = normalize_batched(views, [norm.u for norm in norms], [norm.v for norm in norms])
            return [norm.outputs_first(one) for norm, one in zip(norms, found, strict=True)]
        sigmas = [
            torch.dot(norm.held("u"), torch.mv(norm.matrix(part), norm.held("v")))
            for norm, part in zip(norms, parts, strict=True)
        ]
        if total is not None:
            sigmas = total(torch.stack(sigmas)).unbind()
        # A product with 1 / sigma: the backward of a division makes several more passes over the weight.
        return [(part.float() * s.reciprocal()).to(part.dtype) for part, s in zip(parts, sigmas, strict=True)]


@torch.no_grad()
def iterate_(weights: Weights, iterations: int = 1) -> None:
    """Run power iterations of the weights' u and v, in place; over ranks, by two sums each."""
    norms = [norm for norm, _ in weights]
    with without_autocast(weights[0][1]):
        matrices = [norm.matrix(weight) for norm, weight in weights]
        for _ in range(iterations):
            us, vs = [local(norm.u) for norm in norms], [local(norm.v) for norm in norms]
            if norms[0].split is not None:
                for vector, moved in zip((*us, *vs), _split_power_iteration(norms, matrices, us), strict=True):
                    vector.copy_(moved)
            elif len(norms) == 1:
                power_iteration_(matrices[0], us[0], vs[0])
            else:
                power_iteration_batched_(matrices, us, vs)


def _split_power_iteration(
    norms: Sequence[SpectralNorm], matrices: Sequence[Tensor], us: Sequence[Tensor]
) -> list[Tensor]:
    """Return the new us, then vs, of one power iteration on each of several matrices of which each rank has a part."""
    vs = _unit_vectors(norms, [torch.mv(matrix.t(), u) for matrix, u in zip(matrices, us, strict=True)], along=1)
    us = _unit_vectors(norms, [torch.mv(matrix, v) for matrix, v in zip(matrices, vs, strict=True)], along=0)
    return [*us, *vs]


def _unit_vectors(norms: Sequence[SpectralNorm], products: Sequence[Tensor], along: int) -> list[Tensor]:
    """Return products with split matrices, scaled to length 1; `along` says whether they run along rows or columns.

    Of a matrix that is split along its product, a rank has a part of the product, else a summand of the whole product.
    """
    ours = [norm.split == along for norm in norms]
    parts = [p.square().sum()[None] if part else p for p, part in zip(products, ours, strict=True)]
    sums = norms[0].total(torch.cat(parts)).split([len(part) for part in parts])
    return [
        p / s.sqrt().clamp(min=EPS) if part else normalize_(s) for p, s, part in zip(products, sums, ours, strict=True)
    ]


def take_ordered_iteration(weights: Weights) -> None:
    """Run the power iteration that was ordered of every one of `weights`, which `together` has put together."""
    iterate_(weights)
    for norm, _ in weights:
        norm.armed = False


def apply_spectral_norm(model: nn.Module) -> nn.Module:
    """Normalise every Conv2d, ConvTranspose2d and Linear weight of `model` in place, and return the model."""
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


def weight_chains(module: nn.Module) -> Iterator[tuple[SpectralNorm, parametrize.ParametrizationList]]:
    """Yield (parametrization, all parametrizations of the weight) of every spectrally normalised weight, in any order.

    Without names, which take longer to find than all else that a forward needs of it.
    """
    left: list[nn.Module | None] = [module]
    while left:
        found = left.pop()
        if isinstance(found, parametrize.ParametrizationList):
            yield from ((link, found) for link in found if isinstance(link, SpectralNorm))
        elif found is not None:
            left.extend(found._modules.values())


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
    return chain.original.requires_grad or any(parameter.requires_grad for parameter in chain.parameters())


def arm(model: nn.Module) -> None:
    """Order one power iteration of every weight that trains, in the next forward. Called once an optimizer step."""
    for norm, chain in weight_chains(model):
        norm.armed = trains(chain)


def iterate_per_step(model: nn.Module) -> None:
    """Hand the timing of power iterations to the caller, who calls `arm` at the start of each optimizer step."""
    for _, norm, _ in parametrizations(model):
        norm.per_step = True


def arm_for_forward(model: nn.Module) -> None:
    """Arm the weights of a model that nobody times: one iteration per training forward. For a model's own forward."""
    if model.training and torch.is_grad_enabled():
        for norm, chain in weight_chains(model):
            if not norm.per_step:
                norm.armed = trains(chain)


def iterate_before_forward(module: nn.Module) -> None:
    """Make `module`, before each forward, take the ordered iterations of the weights inside.

    For one whose forward is compiled, where an iteration must not be.
    """
    inside = list(weight_chains(module))

    def iterate(module: nn.Module, args: tuple) -> None:
        ordered = [(norm, chain) for norm, chain in inside if norm.is_ordered()]
        with torch.no_grad():
            for weights in together((norm, unnormalised(chain)) for norm, chain in ordered):
                take_ordered_iteration(weights)

    module.register_forward_pre_hook(iterate)


def prepare_before_forward(module: nn.Module, without: Iterable[nn.Module] = ()) -> None:
    """Make `module`, before each forward, do for the weights inside what can be done for several of them together.

    For blocks with split weights, and for GPUs. A sharded module's weights must be whole by then: FSDP2 puts its own
    hook first. A whole model that orders its iterations itself does so too late for this.

    Args:
        module: outside of what is compiled; inside of what is checkpointed, so that a recomputation does the same.
        without: modules inside of it whose weights are left alone.
    """
    # looked for once: it takes as long as the sums
    apart = {norm for each in without for norm, _ in weight_chains(each)}
    inside = [(norm, chain) for _, norm, chain in parametrizations(module) if norm not in apart]
    module.register_forward_pre_hook(functools.partial(_prepare, inside))
    # also after an exception, such as the one that ends a recomputation early
    module.register_forward_hook(functools.partial(_forget, inside), always_call=True)


def prepare_units_before_forward(module: nn.Module) -> None:
    """Do the same for `module` and for every block inside that is marked as a sharding unit, each with its own weights.

    A unit's weights are whole during its own forward alone, and checkpointing may run that again without `module`.
    """
    for unit in module.modules():
        if unit is module or is_marked(unit):
            inner_units = [inner for inner in unit.modules() if inner is not unit and is_marked(inner)]
            prepare_before_forward(unit, without=inner_units)


def _prepare(inside: Chains, module: nn.Module, args: tuple) -> None:
    if torch.compiler.is_compiling():
        return  # a block inside of what is compiled, which has prepared it
    # An iteration takes the weights that the forward computes with. To form them for it alone would be a product of
    # adapters (LoRA) that a recomputation, where none is ordered, does not repeat: selective checkpointing hands stored
    # products back in their order, so each later one would be another's.
    for weights in together((norm, unnormalised(chain)) for norm, chain in inside if norm.prepared is None):
        ordered = [(norm, weight) for norm, weight in weights if norm.is_ordered()]
        if ordered:
            take_ordered_iteration(ordered)
        if len(weights) > 1 or weights[0][0].split is not None:
            for (norm, _), weight in zip(weights, normalised(weights), strict=True):
                norm.prepared = weight


def _forget(inside: Chains, module: nn.Module, args: tuple, output: object) -> None:
    if not torch.compiler.is_compiling():
        for norm, _ in inside:
            norm.prepared = None


def vectors(model: nn.Module) -> dict[str, Tensor]:
    """Return the live u and v buffers by their state-dict names. EMA stores these beside the averaged weights."""
    return {f"{name}.{key}": getattr(norm, key) for name, norm, _ in parametrizations(model) for key in ("u", "v")}


@torch.no_grad()
def settle_(modules: Iterable[nn.Module], iterations: int = SETTLE_ITERATIONS) -> None:
    """Run `iterations` power iterations for the present weights of `modules` themselves, not of what is inside them.

    In place, as after putting in averaged weights; of a sharded model, while the weights are whole. Weights that do
    not train keep their vectors.
    """
    own = (module for module in modules if parametrize.is_parametrized(module, "weight"))
    chains = ((norm, chain) for module in own for _, norm, chain in parametrizations(module) if trains(chain))
    for weights in together((norm, unnormalised(chain)) for norm, chain in chains):
        iterate_(weights, iterations)
