"""Peak FLOP/s by device name, for MFU: dense, without sparsity, fp32 accumulation.

From NVIDIA's data sheets and architecture papers. fp32 is that of the ordinary cores, since torch
does not round fp32 products to TF32 unless told to.
"""

from __future__ import annotations

from typing import NamedTuple


class Peak(NamedTuple):
    """TFLOP/s; `None` where the device has no such arithmetic in hardware."""

    bf16: float | None
    fp16: float | None
    fp32: float


_OTHER_DEVICE = frozenset({"TI", "SUPER", "LAPTOP", "MAX", "D"})
"""Words that make another device of the one whose name goes without."""

# The first entry whose words all stand in the device's name; so the more special come first.
_PEAKS: tuple[tuple[str, Peak], ...] = (
    ("B200", Peak(2250, 2250, 75)),
    ("H200 NVL", Peak(835, 835, 60)),
    ("H200", Peak(989, 989, 67)),
    ("H100 PCIe", Peak(756, 756, 51)),
    ("H100 NVL", Peak(835, 835, 60)),
    ("H100", Peak(989, 989, 67)),
    ("A100", Peak(312, 312, 19.5)),
    ("A800", Peak(312, 312, 19.5)),
    ("A40", Peak(149.7, 149.7, 37.4)),
    ("A30", Peak(165, 165, 10.3)),
    ("A10G", Peak(70, 70, 31.5)),
    ("A10", Peak(125, 125, 31.2)),
    ("L40S", Peak(362, 362, 91.6)),
    ("L40", Peak(181, 181, 90.5)),
    ("L4", Peak(121, 121, 30.3)),
    ("T4", Peak(None, 65, 8.1)),
    ("V100 PCIE", Peak(None, 112, 14)),
    ("V100", Peak(None, 125, 15.7)),
    ("P100 PCIE", Peak(None, 18.7, 9.3)),
    ("P100", Peak(None, 21.2, 10.6)),
    ("RTX 6000 Ada", Peak(364, 364, 91.1)),
    ("RTX A6000", Peak(154.8, 154.8, 38.7)),
    ("RTX 5090", Peak(209.5, 209.5, 104.8)),
    ("RTX 4090", Peak(165.2, 165.2, 82.6)),
    ("RTX 4080", Peak(97.5, 97.5, 48.7)),
    ("RTX 3090 Ti", Peak(80, 80, 40)),
    ("RTX 3090", Peak(71, 71, 35.6)),
    ("RTX 3080", Peak(59.5, 59.5, 29.8)),
    ("RTX 3070", Peak(40.6, 40.6, 20.3)),
    ("RTX 2080 Ti", Peak(None, 53.8, 13.4)),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """FLOP/s of one device in `bfloat16`, `float16` or `float32`; `None` if we do not know.

    Args:
        device_name: as `torch.cuda.get_device_name` gives it.
        dtype: what the layers compute in.
    """
    field = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype]
    words = set(device_name.upper().replace("-", " ").split())
    for name, peak in _PEAKS:
        own = frozenset(name.upper().split())
        if own <= words and not (words - own) & _OTHER_DEVICE:
            tflops: float | None = getattr(peak, field)
            return None if tflops is None else tflops * 1e12
    return None
