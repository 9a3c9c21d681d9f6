"""Registry of losses by name (``loss.kind``).

This module does not import torch, so that a config can be loaded without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from credit.config.registry import LOSSES
from credit.config.sections.loss import LossSection

if TYPE_CHECKING:
    from credit.losses.base import Loss

LossClass = TypeVar("LossClass", bound="type[Loss]")


def register_loss(name: str, section: type[LossSection]) -> Callable[[LossClass], LossClass]:
    """Class decorator that makes a loss available as ``loss.kind: name``, with `section` for its config keys.

    Args:
        name: value of ``loss.kind`` in a config.
        section: the config section of the loss; derives from `LossSection`, which has the keys of every loss.

    Raises:
        ConfigError: if a different class has this name, or the class does not derive from `credit.losses.base.Loss`.
    """

    def register(cls: LossClass) -> LossClass:
        # Imported here because the base class needs torch, which this module must not load.
        from credit.losses.base import Loss

        return LOSSES.register(name, section, Loss, LossSection)(cls)

    return register
