"""Budgets in the step: closed to 1e-6 in what is fed back and in what is written, over many steps, with gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.forecast.air import FLUXES, H, K, W, assemble, initial_state, raw_config, split, totals, without_budgets

FORCING = torch.zeros(1, 1, 1, H, W)


def forcing(number: int) -> torch.Tensor:
    return torch.full_like(FORCING, float(number))


@pytest.fixture(params=["model levels", "pressure levels"])
def raw(request: pytest.FixtureRequest, tmp_path: Path) -> dict:
    return raw_config(tmp_path, pressure=request.param == "pressure levels")


def of(config, assets, physical: torch.Tensor, row: int = 0) -> dict[str, float]:
    return totals(config, split(assets.channels.output, physical[row].numpy()), assets.static_CHW[0].astype(float))


def residuals(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return what is lacking in each budget, relative to the whole."""
    gained = after["tsr"] + after["ttr"] - sum(after[name] for name in FLUXES[2:])
    return {
        "dry": after["dry"] / before["dry"] - 1,
        "water": (after["water"] - before["water"] + 1000 * (after["e"] + after["tp"])) / before["water"],
        "energy": (after["energy"] - before["energy"] - gained) / before["energy"],
    }


def test_every_budget_is_closed_in_the_fields_that_are_written(raw: dict) -> None:
    config, assets, stepper = assemble(raw)
    state = initial_state(config, stepper)
    before = of(config, assets, stepper.normalizer.decode(state[:, :, 0], "prognostic"))
    with torch.no_grad():
        closed = of(config, assets, stepper.decode(stepper.step(state, FORCING)))
        _, _, plain = assemble(without_budgets(raw))
        as_it_was = of(config, assets, plain.decode(plain.step(state, FORCING)))
    assert all(abs(one) < 1e-7 for one in residuals(before, closed).values()), residuals(before, closed)
    # the network itself does not conserve
    assert all(abs(one) > 1e-4 for one in residuals(before, as_it_was).values()), residuals(before, as_it_was)


def test_only_what_a_budget_corrects_changes(raw: dict) -> None:
    config, assets, stepper = assemble(raw)
    _, _, plain = assemble(without_budgets(raw))
    state = initial_state(config, stepper)
    with torch.no_grad():
        ours, theirs = stepper.step(state, FORCING)[0], plain.step(state, FORCING)[0]
    same = [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]
    changed = {channel.variable for channel, one in zip(assets.channels.output, same, strict=True) if not one}
    assert changed == {"sp", "tp", "t"}
    rain = [row for row, channel in enumerate(assets.channels.output) if channel.variable == "tp"]
    a, b = (one.decode(x[None])[0, rain] for one, x in ((stepper, ours), (plain, theirs)))
    assert torch.equal(a == 0, b == 0) and a.min() == 0  # dry cells stay dry, none is below 0


def test_forty_steps_keep_dry_mass_and_close_each_budget(raw: dict) -> None:
    config, assets, stepper = assemble(raw)
    state = initial_state(config, stepper)
    first = before = of(config, assets, stepper.normalizer.decode(state[:, :, 0], "prognostic"))
    with torch.no_grad():
        for output in stepper.rollout(state, forcing, 40):
            after = of(config, assets, stepper.decode(output))
            assert all(abs(one) < 1e-7 for one in residuals(before, after).values()), residuals(before, after)
            before = after
    assert abs(after["dry"] / first["dry"] - 1) < 1e-6
    assert abs(after["water"] / first["water"] - 1) > 1e-3  # water may change, and does


def test_gradients_through_a_rollout_are_those_of_small_differences(raw: dict) -> None:
    config, _, stepper = assemble(raw)
    state = initial_state(config, stepper)
    weights = torch.randn(1, len(stepper.channels.output), H, W, generator=torch.Generator().manual_seed(2))

    def loss(recompute: bool = False) -> torch.Tensor:
        *_, last = stepper.rollout(state, forcing, 3, recompute=recompute)
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
    other = state + 0.1 * torch.randn(state.shape, generator=torch.Generator().manual_seed(4))
    other[:, :, 0, 0, 0] = state[:, :, 0, 0, 0]
    with torch.no_grad():
        both = stepper.step(torch.cat([state, other]), FORCING.expand(2, -1, -1, -1, -1))
        alone = torch.cat([stepper.step(one, FORCING) for one in (state, other)])
    np.testing.assert_allclose(both, alone, rtol=0, atol=1e-6)


def test_amp_does_not_touch_the_sums(raw: dict) -> None:
    config, assets, stepper = assemble(raw)
    stepper._amp = True
    state = initial_state(config, stepper)
    before = of(config, assets, stepper.normalizer.decode(state[:, :, 0], "prognostic"))
    with torch.no_grad():
        after = of(config, assets, stepper.decode(stepper.step(state, FORCING)))
    assert all(abs(one) < 1e-7 for one in residuals(before, after).values())


@pytest.mark.parametrize(
    ("clamp", "field"),
    [({"minimum": -10.0, "maximum": 15.0}, {}), ({"minimum": -10.0}, {"maximum": 15.0})],
    ids=["model.postprocess", "data.variable_options, too"],
)
def test_bounds(raw: dict, clamp: dict, field: dict) -> None:
    raw["model"]["postprocess"] = [{"kind": "clamp", "variable": "u", **clamp}]
    raw["data"]["variable_options"]["u"] = field
    config, assets, stepper = assemble(without_budgets(raw))
    with torch.no_grad():
        found = stepper.decode(stepper.step(initial_state(config, stepper), FORCING))
        moved = stepper.perturb_state(initial_state(config, stepper), torch.full((1, 4 * K + 1, 1, H, W), 100.0))
    u = slice(K, 2 * K)
    assert found[:, u].max() == 15 and found[:, u].min() == -10 and found[:, :K].max() > 200
    moved = stepper.normalizer.decode(moved[:, :, 0], "prognostic")
    assert moved[:, u].max() == pytest.approx(15, rel=1e-6)


def test_a_budget_has_the_last_word_over_a_bound(raw: dict) -> None:
    """The warmest cells stay a little beyond their bound, where the energy asks for it."""
    bound = {"kind": "clamp", "variable": "t", "maximum": 280.0}
    raw["model"]["postprocess"] = [bound, *raw["model"]["postprocess"]]
    config, assets, stepper = assemble(raw)
    state = initial_state(config, stepper)
    before = of(config, assets, stepper.normalizer.decode(state[:, :, 0], "prognostic"))
    with torch.no_grad():
        decoded = stepper.decode(stepper.step(state, FORCING))
    assert decoded[:, :K].max() != 280.0 and abs(decoded[:, :K].max() / 280 - 1) < 0.02
    assert abs(residuals(before, of(config, assets, decoded))["energy"]) < 1e-7


def test_transforms_are_undone_for_the_sums(raw: dict) -> None:
    raw["data"]["transforms"] = {"tp": {"kind": "log1p", "unit": 1e-3}, "q": {"kind": "sqrt", "unit": 1e-3}}
    config, assets, stepper = assemble(raw)
    state = initial_state(config, stepper)
    before = of(config, assets, stepper.normalizer.decode(state[:, :, 0], "prognostic"))
    with torch.no_grad():
        after = of(config, assets, stepper.decode(stepper.step(state, FORCING)))
    assert all(abs(one) < 1e-7 for one in residuals(before, after).values()), residuals(before, after)


def test_water_that_would_need_negative_rain_leaves_none(raw: dict) -> None:
    """Much evaporation upwards is taken up by q; with q rising by more, rain is 0 and the budget stays open."""
    raw["model"]["postprocess"][2]["evaporation_positive"] = "up"  # e is negative here: dew
    config, assets, stepper = assemble(raw)
    with torch.no_grad():
        stepper.model.noise[3 * K : 4 * K] = 2.0
        found = stepper.decode(stepper.step(initial_state(config, stepper), FORCING))
    air = split(assets.channels.output, found[0].numpy())
    assert (air["tp"] == 0).all() and found.isfinite().all()
