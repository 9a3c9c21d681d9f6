"""Cases of gathering, saving and loading weights and optimizer state."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from credit.errors import CheckpointError, ConfigError
from credit.parallel import fsdp2
from credit.parallel.blocks.marks import strip_wrapper_prefixes
from credit.parallel.object_collectives import run_on_all_ranks, run_on_rank0
from tests.parallel.fsdp2_api.example_models import (
    WIDTH,
    Net,
    built,
    gradients,
    mine,
    raised,
    reference,
    require_close,
    samples,
    squares,
    take_step,
    weights,
)
from tests.parallel.fsdp2_api.gradient_cases import CHECKPOINTED, case
from tests.parallel.training.cases import whole


@case
def state_dict_and_back() -> None:
    plain = built(Net)
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    model = fsdp2.apply_fsdp2(plain, None, CHECKPOINTED)
    with torch.no_grad():
        model(mine(samples()))  # leaves some weights whole
    state = fsdp2.fsdp2_state_dict(model)
    run_on_all_ranks(lambda: require_equal(dict(state), expected if dist.get_rank() == 0 else {}))
    for value in state.values():
        value.zero_()
    run_on_all_ranks(lambda: require_equal(model.scale, expected["scale"]))  # it was a copy
    require_equal(weights(model), {name: value for name, value in expected.items() if name != "scale"})
    other = fsdp2.apply_fsdp2(built(Net, seed=9), None, {})
    given = dict(expected) if dist.get_rank() == 0 else None  # the others' argument is not read
    fsdp2.fsdp2_load_state_dict(other, given)
    require_equal(weights(other), {name: value for name, value in expected.items() if name != "scale"})
    run_on_all_ranks(lambda: require_equal(given, expected if given else None))
    expected["head.bias"].add_(1.0)
    assert not torch.equal(whole(other.head.bias), expected["head.bias"]), "the model holds the dict's memory"


@case
def meta_device_first() -> None:
    with torch.device("meta"):
        model = fsdp2.apply_fsdp2(Net(), None, CHECKPOINTED)
    model.to_empty(device="cpu")
    plain = built(Net, seed=4)
    fsdp2.fsdp2_load_state_dict(model, plain.state_dict() if dist.get_rank() == 0 else {})
    expected = reference(plain, squares)
    squares(model, mine(samples())).backward()
    require_close(gradients(model), expected)


@case
def wrong_state_dicts() -> None:
    model = fsdp2.apply_fsdp2(built(Net), None, {})
    before, whole_state = weights(model), built(Net, seed=1).state_dict()
    for changes, words in (
        ({"head.weight": None}, ("head.weight is missing",)),
        ({"tail": torch.zeros(2)}, ("tail is unknown",)),
        ({"head.weight": torch.zeros(4, 8)}, ("head.weight is (4, 8), here (8, 8)",)),
        ({3: torch.zeros(2)}, ("the key 3 is not a name",)),
    ):
        state = {name: value for name, value in (whole_state | changes).items() if value is not None}
        said = raised(lambda state=state: fsdp2.fsdp2_load_state_dict(model, state if dist.get_rank() == 0 else {}))
        assert said.startswith("CheckpointError") and all(word in said for word in words), said
    after = weights(model)
    assert all(torch.equal(value, before[name]) for name, value in after.items()), "it was loaded in part"


@case
def optimizer_state_and_back() -> None:
    for make in (
        lambda ps: torch.optim.AdamW(ps, lr=0.1, betas=(0.8, 0.9), fused=True),
        lambda ps: torch.optim.AdamW(ps, lr=0.1, amsgrad=True),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        lambda ps: torch.optim.SGD(ps, lr=0.1),
    ):
        for steps in (2, 0):
            check_optimizer(make, steps)


def check_optimizer(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> None:
    """Save after some steps, train on as if nothing were, and let another run take the next steps from there."""
    model = fsdp2.apply_fsdp2(built(Net), None, CHECKPOINTED)
    optimizer, plain = make(model.parameters()), built(Net)
    alone = make(plain.parameters())
    for step in range(steps):
        take_step(model, optimizer, step)
        squares(plain, samples(step)).backward()
        alone.step()
        alone.zero_grad()
    with torch.no_grad():
        model(mine(samples()))  # leaves some weights whole
    state, saved = fsdp2.fsdp2_state_dict(model), fsdp2.fsdp2_optimizer_state_dict(model, optimizer)
    snapshot = copy.deepcopy(saved)
    run_on_all_ranks(lambda: dist.get_rank() == 0 and require_like_one_process(saved, plain, alone))
    for step in (10, 11):
        take_step(model, optimizer, step)
    run_on_all_ranks(lambda: require_equal(saved, snapshot))  # it was a copy
    resumed = fsdp2.apply_fsdp2(built(Net, seed=9), None, {})
    again = make(resumed.parameters())
    take_step(resumed, again, 3)  # the unused layer has no state, the others have a wrong one
    fsdp2.fsdp2_load_state_dict(resumed, state)
    fsdp2.fsdp2_load_optimizer_state_dict(resumed, again, saved)
    run_on_all_ranks(lambda: require_equal(saved, snapshot))  # nor does loading change it
    for key, value in again.state.get(resumed.unused.weight, {}).items():
        assert not torch.count_nonzero(whole(value)), f"{key} does not start from zero"
        assert isinstance(value, DTensor) or value.dim() == 0
    assert again.param_groups[0].get("betas") == optimizer.param_groups[0].get("betas")
    for step in (10, 11):
        take_step(resumed, again, step)
    expected = weights(model)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items()), "other steps"


def require_like_one_process(saved: dict[str, Any], plain: nn.Module, alone: torch.optim.Optimizer) -> None:
    """Compare a gathered state with that of one process."""
    names = [name for name, _ in plain.named_parameters()]
    assert [group["params"] for group in saved["param_groups"]] == [names]
    expected = {name: alone.state[p] for name, p in plain.named_parameters() if alone.state.get(p)}
    assert saved["state"].keys() == expected.keys()
    for name, entry in expected.items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(saved["state"][name][key], value, rtol=1e-4, atol=1e-6, msg=f"{name} {key}")


def require_equal(one: Any, other: Any) -> None:
    """Compare nested values bit for bit, types included."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            require_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            require_equal(a, b)
    else:
        assert torch.equal(one, other) and one.device == other.device if isinstance(one, Tensor) else one == other


@case
def optimizer_in_other_groups() -> None:
    """Settings follow the parameter; a list in place of betas, as some files have it, does no harm."""
    model = fsdp2.apply_fsdp2(built(Net), None, {})
    decayed, others = ([p for p in model.parameters() if (p.dim() > 1) is many] for many in (True, False))
    optimizer = torch.optim.AdamW([{"params": decayed, "lr": 0.3}, {"params": others, "lr": 0.2, "weight_decay": 0.0}])
    take_step(model, optimizer, 0)
    saved = fsdp2.fsdp2_optimizer_state_dict(model, optimizer)
    for group in saved.get("param_groups", []):
        group["betas"] = list(group["betas"])
    turned = torch.optim.AdamW([{"params": others}, {"params": decayed[:3]}, {"params": decayed[3:]}])
    fsdp2.fsdp2_load_optimizer_state_dict(model, turned, saved)
    settings = [(group["lr"], group["weight_decay"]) for group in turned.param_groups]
    assert settings == [(0.2, 0.0), (0.3, 0.01), (0.3, 0.01)]
    assert turned.param_groups[0]["betas"] == (0.9, 0.999)
    for parameter in model.parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            assert torch.equal(whole(value), whole(turned.state[parameter][key]))


@case
def wrong_optimizer_states() -> None:
    model = fsdp2.apply_fsdp2(built(Net), None, {})
    optimizer = torch.optim.AdamW(model.parameters())
    take_step(model, optimizer, 0)
    saved = fsdp2.fsdp2_optimizer_state_dict(model, optimizer)
    spoiled = [None, *(copy.deepcopy(saved) for _ in range(5))]
    if dist.get_rank() == 0:
        spoiled[1]["state"]["head.weight"]["exp_avg"] = torch.zeros(4, 8)
        spoiled[2]["state"]["tail"] = spoiled[2]["state"]["head.weight"]
        spoiled[3]["param_groups"][0]["params"].remove("head.bias")
        spoiled[4]["state"] = [*saved["state"]]
        spoiled[5]["state"]["head.weight"] = torch.zeros(8, 8)
    shapes = "head.weight/exp_avg is (4, 8), here (8, 8)"
    words = [
        "no dict with",
        shapes,
        "tail is not optimized",
        "head.bias is in none",
        "a list in place",
        "head.weight has a",
    ]
    for state, word in zip(spoiled, words, strict=True):
        said = raised(lambda state=state: fsdp2.fsdp2_load_optimizer_state_dict(model, optimizer, state))
        assert said.startswith(CheckpointError.__name__) and word in said, said
    strangers = torch.optim.AdamW(built(Net).parameters())
    said = raised(lambda: fsdp2.fsdp2_optimizer_state_dict(model, strangers))
    assert said.startswith(ConfigError.__name__) and "after the model has been sharded" in said, said


@case
def states_that_are_not_whole() -> None:
    """State on which rank 0 alone would fail is refused by all ranks at once."""
    model = fsdp2.apply_fsdp2(built(Net), None, {})
    optimizer = torch.optim.AdamW(model.parameters())
    take_step(model, optimizer, 0)
    before, whole_state = weights(model), built(Net, seed=1).state_dict()
    begin = time.monotonic()
    for given, words in (
        (model.state_dict(), "embed.weight is a rank's part (a DTensor)"),
        (whole_state | {"head.weight": torch.empty(WIDTH, WIDTH, device="meta")}, "head.weight has no values"),
        (whole_state | {"head.weight": torch.eye(WIDTH).to_sparse()}, "head.weight is a sparse or quantized tensor"),
        (whole_state | {"head.weight": torch.eye(WIDTH).cfloat()}, "head.weight is complex, here real"),
        (whole_state | {"scale": lambda: 3}, "scale is not a tensor"),
    ):
        message = raised(lambda given=given: fsdp2.fsdp2_load_state_dict(model, given))
        assert message.startswith("CheckpointError: state dict: ") and words in message, message
    saved = fsdp2.fsdp2_optimizer_state_dict(model, optimizer)
    parts = {strip_wrapper_prefixes(name): optimizer.state.get(p, {}) for name, p in model.named_parameters()}
    names = [strip_wrapper_prefixes(name) for name, _ in model.named_parameters()]
    for given, words in (
        (optimizer.state_dict(), "its parameters are numbers"),
        ({"state": parts, "param_groups": [{"params": names}]}, "embed.weight/exp_avg is a rank's part (a DTensor)"),
        ({"state": {}, "param_groups": None}, "param_groups is not a list of dicts"),
        ({"state": {}, "param_groups": [{"params": names, "lr": lambda: 1.0}]}, "pickle"),
        ({"state": {3: {}}, "param_groups": [{"params": names}]}, "the key 3 is not a name"),
    ):
        message = raised(lambda given=given: fsdp2.fsdp2_load_optimizer_state_dict(model, optimizer, given))
        assert message.startswith("CheckpointError: ") and words in message, message
    assert time.monotonic() - begin < 30, "the ranks waited for each other"
    require_equal(weights(model), before)
    fsdp2.fsdp2_load_optimizer_state_dict(model, optimizer, saved)


@case
def a_result_that_cannot_be_sent() -> None:
    message = raised(lambda: run_on_rank0(lambda: lambda: 3))
    assert message.startswith("CheckpointError: ") and "pickle" in message, message


@case
def names_of_wrappers() -> None:
    """DDP, FSDP1, torch.compile and checkpointing put their own parts into names, DDP also several times."""
    plain = built(Net, seed=4)
    expected = plain.state_dict()
    model = fsdp2.apply_fsdp2(built(Net), None, CHECKPOINTED)
    optimizer = torch.optim.AdamW(model.parameters())
    take_step(model, optimizer, 0)
    saved = fsdp2.fsdp2_optimizer_state_dict(model, optimizer)
    for wrapped in (
        "module.{}".format,
        "module.module.{}".format,
        "_orig_mod.{}".format,
        "module._orig_mod.{}".format,
        "_fsdp_wrapped_module.{}".format,
        lambda name: name.replace("blocks.0.", "blocks.0._checkpoint_wrapped_module."),
    ):
        other = fsdp2.apply_fsdp2(built(Net), None, CHECKPOINTED)
        fsdp2.fsdp2_load_state_dict(other, {wrapped(name): value for name, value in expected.items()})
        require_equal(weights(other), {name: value for name, value in expected.items() if name != "scale"})
        renamed = {
            "state": {wrapped(name): entry for name, entry in saved.get("state", {}).items()},
            "param_groups": [
                {**group, "params": [wrapped(name) for name in group["params"]]}
                for group in saved.get("param_groups", [])
            ],
        }
        fsdp2.fsdp2_load_optimizer_state_dict(model, optimizer, renamed)
    message = raised(lambda: fsdp2.fsdp2_load_state_dict(model, expected | {"module.head.bias": expected["head.bias"]}))
    assert "head.bias and module.head.bias are one parameter, head.bias" in message, message


@case
def models_that_are_not_sharded() -> None:
    """All four functions also take a plain model and one in DDP, whose names do not show it."""
    expected = built(Net, seed=4).state_dict()
    for wrap in (lambda model: model, lambda model: nn.parallel.DistributedDataParallel(model)):
        for seed in (0, 4):
            plain = built(Net, seed=seed)
            plain.unused.requires_grad_(False)
            model = wrap(plain)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            if seed == 0:
                fsdp2.fsdp2_load_state_dict(model, expected if dist.get_rank() == 0 else {})
                run_on_all_ranks(lambda plain=plain: require_equal(dict(plain.state_dict()), dict(expected)))
            state = fsdp2.fsdp2_state_dict(model)
            run_on_all_ranks(
                lambda state=state: require_equal(dict(state), dict(expected) if dist.get_rank() == 0 else {})
            )
            squares(model, samples()).backward()
            optimizer.step()
            saved = fsdp2.fsdp2_optimizer_state_dict(model, optimizer)
            assert (saved.keys() == {"state", "param_groups"}) == (dist.get_rank() == 0)
            again = torch.optim.AdamW(model.parameters())
            fsdp2.fsdp2_load_optimizer_state_dict(model, again, saved)
            assert again.param_groups[0]["lr"] == 0.1
            for parameter, entry in optimizer.state.items():
                require_equal(dict(again.state[parameter]), dict(entry))
