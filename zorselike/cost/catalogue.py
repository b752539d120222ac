"""What device types can do, from their makers' papers: memory, peak FLOP/s, bandwidths.

Peaks are dense, without sparsity, with fp32 accumulation: on GeForce cards four times the fp32 peak on
Turing, twice on what came later. fp32 is that of NVIDIA's ordinary cores, two a core and boost clock, since
torch does not round fp32 products to TF32 unless told to, and that of AMD's matrix cores. Memory is what
torch reports as the total, some percent below the data sheet's round number (error correction, what the
driver keeps), to a tenth of a GiB. The host link is one way of the bus in theory; four fifths of it are
reached.
"""

from __future__ import annotations

import re
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

_OTHER_DEVICE = frozenset({"TI", "SUPER", "LAPTOP", "MAX", "D", "SFF", "FHHL", "EMBEDDED"})
"""Words that make another device of the one whose name goes without."""
_SLICE = re.compile(r"\bMIG [1-6]g\.")
"""Of 7 parts of a device, each with its own share of multiprocessors and memory."""


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
    DeviceSpec("B300", "B300", 267.7, 2250, 2250, 75, 8000, PCIE5, "NVIDIA HGX B300 data sheet"),
    DeviceSpec("B200", "B200", 178.3, 2250, 2250, 75, 8000, PCIE5, "NVIDIA DGX B200 data sheet"),
    DeviceSpec("GH200", "GH200", 94.5, 989, 989, 67, 4000, NVLINK_C2C, "NVIDIA GH200 data sheet, 96 GB HBM3"),
    DeviceSpec("H200-NVL", "H200 NVL", 139.7, 835, 835, 60, 4800, PCIE5, "NVIDIA H200 data sheet"),
    DeviceSpec("H200", "H200", 139.7, 989, 989, 67, 4800, PCIE5, "NVIDIA H200 data sheet"),
    DeviceSpec("H100-PCIe", "H100 PCIe", 79.1, 756, 756, 51, 2000, PCIE5, "NVIDIA H100 data sheet, 2022"),
    DeviceSpec("H100-NVL", "H100 NVL", 93.0, 835, 835, 60, 3900, PCIE5, "NVIDIA H100 NVL data sheet"),
    DeviceSpec("H100-SXM", "H100", 79.1, 989, 989, 67, 3350, PCIE5, "NVIDIA H100 data sheet"),
    DeviceSpec("H800-PCIe", "H800 PCIe", 79.1, 756, 756, 51, 2000, PCIE5, "NVIDIA H800 data sheet"),
    DeviceSpec("H800-SXM", "H800", 79.1, 989, 989, 67, 3350, PCIE5, "NVIDIA H800 data sheet"),
    DeviceSpec("H20", "H20", 95.1, 148, 148, 44, 4000, PCIE5, "NVIDIA H20 data sheet, 96 GB"),
    DeviceSpec("A100-40", "A100", 39.4, 312, 312, 19.5, 1555, PCIE4, "NVIDIA A100 data sheet"),
    DeviceSpec("A100-80", "A100", 79.1, 312, 312, 19.5, 2039, PCIE4, "NVIDIA A100 data sheet, SXM"),
    DeviceSpec("A800-80", "A800", 79.1, 312, 312, 19.5, 2039, PCIE4, "NVIDIA A800 data sheet, SXM"),
    DeviceSpec("A40", "A40", 44.4, 149.7, 149.7, 37.4, 696, PCIE4, "NVIDIA A40 data sheet"),
    DeviceSpec("A30", "A30", 23.5, 165, 165, 10.3, 933, PCIE4, "NVIDIA A30 data sheet"),
    DeviceSpec("A10G", "A10G", 22.0, 70, 70, 31.5, 600, PCIE4, "NVIDIA A10G data sheet"),
    DeviceSpec("A10", "A10", 22.0, 125, 125, 31.2, 600, PCIE4, "NVIDIA A10 data sheet"),
    DeviceSpec("A2", "A2", 14.6, 18, 18, 4.5, 200, PCIE4 / 2, "NVIDIA A2 data sheet, x8"),
    DeviceSpec("L40S", "L40S", 44.4, 362, 362, 91.6, 864, PCIE4, "NVIDIA L40S data sheet"),
    DeviceSpec("L40", "L40", 44.4, 181, 181, 90.5, 864, PCIE4, "NVIDIA L40 data sheet"),
    DeviceSpec("L20", "L20", 44.5, 119.5, 119.5, 59.8, 864, PCIE4, "NVIDIA L20 data sheet"),
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
    DeviceSpec(
        "RTX5000Ada", "RTX 5000 Ada", 31.6, 261.1, 261.1, 65.3, 576, PCIE4, "NVIDIA RTX 5000 Ada data sheet"
    ),
    DeviceSpec(
        "RTX4500Ada", "RTX 4500 Ada", 23.6, 158.5, 158.5, 39.6, 432, PCIE4, "NVIDIA RTX 4500 Ada data sheet"
    ),
    DeviceSpec(
        "PRO6000-MaxQ", "PRO 6000 Blackwell Max Q", 95.0, 439, 439, 110, 1792, PCIE5, "NVIDIA data sheet"
    ),
    DeviceSpec(
        "PRO6000-Server", "PRO 6000 Blackwell Server", 95.0, 469, 469, 120, 1597, PCIE5, "NVIDIA data sheet"
    ),
    DeviceSpec(
        "PRO6000", "PRO 6000 Blackwell Workstation", 95.0, 503.8, 503.8, 126, 1792, PCIE5, "NVIDIA data sheet"
    ),
    DeviceSpec("A6000", "RTX A6000", 47.4, 154.8, 154.8, 38.7, 768, PCIE4, "NVIDIA RTX A6000 data sheet"),
    DeviceSpec("A5500", "RTX A5500", 23.6, 136.4, 136.4, 34.1, 768, PCIE4, "NVIDIA RTX A5500 data sheet"),
    DeviceSpec("A5000", "RTX A5000", 23.6, 111.1, 111.1, 27.8, 768, PCIE4, "NVIDIA RTX A5000 data sheet"),
    DeviceSpec("A4500", "RTX A4500", 19.6, 94.6, 94.6, 23.7, 640, PCIE4, "NVIDIA RTX A4500 data sheet"),
    DeviceSpec("A4000", "RTX A4000", 15.6, 76.7, 76.7, 19.2, 448, PCIE4, "NVIDIA RTX A4000 data sheet"),
    DeviceSpec("QuadroRTX8000", "Quadro RTX 8000", 47.4, None, 130.5, 16.3, 672, PCIE3, "NVIDIA data sheet"),
    DeviceSpec(
        "QuadroRTX6000", "Quadro RTX 6000", 23.6, None, 130.5, 16.3, 672, PCIE3, "NVIDIA Turing paper"
    ),
    DeviceSpec("RTX5090", "RTX 5090", 31.4, 209.5, 209.5, 104.8, 1792, PCIE5, "NVIDIA Blackwell RTX paper"),
    DeviceSpec("RTX5080", "RTX 5080", 15.5, 112.6, 112.6, 56.3, 960, PCIE5, "NVIDIA Blackwell RTX paper"),
    DeviceSpec("RTX5070Ti", "RTX 5070 Ti", 15.5, 87.9, 87.9, 43.9, 896, PCIE5, "NVIDIA Blackwell RTX paper"),
    DeviceSpec("RTX5070", "RTX 5070", 11.5, 61.7, 61.7, 30.9, 672, PCIE5, "NVIDIA Blackwell RTX paper"),
    DeviceSpec(
        "RTX5060Ti-16", "RTX 5060 Ti", 15.5, 47.4, 47.4, 23.7, 448, PCIE5 / 2, "NVIDIA RTX 5060 Ti page, x8"
    ),
    DeviceSpec(
        "RTX5060Ti-8", "RTX 5060 Ti", 7.5, 47.4, 47.4, 23.7, 448, PCIE5 / 2, "NVIDIA RTX 5060 Ti page, x8"
    ),
    DeviceSpec("RTX4090", "RTX 4090", 23.6, 165.2, 165.2, 82.6, 1008, PCIE4, "NVIDIA Ada architecture paper"),
    DeviceSpec(
        "RTX4080Super", "RTX 4080 SUPER", 15.6, 104.4, 104.4, 52.2, 736, PCIE4, "NVIDIA RTX 4080 SUPER page"
    ),
    DeviceSpec("RTX4080", "RTX 4080", 15.6, 97.5, 97.5, 48.7, 716.8, PCIE4, "NVIDIA Ada architecture paper"),
    DeviceSpec(
        "RTX4070TiSuper", "RTX 4070 Ti SUPER", 15.6, 88.2, 88.2, 44.1, 672, PCIE4, "NVIDIA 4070 Ti SUPER page"
    ),
    DeviceSpec("RTX4070Ti", "RTX 4070 Ti", 11.7, 80.2, 80.2, 40.1, 504, PCIE4, "NVIDIA RTX 4070 Ti page"),
    DeviceSpec(
        "RTX4070Super", "RTX 4070 SUPER", 11.7, 71, 71, 35.5, 504, PCIE4, "NVIDIA RTX 4070 SUPER page"
    ),
    DeviceSpec("RTX4070", "RTX 4070", 11.7, 58.3, 58.3, 29.1, 504, PCIE4, "NVIDIA RTX 4070 page, GDDR6X"),
    DeviceSpec(
        "RTX4060Ti-16", "RTX 4060 Ti", 15.6, 44.1, 44.1, 22.1, 288, PCIE4 / 2, "NVIDIA RTX 4060 Ti page, x8"
    ),
    DeviceSpec(
        "RTX4060Ti-8", "RTX 4060 Ti", 7.7, 44.1, 44.1, 22.1, 288, PCIE4 / 2, "NVIDIA RTX 4060 Ti page, x8"
    ),
    DeviceSpec("RTX4060", "RTX 4060", 7.7, 30.2, 30.2, 15.1, 272, PCIE4 / 2, "NVIDIA RTX 4060 page, x8"),
    DeviceSpec("RTX3090Ti", "RTX 3090 Ti", 23.6, 80, 80, 40, 1008, PCIE4, "NVIDIA GA102 paper, V2.1"),
    DeviceSpec("RTX3090", "RTX 3090", 23.6, 71, 71, 35.6, 936, PCIE4, "NVIDIA GA102 paper"),
    DeviceSpec("RTX3080Ti", "RTX 3080 Ti", 11.7, 68.2, 68.2, 34.1, 912, PCIE4, "NVIDIA RTX 3080 Ti page"),
    DeviceSpec("RTX3080", "RTX 3080", 9.7, 59.5, 59.5, 29.8, 760, PCIE4, "NVIDIA GA102 paper, 10 GB"),
    DeviceSpec("RTX3080-12", "RTX 3080", 11.7, 61.3, 61.3, 30.6, 912, PCIE4, "NVIDIA RTX 3080 page, 12 GB"),
    DeviceSpec("RTX3070Ti", "RTX 3070 Ti", 7.7, 43.5, 43.5, 21.7, 608, PCIE4, "NVIDIA RTX 3070 Ti page"),
    DeviceSpec("RTX3070", "RTX 3070", 7.7, 40.6, 40.6, 20.3, 448, PCIE4, "NVIDIA GA102 paper"),
    DeviceSpec("RTX3060Ti", "RTX 3060 Ti", 7.7, 32.4, 32.4, 16.2, 448, PCIE4, "NVIDIA RTX 3060 Ti GDDR6"),
    DeviceSpec("RTX3060", "RTX 3060", 11.7, 25.5, 25.5, 12.7, 360, PCIE4, "NVIDIA RTX 3060 page, 12 GB"),
    DeviceSpec(
        "RTX2080Ti", "RTX 2080 Ti", 10.7, None, 53.8, 13.4, 616, PCIE3, "NVIDIA Turing paper, reference"
    ),
    DeviceSpec(
        "RTX2080Super", "RTX 2080 SUPER", 7.8, None, 44.6, 11.2, 496, PCIE3, "NVIDIA RTX 2080 SUPER page"
    ),
    DeviceSpec("RTX2080", "RTX 2080", 7.8, None, 40.3, 10.1, 448, PCIE3, "NVIDIA Turing paper, reference"),
    DeviceSpec(
        "RTX2070Super", "RTX 2070 SUPER", 7.8, None, 36.3, 9.1, 448, PCIE3, "NVIDIA RTX 2070 SUPER page"
    ),
    DeviceSpec("RTX2070", "RTX 2070", 7.8, None, 29.9, 7.5, 448, PCIE3, "NVIDIA Turing paper, reference"),
    DeviceSpec("RTX2060", "RTX 2060", 5.8, None, 25.8, 6.5, 336, PCIE3, "NVIDIA RTX 2060 page, 6 GB"),
    # No tensor cores: products of fp16 are computed in fp32.
    DeviceSpec("GTX1080Ti", "GTX 1080 Ti", 10.9, None, 11.3, 11.3, 484, PCIE3, "NVIDIA Turing paper"),
    DeviceSpec("TitanRTX", "TITAN RTX", 23.6, None, 130.5, 16.3, 672, PCIE3, "NVIDIA Turing paper"),
    # One of the card's two dies, which torch sees as a device each.
    DeviceSpec(
        "MI250", "MI250", 63.9, 181, 181, 45.3, 1638, PCIE4, "AMD MI250 data sheet, half of it: one die"
    ),
    DeviceSpec("MI210", "MI210", 64.0, 181, 181, 45.3, 1638, PCIE4, "AMD MI210 data sheet"),
    DeviceSpec("MI300X", "MI300X", 191.7, 1307, 1307, 163.4, 5300, PCIE5, "AMD MI300X data sheet"),
    DeviceSpec("MI325X", "MI325X", 255.7, 1307, 1307, 163.4, 6000, PCIE5, "AMD MI325X data sheet"),
    DeviceSpec("MI355X", "MI355X", 288.0, 2517, 2517, 157.3, 8000, PCIE5, "AMD MI355X data sheet"),
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
    """FLOP/s of one device in `bfloat16`, `float16` or `float32`; None if we do not know, as of a slice of a
    device. Its name is as `torch.cuda.get_device_name` gives it."""
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
    if _SLICE.search(device_name):  # Half of 80 GiB is what another type of that name has.
        return []
    words = set(device_name.upper().replace("-", " ").replace("/", " ").split())
    for row in _TYPES:
        own = frozenset(row.words.upper().split())
        if own <= words and not (words - own) & _OTHER_DEVICE:
            return [other for other in _TYPES if other.words == row.words]
    return []
