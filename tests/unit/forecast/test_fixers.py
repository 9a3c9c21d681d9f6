"""Budget fixers within forecast steps: residuals, unchanged channels, gradients, bounds, transforms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.forecast.air import FLUXES, H, K, W, assemble, initial_state, raw_config, split, totals, without_budgets

FORCING = torch.zeros(1, 1, 1, H, W)


def build_forcing(number: int) -> torch.Tensor:
    return torch.full_like(FORCING, float(number))


@pytest.fixture(params=["model levels", "pressure levels"])
def raw(request: pytest.FixtureRequest, tmp_path: Path) -> dict:
    return raw_config(tmp_path, pressure=request.param == "pressure levels")


def compute_global_budgets(config, assets, physical: torch.Tensor) -> dict[str, float]:
    """Return the global means of dry mass, water, energy and fluxes of the first sample."""
    fields = split(assets.channels.output, physical[0].numpy())
    return totals(config, fields, assets.static_CHW[0].astype(float))


def compute_residuals(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the residual of each budget, relative to its total."""
    gained = after["tsr"] + after["ttr"] - sum(after[name] for name in FLUXES[2:])
    return {
        "dry": after["dry"] / before["dry"] - 1,
        "water": (after["water"] - before["water"] + 1000 * (after["e"] + after["tp"])) / before["water"],
        "energy": (after["energy"] - before["energy"] - gained) / before["energy"],
    }


def test_every_budget_is_closed_in_physical_fields(raw: dict) -> None:
    config, assets, stepper = assemble(raw)
    state = initial_state(config, stepper)
    before = compute_global_budgets(config, assets, stepper.normalizer.decode(state[:, :, 0], "prognostic"))
    with torch.no_grad():
        closed = compute_global_budgets(config, assets, stepper.decode(stepper.step(state, FORCING)))
        _, _, plain = assemble(without_budgets(raw))
        without_fixers = compute_global_budgets(config, assets, plain.decode(plain.step(state, FORCING)))
    assert all(abs(residual) < 1e-7 for residual in compute_residuals(before, closed).values()), compute_residuals(
        before, closed
    )
    # Without the fixers, the output of the network closes no budget.
    assert all(abs(residual) > 1e-4 for residual in compute_residuals(before, without_fixers).values()), (
        compute_residuals(before, without_fixers)
    )


def test_only_corrected_variables_change(raw: dict) -> None:
    config, assets, stepper = assemble(raw)
    _, _, plain = assemble(without_budgets(raw))
    state = initial_state(config, stepper)
    with torch.no_grad():
        output = stepper.step(state, FORCING)
        plain_output = plain.step(state, FORCING)
    changed = set()
    for channel, field, plain_field in zip(assets.channels.output, output[0], plain_output[0], strict=True):
        if not torch.equal(field, plain_field):
            changed.add(channel.variable)
    assert changed == {"sp", "tp", "t"}
    rain_channels = [index for index, channel in enumerate(assets.channels.output) if channel.variable == "tp"]
    rain = stepper.decode(output)[0, rain_channels]
    plain_rain = plain.decode(plain_output)[0, rain_channels]
    assert torch.equal(rain == 0, plain_rain == 0), "dry cells stay dry"
    assert rain.min() == 0


def test_forty_steps_keep_dry_mass_and_close_each_budget(raw: dict) -> None:
    config, assets, stepper = assemble(raw)
    state = initial_state(config, stepper)
    initial = before = compute_global_budgets(config, assets, stepper.normalizer.decode(state[:, :, 0], "prognostic"))
    with torch.no_grad():
        for output in stepper.rollout(state, build_forcing, 40):
            after = compute_global_budgets(config, assets, stepper.decode(output))
            assert all(abs(residual) < 1e-7 for residual in compute_residuals(before, after).values()), (
                compute_residuals(before, after)
            )
            before = after
    assert abs(after["dry"] / initial["dry"] - 1) < 1e-6
    assert abs(after["water"] / initial["water"] - 1) > 1e-3  # unlike dry mass, water changes


def test_gradients_through_a_rollout_match_finite_differences(raw: dict) -> None:
    config, _, stepper = assemble(raw)
    state = initial_state(config, stepper)
    weights = torch.randn(1, len(stepper.channels.output), H, W, generator=torch.Generator().manual_seed(2))

    def loss(recompute: bool = False) -> torch.Tensor:
        *_, last = stepper.rollout(state, build_forcing, 3, recompute=recompute)
        return (last.double() * weights).mean() + (last.double() ** 2).mean()

    size, gradients = stepper.model.size, []
    for recompute in (False, True):
        size.grad = None
        loss(recompute).backward()
        gradients.append(size.grad.item())
    with torch.no_grad():
        values = []
        for value in (1.002, 0.998):
            size.fill_(value)
            values.append(loss().item())
    assert gradients[1] == gradients[0]
    assert gradients[0] == pytest.approx((values[0] - values[1]) / 0.004, rel=1e-3)


def test_samples_do_not_depend_on_their_batch(raw: dict) -> None:
    config, _, stepper = assemble(raw)
    state = initial_state(config, stepper)
    other_state = state + 0.1 * torch.randn(state.shape, generator=torch.Generator().manual_seed(4))
    other_state[:, :, 0, 0, 0] = state[:, :, 0, 0, 0]
    with torch.no_grad():
        both = stepper.step(torch.cat([state, other_state]), FORCING.expand(2, -1, -1, -1, -1))
        separate = torch.cat([stepper.step(state, FORCING), stepper.step(other_state, FORCING)])
    np.testing.assert_allclose(both, separate, rtol=0, atol=1e-6)


def test_amp_does_not_affect_budgets(raw: dict) -> None:
    config, assets, stepper = assemble(raw)
    stepper._amp = True
    state = initial_state(config, stepper)
    before = compute_global_budgets(config, assets, stepper.normalizer.decode(state[:, :, 0], "prognostic"))
    with torch.no_grad():
        after = compute_global_budgets(config, assets, stepper.decode(stepper.step(state, FORCING)))
    assert all(abs(residual) < 1e-7 for residual in compute_residuals(before, after).values())


@pytest.mark.parametrize(
    ("clamp", "field"),
    [({"minimum": -10.0, "maximum": 15.0}, {}), ({"minimum": -10.0}, {"maximum": 15.0})],
    ids=["model.postprocess", "data.variable_options, too"],
)
def test_clamps_hold_in_output_and_perturbed_state(raw: dict, clamp: dict, field: dict) -> None:
    raw["model"]["postprocess"] = [{"kind": "clamp", "variable": "u", **clamp}]
    raw["data"]["variable_options"]["u"] = field
    config, assets, stepper = assemble(without_budgets(raw))
    with torch.no_grad():
        decoded = stepper.decode(stepper.step(initial_state(config, stepper), FORCING))
        perturbed = stepper.perturb_state(initial_state(config, stepper), torch.full((1, 4 * K + 1, 1, H, W), 100.0))
    u = slice(K, 2 * K)
    assert decoded[:, u].max() == 15 and decoded[:, u].min() == -10 and decoded[:, :K].max() > 200
    perturbed = stepper.normalizer.decode(perturbed[:, :, 0], "prognostic")
    assert perturbed[:, u].max() == pytest.approx(15, rel=1e-6)


def test_a_budget_may_exceed_a_clamp(raw: dict) -> None:
    """The energy fixer runs after the clamp, so the warmest cells may exceed the bound slightly."""
    bound = {"kind": "clamp", "variable": "t", "maximum": 280.0}
    raw["model"]["postprocess"] = [bound, *raw["model"]["postprocess"]]
    config, assets, stepper = assemble(raw)
    state = initial_state(config, stepper)
    before = compute_global_budgets(config, assets, stepper.normalizer.decode(state[:, :, 0], "prognostic"))
    with torch.no_grad():
        decoded = stepper.decode(stepper.step(state, FORCING))
    assert decoded[:, :K].max() != 280.0 and abs(decoded[:, :K].max() / 280 - 1) < 0.02
    assert abs(compute_residuals(before, compute_global_budgets(config, assets, decoded))["energy"]) < 1e-7


def test_budgets_are_closed_with_transforms(raw: dict) -> None:
    raw["data"]["transforms"] = {"tp": {"kind": "log1p", "unit": 1e-3}, "q": {"kind": "sqrt", "unit": 1e-3}}
    config, assets, stepper = assemble(raw)
    state = initial_state(config, stepper)
    before = compute_global_budgets(config, assets, stepper.normalizer.decode(state[:, :, 0], "prognostic"))
    with torch.no_grad():
        after = compute_global_budgets(config, assets, stepper.decode(stepper.step(state, FORCING)))
    assert all(abs(residual) < 1e-7 for residual in compute_residuals(before, after).values()), compute_residuals(
        before, after
    )


def test_rain_is_zero_where_the_budget_needs_negative_rain(raw: dict) -> None:
    """The humidity q rises by more than evaporation supplies, so rain is 0 and the budget is not closed."""
    raw["model"]["postprocess"][2]["evaporation_positive"] = "up"  # e is negative here: dew
    config, assets, stepper = assemble(raw)
    with torch.no_grad():
        stepper.model.noise[3 * K : 4 * K] = 2.0
        decoded = stepper.decode(stepper.step(initial_state(config, stepper), FORCING))
    air = split(assets.channels.output, decoded[0].numpy())
    assert (air["tp"] == 0).all() and decoded.isfinite().all()
