"""What device types can do, from their makers' papers: memory, peak FLOP/s, bandwidths.

Peaks are dense, without sparsity, with fp32 accumulation; fp32 is that of NVIDIA's ordinary cores, since
torch does not round fp32 products to TF32 unless told to, and that of AMD's matrix cores. Memory is what
torch reports as the total, some percent below the data sheet's round number (error correction, what the
driver keeps), to a tenth of a GiB. The host link is one way of the bus in theory; four fifths of it are
reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from zorselike.errors import ClusterError
from zorselike.plan.cluster.cluster import Cluster, Place
from zorselike.plan.cluster.device_types import require_device_type, split_speed
from zorselike.text.units import GIB

CPU = "CPU"
"""The device type whose thread computes by itself."""

PCIE3, PCIE4, PCIE5 = 15.75, 31.5, 63.0
"""GB/s of 16 lanes, one way (PCI-SIG: 8, 16 and 32 GT/s a lane, 128b/130b code)."""
NVLINK_C2C = 450.0
"""GB/s one way (NVIDIA Grace Hopper superchip data sheet: 900 GB/s both ways)."""

_MEMORY_TOLERANCE = 0.1
"""How far a device's memory may be from its type's; drivers and vGPU profiles differ."""

_OTHER_DEVICE = frozenset({"TI", "SUPER", "LAPTOP", "MAX", "D"})
"""Words that make another device of the one whose name goes without."""


class DeviceSpec(NamedTuple):
    """One type of device, as the table below has it: GiB, TFLOP/s, GB/s."""

    name: str
    words: str
    """All of which stand in the name that torch gives such a device."""
    gib: float | None
    """As torch reports it; None: of no type but of each machine (CPU)."""
    bf16: float | None
    fp16: float | None
    fp32: float | None
    memory_gb_per_s: float
    host_gb_per_s: float
    """One way of the bus to host memory, in theory."""
    source: str
    """Data sheets of the figures."""

    def at_speed(self, share: float) -> DeviceSpec:
        """One that computes slower."""
        bf16, fp16, fp32 = (peak and share * peak for peak in (self.bf16, self.fp16, self.fp32))
        return self._replace(bf16=bf16, fp16=fp16, fp32=fp32)

    @property
    def memory_bytes(self) -> int | None:
        return None if self.gib is None else int(self.gib * GIB)

    @property
    def peak_flops(self) -> Mapping[str, float]:
        """FLOP/s by dtype; a dtype that the hardware lacks is missing."""
        tflops = {"bfloat16": self.bf16, "float16": self.fp16, "float32": self.fp32}
        return {dtype: peak * 1e12 for dtype, peak in tflops.items() if peak is not None}

    @property
    def memory_bandwidth_bytes_per_s(self) -> float:
        return self.memory_gb_per_s * 1e9

    @property
    def host_link_bytes_per_s(self) -> float:
        return self.host_gb_per_s * 1e9


# The first row whose words all stand in a device's name gives its peaks, so the more special come first.
_TYPES = (
    DeviceSpec("B200", "B200", 178.3, 2250, 2250, 75, 8000, PCIE5, "NVIDIA DGX B200 data sheet"),
    DeviceSpec("GH200", "GH200", 94.5, 989, 989, 67, 4000, NVLINK_C2C, "NVIDIA GH200 data sheet, 96 GB HBM3"),
    DeviceSpec("H200-NVL", "H200 NVL", 139.7, 835, 835, 60, 4800, PCIE5, "NVIDIA H200 data sheet"),
    DeviceSpec("H200", "H200", 139.7, 989, 989, 67, 4800, PCIE5, "NVIDIA H200 data sheet"),
    DeviceSpec("H100-PCIe", "H100 PCIe", 79.1, 756, 756, 51, 2000, PCIE5, "NVIDIA H100 data sheet, 2022"),
    DeviceSpec("H100-NVL", "H100 NVL", 93.0, 835, 835, 60, 3900, PCIE5, "NVIDIA H100 NVL data sheet"),
    DeviceSpec("H100-SXM", "H100", 79.1, 989, 989, 67, 3350, PCIE5, "NVIDIA H100 data sheet"),
    DeviceSpec("A100-40", "A100", 39.4, 312, 312, 19.5, 1555, PCIE4, "NVIDIA A100 data sheet"),
    DeviceSpec("A100-80", "A100", 79.1, 312, 312, 19.5, 2039, PCIE4, "NVIDIA A100 data sheet, SXM"),
    DeviceSpec("A800-80", "A800", 79.1, 312, 312, 19.5, 2039, PCIE4, "NVIDIA A800 data sheet, SXM"),
    DeviceSpec("A40", "A40", 44.4, 149.7, 149.7, 37.4, 696, PCIE4, "NVIDIA A40 data sheet"),
    DeviceSpec("A30", "A30", 23.5, 165, 165, 10.3, 933, PCIE4, "NVIDIA A30 data sheet"),
    DeviceSpec("A10G", "A10G", 22.0, 70, 70, 31.5, 600, PCIE4, "NVIDIA A10G data sheet"),
    DeviceSpec("A10", "A10", 22.0, 125, 125, 31.2, 600, PCIE4, "NVIDIA A10 data sheet"),
    DeviceSpec("L40S", "L40S", 44.4, 362, 362, 91.6, 864, PCIE4, "NVIDIA L40S data sheet"),
    DeviceSpec("L40", "L40", 44.4, 181, 181, 90.5, 864, PCIE4, "NVIDIA L40 data sheet"),
    DeviceSpec("L4", "L4", 22.0, 121, 121, 30.3, 300, PCIE4, "NVIDIA L4 data sheet"),
    DeviceSpec("T4", "T4", 14.6, None, 65, 8.1, 320, PCIE3, "NVIDIA T4 data sheet"),
    DeviceSpec("V100-PCIe-16", "V100 PCIE", 15.8, None, 112, 14, 900, PCIE3, "NVIDIA V100 data sheet"),
    DeviceSpec("V100-PCIe-32", "V100 PCIE", 31.7, None, 112, 14, 900, PCIE3, "NVIDIA V100 data sheet"),
    DeviceSpec("V100-16", "V100", 15.8, None, 125, 15.7, 900, PCIE3, "NVIDIA V100 data sheet, SXM2"),
    DeviceSpec("V100-32", "V100", 31.7, None, 125, 15.7, 900, PCIE3, "NVIDIA V100 data sheet, SXM2"),
    DeviceSpec("P100-PCIe", "P100 PCIE", 15.9, None, 18.7, 9.3, 732, PCIE3, "NVIDIA P100 PCIe data sheet"),
    DeviceSpec("P100", "P100", 15.9, None, 21.2, 10.6, 732, PCIE3, "NVIDIA P100 data sheet, SXM2"),
    DeviceSpec(
        "RTX6000Ada", "RTX 6000 Ada", 47.4, 364, 364, 91.1, 960, PCIE4, "NVIDIA RTX 6000 Ada data sheet"
    ),
    DeviceSpec("A6000", "RTX A6000", 47.4, 154.8, 154.8, 38.7, 768, PCIE4, "NVIDIA RTX A6000 data sheet"),
    DeviceSpec("RTX5090", "RTX 5090", 31.4, 209.5, 209.5, 104.8, 1792, PCIE5, "NVIDIA Blackwell RTX paper"),
    DeviceSpec("RTX4090", "RTX 4090", 23.6, 165.2, 165.2, 82.6, 1008, PCIE4, "NVIDIA Ada architecture paper"),
    DeviceSpec("RTX4080", "RTX 4080", 15.6, 97.5, 97.5, 48.7, 716.8, PCIE4, "NVIDIA Ada architecture paper"),
    DeviceSpec("RTX3090Ti", "RTX 3090 Ti", 23.6, 80, 80, 40, 1008, PCIE4, "NVIDIA GA102 paper, V2.1"),
    DeviceSpec("RTX3090", "RTX 3090", 23.6, 71, 71, 35.6, 936, PCIE4, "NVIDIA GA102 paper"),
    DeviceSpec("RTX3080", "RTX 3080", 9.7, 59.5, 59.5, 29.8, 760, PCIE4, "NVIDIA GA102 paper, 10 GB"),
    DeviceSpec("RTX3070", "RTX 3070", 7.7, 40.6, 40.6, 20.3, 448, PCIE4, "NVIDIA GA102 paper"),
    DeviceSpec(
        "RTX2080Ti", "RTX 2080 Ti", 10.7, None, 53.8, 13.4, 616, PCIE3, "NVIDIA Turing paper, reference"
    ),
    DeviceSpec("TitanRTX", "TITAN RTX", 23.6, None, 130.5, 16.3, 672, PCIE3, "NVIDIA Turing paper"),
    # One of the card's two dies, which torch sees as a device each.
    DeviceSpec(
        "MI250", "MI250", 63.9, 181, 181, 45.3, 1638, PCIE4, "AMD MI250 data sheet, half of it: one die"
    ),
    DeviceSpec("MI300X", "MI300X", 191.7, 1307, 1307, 163.4, 5300, PCIE5, "AMD MI300X data sheet"),
)

_CPU_SOURCE = "one channel of DDR5-4800 (JEDEC JESD79-5); what a CPU computes is measured, not listed"

CATALOGUE: Mapping[str, DeviceSpec] = {
    CPU: DeviceSpec(CPU, "", None, None, None, None, 38.4, 38.4, _CPU_SOURCE)
} | {row.name: row for row in _TYPES}
"""All types by name."""


def find_device(type: str) -> DeviceSpec:
    """What is known of a device type; raises `ClusterError`, with the nearest names, if nothing."""
    require_device_type(type)
    base, share = split_speed(type)
    return CATALOGUE[base] if share == 1 else CATALOGUE[base].at_speed(share)


def find_memory_bytes(cluster: Cluster, place: Place) -> int | None:
    """Of one device: what its node says, else the catalogue; None where neither does. CPU ranks divide their
    host's memory."""
    node, device = cluster.nodes[place.node], cluster.device_type(place)
    if node.memory_bytes:
        return node.memory_bytes[place.local_rank]
    if device == CPU:
        return None if node.host_memory_bytes is None else node.host_memory_bytes // node.devices.count(CPU)
    try:
        return find_device(device).memory_bytes
    except ClusterError:
        return None  # Measured on, but in no catalogue.


def peak_flops(device_name: str, dtype: str) -> float | None:
    """FLOP/s of one device in `bfloat16`, `float16` or `float32`; None if we do not know. Its name is as
    `torch.cuda.get_device_name` gives it."""
    rows = _rows_named(device_name)
    return rows[0].peak_flops.get(dtype) if rows else None


def match_device_name(device_name: str, memory_bytes: int) -> str | None:
    """The type of a device that runs, such as `A100-40`; None if the catalogue has no such one. Its name is
    as `torch.cuda.get_device_name` gives it, `cpu` for a host; types of one name are told apart by all the
    memory that it has, so a slice of a device is none of them."""
    if device_name.casefold() == "cpu":
        return CPU
    for row in _rows_named(device_name):
        if row.gib and abs(memory_bytes / (row.gib * GIB) - 1) <= _MEMORY_TOLERANCE:
            return row.name
    return None


def _rows_named(device_name: str) -> list[DeviceSpec]:
    """The rows that a name may mean: those of the first words that all stand in it."""
    words = set(device_name.upper().replace("-", " ").replace("/", " ").split())
    for row in _TYPES:
        own = frozenset(row.words.upper().split())
        if own <= words and not (words - own) & _OTHER_DEVICE:
            return [other for other in _TYPES if other.words == row.words]
    return []
