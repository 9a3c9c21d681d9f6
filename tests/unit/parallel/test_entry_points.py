"""Views that need a gradient are copied in any container of an output; nothing else is copied."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from credit.errors import ConfigError
from credit.parallel.blocks.entry_points import copy_returned_views, copy_views, list_custom_entry_points


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclass(frozen=True)
class Frozen:
    field: Any
    count: int = 3

    def __post_init__(self) -> None:
        assert self.count == 3


BASE = torch.zeros(4, 2, requires_grad=True)
VIEW, NEW = (2 * BASE)[0], 2 * BASE


@pytest.mark.parametrize(
    ("make", "take"),
    [
        (lambda x: x, lambda y: y),
        (lambda x: (NEW, x), lambda y: y[1]),
        (lambda x: [x, NEW], lambda y: y[0]),
        (lambda x: Pair(NEW, x), lambda y: y.second),
        (lambda x: {"a": {"b": x}}, lambda y: y["a"]["b"]),
        (lambda x: OrderedDict(a=x, b=1), lambda y: y["a"]),
        (lambda x: Frozen([Pair(x, None)]), lambda y: y.field[0].first),
    ],
)
def test_views_in_containers(make: Any, take: Any) -> None:
    output = make(VIEW)
    copied = copy_views(output)
    assert type(copied) is type(output)
    assert take(copied)._base is None and take(copied).requires_grad
    torch.testing.assert_close(take(copied), VIEW)
    assert take(output) is VIEW, "the output itself stays as it is"
    for uncopied_output in (make(NEW), make(VIEW.detach()), make(torch.zeros(3)[1:]), make(None)):
        assert copy_views(uncopied_output) is uncopied_output


class Coder(nn.Module):
    """Module that returns views from its forward and from another entry point."""

    _fsdp2_forward_methods = ("forward", "encode")

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()[0]

    def encode(self, x: Tensor) -> Tensor:
        return x.cos()[0]


def test_every_entry_point_returns_copies_also_of_a_copied_module() -> None:
    coder = Coder()
    assert list_custom_entry_points(coder) == ("encode",)
    copy_returned_views(coder)
    for module in (coder, copy.deepcopy(coder)):
        for result, expected in ((module(BASE), BASE.sin()[0]), (module.encode(BASE), BASE.cos()[0])):
            assert result._base is None
            torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("name", ["encoded", "training"])
def test_a_name_that_is_not_a_method(name: str) -> None:
    coder = Coder()
    coder._fsdp2_forward_methods = (name,)
    with pytest.raises(ConfigError, match=f"Coder._fsdp2_forward_methods: '{name}' is not a method of the class"):
        list_custom_entry_points(coder)
