"""Networks, precisions and runs that the parts measure, as config files with overrides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "config"

# Precision -> overrides of the config.
PRECISIONS = {
    "float32": ("trainer.amp=false", "trainer.tf32=false", "inference.amp=false"),
    "tf32": ("trainer.amp=false", "trainer.tf32=true", "inference.amp=false"),
    "bfloat16": ("trainer.amp=true", "trainer.tf32=true", "inference.amp=true"),
}
# The name of the network -> overrides of the quickstart.
NETWORKS = {
    "wxformer": (),
    "unet": ("model={type: unet}",),
    "swin": ("model={type: swin}",),
    "sfno": ("model={type: sfno}",),
    "graph": ("model={type: graph}",),
}
# Name of a kind of noise in the network -> overrides that train an ensemble with it.
NOISES = {
    "global": ("model.noise={kind: global, memory: [0h, 24h]}",),
    "cell": ("model.noise=cell",),
    "spherical": ("model.noise=spherical",),
    "dropout": ("model.noise=dropout",),
}
ENSEMBLE = ("loss={kind: crps}", "trainer.members=4")
# Overrides that make WXFormer small enough to try the script on a CPU.
_SMALL_WXFORMER = ("model.dim=[8, 16, 32, 64]", "model.depth=[1, 1, 1, 1]", "model.dim_head=8")
ONE_BY_ONE = "trainer.members_at_once=1"
AT_ONCE = "trainer.members_at_once=4"


@dataclass(frozen=True)
class Run:
    """A run that is measured.

    Attributes:
        name: its name in tables.
        config: path of the config file.
        grid: ``ROWSxCOLUMNS`` of the global grid.
        overrides: overrides of the config.
    """

    name: str
    config: str
    grid: str
    overrides: tuple[str, ...] = ()

    def with_overrides(self, name: str, *overrides: str) -> Run:
        """Return a copy of the run with additional overrides; `name` is appended to the name of the run."""
        return Run(f"{self.name} {name}", self.config, self.grid, (*self.overrides, *overrides))

    def in_precision(self, precision: str) -> Run:
        """Return the run in a precision of `PRECISIONS`."""
        return self.with_overrides(precision, *PRECISIONS[precision])


def quickstart(network: str, fast: bool) -> Run:
    """Return the quickstart run with a network of `NETWORKS`; `fast` reduces the batch and the size of WXFormer."""
    overrides = NETWORKS[network]
    if fast:
        overrides += ("trainer.train_batch_size=1", "trainer.valid_members=2", "inference.batch_size=1")
        if network == "wxformer":
            overrides += _SMALL_WXFORMER
    return Run(f"quickstart {network}", str(CONFIGS / "quickstart.yml"), "32x64", overrides)


def starter(fast: bool) -> Run:
    """Return the run of the 1 degree starter with one batch per step; `fast` uses a grid of 5.6 degrees."""
    config = str(CONFIGS / "wxformer_1deg.yml")
    if fast:
        # The padding of the small grid keeps its cells a multiple of the windows.
        overrides = ("model.padding={mode: earth, lat: auto, lon: auto}", *_SMALL_WXFORMER)
        return Run("small starter", config, "32x64", ("trainer.grad_accum_every=1", *overrides))
    return Run("starter 1deg", config, "181x360", ("trainer.grad_accum_every=1",))


def quarter_degree() -> Run:
    """Return the run of the model at 0.25 degrees with one sample per step."""
    overrides = ("trainer.grad_accum_every=1", "trainer.train_batch_size=1", "inference.batch_size=1")
    return Run("0.25deg", str(CONFIGS / "wxformer_0p25deg.yml"), "721x1440", overrides)
