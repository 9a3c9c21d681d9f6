"""Mixed precision of a sharded model: FSDP2's policy from a config, and a cast of buffers that FSDP2 does not cast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from credit.errors import ConfigError, did_you_mean

# Dtypes that are allowed in a config, and the default dtypes of a policy.
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEFAULT_DTYPES = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "output_dtype": torch.float32}
_CAST_INPUTS_KEY = "cast_forward_inputs"
_POLICY_KEYS = (*_DEFAULT_DTYPES, _CAST_INPUTS_KEY)


def _build_mp_policy(conf: Mapping[str, Any]) -> MixedPrecisionPolicy | None:
    """Return FSDP2's mixed precision policy for the settings in a config; None if all computations use float32.

    Without ``trainer.amp`` the result is None. With ``model.use_spectral_norm`` the result is also None, unless
    ``trainer.fsdp2_mp_policy`` is set. With ``trainer.fsdp2_mp_policy.cast_forward_inputs: false``, inputs keep their
    dtypes, and the model must cast the inputs where necessary.

    Args:
        conf: a whole config as nested dicts. Dtypes are names such as ``bfloat16``, or ``torch.dtype`` objects.

    Raises:
        ConfigError: if a key or dtype is unknown, or a boolean is neither true nor false.
    """
    trainer = read_section(conf, "trainer")
    policy_section = trainer.get("fsdp2_mp_policy")
    amp = read_boolean(trainer, "trainer.amp", default=False)
    has_spectral_norm = read_boolean(read_section(conf, "model"), "model.use_spectral_norm", default=False)
    if not amp:
        return None
    if has_spectral_norm and policy_section is None:
        return None
    policy_section = policy_section or {}
    if not isinstance(policy_section, Mapping):
        raise ConfigError(
            f"trainer.fsdp2_mp_policy: {policy_section!r} is not a section; its keys are {', '.join(_POLICY_KEYS)}"
        )
    # Keys of the section replace the defaults. The section is a plain dict, so its values are validated here.
    settings: dict[str, Any] = dict(_DEFAULT_DTYPES)
    for key, value in policy_section.items():
        path = f"trainer.fsdp2_mp_policy.{key}"
        if key not in _POLICY_KEYS:
            raise ConfigError(f"{path}: there is no such key{did_you_mean(str(key), _POLICY_KEYS)}")
        if key == _CAST_INPUTS_KEY:
            settings[key] = read_boolean(policy_section, path, default=True)
        else:
            settings[key] = _read_dtype(value, path)
    return MixedPrecisionPolicy(**settings)


def _fix_spectral_norm_dtype(model: nn.Module, param_dtype: torch.dtype) -> None:
    """Cast the u and v buffers of torch's spectral norm to `param_dtype`, in place.

    This covers ``torch.nn.utils.spectral_norm`` (a hook with the buffers ``weight_u`` and ``weight_v``) and
    ``torch.nn.utils.parametrizations.spectral_norm`` (buffers ``_u`` and ``_v``). Both methods multiply the vectors
    with the weight, which FSDP2 casts to `param_dtype`. The spectral norm of this package needs no cast, because it
    always computes in float32.
    """
    for module in model.modules():
        vector_names = {"weight_u", "weight_v"}
        if isinstance(module, _SpectralNorm):
            vector_names |= {"_u", "_v"}
        for hook in module._forward_pre_hooks.values():
            # A hook names its buffers after the parameter that it normalizes.
            if isinstance(hook, SpectralNorm):
                vector_names |= {f"{hook.name}_u", f"{hook.name}_v"}
        for name, buffer in module.named_buffers(recurse=False):
            if name in vector_names:
                setattr(module, name, buffer.to(param_dtype))


def read_section(conf: Any, name: str, parent: str = "") -> Mapping[str, Any]:
    """Return a section of a config as nested dicts; an empty dict if the section is missing or empty.

    Args:
        conf: the whole config, or a section that contains the section `name`.
        name: key of the section in `conf`.
        parent: path of `conf` in the whole config with a dot at the end, such as ``"trainer."``; for messages.

    Raises:
        ConfigError: if the section, or `conf`, is not a dict.
    """
    section = conf
    if isinstance(conf, Mapping):
        section = conf.get(name)
    section = section or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{parent}{name}: {section!r} is not a section; conf is a whole config as nested dicts")
    return section


def read_boolean(section: Mapping[str, Any], path: str, default: bool) -> bool:
    """Return the boolean value of a key of a section; `default` if the key is missing or its value is None.

    The section is a plain dict that has not been validated. Only the values true, false, 0 and 1 are valid, because
    Python would interpret the string "false" as true.

    Args:
        section: section of the config as a dict.
        path: full path of the key, such as ``"trainer.amp"``; its last component is the key in `section`.
        default: result for a missing key.

    Raises:
        ConfigError: if the value is neither true nor false.
    """
    _, _, key = path.rpartition(".")
    value = section.get(key)
    if value is None:
        return default
    # In Python, True and False are also ints and equal 1 and 0.
    if not isinstance(value, int) or value not in (0, 1):
        raise ConfigError(f"{path}: {value!r} is not a boolean; write true or false, without quotation marks")
    return bool(value)


def _read_dtype(value: Any, path: str) -> torch.dtype:
    """Return the dtype for a value in a config, which is a name (``"bfloat16"``) or a ``torch.dtype``.

    Args:
        value: value of the key, not validated yet.
        path: path of the key in the config, for messages.

    Raises:
        ConfigError: if the value is not a supported dtype; the message suggests the most similar name.
    """
    if isinstance(value, torch.dtype) and value in _DTYPES.values():
        return value
    if isinstance(value, str) and value in _DTYPES:
        return _DTYPES[value]
    name = str(value).removeprefix("torch.")
    raise ConfigError(f"{path}: {value!r} is not a dtype{did_you_mean(name, _DTYPES)}")
