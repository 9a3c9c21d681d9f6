"""Peak rates of GPUs and of the links between them, and the fraction of each peak that kernels are assumed to reach.

The rates are for dense matrix products on SXM modules, from NVIDIA's data sheets of A100 (2021), H100, H200 and HGX
B200 (2023 to 2025). The memory is the total that `torch.cuda.get_device_properties` reports. A100 nodes are assumed to
be like nodes of NSF NCAR's Derecho and NERSC's Perlmutter: four GPUs, each with a 200 Gb/s Slingshot port. The other
nodes are assumed to be like NVIDIA's DGX: eight GPUs, each with a 400 Gb/s InfiniBand port. Command-line options
describe sites with different nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from credit.errors import ConfigError

# Fractions of the peak that kernels, memory and links are assumed to reach.
COMPUTE_SHARE = 0.5
MEMORY_SHARE = 0.8
LINK_SHARE = 0.8
# Shortest time of a kernel on the GPU: 4335 kernels of a step of the 1 degree starter took 17.3 ms on an H100.
KERNEL_SECONDS = 4e-6
# Time that the host needs to queue a kernel on the GPU, without ``trainer.compile``. Measured: 36 to 50 us in steps of
# three networks on one virtual machine with an H100 (benchmarks/lab_notes.md). Other hosts differ.
LAUNCH_SECONDS = 40e-6
# Assumed memory for the context of CUDA, NCCL's buffers, the libraries' workspaces, and fragmentation of the allocator.
RESERVED_GIB = 2.0
RESERVED_SHARE = 0.05


@dataclass(frozen=True)
class Gpu:
    """Peak rates of a GPU model, and of its links within and between nodes.

    Attributes:
        name: name on the command line (``--gpu``).
        memory_gib: memory in GiB.
        bfloat16: peak rate of bfloat16 matrix products in TFLOP/s.
        tf32: peak rate of float32 matrix products in TF32 (``trainer.tf32``) in TFLOP/s.
        float32: peak rate of float32 matrix products without TF32 in TFLOP/s.
        memory_gbs: memory bandwidth in GB/s.
        node_gbs: bandwidth of a GPU to the other GPUs of its node, in one direction, in GB/s.
        network_gbs: bandwidth of a GPU to other nodes, in one direction, in GB/s. The bandwidth of the node's network
            ports is divided equally among its GPUs.
        per_node: number of GPUs in a node.
        watts: maximum power of the board in watts.
        launch_seconds: time that the host needs to queue a kernel, in seconds.
    """

    name: str
    memory_gib: float
    bfloat16: float
    tf32: float
    float32: float
    memory_gbs: float
    node_gbs: float
    network_gbs: float
    per_node: int
    watts: float
    launch_seconds: float = LAUNCH_SECONDS

    @property
    def usable_bytes(self) -> int:
        """Bytes of GPU memory that a run may use: all memory except the reserve for CUDA, NCCL and libraries."""
        return int(2**30 * (self.memory_gib * (1 - RESERVED_SHARE) - RESERVED_GIB))

    def estimate_kernel_seconds(self, rate: str, flops: float, moved_bytes: float) -> float:
        """Estimate the seconds of one kernel: the maximum of arithmetic time, memory time and `KERNEL_SECONDS`.

        This is the roofline model of Williams et al. 2009, doi 10.1145/1498765.1498785.

        Args:
            rate: name of the attribute of this class with the peak rate: bfloat16, tf32 or float32.
            flops: number of floating-point operations of the kernel.
            moved_bytes: number of bytes that the kernel reads and writes.
        """
        peak_flops = getattr(self, rate) * 1e12
        compute_seconds = flops / (peak_flops * COMPUTE_SHARE)
        memory_seconds = moved_bytes / (self.memory_gbs * 1e9 * MEMORY_SHARE)
        return max(compute_seconds, memory_seconds, KERNEL_SECONDS)


# The numbers are in the order of the attributes of `Gpu`: memory (GiB), peak rates (TFLOP/s) of bfloat16, TF32 and
# float32, bandwidths (GB/s) of memory, node and network, GPUs per node, power (W).
_GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40", 39.4, 312, 156, 19.5, 1555, 300, 25, 4, 400),
        Gpu("a100-80", 79.1, 312, 156, 19.5, 2039, 300, 25, 4, 400),
        Gpu("h100", 79.1, 989, 494, 66.9, 3350, 450, 50, 8, 700),
        Gpu("h200", 139.8, 989, 494, 66.9, 4800, 450, 50, 8, 700),
        Gpu("b200", 178.3, 2250, 1100, 80, 8000, 900, 50, 8, 1000),
    )
}

# Name that `torch.cuda.get_device_name` reports -> name in `_GPUS`. Variants with different peaks (PCIe and NVL cards
# of Hopper) and slices of a GPU are omitted. The A100 PCIe cards have the same peaks as the SXM modules.
_NAMES_BY_DEVICE = {
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-PCIE-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A100 80GB PCIe": "a100-80",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}


def find_peak_rates(device_name: str) -> dict[str, float]:
    """Return the peak rates of a GPU in TFLOP/s, by the name of the rate: bfloat16, tf32 and float32.

    Args:
        device_name: name that the driver reports, from `torch.cuda.get_device_name`.

    Returns:
        Name of the rate -> TFLOP/s; empty for a GPU that is not in `_NAMES_BY_DEVICE`.
    """
    name = _NAMES_BY_DEVICE.get(device_name)
    if name is None:
        return {}
    gpu = _GPUS[name]
    return {"bfloat16": gpu.bfloat16, "tf32": gpu.tf32, "float32": gpu.float32}


def list_gpu_names() -> Sequence[str]:
    """Return the names of GPUs for the command line (``--gpu``)."""
    return list(_GPUS)


def find_gpu(
    name: str, per_node: int | None = None, network_gbs: float | None = None, launch_us: float | None = None
) -> Gpu:
    """Return the description of a GPU by name, with the numbers of a site.

    Args:
        name: a name from `list_gpu_names`.
        per_node: number of GPUs in a node at the site; None for the number in the table.
        network_gbs: bandwidth of a GPU to other nodes in one direction at the site, in GB/s; None for the bandwidth in
            the table.
        launch_us: time that the host needs to queue a kernel, in microseconds; None for `LAUNCH_SECONDS`.

    Raises:
        ConfigError: for an unknown name, or a number that is not positive.
    """
    if name not in _GPUS:
        raise ConfigError(f'--gpu: "{name}" is not known; choices are {", ".join(list_gpu_names())}')
    for option, value in (("--per-node", per_node), ("--network", network_gbs), ("--launch", launch_us)):
        if value is not None and value <= 0:
            raise ConfigError(f"{option}: {value} must be more than 0")
    gpu = _GPUS[name]
    launch_seconds = gpu.launch_seconds
    if launch_us is not None:
        launch_seconds = launch_us * 1e-6
    return replace(
        gpu,
        per_node=per_node or gpu.per_node,
        network_gbs=network_gbs or gpu.network_gbs,
        launch_seconds=launch_seconds,
    )
