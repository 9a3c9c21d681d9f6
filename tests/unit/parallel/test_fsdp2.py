"""The interface of credit.parallel.fsdp2 in one process, with a process group of one rank if a test needs it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from credit.errors import CheckpointError, ConfigError
from credit.parallel import fsdp2
from tests.parallel.fsdp2_api.example_models import (
    Block,
    Nested,
    Net,
    OwnMark,
    build_seeded,
    gradients,
    local_share,
    mean_square_loss,
    reference_gradients,
    require_close,
    samples,
    take_step,
    weights,
)


@pytest.fixture
def without_process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without a process group and without variables of a launcher; destroy the group of the test afterwards."""
    assert not dist.is_initialized()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    dist.destroy_process_group()


def test_the_module_has_its_own_logger() -> None:
    assert isinstance(fsdp2.logger, logging.Logger) and fsdp2.logger.name == "credit.parallel.fsdp2"


@pytest.mark.parametrize("conf", [{}, {"trainer": None}, {"trainer": {"activation_checkpoint": True}, "model": {}}])
def test_one_process_without_a_group(conf: dict, without_process_group: None) -> None:
    model = build_seeded(Net)
    expected = reference_gradients(model, mean_square_loss)
    assert not fsdp2.fsdp2_is_applied(model)
    assert fsdp2.apply_fsdp2(model, None, conf) is model
    assert fsdp2.fsdp2_is_applied(model) and fsdp2.fsdp2_is_applied(nn.Sequential(model))
    mean_square_loss(model, local_share(samples())).backward()
    require_close(gradients(model), expected)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert dist.get_world_size() == 1


def test_saved_states_are_copies_and_resume_training(without_process_group: None) -> None:
    model = fsdp2.apply_fsdp2(build_seeded(Net), None, {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    take_step(model, optimizer, 1)
    state, saved = fsdp2.fsdp2_state_dict(model), fsdp2.fsdp2_optimizer_state_dict(model, optimizer)
    snapshot = copy.deepcopy((state, saved["state"]["head.weight"]))
    other_model = fsdp2.apply_fsdp2(build_seeded(Net, seed=2), None, {})
    resumed_optimizer = torch.optim.AdamW(other_model.parameters())
    fsdp2.fsdp2_load_state_dict(other_model, state)
    fsdp2.fsdp2_load_optimizer_state_dict(other_model, resumed_optimizer, saved)
    take_step(model, optimizer, 5)
    take_step(other_model, resumed_optimizer, 5)
    assert all(torch.equal(value, weights(other_model)[name]) for name, value in weights(model).items())
    for name, value in snapshot[0].items():
        assert torch.equal(state[name], value), f"{name} was the model's own memory"
    for key, value in snapshot[1].items():
        assert torch.equal(saved["state"]["head.weight"][key], value), f"{key} was the optimizer's own memory"


def test_a_model_that_is_not_sharded() -> None:
    model = build_seeded(Net)
    state = fsdp2.fsdp2_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    assert all(state[name].data_ptr() != value.data_ptr() for name, value in model.state_dict().items())
    fsdp2.fsdp2_load_state_dict(model, {name: value + 1 for name, value in state.items()})
    assert all(torch.equal(value, state[name] + 1) for name, value in model.state_dict().items())
    fsdp2.set_gradient_sync(model, False)
    fsdp2.reshard(model)


def test_marked_modules_are_shardable() -> None:
    assert fsdp2._has_fsdp2_shard(Block()) and fsdp2._has_fsdp2_shard(OwnMark())
    plain_model, unmarked = nn.Linear(1, 1), Block()
    unmarked._fsdp2_shard = False
    assert not fsdp2._has_fsdp2_shard(plain_model) and not fsdp2._has_fsdp2_shard(unmarked)
    assert fsdp2._is_shardable(Block(), False) and not fsdp2._is_shardable(plain_model, False)


def test_the_checkpoint_wrapper_is_the_sharding_unit() -> None:
    model = nn.Sequential(Block(), nn.Linear(8, 8), OwnMark())
    blocks = list(model)
    fsdp2._apply_activation_checkpointing(model)
    fsdp2._apply_activation_checkpointing(model)
    assert [type(m) for m in model] == [CheckpointWrapper, nn.Linear, CheckpointWrapper]
    assert [m._checkpoint_wrapped_module for m in (model[0], model[2])] == [blocks[0], blocks[2]]
    for wrapper, inner in ((model[0], blocks[0]), (model[2], blocks[2])):
        assert fsdp2._is_shardable(wrapper, True) and not fsdp2._is_shardable(inner, True)
        assert not fsdp2._is_shardable(wrapper, False)
    assert not fsdp2._is_shardable(model[1], True) and not fsdp2._is_shardable(model[1], False)
    assert list(model.state_dict()) == list(nn.Sequential(*blocks).state_dict())


def test_checkpointing_of_a_model_without_blocks() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    fsdp2._apply_activation_checkpointing(model)
    assert type(model[0]) is nn.Linear
    with pytest.raises(ConfigError, match="Sequential marks no block"):
        fsdp2.apply_fsdp2(model, None, {"trainer": {"activation_checkpoint": True}})
    assert not dist.is_initialized()


def test_blocks_in_two_places_and_in_blocks() -> None:
    model = build_seeded(Nested)
    expected = reference_gradients(model, mean_square_loss)
    fsdp2._apply_activation_checkpointing(model)
    assert model.again is model.outer.inner[0], "one wrapper in both places"
    assert sum(isinstance(m, CheckpointWrapper) for m in model.modules()) == 3
    mean_square_loss(model, samples()).backward()
    require_close(gradients(model), expected)


def test_blocks_that_were_wrapped_only_in_part(without_process_group: None) -> None:
    model = nn.Sequential(Block(), Block(), Block())
    fsdp2._apply_activation_checkpointing(model[:1])
    wrapped_twice = nn.Sequential(model[0])
    fsdp2._apply_activation_checkpointing(wrapped_twice)
    model[0] = wrapped_twice[0]
    model[1] = torch.compile(model[1], backend="eager")
    fsdp2.apply_fsdp2(model, None, {})
    assert [isinstance(m, FSDPModule) for m in model] == [True] * 3
    assert sum(isinstance(m, FSDPModule) for m in model.modules()) == 4


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("conf", "dtypes"),
    [
        ({}, None),
        ({"trainer": None, "model": None}, None),
        ({"trainer": {"amp": False, "fsdp2_mp_policy": {"param_dtype": "bfloat16"}}}, None),
        ({"trainer": {"amp": True}}, (BF16, FP32, FP32)),
        ({"trainer": {"amp": True}, "model": {"use_spectral_norm": False}}, (BF16, FP32, FP32)),
        ({"trainer": {"amp": True}, "model": {"use_spectral_norm": True}}, None),
        ({"trainer": {"amp": True, "fsdp2_mp_policy": None}, "model": {"use_spectral_norm": True}}, None),
        ({"trainer": {"amp": True, "fsdp2_mp_policy": {}}, "model": {"use_spectral_norm": True}}, (BF16, FP32, FP32)),
        (
            {
                "trainer": {"amp": True, "fsdp2_mp_policy": {"reduce_dtype": "bfloat16"}},
                "model": {"use_spectral_norm": 1},
            },
            (BF16, BF16, FP32),
        ),
        (
            {"trainer": {"amp": True, "fsdp2_mp_policy": {"param_dtype": "float16", "output_dtype": "bfloat16"}}},
            (torch.float16, FP32, BF16),
        ),
        (
            {"trainer": {"amp": True, "fsdp2_mp_policy": {"param_dtype": BF16, "reduce_dtype": BF16}}},
            (BF16, BF16, FP32),
        ),
    ],
)
def test_policy(conf: dict, dtypes: tuple | None) -> None:
    policy = fsdp2._build_mp_policy(conf)
    assert dtypes == (policy and (policy.param_dtype, policy.reduce_dtype, policy.output_dtype))


@pytest.mark.parametrize(
    ("policy_section", "message"),
    [
        ({"param_dtype": "bfloat"}, r'param_dtype: .bfloat. is not a dtype; did you mean "bfloat16"'),
        ({"parm_dtype": "bfloat16"}, r'parm_dtype: there is no such key; did you mean "param_dtype"'),
        ("bfloat16", "is not a section; its keys are param_dtype"),
        ({"param_dtype": torch.int8}, r"param_dtype: torch\.int8 is not a dtype"),
        ({"cast_forward_inputs": "false"}, r"cast_forward_inputs: .false. is not a boolean; write true or false"),
    ],
)
def test_invalid_mixed_precision_policies_are_refused(policy_section: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fsdp2._build_mp_policy({"trainer": {"amp": True, "fsdp2_mp_policy": policy_section}})


def test_spectral_norm_buffers() -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3)), nn.BatchNorm1d(3))
    before = model[0].weight_u.clone()
    fsdp2._fix_spectral_norm_dtype(model, BF16)
    assert (model[0].weight_u.dtype, model[0].weight_v.dtype) == (BF16, BF16)
    torch.testing.assert_close(model[0].weight_u.float(), before, atol=1e-2, rtol=1e-2)
    assert model[0].weight_orig.dtype == model[1].running_mean.dtype == FP32
    assert "0.weight_u" in model.state_dict()


def test_parametrized_spectral_norm_buffers() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)))
    norm = model[0].parametrizations.weight[0]
    before = norm._u.clone()
    fsdp2._fix_spectral_norm_dtype(model, BF16)
    assert (norm._u.dtype, norm._v.dtype) == (BF16, BF16)
    torch.testing.assert_close(norm._u.float(), before, atol=1e-2, rtol=1e-2)
    assert model[0].parametrizations.weight.original.dtype == FP32


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"trainer": {"amp": "false"}}, r"trainer\.amp: 'false' is not a boolean; write true or false"),
        ({"trainer": {"amp": 2}}, r"trainer\.amp: 2 is not a boolean"),
        ({"trainer": {"amp": True}, "model": {"use_spectral_norm": "no"}}, r"model\.use_spectral_norm: 'no' is not"),
        ({"trainer": {"parallelism": {"cpu_offload": "true"}}}, r"trainer\.parallelism\.cpu_offload: 'true' is not"),
        ({"trainer": {"parallelism": {"reshard_after_forward": "false"}}}, r"reshard_after_forward: 'false' is not"),
        ({"trainer": {"parallelism": [1]}}, r"trainer\.parallelism: \[1\] is not a section"),
        ({"trainer": {"activation_checkpoint": "false"}}, "activation_checkpoint: 'false' is not one of true, false"),
    ],
)
def test_switches_that_are_no_booleans(conf: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fsdp2.apply_fsdp2(build_seeded(Net), None, conf)
    assert not dist.is_initialized()


@pytest.mark.parametrize("offload", [True, False, None])
@pytest.mark.parametrize("reshard", [True, False, None])
def test_parallelism_of_the_config_is_honoured(
    offload: bool | None, reshard: bool | None, without_process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload_flags, reshard_flags = [], []

    def record(module: nn.Module, **options) -> None:
        offload_flags.append(isinstance(options["offload_policy"], CPUOffloadPolicy))
        reshard_flags.append(options["reshard_after_forward"])
        fully_shard(module, **options)

    monkeypatch.setattr(fsdp2, "fully_shard", record)
    conf = {"trainer": {"parallelism": {"cpu_offload": offload, "reshard_after_forward": reshard}}}
    fsdp2.apply_fsdp2(build_seeded(Net), None, conf)
    assert offload_flags == [bool(offload)] * 3
    # The last block and the model stay unsharded, because the backward pass needs them first.
    assert reshard_flags == [False, reshard is not False, False]


class UnshardableNet(Net):
    """A net with a parameter that FSDP2 cannot shard."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "tied":
            self.blocks[1].expand.weight = self.blocks[0].expand.weight
        else:
            self.gain = nn.Parameter(torch.tensor(1.0) if kind == "scalar" else torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("tied", r"blocks\.0\.expand\.weight and blocks\.1\.expand\.weight: two sharding units share this parameter"),
        ("scalar", r"gain: FSDP2 cannot shard a scalar.*torch\.ones\(1\)"),
        ("complex", r"gain: FSDP2 does not support complex"),
        ("twice", "Net is already sharded"),
    ],
)
def test_models_that_cannot_be_sharded(kind: str, message: str, without_process_group: None) -> None:
    model = fsdp2.apply_fsdp2(build_seeded(Net), None, {}) if kind == "twice" else UnshardableNet(kind)
    if kind != "twice":
        fsdp2.apply_fsdp2(build_seeded(Net), None, {})  # creates the process group
    with pytest.raises(ConfigError, match=message):
        fsdp2.apply_fsdp2(model, None, {})


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ([1], r"trainer: \[1\] is not a section"),
        ({"trainer": [1]}, r"trainer: \[1\] is not a section"),
        ({"trainer": {"amp": True}, "model": 3}, "model: 3 is not a section"),
        ({"trainer": {"amp": True, "fsdp2_mp_policy": {"param_dtype": ["bfloat16"]}}}, "is not a dtype"),
    ],
)
def test_invalid_configs_are_refused(conf, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fsdp2._build_mp_policy(conf)


@pytest.mark.parametrize("state_dict", [None, "model.pt", {"head.weight": [1.0]}])
def test_invalid_state_dicts_are_refused(state_dict) -> None:
    with pytest.raises(CheckpointError, match="instead of a dict|head.weight is not a tensor"):
        fsdp2.fsdp2_load_state_dict(build_seeded(Net), state_dict)


def test_state_of_a_plain_optimizer_is_refused(without_process_group: None) -> None:
    model = fsdp2.apply_fsdp2(build_seeded(Net), None, {})
    plain_model = build_seeded(Net)
    saved = torch.optim.AdamW(plain_model.parameters()).state_dict()
    with pytest.raises(CheckpointError, match="numbers.*fsdp2_optimizer_state_dict"):
        fsdp2.fsdp2_load_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()), saved)


def test_groups_with_two_settings_are_refused(without_process_group: None) -> None:
    """A group has one value of each setting, and each parameter must keep its own."""
    model = fsdp2.apply_fsdp2(build_seeded(Net), None, {})
    first, *others = model.parameters()
    optimizer = torch.optim.AdamW([{"params": [first], "lr": 0.3}, {"params": others, "lr": 0.2}])
    saved = fsdp2.fsdp2_optimizer_state_dict(model, optimizer)
    merged_optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match=r"are in one group here, but were saved with lr 0\.3 and 0\.2"):
        fsdp2.fsdp2_load_optimizer_state_dict(model, merged_optimizer, saved)
    saved["param_groups"][0]["lr"] = 0.2
    fsdp2.fsdp2_load_optimizer_state_dict(model, merged_optimizer, saved)
    assert merged_optimizer.param_groups[0]["lr"] == 0.2
