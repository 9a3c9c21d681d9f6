"""Ensemble training: members one by one equal all members at once, and noise depends only on the sample."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from credit.data.samples.batch import Batch
from credit.forecast.objectives.base import MicroStep
from credit.forecast.objectives.ensemble import EnsembleRollout
from credit.parallel.mesh import DeviceGrid
from tests.parallel.training import cases

CASE = cases.Case(True, False, 1, 1, "pixel_shuffle", members=4)


def build_ensemble(case: cases.Case) -> tuple[EnsembleRollout, Batch]:
    """Return the objective of a case, whose noise has an effect, and a batch of four samples."""
    model, autocast = cases.build(case, DeviceGrid(), "none")
    step, *_ = cases.build_step(case, model, autocast, DeviceGrid())
    batch = next(cases.batches(case, DeviceGrid()))
    return step._objective, select_samples(batch, [0, 1, 2, 3])


def is_noise(name: str) -> bool:
    """Return whether a parameter belongs to a layer of noise."""
    return any(part in name for part in ("scale_shift", "noise"))


def select_samples(batch: Batch, rows: list[int]) -> Batch:
    history, forcing, target = (tensor[rows] for tensor in batch.tensors())
    return Batch(history, forcing, target, tuple(batch.initial_minutes[row] for row in rows))


def compute_gradients(objective: EnsembleRollout, batch: Batch, micro_step: MicroStep) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the gradients of all parameters."""
    model = objective.stepper.model
    model.zero_grad()
    loss = objective.accumulate_gradients(batch, micro_step)
    return loss, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("checkpoint", [True, "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_blocks_have_the_same_noise_when_they_are_computed_again(
    checkpoint: bool | str, dropout: float
) -> None:
    """The cases have no dropout or dropout of attention weights, which the noise of kind dropout replaces here."""
    case = replace(CASE, rollout=2, recompute=True, members=2, members_at_once=1, dropout=dropout)
    micro_step = MicroStep(2, [1, 2])
    plain, batch = build_ensemble(case)
    expected_loss, expected = compute_gradients(plain, batch, micro_step)
    checkpointed, _ = build_ensemble(replace(case, checkpoint=checkpoint))
    loss, gradients = compute_gradients(checkpointed, batch, micro_step)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("rollout", "loss_steps"), [(1, [1]), (3, [1, 2, 3]), (3, [2, 3])])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("members_at_once", [1, 3])
def test_members_one_by_one_equal_all_at_once(
    rollout: int, loss_steps: list[int], recompute: bool, members_at_once: int
) -> None:
    case = replace(CASE, rollout=rollout, recompute=recompute)
    micro_step = MicroStep(2, loss_steps, num_micro_steps=2)
    all_at_once, batch = build_ensemble(replace(case, members_at_once=4))
    expected_loss, expected = compute_gradients(all_at_once, batch, micro_step)
    in_turn, _ = build_ensemble(replace(case, members_at_once=members_at_once))
    loss, gradients = compute_gradients(in_turn, batch, micro_step)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    largest = max(gradient.abs().max().item() for gradient in expected)
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-6 * max(largest, 1.0))
    names = [name for name, _ in in_turn.stepper.model.named_parameters()]
    has_noise_gradient = [
        gradient.abs().max() > 0 for name, gradient in zip(names, gradients, strict=True) if is_noise(name)
    ]
    assert has_noise_gradient and all(has_noise_gradient)


def test_dropout_masks_are_those_of_the_first_pass() -> None:
    """With dropout in training, the second pass, which has gradients, gives the outputs of the first pass."""
    objective, batch = build_ensemble(replace(CASE, rollout=2, dropout=0.3, noise=("global",)))
    micro_step = MicroStep(0, [1, 2])
    outputs: list[list[Tensor]] = []
    rollout = objective.stepper.rollout

    def record_rollout(*args: object, **options: object) -> object:
        outputs.append([])
        for output in rollout(*args, **options):
            outputs[-1].append(output.detach())
            yield output

    objective.stepper.rollout = record_rollout
    objective.accumulate_gradients(batch, micro_step)
    # The last member keeps its graph and is not computed again.
    first_pass, second_pass = outputs[:3], outputs[4:]
    assert len(second_pass) == 3
    for first, second in zip(first_pass, second_pass, strict=True):
        for first_output, second_output in zip(first, second, strict=True):
            torch.testing.assert_close(first_output, second_output, rtol=0, atol=1e-6)


@torch.no_grad()
def test_noise_depends_on_the_sample_and_not_on_the_batch() -> None:
    objective, batch = build_ensemble(CASE)
    objective.stepper.model.eval()
    batch_outputs = next(objective.predict(objective.encode(batch), 1))
    assert batch_outputs.shape[:2] == (4, 4)
    for row in range(4):
        single_output = next(objective.predict(objective.encode(select_samples(batch, [row])), 1))
        torch.testing.assert_close(single_output[0], batch_outputs[row], rtol=1e-5, atol=1e-5)
    # Members differ, and so does the noise of equal samples with other initial times.
    assert (batch_outputs[:, 0] - batch_outputs[:, 1]).abs().amax() > 1e-3
    shifted_batch = replace(batch, initial_minutes=tuple(minutes + 1 for minutes in batch.initial_minutes))
    assert (next(objective.predict(objective.encode(shifted_batch), 1)) - batch_outputs).abs().amax() > 1e-3


@torch.no_grad()
def test_validation_noise_is_fixed_and_training_noise_is_not() -> None:
    objective, batch = build_ensemble(replace(CASE, rollout=2))
    objective.stepper.model.eval()
    encoded = objective.encode(batch)
    first, second = (list(objective.predict(encoded, 2)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    losses = [objective.training_loss(batch, MicroStep(step, [1])).item() for step in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


@torch.no_grad()
@pytest.mark.parametrize("decoder", ["pixel_shuffle", "transposed"])
def test_new_noise_leaves_the_network_unchanged(decoder: str) -> None:
    """The outputs of a network with new layers of noise equal those of the network without noise, bit for bit."""
    # Noise of kind dropout is left out, because it changes the function.
    case = replace(CASE, decoder=decoder, noise=("global", "cell", "spherical"))
    objective, batch = build_ensemble(case)
    model = objective.stepper.model.eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("scale_shift.weight", "noise_embed.weight")):
            parameter.zero_()
    plain_model, _ = cases.build(replace(case, members=1), DeviceGrid(), "none")
    weights = {name: tensor for name, tensor in model.state_dict().items() if not is_noise(name)}
    plain_model.load_state_dict(weights)
    plain_model.eval()
    x = torch.randn(2, 4, 1, cases.ROWS, cases.COLUMNS)
    grid = (cases.ROWS, cases.COLUMNS)
    condition = {
        "global": torch.randn(2, 6), "cell": torch.randn(2, 3, *grid), "spherical": torch.randn(2, 2, *grid),
    }  # fmt: skip
    assert torch.equal(model(x, condition), plain_model(x))
    assert torch.equal(model(x), plain_model(x))


def test_many_members_save_no_more_activations_than_one() -> None:
    """Eight members, computed one by one, save the activations of one member and the outputs of eight."""
    peaks = {}
    for members in (2, 8):
        objective, batch = build_ensemble(replace(CASE, members=members, rollout=2, noise=("global",)))
        tracker = SavedTensors()
        with torch.autograd.graph.saved_tensors_hooks(tracker.pack, lambda packed: packed.tensor):
            objective.accumulate_gradients(batch, MicroStep(0, [1, 2]))
        peaks[members] = tracker.peak
    # Two rollout steps of eight members: (B, C, H, W) float32 each.
    output_bytes = 2 * 8 * 4 * 3 * cases.ROWS * cases.COLUMNS * 4
    assert output_bytes < 0.1 * peaks[2], "the outputs must not hide activations"
    assert peaks[8] < 1.1 * peaks[2] + output_bytes


class SavedTensors:
    """Bytes of the tensors that are saved for backward passes at one time, and their peak."""

    def __init__(self) -> None:
        self.held = 0
        self.peak = 0

    def pack(self, tensor: Tensor) -> TrackedTensor:
        tracked_tensor = TrackedTensor(tensor, self)
        self.peak = max(self.peak, self.held)
        return tracked_tensor


class TrackedTensor:
    """A saved tensor; its bytes count until the graph releases it."""

    def __init__(self, tensor: Tensor, tracker: SavedTensors) -> None:
        self.tensor = tensor
        self._bytes = tensor.numel() * tensor.element_size()
        self._tracker = tracker
        tracker.held += self._bytes

    def __del__(self) -> None:
        self._tracker.held -= self._bytes
