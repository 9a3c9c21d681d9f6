"""Tests of Muon: orthogonal updates, the choice of matrices, scaled gradients, and skipped steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from credit.config.registry import MODELS
from credit.config.sections.trainer import TrainerConfig
from credit.models.base import ModelSpec
from credit.models.data_axes import find_channel_axes
from credit.models.matrices import (
    NEWTON_SCHULZ,
    NUM_ITERATIONS,
    UPDATE_RMS,
    count_matrix_operations,
    find_muon_matrices,
    orthogonalize,
    orthogonalize_updates,
)
from credit.models.registry import build_model
from credit.parallel.matrix_exchange import MatrixExchange, assign_owners, find_replica_size
from credit.train.muon import MOMENTUM, Muon
from credit.train.optim import build_optimizer, optimizer_tensors
from tests.networks.networks import SECTIONS


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return a float64 tensor of random numbers."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def apply_to_singular_values(matrix: Tensor) -> Tensor:
    """Apply the iterations to the singular values of a matrix, and return the new matrix."""
    u, singular_values, vh = torch.linalg.svd(matrix, full_matrices=False)
    a, b, c = NEWTON_SCHULZ
    x = singular_values / matrix.norm()
    for _ in range(NUM_ITERATIONS):
        x = a * x + b * x**3 + c * x**5
    return u @ torch.diag(x) @ vh


@pytest.mark.parametrize("shape", [(6, 6), (4, 10), (10, 4)])
def test_the_iterations_change_the_singular_values_alone(shape: tuple[int, int]) -> None:
    matrix = draw(*shape)
    torch.testing.assert_close(orthogonalize(matrix), apply_to_singular_values(matrix), rtol=0, atol=1e-6)


def test_singular_values_become_about_equal() -> None:
    values = torch.linalg.svdvals(orthogonalize(draw(20, 60)))
    assert values.min() > 0.6 and values.max() < 1.2


@pytest.mark.parametrize("out_dim", [0, 1])
def test_kernels_are_matrices_of_outputs_and_inputs(out_dim: int) -> None:
    # Two kernels of one shape, and a matrix.
    kernels = {0: draw(5, 3, 2, 2), 4: draw(5, 3, 2, 2, seed=1), 3: draw(2, 7)}
    updates = orthogonalize_updates(kernels, out_dim)
    assert updates.keys() == kernels.keys()
    for number, kernel in kernels.items():
        # A transposed convolution counts its outputs in dimension 1.
        matrix = kernel.movedim(out_dim, 0).flatten(1)
        expected = UPDATE_RMS * max(matrix.shape) ** 0.5 * apply_to_singular_values(matrix)
        update = updates[number].movedim(out_dim, 0).flatten(1)
        torch.testing.assert_close(update, expected, rtol=0, atol=1e-5)
    # In bfloat16 the result is close, and keeps the dtype of the weight.
    rounded = orthogonalize_updates(kernels, out_dim, torch.bfloat16)[3]
    assert rounded.dtype == torch.float64
    assert (rounded - updates[3]).norm() < 0.1 * updates[3].norm()


def build_pair(seed: int = 0) -> nn.Sequential:
    """Return two linear layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0, found_inf: float = 0.0) -> None:
    """Take a step with gradients of fixed inputs, multiplied by a factor that `grad_scale` removes."""
    optimizer.zero_grad()
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    (scale * model(x).square().sum()).backward()
    optimizer.grad_scale = torch.tensor(scale)
    optimizer.found_inf = torch.tensor(found_inf)
    optimizer.step()


def test_steps_follow_the_formula() -> None:
    """Weight decay, Nesterov momentum and orthogonalisation by hand, in float64, with changing gradients."""
    weight = nn.Parameter(draw(6, 9))
    optimizer = Muon([{"params": [weight], "weight_decay": 0.3, "out_dim": 0}], 0.02, (0.9, 0.95))
    expected, momentum = weight.detach().clone(), torch.zeros(6, 9, dtype=torch.float64)
    for number in range(4):
        gradient = draw(6, 9, seed=number + 1)
        weight.grad = gradient.clone()
        optimizer.step()
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        combined = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        direction = UPDATE_RMS * 3 * apply_to_singular_values(combined)
        expected = expected * (1 - 0.02 * 0.3) - 0.02 * direction
        torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-6)
    # A matrix without a gradient is left as it is.
    weight.grad = None
    optimizer.step()
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-6)


def test_agrees_with_torch() -> None:
    """torch iterates in bfloat16, whose rounding the iterations amplify, so only the directions agree closely."""
    model, torch_model = build_pair(), build_pair()
    optimizer = Muon([{"params": [layer.weight for layer in model], "out_dim": 0}], 0.02, (0.9, 0.95))
    reference = torch.optim.Muon(
        [layer.weight for layer in torch_model], lr=0.02, weight_decay=0.0, momentum=MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    model_before = copy.deepcopy(model)
    take_step(model, optimizer)
    take_step(torch_model, reference)
    for layer, torch_layer, layer_before in zip(model, torch_model, model_before, strict=True):
        change, torch_change = layer.weight - layer_before.weight, torch_layer.weight - layer_before.weight
        cosine = (change * torch_change).sum() / (change.norm() * torch_change.norm())
        assert cosine > 0.95 and 0.9 < change.norm() / torch_change.norm() < 1.1


def test_gradients_are_scaled_and_bad_steps_are_skipped() -> None:
    conf = TrainerConfig(max_steps=1, optimizer="muon", learning_rate=0.02, weight_decay=0.1)
    plain, scaled = build_pair(), build_pair()
    plain_optimizer, scaled_optimizer = build_optimizer(plain, conf), build_optimizer(scaled, conf)
    for _ in range(2):
        take_step(plain, plain_optimizer)
        take_step(scaled, scaled_optimizer, scale=64.0)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(scaled.state_dict()[name], value)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    state = {name: value.clone() for name, value in optimizer_tensors(plain, plain_optimizer).items()}
    take_step(plain, plain_optimizer, scale=float("nan"), found_inf=1.0)
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in before.items())
    after = optimizer_tensors(plain, plain_optimizer)
    assert state.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in state.items())


def test_state_of_matrices_and_of_other_parameters() -> None:
    optimizer = build_optimizer(build_pair(), TrainerConfig(max_steps=1, optimizer="muon"))
    kinds = [set(state) for state in optimizer.state.values()]
    assert kinds.count({"momentum"}) == 2 and kinds.count({"step", "exp_avg", "exp_avg_sq"}) == 2


@pytest.mark.parametrize("name", SECTIONS)
def test_layers_at_the_border_of_a_network_keep_adamw(name: str) -> None:
    section = MODELS.find_section(name).model_validate({**SECTIONS[name], "noise": [{"kind": "global", "channels": 4}]})
    spec = ModelSpec.from_sizes(image_height=16, image_width=32, in_channels=3, out_channels=2)
    with torch.device("meta"):
        model = build_model(spec, section)
    names = {parameter: key for key, parameter in model.named_parameters()}
    matrices = {names[parameter] for parameter in find_muon_matrices(model)}
    # Most weights are matrices; sfno is an exception because of its filters. No layer of noise is among them.
    share = sum(model.get_parameter(key).numel() for key in matrices) / sum(p.numel() for p in model.parameters())
    assert share > (0.1 if name == "sfno" else 0.7)
    border_layers = find_channel_axes(model).keys()
    assert border_layers and not matrices & border_layers
    assert not any("scale_shift" in key or "bias" in key.split(".")[-1] for key in matrices)
    assert len(matrices) < len(names) / 2


def test_learning_rates_and_decay_of_groups() -> None:
    conf = TrainerConfig(
        max_steps=1, optimizer="muon", weight_decay=0.3, learning_rate_factors={"0": 0.1}, learning_rate=0.5
    )
    optimizer = build_optimizer(build_pair(), conf)
    groups = {(group["out_dim"] is not None, group["lr_factor"]): group for group in optimizer.param_groups}
    assert groups.keys() == {(True, 0.1), (True, 1.0), (False, 0.1), (False, 1.0)}
    assert groups[True, 0.1]["weight_decay"] == 0.3 and groups[False, 1.0]["weight_decay"] == 0.0


def test_work_is_divided_evenly() -> None:
    assert assign_owners([1.0, 5.0, 2.0, 2.0], 2) == [1, 0, 1, 1]
    assert assign_owners([1.0], 4) == [0]
    # A product of 4 x 10 with its transpose has 2 * 4 * 4 * 10 operations, and so on.
    num_operations = 5 * (4 * 160 + 2 * 64)
    assert count_matrix_operations(torch.zeros(4, 10), 0) == num_operations
    assert count_matrix_operations(torch.zeros(2, 10, 2), 1) == num_operations
    exchange = MatrixExchange([torch.zeros(2, 3), torch.zeros(4)], [1.0, 1.0])

    def multiply(matrices: dict[int, Tensor]) -> dict[int, Tensor]:
        return {index: matrix * (index + 1) for index, matrix in matrices.items()}

    results = exchange.apply(multiply, [torch.ones(2, 3), torch.ones(4)])
    assert results[0].sum() == 6 and results[1].sum() == 8


def test_replicas_are_the_fewest_consecutive_ranks_with_all_parts() -> None:
    shapes = [torch.Size([4, 6]), torch.Size([3])]
    all_parts = [((0, 4), (0, 6)), ((0, 3),)]
    first = [((0, 2), (0, 6)), ((0, 3),)]
    second = [((2, 4), (0, 6)), ((3, 3),)]
    assert find_replica_size([all_parts] * 4, shapes) == 1
    assert find_replica_size([first, second] * 2, shapes) == 2
    assert find_replica_size([first, first, second, second], shapes) == 4


def test_buckets_limit_the_elements_that_are_updated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("credit.parallel.matrix_exchange.BUCKET_ELEMENTS", 20)
    conf = TrainerConfig(max_steps=1, optimizer="muon", learning_rate=0.02)
    plain, bucketed = build_pair(), build_pair()
    bucketed_optimizer = build_optimizer(bucketed, conf)
    for _ in range(2):
        take_step(bucketed, bucketed_optimizer)
    assert len(bucketed_optimizer._exchanges) == 2
    monkeypatch.setattr("credit.parallel.matrix_exchange.BUCKET_ELEMENTS", 2**26)
    plain_optimizer = build_optimizer(plain, conf)
    for _ in range(2):
        take_step(plain, plain_optimizer)
    assert len(plain_optimizer._exchanges) == 1
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(bucketed.state_dict()[name], value)
