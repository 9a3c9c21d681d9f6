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
    build_seeded,
    describe_error,
    gradients,
    local_share,
    mean_square_loss,
    reference_gradients,
    require_close,
    samples,
    take_step,
    weights,
)
from tests.parallel.fsdp2_api.gradient_cases import CHECKPOINTED, register_case
from tests.parallel.training.cases import to_full_tensor


@register_case
def state_dict_and_back() -> None:
    plain_model = build_seeded(Net)
    expected = {name: value.clone() for name, value in plain_model.state_dict().items()}
    model = fsdp2.apply_fsdp2(plain_model, None, CHECKPOINTED)
    with torch.no_grad():
        model(local_share(samples()))  # Leaves some weights gathered.
    state = fsdp2.fsdp2_state_dict(model)
    run_on_all_ranks(lambda: require_equal(dict(state), expected if dist.get_rank() == 0 else {}))
    for value in state.values():
        value.zero_()
    run_on_all_ranks(lambda: require_equal(model.scale, expected["scale"]))  # The state is a copy.
    require_equal(weights(model), {name: value for name, value in expected.items() if name != "scale"})
    other_model = fsdp2.apply_fsdp2(build_seeded(Net, seed=9), None, {})
    given_state = dict(expected) if dist.get_rank() == 0 else None  # The argument of other ranks is not read.
    fsdp2.fsdp2_load_state_dict(other_model, given_state)
    require_equal(weights(other_model), {name: value for name, value in expected.items() if name != "scale"})
    run_on_all_ranks(lambda: require_equal(given_state, expected if given_state else None))
    expected["head.bias"].add_(1.0)
    assert not torch.equal(to_full_tensor(other_model.head.bias), expected["head.bias"]), (
        "the model holds the dict's memory"
    )


@register_case
def meta_device_first() -> None:
    with torch.device("meta"):
        model = fsdp2.apply_fsdp2(Net(), None, CHECKPOINTED)
    model.to_empty(device="cpu")
    plain_model = build_seeded(Net, seed=4)
    fsdp2.fsdp2_load_state_dict(model, plain_model.state_dict() if dist.get_rank() == 0 else {})
    expected = reference_gradients(plain_model, mean_square_loss)
    mean_square_loss(model, local_share(samples())).backward()
    require_close(gradients(model), expected)


@register_case
def wrong_state_dicts() -> None:
    model = fsdp2.apply_fsdp2(build_seeded(Net), None, {})
    weights_before, whole_state = weights(model), build_seeded(Net, seed=1).state_dict()
    for changes, fragments in (
        ({"head.weight": None}, ("head.weight is missing",)),
        ({"tail": torch.zeros(2)}, ("tail is unknown",)),
        ({"head.weight": torch.zeros(4, 8)}, ("head.weight is (4, 8), here (8, 8)",)),
        ({3: torch.zeros(2)}, ("the key 3 is not a name",)),
    ):
        state = {name: value for name, value in (whole_state | changes).items() if value is not None}
        message = describe_error(
            lambda state=state: fsdp2.fsdp2_load_state_dict(model, state if dist.get_rank() == 0 else {})
        )
        assert message.startswith("CheckpointError") and all(word in message for word in fragments), message
    weights_after = weights(model)
    assert all(torch.equal(value, weights_before[name]) for name, value in weights_after.items()), (
        "it was loaded in part"
    )


@register_case
def optimizer_state_and_back() -> None:
    for build_optimizer in (
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, betas=(0.8, 0.9), fused=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ):
        for steps in (2, 0):
            check_optimizer(build_optimizer, steps)


def check_optimizer(build_optimizer: Callable[[Any], torch.optim.Optimizer], steps: int) -> None:
    """Save a state, take further steps, and require that a run that loads the state takes the same steps."""
    model = fsdp2.apply_fsdp2(build_seeded(Net), None, CHECKPOINTED)
    optimizer, plain_model = build_optimizer(model.parameters()), build_seeded(Net)
    plain_optimizer = build_optimizer(plain_model.parameters())
    for step in range(steps):
        take_step(model, optimizer, step)
        mean_square_loss(plain_model, samples(step)).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    with torch.no_grad():
        model(local_share(samples()))  # Leaves some weights gathered.
    state, saved_state = fsdp2.fsdp2_state_dict(model), fsdp2.fsdp2_optimizer_state_dict(model, optimizer)
    snapshot = copy.deepcopy(saved_state)
    run_on_all_ranks(
        lambda: dist.get_rank() == 0 and require_state_of_one_process(saved_state, plain_model, plain_optimizer)
    )
    for step in (10, 11):
        take_step(model, optimizer, step)
    run_on_all_ranks(lambda: require_equal(saved_state, snapshot))  # The state is a copy.
    resumed_model = fsdp2.apply_fsdp2(build_seeded(Net, seed=9), None, {})
    resumed_optimizer = build_optimizer(resumed_model.parameters())
    take_step(resumed_model, resumed_optimizer, 3)  # The unused layer has no state, and the others have a wrong state.
    fsdp2.fsdp2_load_state_dict(resumed_model, state)
    fsdp2.fsdp2_load_optimizer_state_dict(resumed_model, resumed_optimizer, saved_state)
    run_on_all_ranks(lambda: require_equal(saved_state, snapshot))  # Loading does not change the state.
    for key, value in resumed_optimizer.state.get(resumed_model.unused.weight, {}).items():
        assert not torch.count_nonzero(to_full_tensor(value)), f"{key} does not start from zero"
        assert isinstance(value, DTensor) or value.dim() == 0
    assert resumed_optimizer.param_groups[0].get("betas") == optimizer.param_groups[0].get("betas")
    for step in (10, 11):
        take_step(resumed_model, resumed_optimizer, step)
    expected = weights(model)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed_model).items()), "other steps"


def require_state_of_one_process(
    saved_state: dict[str, Any], plain_model: nn.Module, plain_optimizer: torch.optim.Optimizer
) -> None:
    """Require that a gathered optimizer state is that of one process."""
    names = [name for name, _ in plain_model.named_parameters()]
    assert [group["params"] for group in saved_state["param_groups"]] == [names]
    expected = {
        name: plain_optimizer.state[p] for name, p in plain_model.named_parameters() if plain_optimizer.state.get(p)
    }
    assert saved_state["state"].keys() == expected.keys()
    for name, entry in expected.items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(
                    saved_state["state"][name][key], value, rtol=1e-4, atol=1e-6, msg=f"{name} {key}"
                )


def require_equal(value: Any, other_value: Any) -> None:
    """Require that nested values and their types are equal bit for bit."""
    assert type(value) is type(other_value)
    if isinstance(value, dict):
        assert value.keys() == other_value.keys()
        for key in value:
            require_equal(value[key], other_value[key])
    elif isinstance(value, list | tuple):
        assert len(value) == len(other_value)
        for item, other_item in zip(value, other_value, strict=True):
            require_equal(item, other_item)
    elif isinstance(value, Tensor):
        assert torch.equal(value, other_value) and value.device == other_value.device
    else:
        assert value == other_value


@register_case
def optimizer_in_other_groups() -> None:
    """Settings of a group follow its parameters. A list instead of a tuple of betas, as in some files, is accepted."""
    model = fsdp2.apply_fsdp2(build_seeded(Net), None, {})
    matrices, vectors_and_scalars = (
        [p for p in model.parameters() if (p.dim() > 1) is is_matrix] for is_matrix in (True, False)
    )
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "lr": 0.3}, {"params": vectors_and_scalars, "lr": 0.2, "weight_decay": 0.0}]
    )
    take_step(model, optimizer, 0)
    saved_state = fsdp2.fsdp2_optimizer_state_dict(model, optimizer)
    for group in saved_state.get("param_groups", []):
        group["betas"] = list(group["betas"])
    regrouped_optimizer = torch.optim.AdamW(
        [{"params": vectors_and_scalars}, {"params": matrices[:3]}, {"params": matrices[3:]}]
    )
    fsdp2.fsdp2_load_optimizer_state_dict(model, regrouped_optimizer, saved_state)
    settings = [(group["lr"], group["weight_decay"]) for group in regrouped_optimizer.param_groups]
    assert settings == [(0.2, 0.0), (0.3, 0.01), (0.3, 0.01)]
    assert regrouped_optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    for parameter in model.parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            assert torch.equal(to_full_tensor(value), to_full_tensor(regrouped_optimizer.state[parameter][key]))


@register_case
def wrong_optimizer_states() -> None:
    model = fsdp2.apply_fsdp2(build_seeded(Net), None, {})
    optimizer = torch.optim.AdamW(model.parameters())
    take_step(model, optimizer, 0)
    saved_state = fsdp2.fsdp2_optimizer_state_dict(model, optimizer)
    wrong_states = [None, *(copy.deepcopy(saved_state) for _ in range(5))]
    if dist.get_rank() == 0:
        wrong_states[1]["state"]["head.weight"]["exp_avg"] = torch.zeros(4, 8)
        wrong_states[2]["state"]["tail"] = wrong_states[2]["state"]["head.weight"]
        wrong_states[3]["param_groups"][0]["params"].remove("head.bias")
        wrong_states[4]["state"] = [*saved_state["state"]]
        wrong_states[5]["state"]["head.weight"] = torch.zeros(8, 8)
    shapes = "head.weight/exp_avg is (4, 8), here (8, 8)"
    fragments = [
        "no dict with",
        shapes,
        "tail is not optimized",
        "head.bias is in none",
        "a list instead",
        "head.weight has a",
    ]
    for state, word in zip(wrong_states, fragments, strict=True):
        message = describe_error(lambda state=state: fsdp2.fsdp2_load_optimizer_state_dict(model, optimizer, state))
        assert message.startswith(CheckpointError.__name__) and word in message, message
    foreign_optimizer = torch.optim.AdamW(build_seeded(Net).parameters())
    message = describe_error(lambda: fsdp2.fsdp2_optimizer_state_dict(model, foreign_optimizer))
    assert message.startswith(ConfigError.__name__) and "after the model has been sharded" in message, message


@register_case
def states_that_are_not_whole() -> None:
    """All ranks refuse at once a state on which only rank 0 would fail."""
    model = fsdp2.apply_fsdp2(build_seeded(Net), None, {})
    optimizer = torch.optim.AdamW(model.parameters())
    take_step(model, optimizer, 0)
    weights_before, whole_state = weights(model), build_seeded(Net, seed=1).state_dict()
    start_seconds = time.monotonic()
    for wrong_state, fragment in (
        (model.state_dict(), "embed.weight is only a rank's part (a DTensor)"),
        (whole_state | {"head.weight": torch.empty(WIDTH, WIDTH, device="meta")}, "head.weight has no values"),
        (whole_state | {"head.weight": torch.eye(WIDTH).to_sparse()}, "head.weight is a sparse or quantized tensor"),
        (whole_state | {"head.weight": torch.eye(WIDTH).cfloat()}, "head.weight is complex, here real"),
        (whole_state | {"scale": lambda: 3}, "scale is not a tensor"),
    ):
        message = describe_error(lambda wrong_state=wrong_state: fsdp2.fsdp2_load_state_dict(model, wrong_state))
        assert message.startswith("CheckpointError: state dict: ") and fragment in message, message
    saved_state = fsdp2.fsdp2_optimizer_state_dict(model, optimizer)
    parts = {strip_wrapper_prefixes(name): optimizer.state.get(p, {}) for name, p in model.named_parameters()}
    names = [strip_wrapper_prefixes(name) for name, _ in model.named_parameters()]
    for wrong_state, fragment in (
        (optimizer.state_dict(), "parameters are numbers"),
        (
            {"state": parts, "param_groups": [{"params": names}]},
            "embed.weight/exp_avg is only a rank's part (a DTensor)",
        ),
        ({"state": {}, "param_groups": None}, "param_groups is not a list of dicts"),
        ({"state": {}, "param_groups": [{"params": names, "lr": lambda: 1.0}]}, "pickle"),
        ({"state": {3: {}}, "param_groups": [{"params": names}]}, "the key 3 is not a name"),
    ):
        message = describe_error(
            lambda wrong_state=wrong_state: fsdp2.fsdp2_load_optimizer_state_dict(model, optimizer, wrong_state)
        )
        assert message.startswith("CheckpointError: ") and fragment in message, message
    assert time.monotonic() - start_seconds < 30, "the ranks waited for each other"
    require_equal(weights(model), weights_before)
    fsdp2.fsdp2_load_optimizer_state_dict(model, optimizer, saved_state)


@register_case
def a_result_that_cannot_be_sent() -> None:
    message = describe_error(lambda: run_on_rank0(lambda: lambda: 3))
    assert message.startswith("CheckpointError: ") and "pickle" in message, message


@register_case
def names_of_wrappers() -> None:
    """DDP, FSDP1, torch.compile and checkpointing add prefixes to names. DDP may add its prefix several times."""
    plain_model = build_seeded(Net, seed=4)
    expected = plain_model.state_dict()
    model = fsdp2.apply_fsdp2(build_seeded(Net), None, CHECKPOINTED)
    optimizer = torch.optim.AdamW(model.parameters())
    take_step(model, optimizer, 0)
    saved_state = fsdp2.fsdp2_optimizer_state_dict(model, optimizer)
    for add_prefix in (
        "module.{}".format,
        "module.module.{}".format,
        "_orig_mod.{}".format,
        "module._orig_mod.{}".format,
        "_fsdp_wrapped_module.{}".format,
        lambda name: name.replace("blocks.0.", "blocks.0._checkpoint_wrapped_module."),
    ):
        other_model = fsdp2.apply_fsdp2(build_seeded(Net), None, CHECKPOINTED)
        fsdp2.fsdp2_load_state_dict(other_model, {add_prefix(name): value for name, value in expected.items()})
        require_equal(weights(other_model), {name: value for name, value in expected.items() if name != "scale"})
        prefixed_state = {
            "state": {add_prefix(name): entry for name, entry in saved_state.get("state", {}).items()},
            "param_groups": [
                {**group, "params": [add_prefix(name) for name in group["params"]]}
                for group in saved_state.get("param_groups", [])
            ],
        }
        fsdp2.fsdp2_load_optimizer_state_dict(model, optimizer, prefixed_state)
    message = describe_error(
        lambda: fsdp2.fsdp2_load_state_dict(model, expected | {"module.head.bias": expected["head.bias"]})
    )
    assert "head.bias and module.head.bias are the same parameter, head.bias" in message, message


@register_case
def models_that_are_not_sharded() -> None:
    """All four functions also take a plain model and a model in DDP. Names in states have no prefix of DDP."""
    expected = build_seeded(Net, seed=4).state_dict()
    for wrap in (lambda model: model, lambda model: nn.parallel.DistributedDataParallel(model)):
        for seed in (0, 4):
            plain_model = build_seeded(Net, seed=seed)
            plain_model.unused.requires_grad_(False)
            model = wrap(plain_model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            if seed == 0:
                fsdp2.fsdp2_load_state_dict(model, expected if dist.get_rank() == 0 else {})
                run_on_all_ranks(
                    lambda plain_model=plain_model: require_equal(dict(plain_model.state_dict()), dict(expected))
                )
            state = fsdp2.fsdp2_state_dict(model)
            run_on_all_ranks(
                lambda state=state: require_equal(dict(state), dict(expected) if dist.get_rank() == 0 else {})
            )
            mean_square_loss(model, samples()).backward()
            optimizer.step()
            saved_state = fsdp2.fsdp2_optimizer_state_dict(model, optimizer)
            assert (saved_state.keys() == {"state", "param_groups"}) == (dist.get_rank() == 0)
            resumed_optimizer = torch.optim.AdamW(model.parameters())
            fsdp2.fsdp2_load_optimizer_state_dict(model, resumed_optimizer, saved_state)
            assert resumed_optimizer.param_groups[0]["lr"] == 0.1
            for parameter, entry in optimizer.state.items():
                require_equal(dict(resumed_optimizer.state[parameter]), dict(entry))
