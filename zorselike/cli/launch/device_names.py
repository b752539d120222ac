"""What drivers, Kubernetes, SkyPilot and Ray call our device types."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from zorselike.cli.launch.job import Job
from zorselike.cost.catalogue import find_device
from zorselike.errors import ConfigError
from zorselike.text.wording import list_few

PRODUCTS: Mapping[str, str] = {
    "GH200": "NVIDIA-GH200-480GB",
    "H100-SXM": "NVIDIA-H100-80GB-HBM3",
    "A100-40": "NVIDIA-A100-SXM4-40GB",
    "A100-80": "NVIDIA-A100-SXM4-80GB",
    "A800-80": "NVIDIA-A800-SXM4-80GB",
    "T4": "Tesla-T4",
    "V100-PCIe-16": "Tesla-V100-PCIE-16GB",
    "V100-PCIe-32": "Tesla-V100-PCIE-32GB",
    "V100-16": "Tesla-V100-SXM2-16GB",
    "V100-32": "Tesla-V100-SXM2-32GB",
    "P100-PCIe": "Tesla-P100-PCIE-16GB",
    "P100": "Tesla-P100-SXM2-16GB",
    "QuadroRTX6000": "Quadro-RTX-6000",
    "QuadroRTX8000": "Quadro-RTX-8000",
    "RTX4500Ada": "NVIDIA-RTX-4500-Ada-Generation",
    "RTX5000Ada": "NVIDIA-RTX-5000-Ada-Generation",
    "RTX6000Ada": "NVIDIA-RTX-6000-Ada-Generation",
    "PRO6000": "NVIDIA-RTX-PRO-6000-Blackwell-Workstation-Edition",
    "PRO6000-MaxQ": "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-Edition",
    "PRO6000-Server": "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
}
"""Where it is not `NVIDIA-` and the words by which the catalogue knows it, with `GeForce-` where these are a
number alone: the most common of a type's names by its driver, with hyphens."""
_SKYPILOT: Mapping[str, str] = {
    "H100-SXM": "H100",
    "H100-PCIe": "H100",
    "A100-40": "A100",
    "A100-80": "A100-80GB",
    "V100-16": "V100",
    "V100-32": "V100-32GB",
    "V100-PCIe-16": "V100",
    "V100-PCIe-32": "V100-32GB",
    "P100-PCIe": "P100",
    "A4000": "RTXA4000",
    "A4500": "RTXA4500",
    "A5000": "RTXA5000",
    "A6000": "RTXA6000",
}
"""SkyPilot's names of device types, where they are not ours."""
_GEFORCE = re.compile(r"[RG]TX \d+( Ti)?( SUPER)?")
_RAY = re.compile(r"\w+-([A-Z0-9]+)")
"""The part of a driver's name that a Ray node takes for its `accelerator_type`
(`python/ray/_private/accelerators/nvidia_gpu.py`)."""


def name_product(device: str) -> str:
    """The value of a Kubernetes node's label `nvidia.com/gpu.product` (NVIDIA's GPU feature discovery)."""
    if device.upper().startswith("MI"):
        raise ConfigError(f"launch: {device} is no NVIDIA GPU; start by torchrun or slurm")
    words = find_device(device).words
    brand = "GeForce-" if _GEFORCE.fullmatch(words) else ""
    return PRODUCTS.get(device, f"NVIDIA-{brand}{words.replace(' ', '-')}")


def name_for_skypilot(device: str) -> str:
    """SkyPilot's accelerator."""
    return _SKYPILOT.get(device, device)


def name_for_ray(device: str) -> str:
    """Ray's `accelerator_type`."""
    found = _RAY.match(name_product(device))
    assert found is not None
    return found[1]


def require_types(job: Job, launcher: str) -> None:
    """Raises `ConfigError` where the plan does not name a device's type, which a launcher asks for."""
    unknown = [device.rank for device in job.plan.devices if not device.type]
    if unknown:
        raise ConfigError(
            f"launch: {launcher} asks for GPUs by their type, and [[devices]] of {job.path} has none for "
            f'{list_few(unknown, "rank")}; add it, such as type = "A100-40", or start by torchrun'
        )


def refuse_mixed_nodes(job: Job, launcher: str, name: Callable[[str], str]) -> None:
    """Raises `ConfigError` where a launcher, which counts the GPUs of a node by number alone and knows their
    type by `name`, could not tell devices of the plan apart or does not know what they are."""
    require_types(job, launcher)
    types_of: dict[str, str] = {}
    for kind in job.kinds:
        if len({*kind.types}) > 1:
            raise ConfigError(
                f"launch: {launcher} asks for GPUs of one type on a node, and node {kind.nodes[0]} has "
                f"{' and '.join(dict.fromkeys(kind.types))}; start by torchrun or slurm"
            )
        device = kind.types[0]
        if not kind.is_cpu and types_of.setdefault(name(device), device) != device:
            raise ConfigError(
                f"launch: {launcher} does not tell {types_of[name(device)]} from {device}, both of "
                f"which it calls '{name(device)}'; start by torchrun or slurm"
            )
