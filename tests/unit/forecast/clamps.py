"""Builder of a chain of clamps for steppers without a config."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from credit.channels import ChannelMap
from credit.data.normalize import Normalizer
from credit.forecast.postprocess.base import PostprocessChain, PostprocessContext
from credit.forecast.postprocess.clamp import Clamp
from credit.forecast.postprocess.section import ClampSection


def build_clamp_chain(
    channels: ChannelMap, normalizer: Normalizer, minimum: Sequence[float] | None
) -> PostprocessChain:
    """Return a chain that clamps each output channel to its minimum; -inf means no minimum."""
    context = PostprocessContext(
        data=None,
        channels=channels,
        grid=None,
        attributes={},
        masks={},
        static_CHW=None,
        layers=None,
        normalizer=normalizer,
        device=torch.device("cpu"),
    )
    chain: Clamp | None = None
    for channel, value in zip(channels.output, minimum or [], strict=False):
        if math.isfinite(value):
            clamp = Clamp(context, ClampSection(kind="clamp", variable=channel.variable, minimum=value))
            chain = clamp if chain is None else chain.merge(clamp)
    return PostprocessChain([] if chain is None else [chain])
