"""Cases of tensor-parallel plans: split layers give the results of one process, or are refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations, parametrize, prune

from credit.config.sections.execution import ParallelismConfig
from credit.parallel import fsdp2
from credit.parallel.mesh import build_mesh, plan_degrees
from credit.parallel.parallelize import parallelize
from credit.parallel.tensor.tensor_parallel import apply_tensor_parallel
from credit.train.build.model import compile_blocks
from tests.parallel.fsdp2_api.example_models import (
    WIDTH,
    Planned,
    build_seeded,
    describe_error,
    gradients,
    mean_square_loss,
    require_close,
    samples,
    weights,
)
from tests.parallel.fsdp2_api.gradient_cases import register_case

HIDDEN, HEAD = 12, 4


class Gated(nn.Module):
    """SwiGLU with gate and up in one layer, whose outputs are in equal parts or interleaved by hidden unit."""

    def __init__(self, kind: str, parts: int = 2, interleaved: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, parts * HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.parts, self.interleaved = parts, interleaved
        self._tp_plan = {"up": kind, "down": "rowwise"}

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        parts = y.unflatten(-1, (-1, self.parts)).unbind(-1) if self.interleaved else y.chunk(self.parts, -1)
        product = nn.functional.silu(parts[0])
        for number, part in enumerate(parts[1:]):
            product = product * (part + number)
        return x + self.down(product)


class Gate(nn.Module):
    """Product of gate and up, with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.proj, self.drop = nn.Linear(WIDTH, 2 * HIDDEN), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.proj(x).chunk(2, -1)
        return self.drop(gate * up)


class Deep(nn.Module):
    """Feed-forward block whose two layers are at different depths."""

    _tp_plan = {"net.0.proj": "colwise:2", "net.1": "rowwise"}

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(Gate(dropout), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class Grouped(nn.Module):
    """Attention with fewer heads of keys and values than of queries."""

    def __init__(self, heads: int, kv_heads: int, keys: str = "colwise") -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(WIDTH, heads * HEAD)
        self.to_k, self.to_v = nn.Linear(WIDTH, kv_heads * HEAD), nn.Linear(WIDTH, kv_heads * HEAD)
        self.to_out = nn.Linear(heads * HEAD, WIDTH)
        self._tp_plan = {"to_q": "colwise", "to_k": keys, "to_v": keys, "to_out": "rowwise"}

    def forward(self, x: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.to_q, self.to_k, self.to_v))
        q = q + shift
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.to_out(y.transpose(1, 2).flatten(2))


class Shifted(nn.Module):
    """Attention whose heads all use the output of a separate layer."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.attention, self.shift = Grouped(heads, heads), nn.Linear(WIDTH, HEAD)
        plan, self.attention._tp_plan = self.attention._tp_plan, {}
        self._tp_plan = {f"attention.{name}": kind for name, kind in plan.items()} | {"shift": "replicated"}

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, self.shift(x).unsqueeze(1))


class Fused(nn.Module):
    """Attention with a layer whose outputs are first q, then k, then v of all heads."""

    _tp_plan = {"to_qkv": "colwise:3", "to_out": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * 4 * HEAD, bias=False), nn.Linear(4 * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in self.to_qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.to_out(y.transpose(1, 2).flatten(2))


def require_same_split(build: Callable[[], nn.Module], tensor: int, num_split: int) -> None:
    """Split and shard a model, and require the gradients and weights of one process.

    Args:
        build: function that builds the model.
        tensor: number of tensor-parallel ranks.
        num_split: expected number of split layers.
    """
    mesh = init_device_mesh("cpu", (4 // tensor, tensor), mesh_dim_names=("dp", "tp"))
    model, reference_model = build_seeded(build), build_seeded(build)
    mean_square_loss(reference_model, samples()).backward()
    names = apply_tensor_parallel(model, mesh["tp"])
    assert len(names) == num_split, names
    fsdp2.apply_fsdp2(model, mesh["dp"], {})
    mean_square_loss(model, samples().chunk(4 // tensor)[mesh["dp"].get_local_rank()]).backward()
    require_close(gradients(model), gradients(reference_model))
    for name, value in weights(model).items():
        assert torch.equal(value, reference_model.get_parameter(name)), f"{name} is in another order"


@register_case
def fused_parts_are_dealt_one_by_one() -> None:
    for tensor in (2, 4):
        for parts in (2, 3):
            require_same_split(partial(Gated, f"colwise:{parts}", parts), tensor, 2)
        require_same_split(partial(Gated, "colwise:1", 2, True), tensor, 2)
        require_same_split(Deep, tensor, 2)
        require_same_split(Fused, tensor, 2)


@register_case
def fused_parts_checkpointed_and_compiled() -> None:
    mesh = build_mesh(plan_degrees(ParallelismConfig(tensor=2), 4), dist.get_rank(), "cpu")
    for compile_function in (None, partial(compile_blocks, backend="aot_eager")):
        model = build_seeded(partial(Gated, "colwise:2"))
        model._fsdp2_shard = True
        model = nn.Sequential(model)
        reference_model = copy.deepcopy(model)
        mean_square_loss(reference_model, samples()).backward()
        parallelize(model, mesh.device_mesh, checkpoint=True, compile_blocks=compile_function)
        mean_square_loss(model, samples().chunk(2)[mesh.data_rank]).backward()
        require_close(gradients(model), gradients(reference_model))


@register_case
def fused_parts_that_are_not_declared() -> None:
    mesh = init_device_mesh("cpu", (4,))
    half_heads = Grouped(4, 4)
    half_heads.to_k = nn.Linear(WIDTH, 6)
    for model, fragments in (
        (Gated("colwise"), ("Gated._tp_plan['up']", "24 outputs do not match the 12 inputs of 'down'", '"colwise:2"')),
        (Gated("colwise:5"), ("Gated._tp_plan['up']", "24 outputs cannot be divided into 5 equal parts")),
        (Gated("colwise:0"), ("'colwise:0' is not one of colwise, rowwise",)),
        (Gated("rowwise:2"), ("'rowwise:2' is not one of colwise, rowwise",)),
        (
            half_heads,
            ("Grouped._tp_plan['to_k']", "6 outputs cannot be divided into heads; the 16 inputs"),
        ),
    ):
        message = describe_error(lambda model=model: apply_tensor_parallel(model, mesh))
        assert message.startswith("ConfigError") and all(word in message for word in fragments), message


@register_case
def fewer_heads_of_keys_than_of_queries() -> None:
    require_same_split(partial(Grouped, 4, 2), 2, 4)
    require_same_split(partial(Grouped, 8, 4), 4, 4)
    # Every rank has the only head of keys and values of multi-query attention.
    require_same_split(partial(Grouped, 4, 1, "replicated"), 4, 2)
    # Two heads of keys cannot be divided among four ranks, so the attention is not split, but the feed-forward is.
    model = lambda: nn.Sequential(Grouped(4, 2), Gated("colwise:2"))  # noqa: E731
    require_same_split(model, 4, 2)


@register_case
def what_all_heads_use_beside_their_attention() -> None:
    """The gradient of the shared layer is summed over the ranks only if the attention is split."""
    require_same_split(partial(Shifted, 4), 2, 4)
    require_same_split(lambda: nn.Sequential(Shifted(2), Gated("colwise:2")), 4, 2)


@register_case
def dropout_between_layers_at_different_depths() -> None:
    """After a pass through split layers, all ranks draw the same random numbers."""
    model = build_seeded(partial(Deep, 0.5)).train()
    apply_tensor_parallel(model, init_device_mesh("cpu", (4,)))
    torch.manual_seed(7)
    model(samples())
    draws = [torch.empty(3) for _ in range(4)]
    dist.all_gather(draws, torch.rand(3))
    assert all(torch.equal(draw, draws[0]) for draw in draws)


class Scaled(nn.Linear):
    """Linear layer that overrides forward."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def replace_forward(layer: nn.Linear) -> None:
    layer.forward = lambda x: 2 * nn.Linear.forward(layer, x)


@register_case
def layers_that_cannot_be_split() -> None:
    """Layers whose weight a hook computes, or that do more than a product, would give wrong sums without an error."""
    mesh = init_device_mesh("cpu", (4,))
    changes: list[tuple[Callable[[nn.Module], object], str]] = [
        (lambda m: nn.utils.spectral_norm(m.up), "its weight is not a parameter; a hook"),
        (lambda m: nn.utils.weight_norm(m.up), "its weight is not a parameter; a hook"),
        (lambda m: prune.l1_unstructured(m.up, "weight", 0.5), "its weight is not a parameter; a hook"),
        (lambda m: parametrizations.weight_norm(m.up), "_WeightNorm of its weight has no method share"),
        (lambda m: parametrizations.spectral_norm(m.up), "_SpectralNorm of its weight has no method share"),
        (lambda m: parametrize.register_parametrization(m.up, "bias", nn.Tanh()), "its bias is not a plain parameter"),
        (lambda m: setattr(m, "up", Scaled(WIDTH, HIDDEN)), "Scaled overrides forward"),
        (lambda m: replace_forward(m.up), "its forward was already replaced"),
        (lambda m: setattr(m, "tied", m.down) or setattr(m.norm, "copy", m.up.weight), "shared with another module"),
        (lambda m: fsdp2.apply_fsdp2(m, None, {}), "already sharded or split"),
        (lambda m: apply_tensor_parallel(m, mesh), "already sharded or split"),
    ]
    for change, fragment in changes:
        model = build_seeded(lambda: Planned({"down": "rowwise", "up": "colwise"}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            change(model)
        parameter_ids = [id(parameter) for parameter in model.parameters()]
        message = describe_error(lambda model=model: apply_tensor_parallel(model, mesh))
        assert message.startswith("ConfigError") and "Planned._tp_plan[" in message and fragment in message, message
        assert [id(parameter) for parameter in model.parameters()] == parameter_ids, "it was split in part"
    ddp_model = nn.parallel.DistributedDataParallel(build_seeded(lambda: Planned({"up": "colwise", "down": "rowwise"})))
    for call in (lambda: apply_tensor_parallel(ddp_model, mesh), lambda: fsdp2.apply_fsdp2(ddp_model, None, {})):
        message = describe_error(call)
        assert message.startswith("ConfigError: the model: is wrapped in DistributedDataParallel"), message
