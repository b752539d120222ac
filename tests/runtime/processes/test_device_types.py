"""A plan's device types are the catalogue's, and mean the devices that drivers name otherwise."""

from __future__ import annotations

import pytest

from zorselike.runtime.processes.world import ProcessInfo, is_device_type

GIB = 2**30

NAMES = {
    "A100-40": ("NVIDIA A100-SXM4-40GB", 39.4),
    "A100-80": ("NVIDIA A100 80GB PCIe", 79.1),
    "V100-16": ("Tesla V100-SXM2-16GB", 15.8),
    "H100-SXM": ("NVIDIA H100 80GB HBM3", 79.1),
    "T4": ("Tesla T4", 14.6),
    "RTX3090": ("NVIDIA GeForce RTX 3090", 23.7),
}


@pytest.mark.parametrize("planned", NAMES)
def test_the_catalogues_name_means_its_device_and_no_other(planned: str) -> None:
    for type, (name, gib) in NAMES.items():
        process = ProcessInfo(0, "a", 0, device="cuda", device_name=name, memory_bytes=int(gib * GIB))
        assert is_device_type(planned, process) == (type == planned), (planned, name)
        assert is_device_type(planned.lower(), process) == (type == planned)
