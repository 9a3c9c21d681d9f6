"""Networks of miles-credit (``model.type``), and the corresponding networks of this package.

To add a network, add an entry to `NETWORKS` with a function that converts the keys of the network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from credit.interop.miles_credit.draft import ConfigDraft
from credit.interop.miles_credit.reading import MilesConfig
from credit.interop.miles_credit.sections.fuxi import convert_fuxi
from credit.interop.miles_credit.sections.wxformer import convert_crossformer, convert_wxformer


@dataclass(frozen=True)
class NetworkConversion:
    """Conversion of the keys of one network.

    Attributes:
        convert: function that writes the ``model`` section; None if there is no counterpart.
        counterpart: corresponding ``model.type`` of this package.
        reason: reason why the network has no counterpart, and a remedy if there is one; empty for a network with a
            counterpart.
    """

    convert: Callable[[MilesConfig, ConfigDraft], None] | None = None
    counterpart: str = ""
    reason: str = ""


_OTHER_FORM = "keys and weights have no counterpart; a similar network is"
_DIFFUSION = "a denoising network; this package has no denoising training"
_REGIONAL = "a regional network; this package trains global models only"
_OTHER = "this package has no network of this kind"

# `model.type` -> its conversion. Generation 1 and 2 share these names.
NETWORKS: dict[str, NetworkConversion] = {
    "crossformer": NetworkConversion(convert_crossformer, "wxformer"),
    "wxformer": NetworkConversion(convert_wxformer, "wxformer"),
    "wxformer_base": NetworkConversion(convert_wxformer, "wxformer"),
    "fuxi": NetworkConversion(convert_fuxi, "swin"),
    "swin": NetworkConversion(reason=f"Swin Transformer of another library: {_OTHER_FORM} `swin`"),
    "unet": NetworkConversion(reason=f"U-Net of another library: {_OTHER_FORM} `unet`"),
    "camulator": NetworkConversion(reason=f"CAMulator: {_OTHER}"),
    "graph": NetworkConversion(reason=f"graph network of another library: {_OTHER_FORM} `graph`"),
    "debugger": NetworkConversion(reason=_OTHER),
    "nextgen_wxformer": NetworkConversion(reason=f"WXFormer with a spectral bottleneck: {_OTHER}"),
    "crossformer-ensemble": NetworkConversion(
        reason="noise in the decoder has no counterpart; use `wxformer` with `model.noise`"
    ),
    "crossformer-style": NetworkConversion(
        reason="noise in the decoder has no counterpart; use `wxformer` with `model.noise`"
    ),
    "crossformer-diffusion": NetworkConversion(reason=_DIFFUSION),
    "unet-diffusion": NetworkConversion(reason=_DIFFUSION),
    "crossformer_downscaling": NetworkConversion(reason=_REGIONAL),
    "unet_downscaling": NetworkConversion(reason=_REGIONAL),
    "unet404": NetworkConversion(reason=_REGIONAL),
    "wrf": NetworkConversion(reason=_REGIONAL),
    "dscale": NetworkConversion(reason=_REGIONAL),
}


def convert_network(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write the ``model`` section, or record `model.type` as refused."""
    name = config.get("model.type")
    if name is None:
        config.report.record_refused("model.type", "missing; the file does not describe a network")
        return
    network = NETWORKS.get(str(name))
    if network is None:
        choices = ", ".join(key for key, value in NETWORKS.items() if value.convert is not None)
        config.report.record_refused("model.type", f"`{name}` is unknown; networks with a conversion are {choices}")
    elif network.convert is None:
        config.report.record_refused("model.type", f"`{name}`: {network.reason}")
    else:
        network.convert(config, draft)
