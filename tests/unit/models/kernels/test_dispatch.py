"""The choice between kernels and their plain formulations."""

from __future__ import annotations

import pytest
import torch

from credit.models.kernels.dispatch import KERNELS, Kernel, force_gpu_path, use_plain_formulations, uses_kernel

CPU_ONLY = Kernel("cpu", cpu_only=True)
FLOAT32_ONLY = Kernel("float32", float32_only=True)
ANYWHERE = Kernel("anywhere")
COMPILED = Kernel("compiled", can_be_traced=True)


def find_used_kernels(x: torch.Tensor) -> set[str]:
    return {kernel.name for kernel in (CPU_ONLY, FLOAT32_ONLY, ANYWHERE, COMPILED) if uses_kernel(kernel, x)}


def test_conditions_of_hardware_and_precision() -> None:
    x = torch.ones(2)
    assert find_used_kernels(x) == {"cpu", "float32", "anywhere", "compiled"}
    assert find_used_kernels(x.bfloat16()) == {"cpu", "anywhere", "compiled"}
    assert find_used_kernels(x.to("meta")) == {"float32", "anywhere", "compiled"}
    with torch.autocast("cpu", torch.bfloat16):
        assert find_used_kernels(x) == {"cpu", "anywhere", "compiled"}
    with force_gpu_path():
        assert find_used_kernels(x) == {"float32", "anywhere", "compiled"}


def test_the_compiler_is_given_plain_formulations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert find_used_kernels(torch.ones(2)) == {"compiled"}


def test_replaced_kernels_come_back() -> None:
    x = torch.ones(2)
    with (
        pytest.raises(RuntimeError, match="inside"),
        use_plain_formulations(CPU_ONLY),
        use_plain_formulations(ANYWHERE),
    ):
        assert find_used_kernels(x) == {"float32", "compiled"}
        raise RuntimeError("inside")
    assert find_used_kernels(x) == {"cpu", "float32", "anywhere", "compiled"}


def test_names_are_unique() -> None:
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)
