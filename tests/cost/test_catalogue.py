"""What is listed of device types, and how running devices are recognised."""

from __future__ import annotations

import pytest

from zorselike.cost.catalogue import CATALOGUE, find_device, match_device_name, peak_flops
from zorselike.errors import ClusterError
from zorselike.plan.cluster.device_types import DEVICE_TYPES

GIB = 2**30


def test_every_name_has_its_entry() -> None:
    assert set(CATALOGUE) == set(DEVICE_TYPES)
    assert len(DEVICE_TYPES) == len(set(DEVICE_TYPES))


@pytest.mark.parametrize("name", sorted(set(DEVICE_TYPES) - {"CPU"}))
def test_figures_are_in_their_units(name: str) -> None:
    """A slip of a power of ten, or bits for bytes, leaves these ranges."""
    spec = find_device(name)
    assert spec.name == name
    assert spec.memory_bytes is not None
    assert 5 * GIB < spec.memory_bytes < 300 * GIB
    assert 4e12 <= spec.peak_flops["float32"] <= 170e12
    assert spec.peak_flops["float16"] / spec.peak_flops["float32"] < 35
    assert spec.peak_flops["float16"] >= spec.peak_flops["float32"]
    assert 200e9 <= spec.memory_bandwidth_bytes_per_s <= 8e12
    assert 15e9 < spec.host_link_bytes_per_s <= 450e9
    assert spec.source


def test_half_precision_is_missing_where_the_hardware_lacks_it() -> None:
    without = {name for name, spec in CATALOGUE.items() if "bfloat16" not in spec.peak_flops}
    old = ("T4", "P100", "V100", "GTX", "RTX20", "TitanRTX", "QuadroRTX", "CPU")
    assert without == {name for name in DEVICE_TYPES if name.startswith(old)}


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("A100", "did you mean A100-40 or A100-80?"),
        ("a100-40", "did you mean A100-40?"),
        ("RTX 3090", "did you mean RTX3090?"),
        ("V100-61", "did you mean 'V100-16'?"),
        ("3090", "did you mean RTX3090 or RTX3090Ti?"),
        ("RTX 6000", "did you mean QuadroRTX6000 or RTX6000Ada?"),
        # As `nvidia-smi` prints them.
        ("NVIDIA GeForce RTX 4090", "did you mean RTX4090?"),
        ("NVIDIA GeForce RTX 2080 Ti", "did you mean RTX2080Ti?"),
        ("NVIDIA GeForce RTX 4060 Ti", "did you mean RTX4060Ti-8 or RTX4060Ti-16?"),
        ("NVIDIA A100 80GB PCIe", "did you mean A100-40 or A100-80?"),
        ("NVIDIA H100 80GB HBM3", "did you mean H100-PCIe or H100-NVL or H100-SXM?"),
        ("Tesla V100-SXM2-16GB", "did you mean V100-16 or V100-32 or V100-PCIe-16 or V100-PCIe-32?"),
        ("NVIDIA RTX 6000 Ada Generation", "did you mean RTX6000Ada?"),
        ("NVIDIA RTX A6000", "did you mean A6000?"),
        ("NVIDIA L40S", "did you mean L40S?"),
        # Slower, and with less memory, than what is listed under that number.
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "the types are T4,"),
        ("Quadro RTX 6000 with Max-Q Design", "the types are T4,"),
        ("abacus", "the types are T4,"),
    ],
)
def test_an_unknown_type_is_told_the_nearest(wrong: str, hint: str) -> None:
    with pytest.raises(ClusterError) as caught:
        find_device(wrong)
    assert repr(wrong) in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("name", "gib", "type"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.39, "A100-40"),
        ("NVIDIA A100-PCIE-40GB", 39.59, "A100-40"),
        ("NVIDIA A100 80GB PCIe", 79.25, "A100-80"),
        ("NVIDIA A100-SXM-64GB", 63.4, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.75, None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.5, None),
        ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 78.9, "H100-SXM"),
        ("Tesla T4", 14.58, "T4"),
        ("Tesla T4", 14.76, "T4"),
        ("Tesla V100-SXM2-16GB", 15.77, "V100-16"),
        ("Tesla V100-SXM2-32GB", 31.74, "V100-32"),
        ("Tesla V100-PCIE-32GB", 31.74, "V100-PCIe-32"),
        ("Tesla V100-FHHL-16GB", 15.77, None),
        ("Tesla P100-PCIE-12GB", 11.9, None),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-SXM"),
        ("NVIDIA H100 NVL", 93.1, "H100-NVL"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA GH200 480GB", 94.5, "GH200"),
        ("NVIDIA GeForce RTX 3090", 23.69, "RTX3090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, None),
        ("NVIDIA RTX A6000", 47.5, "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", 47.4, "RTX6000Ada"),
        ("NVIDIA A10G", 22.06, "A10G"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("NVIDIA TITAN RTX", 23.65, "TitanRTX"),
        ("NVIDIA GeForce RTX 2080 Ti", 10.76, "RTX2080Ti"),
        ("NVIDIA GeForce RTX 3060", 11.63, "RTX3060"),
        ("NVIDIA GeForce RTX 3060 Ti", 7.78, "RTX3060Ti"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", 5.8, None),
        ("NVIDIA GeForce RTX 3080", 9.78, "RTX3080"),
        ("NVIDIA GeForce RTX 3080", 11.76, "RTX3080-12"),
        ("NVIDIA GeForce RTX 4060 Ti", 15.57, "RTX4060Ti-16"),
        ("NVIDIA GeForce RTX 4060 Ti", 7.75, "RTX4060Ti-8"),
        ("NVIDIA GeForce RTX 4070", 11.72, "RTX4070"),
        ("NVIDIA GeForce RTX 4070 SUPER", 11.72, "RTX4070Super"),
        ("NVIDIA GeForce RTX 4070 Ti", 11.73, "RTX4070Ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 15.6, "RTX4070TiSuper"),
        ("NVIDIA GeForce RTX 5080", 15.47, "RTX5080"),
        ("NVIDIA GeForce RTX 2060", 5.79, "RTX2060"),
        ("NVIDIA GeForce RTX 2060 SUPER", 7.8, None),
        ("NVIDIA GeForce GTX 1080 Ti", 10.91, "GTX1080Ti"),
        ("NVIDIA RTX A4000", 15.61, "A4000"),
        ("NVIDIA RTX A5000", 23.55, "A5000"),
        ("NVIDIA RTX A5000 Laptop GPU", 15.7, None),
        ("Quadro RTX 6000", 23.6, "QuadroRTX6000"),
        ("NVIDIA RTX 4000 SFF Ada Generation", 19.6, None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 94.97, "PRO6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 94.97, "PRO6000-MaxQ"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.97, "PRO6000-Server"),
        ("NVIDIA H800 PCIe", 79.1, "H800-PCIe"),
        ("NVIDIA H20", 95.1, "H20"),
        ("AMD Instinct MI250X/MI250", 63.98, "MI250"),
        ("AMD Instinct MI300X", 191.98, "MI300X"),
        ("cpu", 23.0, "CPU"),
        ("NVIDIA Something New", 24.0, None),
    ],
)
def test_a_running_device_is_recognised(name: str, gib: float, type: str | None) -> None:
    assert match_device_name(name, int(gib * GIB)) == type


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "bfloat16", None),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 NVL", "bfloat16", 835),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla V100-PCIE-32GB", "float16", 112),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("Tesla T4", "float16", 65),
        ("NVIDIA A10G", "bfloat16", 70),
        ("NVIDIA A10", "bfloat16", 125),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA GeForce RTX 3090", "bfloat16", 71),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("NVIDIA GeForce RTX 3080 Ti", "bfloat16", 68.2),
        ("NVIDIA GeForce RTX 3080", "bfloat16", 59.5),
        ("NVIDIA GeForce RTX 4070 SUPER", "bfloat16", 71),
        ("cpu", "float32", None),
    ],
)
def test_peaks_are_known_or_none(name: str, dtype: str, tflops: float | None) -> None:
    assert peak_flops(name, dtype) == (None if tflops is None else tflops * 1e12)
